"""Remove what no output needs.

a = Relu(x); b = Sigmoid(x)      ->   a = Relu(x)
outputs: a                            outputs: a
"""

from __future__ import annotations

from mcompile.graph.graph import Graph


def eliminate_dead(graph: Graph) -> Graph:
    """The graph without nodes and constants that no output depends on."""
    live = _live_nodes(graph)
    constants = [name for name in graph.constants if not _is_used(graph, name, live)]
    if len(live) == len(graph.nodes) and not constants:
        return graph
    new = graph.copy()
    for node in reversed(graph.topological()):
        if node.name not in live:
            new.remove(node.name)
    for name in constants:
        del new.constants[name], new.types[name]
        new.users.pop(name, None)
    return new


def _live_nodes(graph: Graph) -> set[str]:
    live: set[str] = set()
    pending = [graph.producers[value] for value in graph.outputs if value in graph.producers]
    while pending:
        name = pending.pop()
        if name not in live:
            live.add(name)
            inputs = graph.nodes[name].inputs
            pending.extend(graph.producers[value] for value in inputs if value in graph.producers)
    return live


def _is_used(graph: Graph, value: str, live: set[str]) -> bool:
    return value in graph.outputs or any(name in live for name in graph.users.get(value, ()))
