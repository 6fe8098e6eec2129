"""Stable text of a Graph, one node a line: the form of dumps and golden tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from mcompile.dtypes import TensorType
from mcompile.graph.graph import Graph, Node

_SHOWN_ELEMENTS = 8


def print_graph(graph: Graph, indent: str = "") -> str:
    """`graph name(inputs) -> outputs`, the constants that are used, then the nodes in topological order."""
    inputs = ", ".join(f"{name}: {graph.types[name]}" for name in graph.inputs)
    lines = [f"graph {graph.name}({inputs}) -> ({', '.join(graph.outputs)})"]
    for name, array in graph.constants.items():
        if graph.users.get(name) or name in graph.outputs:
            lines.append(f"  const {name}: {graph.types[name]}{_elements(array)}")
    lines.extend(f"  {_node(graph, node, indent)}" for node in graph.topological())
    return "".join(f"{indent}{line}\n" for line in lines)


def _node(graph: Graph, node: Node, indent: str) -> str:
    outputs = ", ".join(f"{name}: {graph.types.get(name, '?')}" for name in node.outputs)
    operands = [name or "-" for name in node.inputs]
    attrs = [f"{name}={_attr(node.attrs[name], indent)}" for name in sorted(node.attrs)]
    op = f"{node.domain}.{node.op}" if node.domain else node.op
    return f"{outputs} = {op}({', '.join(operands + attrs)})"


def _attr(value: Any, indent: str) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype.name}{list(value.shape)}{_elements(value)}"
    if isinstance(value, Graph):
        return "{\n" + print_graph(value, indent + "    ") + indent + "  }"
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, (TensorType, int, float, str)) or value is None:
        return str(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_attr(item, indent) for item in value) + "]"
    return str(value)


def _elements(array: np.ndarray[Any, Any]) -> str:
    if array.size > _SHOWN_ELEMENTS:
        return ""
    return " = [" + ", ".join(str(item) for item in array.reshape(-1).tolist()) + "]"
