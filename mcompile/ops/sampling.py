"""Seeded arrays for op samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mcompile.dtypes import DType
from mcompile.ops.registry import Array, Sample


def numbers(*shape: int, low: float = -3, high: float = 3, dtype: str = "float32", seed: int = 0) -> Array:
    """Uniform values of [low, high], integers included at both ends for integer dtypes; bools at random."""
    rng = np.random.default_rng([seed, *shape])
    kind = DType(dtype)
    if kind is DType.BOOL:
        return np.asarray(rng.integers(0, 2, shape), dtype=bool)
    if kind.is_integer:
        lowest = max(int(low), int(kind.min_value))
        return np.asarray(rng.integers(lowest, int(high) + 1, shape)).astype(kind.numpy)
    return np.asarray(rng.uniform(low, high, shape)).astype(kind.numpy)


def series(*shape: int, start: float = 0, dtype: str = "float32") -> Array:
    """start, start + 1, ... in row-major order."""
    return (np.arange(int(np.prod(shape))) + start).reshape(shape).astype(DType(dtype).numpy)


def sample(*inputs: ArrayLike | None, opset: int = 0, **attrs: Any) -> Sample:
    return Sample(tuple(None if value is None else np.asarray(value) for value in inputs), attrs, opset)


def each(*samples: Sample) -> Callable[[], Iterator[Sample]]:
    return lambda: iter(samples)
