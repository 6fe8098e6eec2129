"""`--batch N`: what it means for a model's inputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx

from mcompile.errors import OptionError
from mcompile.frontend.dims import declared_type
from mcompile.frontend.source import open_source


@dataclass(frozen=True)
class BatchBinding:
    """The first dims of the inputs as the importer takes them: by dim name where they have one, else by shape."""

    dims: dict[str, int]
    shapes: dict[str, tuple[int, ...]]


def bind_batch(source: str | Path | bytes | onnx.ModelProto, batch: int) -> BatchBinding:
    """Give every input's first dim the size `batch`. Raises OptionError where it is fixed to another one."""
    graph = open_source(source).model.graph
    weights = {tensor.name for tensor in graph.initializer}
    binding = BatchBinding({}, {})
    for value in graph.input:
        if value.name in weights:
            continue
        _, shape = declared_type(value, f"input {value.name!r}")
        if not shape or shape[0] == batch:
            continue
        first, rest = shape[0], shape[1:]
        if isinstance(first, int):
            raise OptionError(f"--batch {batch}: the first dim of input {value.name!r} is fixed to {first}")
        if first != "?":
            binding.dims[first] = batch
        elif all(isinstance(dim, int) for dim in rest):
            binding.shapes[value.name] = (batch, *(int(dim) for dim in rest))
        else:
            raise OptionError(
                f"--batch {batch}: input {value.name!r} has more open dims: give --shape {value.name}=..."
            )
    return binding
