"""Input arrays for a run: read from a file, or made from a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcompile.dtypes import DType
from mcompile.errors import OptionError
from mcompile.runtime.plan import Signature

Array = NDArray[Any]


def random_feeds(inputs: Sequence[Signature], seed: int, limits: Mapping[str, int] | None = None) -> dict[str, Array]:
    """Arrays for `inputs`: floats standard normal, booleans either, integers 1.

    `limits` names the integer inputs that index a table, with the table's length: they get values from
    [0, min(length, 100)).
    """
    random = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for signature in inputs:
        shape, dtype = signature.type.dims, signature.type.dtype
        if dtype.is_float:
            feeds[signature.name] = random.standard_normal(shape).astype(dtype.numpy)
        elif dtype is DType.BOOL:
            feeds[signature.name] = random.integers(0, 2, shape).astype(np.bool_)
        elif limits and signature.name in limits:
            high = max(1, min(100, limits[signature.name]))
            feeds[signature.name] = random.integers(0, high, shape).astype(dtype.numpy)
        else:
            feeds[signature.name] = np.ones(shape, dtype.numpy)
    return feeds


def read_feeds(path: Path, inputs: Sequence[Signature]) -> dict[str, Array]:
    """The arrays of an .npz file by input name (a lone array may have any name when there is one input).

    Raises OptionError if the file cannot be read or lacks an input.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, AttributeError) as error:
        raise OptionError(f"--input {path}: cannot read it as an .npz file: {error}") from error
    if len(inputs) == 1 and len(arrays) == 1:
        arrays = {inputs[0].name: next(iter(arrays.values()))}
    missing = [signature.name for signature in inputs if signature.name not in arrays]
    if missing:
        raise OptionError(f"--input {path}: no array for input {', '.join(missing)}; it holds {', '.join(arrays)}")
    return {signature.name: arrays[signature.name] for signature in inputs}


def write_outputs(path: Path, outputs: Mapping[str, Array]) -> None:
    """Write arrays by name as an .npz file. Raises OptionError if that is not possible."""
    try:
        with path.open("wb") as file:
            np.savez(file, **outputs)  # type: ignore[arg-type]
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror or error}") from error
