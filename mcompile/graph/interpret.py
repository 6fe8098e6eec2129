"""Evaluate a Graph node by node with numpy: the reference answer at the graph's level."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mcompile.errors import InternalError, ModelError
from mcompile.graph.expand_recurrent import expand_recurrent
from mcompile.graph.graph import Array, Graph, Node
from mcompile.graph.passes.fold_constants import evaluate_op
from mcompile.ops.registry import lookup

Arrays = Sequence[Array | None]
RunHostOp = Callable[[Node, Arrays], Sequence[Array]]


def evaluate_graph(
    graph: Graph,
    feeds: Mapping[str, Array],
    values: Sequence[str] | None = None,
    run_host_op: RunHostOp | None = None,
) -> dict[str, Array]:
    """The arrays of `values` (by default the graph's outputs) for the inputs `feeds`.

    `run_host_op` runs the nodes that no OpDef declares. Raises ModelError for a wrong feed, InternalError if a node's
    result is not of its declared type.
    """
    graph = expand_recurrent(graph)
    known: dict[str, Array] = dict(graph.constants)
    for name in graph.inputs:
        type_ = graph.types[name]
        if name not in feeds or feeds[name].shape != type_.dims or feeds[name].dtype != type_.dtype.numpy:
            raise ModelError(f"input {name}: expected {type_}")
        known[name] = feeds[name]
    for node in graph.topological():
        inputs = [known[value] if value else None for value in node.inputs]
        for output, array in zip(node.outputs, _evaluate_node(node, inputs, run_host_op), strict=False):
            if output:
                _check_type(graph, node, output, array)
                known[output] = array
    return {name: known[name] for name in (graph.outputs if values is None else values)}


def _check_type(graph: Graph, node: Node, output: str, array: Array) -> None:
    type_ = graph.types[output]
    if array.shape != type_.dims or array.dtype != type_.dtype.numpy:
        raise InternalError(f"node {node.name}: output {output} is declared {type_}, got {array.dtype}{array.shape}")


def _evaluate_node(node: Node, inputs: Arrays, run_host_op: RunHostOp | None) -> Sequence[Array]:
    if isinstance(node.attrs.get("body"), Graph):
        return _evaluate_scan(node, inputs, run_host_op)
    op = lookup(node.op, node.domain)
    if op is not None:
        return evaluate_op(op, inputs, node.attrs)
    if run_host_op is None:
        raise InternalError(f"node {node.name}: nothing evaluates {node.op}")
    return run_host_op(node, inputs)


def _evaluate_scan(node: Node, inputs: Arrays, run_host_op: RunHostOp | None) -> Sequence[Array]:
    """ONNX Scan 9: the body once for each slice of the scanned inputs."""
    body: Graph = node.attrs["body"]
    first = len(inputs) - int(node.attrs["num_scan_inputs"])
    states = [array for array in inputs[:first] if array is not None]
    scanned = [
        _slices(array, axis, backward)
        for array, axis, backward in zip(
            inputs[first:], node.attrs["scan_input_axes"], node.attrs["scan_input_directions"], strict=True
        )
        if array is not None
    ]
    stacks: list[list[Array]] = [[] for _ in body.outputs[first:]]
    for slices in zip(*scanned, strict=True):
        feeds = dict(zip(body.inputs, [*states, *slices], strict=True))
        results = evaluate_graph(body, feeds, run_host_op=run_host_op)
        states = [results[name] for name in body.outputs[:first]]
        for stack, name in zip(stacks, body.outputs[first:], strict=True):
            stack.append(results[name])
    axes, directions = node.attrs["scan_output_axes"], node.attrs["scan_output_directions"]
    stacked = zip(stacks, body.outputs[first:], axes, directions, strict=True)
    return [*states, *(_stack(stack, body, name, axis, backward) for stack, name, axis, backward in stacked)]


def _slices(array: Array, axis: int, backward: int) -> list[Array]:
    slices = list(np.moveaxis(array, axis, 0))
    return slices[::-1] if backward else slices


def _stack(stack: Sequence[Array], body: Graph, name: str, axis: int, backward: int) -> Array:
    if not stack:
        shape = list(body.types[name].dims)
        shape.insert(axis, 0)
        return np.zeros(shape, body.types[name].dtype.numpy)
    return np.stack(stack[::-1] if backward else stack, axis)
