"""verify_graph: whether a Graph keeps its invariants. Run by the PassManager after passes."""

from __future__ import annotations

from collections.abc import Iterator

import networkx as nx

from mcompile.dtypes import DType
from mcompile.errors import InternalError, McompileError
from mcompile.graph.graph import Graph, Node
from mcompile.graph.infer import node_facts


def verify_graph(graph: Graph) -> None:
    """Raises InternalError listing every broken invariant: names, definitions, uses, cycles, types."""
    faults = [*_values(graph), *_bookkeeping(graph), *_cycles(graph)]
    if not faults:
        faults = [fault for node in graph.nodes.values() for fault in _types(graph, node)]
    if faults:
        raise InternalError("\n  ".join([f"graph {graph.name} is broken:", *faults]))


def _values(graph: Graph) -> Iterator[str]:
    defined = {*graph.inputs, *graph.constants, *graph.producers}
    for name in graph.inputs:
        if name in graph.constants or name in graph.producers:
            yield f"input {name} is defined twice"
    for name in graph.constants:
        if name in graph.producers:
            yield f"constant {name} is defined twice"
    for node in graph.nodes.values():
        for value in node.inputs:
            if value and value not in defined:
                yield f"node {node.name} uses {value}, which nothing defines"
    for value in graph.outputs:
        if value not in defined:
            yield f"output {value} is not defined"
    for value in defined:
        if value not in graph.types:
            yield f"value {value} has no type"
    for name, array in graph.constants.items():
        type_ = graph.types.get(name)
        if type_ is not None and (array.shape != type_.dims or DType.from_numpy(array.dtype) is not type_.dtype):
            yield f"constant {name} is {array.dtype}{list(array.shape)}, its type says {type_}"


def _bookkeeping(graph: Graph) -> Iterator[str]:
    users: dict[str, set[str]] = {}
    edges: set[tuple[str, str]] = set()
    for name, node in graph.nodes.items():
        if name != node.name:
            yield f"node {node.name} is filed under {name}"
        for output in node.outputs:
            if graph.producers.get(output) != name:
                yield f"value {output} of node {name} has producer {graph.producers.get(output)}"
        for value in filter(None, node.inputs):
            users.setdefault(value, set()).add(name)
            if value in graph.producers:
                edges.add((graph.producers[value], name))
    if {value: set(names) for value, names in graph.users.items() if names} != users:
        yield "users differ from the nodes' inputs"
    if set(graph.nx.edges) != edges or set(graph.nx.nodes) != set(graph.nodes):
        yield "graph.nx differs from the nodes"


def _cycles(graph: Graph) -> Iterator[str]:
    if not nx.is_directed_acyclic_graph(graph.nx):
        cycle = [edge[0] for edge in nx.find_cycle(graph.nx)]
        yield f"cycle through nodes {', '.join(cycle)}"


def _types(graph: Graph, node: Node) -> Iterator[str]:
    try:
        facts = node_facts(graph, node)
    except McompileError as error:
        yield f"node {node.name} ({node.op}): {error}"
        return
    if facts is None:
        return
    got = tuple(graph.types[output] for output in node.outputs)
    if got != facts.types[: len(got)]:
        expected = ", ".join(map(str, facts.types))
        yield f"node {node.name} ({node.op}): expected output types {expected}, got {', '.join(map(str, got))}"
