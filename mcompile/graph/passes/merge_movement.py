"""Merge and cancel nodes that only move elements.

Transpose(Transpose(x, p), q)                 ->   Transpose(x, p then q)
Transpose(x) that moves dims of 1 only        ->   Reshape(x)
Reshape(Reshape(x))                           ->   Reshape(x)
Concat(all parts of Split(x), same axis)      ->   Identity(x)
Split(Concat(a, b)) into the same parts       ->   Identity(a), Identity(b)
"""

from __future__ import annotations

from mcompile.graph.graph import Graph, Node
from mcompile.graph.infer import become
from mcompile.graph.passes.canonicalize import reshape_attrs
from mcompile.graph.passes.pattern import Any, Binding, Rule, apply_rules, op

X = Any("x")


def merge_movement(graph: Graph) -> Graph:
    """The graph with chains of moves merged."""
    return _cancel_splits(_cancel_concats(apply_rules(graph, RULES)))


def _merge_transposes(graph: Graph, node: Node, bound: Binding) -> bool:
    inner = graph.producer(bound["inner"])
    assert inner is not None
    perm = tuple(inner.attrs["perm"][axis] for axis in node.attrs["perm"])
    become(graph, node, "Transpose", (bound["x"],), {"perm": perm})
    return True


def _transpose_of_ones(graph: Graph, node: Node, bound: Binding) -> bool:
    shape = graph.types[bound["x"]].dims
    moved = [axis for axis in node.attrs["perm"] if shape[axis] != 1]
    if moved != sorted(moved):
        return False
    become(graph, node, "Reshape", (bound["x"],), reshape_attrs(graph.types[node.outputs[0]].dims))
    return True


def _merge_reshapes(graph: Graph, node: Node, bound: Binding) -> bool:
    become(graph, node, "Reshape", (bound["x"],), reshape_attrs(graph.types[node.outputs[0]].dims))
    return True


def _has_perm(attrs: object) -> bool:
    return attrs["perm"] is not None  # type: ignore[index]


RULES = (
    Rule(
        "merge_transposes",
        op("Transpose", op("Transpose", X, bind="inner", where=_has_perm), where=_has_perm),
        _merge_transposes,
    ),
    Rule("transpose_of_ones", op("Transpose", X, where=_has_perm), _transpose_of_ones),
    Rule("merge_reshapes", op("Reshape", op("Reshape", X)), _merge_reshapes),
)


def _axis(graph: Graph, node: Node) -> int:
    """A Split's or Concat's axis, counted from the front."""
    rank = len(graph.types[node.outputs[0]].shape)
    return int(node.attrs["axis"]) % rank


def _cancel_concats(graph: Graph) -> Graph:
    new = graph
    for node in graph.topological():
        if node.op != "Concat" or node.domain:
            continue
        split = graph.producer(node.inputs[0])
        if split is None or split.op != "Split" or split.domain or split.outputs != node.inputs:
            continue
        if _axis(graph, split) == _axis(graph, node):
            new = graph.copy() if new is graph else new
            become(new, new.nodes[node.name], "Identity", (new.nodes[split.name].inputs[0],))
    return new


def _cancel_splits(graph: Graph) -> Graph:
    new = graph
    for node in graph.topological():
        concat = graph.producer(node.inputs[0]) if node.op == "Split" and not node.domain else None
        if concat is None or concat.op != "Concat" or concat.domain or _axis(graph, concat) != _axis(graph, node):
            continue
        parts = new.nodes[concat.name].inputs
        if [graph.types[part] for part in parts] != [graph.types[output] for output in node.outputs]:
            continue
        if any(output in graph.outputs for output in node.outputs):
            continue
        new = graph.copy() if new is graph else new
        for output, part in zip(node.outputs, parts, strict=True):
            new.replace_uses(output, part)
        new.remove(node.name)
    return new
