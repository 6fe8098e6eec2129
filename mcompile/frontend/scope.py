"""What converting nodes needs to know: the names of a (sub)graph or function body, and the state of one import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnx import AttributeProto

from mcompile.frontend.check import Problem
from mcompile.frontend.host import HostOp
from mcompile.frontend.source import ModelSource
from mcompile.graph.graph import Graph


@dataclass
class Scope:
    """Names of one ONNX graph or function body -> values of our Graph; None for one that could not be converted."""

    opsets: Mapping[str, int]
    parent: Scope | None = None
    prefix: str = ""
    formal: Mapping[str, AttributeProto] = field(default_factory=dict)  # attributes of the function call
    names: dict[str, str | None] = field(default_factory=dict)

    def find(self, name: str) -> str | None:
        """The Graph value called `name`; "" for an absent input."""
        if not name:
            return ""
        if name in self.names:
            return self.names[name]
        return self.parent.find(name) if self.parent else None

    def opset(self, domain: str) -> int:
        return self.opsets.get("" if domain == "ai.onnx" else domain, 0)


@dataclass
class Import:
    """One import under way: the graph so far, its problems, the host ops."""

    source: ModelSource
    graph: Graph
    reserved: set[str]  # names of the main graph's values, not to be taken by inlined ones
    problems: list[Problem] = field(default_factory=list)
    host_ops: list[HostOp] = field(default_factory=list)

    def fresh_value(self, stem: str) -> str:
        """A value name that neither exists nor will be needed."""
        name, number = stem, 0
        while name in self.graph.types or name in self.reserved or name in self.graph.nodes:
            number += 1
            name = f"{stem}.{number}"
        return name

    def fresh_node(self, stem: str) -> str:
        name, number = stem, 0
        while name in self.graph.nodes:
            number += 1
            name = f"{stem}.{number}"
        return name
