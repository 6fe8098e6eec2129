"""Remove nodes that compute what they are given.

    y = Identity(x); z = Relu(y)                 ->   z = Relu(x)
    y = Reshape(x: f32[2, 3], shape=[2, 3])      ->   x
    y = Mul(x, 1), Add(x, 0), Sub(x, 0), ...     ->   x

Most are found by what their compute says (each element is the load of the same element of an input), not by name; the
neutral elements of arithmetic are a list.
"""

from __future__ import annotations

from mcompile.graph.graph import Graph, Node
from mcompile.graph.infer import node_facts
from mcompile.graph.passes.pattern import scalar

# op -> (position of the neutral operand, its value); addition and multiplication have one on either side
_NEUTRAL: dict[str, tuple[tuple[int, float], ...]] = {
    "Add": ((1, 0.0), (0, 0.0)),
    "Sub": ((1, 0.0),),
    "Mul": ((1, 1.0), (0, 1.0)),
    "Div": ((1, 1.0),),
}


def eliminate_identity(graph: Graph) -> Graph:
    """The graph without nodes whose only used output equals an input."""
    new: Graph | None = None
    for node in graph.topological():
        current = new or graph
        node = current.nodes[node.name]
        source = _equal_input(current, node)
        if source is None or any(current.users.get(output) for output in node.outputs[1:]):
            continue
        if not _may_vanish(current, node, source):
            continue
        new = new or graph.copy()
        new.replace_uses(node.outputs[0], source)
        new.remove(node.name)
    return new or graph


def _equal_input(graph: Graph, node: Node) -> str | None:
    """The input that the first output equals."""
    facts = node_facts(graph, node)
    if facts is None:
        return None
    if facts.copied_input is not None:
        return node.inputs[facts.copied_input]
    for position, number in _NEUTRAL.get(node.op, ()) if not node.domain else ():
        other = node.inputs[1 - position]
        if graph.types[other] == facts.types[0] and scalar(graph, node.inputs[position]) == number:
            return other
    return None


def _may_vanish(graph: Graph, node: Node, source: str) -> bool:
    """An output of the graph needs a node of its own that computes it."""
    if not any(output in graph.outputs for output in node.outputs):
        return True
    if any(output in graph.outputs for output in node.outputs[1:]):
        return False
    return source in graph.producers and source not in graph.outputs
