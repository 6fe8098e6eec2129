"""Which files a model is made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx

from mcompile.frontend.check import subgraphs
from mcompile.frontend.source import external_entries, open_source
from mcompile.frontend.wire import IN_MODEL


def model_files(path: Path) -> tuple[Path, ...]:
    """The model's own file, then those of its external data, sorted. Raises ModelError if it is no ONNX model."""
    locations = {
        external_entries(tensor).get("location", IN_MODEL) for tensor in _tensors(open_source(path).model.graph)
    }
    return (path, *(path.parent / location for location in sorted(locations - {IN_MODEL})))


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
        for body in subgraphs(node):
            yield from _tensors(body)
