"""ONNX Scan (opset 9 on) -> a Scan node whose attribute `body` is a Graph of one step.

Inputs of the node: the initial states, the values that the body takes from outside (passed through as further
states), the scanned values. Outside constants are copied into the body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx import GraphProto

from mcompile.dtypes import TensorType
from mcompile.errors import ModelError
from mcompile.frontend.bodies import Convert, bind_initializers
from mcompile.frontend.check import free_values, sort_nodes
from mcompile.frontend.scope import Import, Scope
from mcompile.graph.graph import Graph
from mcompile.graph.infer import apply

Converted = tuple[tuple[str, ...], dict[str, Any], tuple[TensorType, ...]]


def convert_scan(
    state: Import, scope: Scope, inputs: Sequence[str], attrs: Mapping[str, Any], convert: Convert
) -> Converted:
    """Inputs, attributes and output types of the Scan node (states, passed-through values, stacked outputs).

    Raises ModelError where the body does not fit the inputs, or needs a host op.
    """
    body: GraphProto = attrs["body"]
    count = int(attrs["num_scan_inputs"])
    states, scanned = inputs[: len(inputs) - count], inputs[len(inputs) - count :]
    if count < 1 or len(body.input) != len(inputs) or len(body.output) < len(states):
        raise ModelError(f"Scan: {len(inputs)} inputs do not fit a body of {len(body.input)} ({count} scanned)")
    types = state.graph.types
    axes = _axes(attrs.get("scan_input_axes"), [types[value] for value in scanned])
    steps = {types[value].dims[axis] for value, axis in zip(scanned, axes, strict=True)}
    if len(steps) != 1:
        raise ModelError(f"Scan: the scanned inputs have different lengths {sorted(steps)}")
    taken = [name for name in free_values(body) if scope.find(name)]
    captured = [name for name in taken if str(scope.find(name)) not in state.graph.constants]
    slices = [_without(types[value], axis) for value, axis in zip(scanned, axes, strict=True)]
    graph = _body(state, scope, body, [types[value] for value in states], slices, taken, captured, convert)
    stacked = [graph.types[value] for value in graph.outputs[len(states) + len(captured) :]]
    output_axes = _axes(attrs.get("scan_output_axes"), [TensorType((*t.shape, 1), t.dtype) for t in stacked])
    length = steps.pop()
    results = [_with(type_, axis, length) for type_, axis in zip(stacked, output_axes, strict=True)]
    passed = tuple(str(scope.find(name)) for name in captured)
    converted = {
        "body": graph,
        "num_scan_inputs": count,
        "scan_input_axes": axes,
        "scan_input_directions": tuple(attrs.get("scan_input_directions") or (0,) * count),
        "scan_output_axes": output_axes,
        "scan_output_directions": tuple(attrs.get("scan_output_directions") or (0,) * len(stacked)),
    }
    kept = [types[value] for value in (*states, *passed)]
    return (*states, *passed, *scanned), converted, (*kept, *results)


def _body(
    state: Import,
    scope: Scope,
    body: GraphProto,
    states: Sequence[TensorType],
    slices: Sequence[TensorType],
    taken: Sequence[str],
    captured: Sequence[str],
    convert: Convert,
) -> Graph:
    names = [value.name for value in body.input]
    first = len(states)
    graph = Graph(body.name or "body", (*names[:first], *captured, *names[first:]))
    graph.types.update(zip(names, (*states, *slices), strict=True))
    outside = {name: str(scope.find(name)) for name in taken}
    graph.types.update({name: state.graph.types[outside[name]] for name in captured})
    for name in taken:
        if name not in captured:
            graph.add_constant(name, state.graph.constants[outside[name]], state.graph.types[outside[name]])
    reserved = {*names, *taken, *(output for node in body.node for output in node.output)}
    inner = Import(state.source, graph, reserved, state.problems)
    inside = Scope(scope.opsets, None, "", scope.formal, {name: name for name in (*names, *taken)})
    bind_initializers(inner, inside, body)
    before = len(state.problems)
    convert(inner, inside, sort_nodes(body.node, scope.opset("")))
    if len(state.problems) > before:
        raise ModelError("Scan: its body cannot be converted")
    if inner.host_ops:
        raise ModelError(f"Scan: its body needs {inner.host_ops[0].op}, which has no native implementation")
    graph = inner.graph
    outputs: list[str] = []
    for value in body.output:
        found = str(inside.find(value.name))
        is_own = found in graph.producers and found not in outputs
        outputs.append(found if is_own else apply(graph, "Identity", (found,), stem=f"{value.name}.output"))
    for value, type_ in zip(outputs, states, strict=False):
        if graph.types[value] != type_:
            raise ModelError(f"Scan: a state of type {type_} becomes {graph.types[value]} after a step")
    graph.outputs = (*outputs[:first], *captured, *outputs[first:])
    return graph


def _axes(given: Sequence[int] | None, types: Sequence[TensorType]) -> tuple[int, ...]:
    axes = tuple(given or (0,) * len(types))
    if len(axes) != len(types) or any(not -len(t.shape) <= a < len(t.shape) for a, t in zip(axes, types, strict=True)):
        raise ModelError(f"Scan: axes {list(axes)} do not fit {', '.join(map(str, types))}")
    return tuple(axis % len(type_.shape) for axis, type_ in zip(axes, types, strict=True))


def _without(type_: TensorType, axis: int) -> TensorType:
    return TensorType((*type_.shape[:axis], *type_.shape[axis + 1 :]), type_.dtype)


def _with(type_: TensorType, axis: int, extent: int) -> TensorType:
    return TensorType((*type_.shape[:axis], extent, *type_.shape[axis:]), type_.dtype)
