"""Parts of an ONNX model as models of their own, and what its graph says about its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

_TRANSPARENT = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"})


@dataclass(frozen=True)
class ModelNode:
    """A node as messages name it: its place in topological order, name, op and outputs."""

    index: int
    name: str
    op: str
    outputs: tuple[str, ...]


def list_nodes(model: onnx.ModelProto) -> tuple[ModelNode, ...]:
    """The nodes of the main graph; ONNX stores them in topological order."""
    return tuple(
        ModelNode(index, node.name or f"{node.op_type}_{index}", node.op_type, tuple(filter(None, node.output)))
        for index, node in enumerate(model.graph.node)
    )


def live_values(model: onnx.ModelProto, count: int) -> tuple[str, ...]:
    """Values made by the first `count` nodes that later nodes or the graph's outputs use, in order."""
    made = [value for node in model.graph.node[:count] for value in node.output if value]
    later = {value for node in model.graph.node[count:] for value in _used_by(node)}
    later.update(output.name for output in model.graph.output)
    return tuple(value for value in made if value in later)


def first_nodes(model: onnx.ModelProto, count: int, outputs: Sequence[str]) -> onnx.ModelProto:
    """The model made of those of the first `count` nodes that `outputs` need; its inputs are the model's inputs."""
    return _part(model, range(count), outputs, list(model.graph.input))


def one_node(
    model: onnx.ModelProto, index: int, inputs: Mapping[str, onnx.ValueInfoProto], outputs: Sequence[str]
) -> onnx.ModelProto:
    """The model of node number `index`; its inputs that are not initializers get their types from `inputs`."""
    node = model.graph.node[index]
    constants = {tensor.name for tensor in model.graph.initializer}
    fed = [inputs[value] for value in dict.fromkeys(_used_by(node)) if value in inputs and value not in constants]
    return _part(model, range(index, index + 1), outputs, fed)


def tensor_value(name: str, element: int, shape: Sequence[int]) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, element, list(shape))


def index_limits(model: onnx.ModelProto) -> dict[str, int]:
    """For every graph input used as Gather's indices into a constant: the shortest length of the axis it indexes."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    origin = {value.name: value.name for value in model.graph.input}
    limits: dict[str, int] = {}
    for node in model.graph.node:
        if node.op_type in _TRANSPARENT and node.input[0] in origin:
            origin[node.output[0]] = origin[node.input[0]]
        if node.op_type == "Gather" and node.input[0] in shapes and node.input[1] in origin:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
            length = shapes[node.input[0]][axis]
            name = origin[node.input[1]]
            limits[name] = min(length, limits.get(name, length))
    return limits


def _used_by(node: onnx.NodeProto) -> list[str]:
    """Values a node takes, those that its subgraphs take from outside included."""
    used = [value for value in node.input if value]
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            used.extend(value for inner in graph.node for value in _used_by(inner))
    return used


def _part(
    model: onnx.ModelProto, indices: Sequence[int], outputs: Sequence[str], inputs: Sequence[onnx.ValueInfoProto]
) -> onnx.ModelProto:
    needed, kept = set(outputs), []
    for index in reversed(indices):
        node = model.graph.node[index]
        if needed.intersection(node.output):
            needed.update(_used_by(node))
            kept.append(node)
    part = onnx.ModelProto()
    part.ir_version = model.ir_version
    part.opset_import.extend(model.opset_import)
    part.functions.extend(model.functions)
    part.graph.name = f"part of {model.graph.name}"
    part.graph.node.extend(reversed(kept))
    part.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in needed)
    names = {tensor.name for tensor in part.graph.initializer}
    part.graph.input.extend(value for value in inputs if value.name in needed and value.name not in names)
    for name in outputs:
        part.graph.output.add().name = name
    return part
