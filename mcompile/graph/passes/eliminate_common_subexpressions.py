"""Merge equal nodes and equal constants.

a = Sigmoid(x); b = Sigmoid(x); c = Add(a, b)      ->   a = Sigmoid(x); c = Add(a, a)
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from mcompile.dtypes import TensorType
from mcompile.graph.graph import Array, Graph, Node
from mcompile.graph.infer import freeze, is_host

_SAMPLES = 64


def eliminate_common_subexpressions(graph: Graph) -> Graph:
    """The graph with one node for each distinct application and one constant for each distinct value."""
    new = _merge_constants(graph)
    first: dict[Hashable, Node] = {}
    for node in new.topological():
        node = new.nodes[node.name]
        key = _key(node)
        kept = None if key is None else first.setdefault(key, node)
        if kept is None or kept is node or any(output in new.outputs for output in node.outputs):
            continue
        new = graph.copy() if new is graph else new
        for old, output in zip(node.outputs, kept.outputs, strict=True):
            new.replace_uses(old, output)
        new.remove(node.name)
    return new


def _key(node: Node) -> Hashable:
    """Equal for nodes that compute the same; None for those that may not be merged."""
    if is_host(node):
        return None
    try:
        attrs = tuple((name, freeze(node.attrs[name])) for name in sorted(node.attrs))
    except TypeError:  # holds a Graph
        return None
    return node.op, node.domain, node.inputs, len(node.outputs), attrs


def _merge_constants(graph: Graph) -> Graph:
    groups: dict[tuple[TensorType, bytes], list[str]] = {}
    new = graph
    for name, array in graph.constants.items():
        if not graph.users.get(name):
            continue
        candidates = groups.setdefault((graph.types[name], _sample(array)), [])
        kept = next((other for other in candidates if _same_bytes(graph.constants[other], array)), None)
        if kept is None:
            candidates.append(name)
            continue
        new = graph.copy() if new is graph else new
        outputs = new.outputs
        new.replace_uses(name, kept)
        new.outputs = outputs
    return new


def _sample(array: Array) -> bytes:
    """A few elements, spread over the array."""
    step = max(1, array.size // _SAMPLES)
    return array.ravel()[::step][:_SAMPLES].tobytes() if array.flags.c_contiguous else array.flat[::step].tobytes()


def _same_bytes(a: Array, b: Array) -> bool:
    if a is b:
        return True
    first, second = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return bool(np.array_equal(first, second))
