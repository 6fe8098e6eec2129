"""Find the first graph value that differs from the reference, by halving the graph.

Marking every value as an output would change what is fused and so hide a fault. So the graph is cut after its first k
nodes: the model of those nodes, whose outputs are the values still in use at the cut, is compiled and compared. If
all of them agree the fault lies behind the cut, else before it; k is halved until one node is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from mcompile.compare.accuracy import OutputError, Tolerance, output_error
from mcompile.frontend import submodel

Array = NDArray[Any]
Feeds = Mapping[str, Array]
RunModel = Callable[[onnx.ModelProto, Feeds], list[Array]]


@dataclass(frozen=True)
class FirstDifference:
    """`error` is that of the node's output within the model; `alone` says whether the node, compiled by itself on
    the reference's inputs, differs too. If it does not, look at what it is fused with."""

    node: str
    op: str
    value: str
    error: OutputError
    alone: bool


@dataclass(frozen=True)
class Localiser:
    """Two ways to run a model, and what counts as agreement."""

    ours: RunModel
    reference: RunModel
    tolerance: Tolerance
    progress: Callable[[str], None]

    def find(self, model: onnx.ModelProto, feeds: Feeds) -> FirstDifference | None:
        """The first difference; None if the outputs agree after all."""
        nodes = submodel.list_nodes(model)
        good, bad = 0, len(nodes)
        errors = self._errors_at(model, bad, feeds)
        if not errors:
            return None
        while bad - good > 1:
            middle = (good + bad) // 2
            found = self._errors_at(model, middle, feeds)
            verdict = "differs" if found else "agrees"
            self.progress(f"first {middle} of {len(nodes)} nodes ({nodes[middle - 1].name}): {verdict}")
            if found:
                bad, errors = middle, found
            else:
                good = middle
        node = nodes[bad - 1]
        error = next((error for error in errors if error.name in node.outputs), errors[0])
        return FirstDifference(node.name, node.op, error.name, error, self._differs_alone(model, bad - 1, feeds))

    def _errors_at(self, model: onnx.ModelProto, count: int, feeds: Feeds) -> list[OutputError]:
        """The live values that differ when the graph is cut after `count` nodes."""
        values = submodel.live_values(model, count)
        if not values:
            return []
        return self._errors_of(submodel.first_nodes(model, count, values), feeds)

    def _errors_of(self, part: onnx.ModelProto, feeds: Feeds) -> list[OutputError]:
        names = [value.name for value in part.graph.input]
        fed = {name: feeds[name] for name in names if name in feeds}
        expected = self.reference(part, fed)
        for value, array in zip(part.graph.output, expected, strict=True):
            value.CopyFrom(_value_of(value.name, array))
        got = self.ours(part, fed)
        pairs = zip(part.graph.output, got, expected, strict=True)
        errors = [output_error(value.name, a, b, self.tolerance) for value, a, b in pairs]
        return [error for error in errors if not error.ok]

    def _differs_alone(self, model: onnx.ModelProto, index: int, feeds: Feeds) -> bool:
        values = submodel.live_values(model, index)
        known = dict(feeds)
        if values:
            prefix = submodel.first_nodes(model, index, values)
            fed = {value.name: feeds[value.name] for value in prefix.graph.input if value.name in feeds}
            known.update(zip(values, self.reference(prefix, fed), strict=True))
        outputs = [value for value in model.graph.node[index].output if value]
        types = {name: _value_of(name, array) for name, array in known.items()}
        return bool(self._errors_of(submodel.one_node(model, index, types, outputs), known))


def _value_of(name: str, array: Array) -> onnx.ValueInfoProto:
    element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(array.dtype))
    return submodel.tensor_value(name, element, array.shape)
