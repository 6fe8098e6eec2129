"""Which files a model is made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx

from mcompile.frontend.check import subgraphs
from mcompile.frontend.source import external_entries, open_source
from mcompile.frontend.wire import IN_MODEL


def model_files(path: Path) -> tuple[Path, ...]:
    """The model's own file, then those of its external data, sorted.

    Raises ModelError if it is no ONNX model, or one whose data lies elsewhere than in its folder.
    """
    source = open_source(path)
    files = set()
    for tensor in _tensors(source.model.graph):
        location = external_entries(tensor).get("location", IN_MODEL)
        if location != IN_MODEL:
            files.add(source.external_path(location, tensor.name))
    return (path, *sorted(files))


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
        for body in subgraphs(node):
            yield from _tensors(body)
