"""The Graph: nodes and values of a model, static shapes, constants as arrays; networkx underneath for algorithms.

`Node.inputs` (ordered, repeats allowed, "" for an absent optional input) is the truth; `graph.nx` is a DiGraph of node
names kept in step by the mutators. A pass takes a Graph and returns a new one (`copy` first), never edits its input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
from numpy.typing import NDArray

from mcompile.dtypes import TensorType
from mcompile.errors import InternalError

Array = NDArray[Any]


@dataclass(frozen=True)
class Node:
    """An operator application. `op` names an OpDef (or a host op); `attrs` are in the op's canonical form."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""


@dataclass
class Graph:
    """A model. Every value (input, constant, node output) has a static TensorType in `types`."""

    name: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    types: dict[str, TensorType] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    producers: dict[str, str] = field(default_factory=dict)  # value -> node name
    users: dict[str, list[str]] = field(default_factory=dict)  # value -> node names, each once, in order of adding
    nx: nx.DiGraph = field(default_factory=nx.DiGraph)

    # --- mutators: the only places that touch nodes, producers, users and nx ---

    def add_constant(self, name: str, array: Array, type: TensorType) -> str:
        self.constants[name] = array
        self.types[name] = type
        return name

    def add(self, node: Node, types: Iterable[TensorType]) -> None:
        """Add a node whose inputs exist already. Raises InternalError on a name clash."""
        if node.name in self.nodes:
            raise InternalError(f"node {node.name} added twice")
        self.nodes[node.name] = node
        self.nx.add_node(node.name)
        for output, type_ in zip(node.outputs, types, strict=True):
            if output in self.producers or output in self.constants:
                raise InternalError(f"value {output} produced twice")
            self.producers[output] = node.name
            self.types[output] = type_
        for value in dict.fromkeys(node.inputs):
            if value:
                self.users.setdefault(value, []).append(node.name)
                if value in self.producers:
                    self.nx.add_edge(self.producers[value], node.name)

    def remove(self, name: str) -> None:
        """Remove a node whose outputs nobody uses any more."""
        node = self.nodes.pop(name)
        for value in dict.fromkeys(node.inputs):
            if value:
                self.users[value].remove(name)
        for output in node.outputs:
            del self.producers[output]
            if not self.users.get(output):
                self.types.pop(output, None)
        self.nx.remove_node(name)

    def replace_uses(self, old: str, new: str) -> None:
        """Make every user of `old` (and the graph's outputs) take `new`."""
        for name in list(self.users.get(old, ())):
            node = self.nodes[name]
            types = [self.types[output] for output in node.outputs]
            inputs = tuple(new if value == old else value for value in node.inputs)
            self.replace(Node(node.name, node.op, inputs, node.outputs, node.attrs, node.domain), types)
        self.outputs = tuple(new if value == old else value for value in self.outputs)

    def replace(self, node: Node, types: Iterable[TensorType]) -> None:
        """Put `node` in the place of the node of the same name, whose outputs are the first of its own."""
        old = self.nodes[node.name]
        for value in dict.fromkeys(old.inputs):
            if value:
                self.users[value].remove(node.name)
                if value in self.producers and self.nx.has_edge(self.producers[value], node.name):
                    self.nx.remove_edge(self.producers[value], node.name)
        self.nodes[node.name] = node
        for output, type_ in zip(node.outputs, types, strict=True):
            self.producers[output] = node.name
            self.types[output] = type_
        for value in dict.fromkeys(node.inputs):
            if value:
                self.users.setdefault(value, []).append(node.name)
                if value in self.producers:
                    self.nx.add_edge(self.producers[value], node.name)

    # --- queries ---

    def producer(self, value: str) -> Node | None:
        name = self.producers.get(value)
        return None if name is None else self.nodes[name]

    def consumers(self, value: str) -> list[Node]:
        return [self.nodes[name] for name in self.users.get(value, ())]

    def topological(self) -> list[Node]:
        """Nodes in a deterministic topological order (ties by order of adding). Raises InternalError on a cycle."""
        position = {name: index for index, name in enumerate(self.nodes)}
        try:
            order = list(nx.lexicographical_topological_sort(self.nx, key=position.__getitem__))
        except nx.NetworkXUnfeasible as error:
            raise InternalError(f"graph {self.name} has a cycle") from error
        return [self.nodes[name] for name in order]

    def copy(self) -> Graph:
        return Graph(
            self.name,
            self.inputs,
            self.outputs,
            dict(self.types),
            dict(self.constants),
            dict(self.nodes),
            dict(self.producers),
            {value: list(names) for value, names in self.users.items()},
            self.nx.copy(),
        )

    def fresh(self, stem: str) -> str:
        """A name not yet taken by a value or node."""
        if stem not in self.types and stem not in self.nodes:
            return stem
        number = 1
        while f"{stem}.{number}" in self.types or f"{stem}.{number}" in self.nodes:
            number += 1
        return f"{stem}.{number}"
