"""Patterns over a Graph, and rules: what a pass that replaces small subgraphs is made of.

A pattern is matched backwards from a value: `Op("Mul", Any("x"), Op("Sigmoid", Any("x")))` matches the output of a
Mul one of whose operands is the Sigmoid of the other. Names bind values; a name used twice must bind the same value.
Ops in `_COMMUTATIVE` match with their two operands in either order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Protocol

from mcompile.graph.graph import Graph, Node
from mcompile.ops.registry import lookup

Binding = Mapping[str, str]  # pattern name -> value; the name of an Op -> its output value
_COMMUTATIVE = frozenset({"Add", "Mul"})


class Pattern(Protocol):
    def match(self, graph: Graph, value: str, bound: Binding) -> Iterator[Binding]:
        """Every way in which `value` fits, as `bound` with more names."""


@dataclass(frozen=True)
class Any:
    """Any value, absent ones not."""

    name: str

    def match(self, graph: Graph, value: str, bound: Binding) -> Iterator[Binding]:
        if value and bound.get(self.name, value) == value:
            yield {**bound, self.name: value}


@dataclass(frozen=True)
class Known:
    """A constant."""

    name: str

    def match(self, graph: Graph, value: str, bound: Binding) -> Iterator[Binding]:
        if value in graph.constants:
            yield from Any(self.name).match(graph, value, bound)


@dataclass(frozen=True)
class Number:
    """A constant whose only element is (nearly) `number`; any number if None."""

    number: float | None = None
    name: str = ""

    def match(self, graph: Graph, value: str, bound: Binding) -> Iterator[Binding]:
        got = scalar(graph, value)
        if got is not None and (self.number is None or isclose(got, self.number, rel_tol=1e-4)):
            yield {**bound, self.name: value} if self.name else bound


@dataclass(frozen=True)
class Op:
    """The first output of a node of op `op`, whose operands fit `inputs` and whose attributes fit `where`.

    `sole`: nothing else uses the value, so that a rule may change what computes it.
    """

    op: str
    inputs: tuple[Pattern, ...]
    name: str = ""
    where: Callable[[Mapping[str, object]], bool] | None = None
    sole: bool = False

    def match(self, graph: Graph, value: str, bound: Binding) -> Iterator[Binding]:
        node = graph.producer(value) if value else None
        if node is None or node.op != self.op or node.domain or value != node.outputs[0]:
            return
        if self.sole and not is_sole_use(graph, value):
            return
        yield from self.match_node(graph, node, bound)

    def match_node(self, graph: Graph, node: Node, bound: Binding) -> Iterator[Binding]:
        """The ways in which the node's operands fit, its op being known to."""
        if len(node.inputs) != len(self.inputs) or (self.where is not None and not self.where(node.attrs)):
            return
        start = {**bound, self.name: node.outputs[0]} if self.name else bound
        yield from _match_all(graph, self.inputs, node.inputs, start)
        if self.op in _COMMUTATIVE:
            yield from _match_all(graph, self.inputs, node.inputs[::-1], start)


def op(
    name: str,
    *inputs: Pattern,
    bind: str = "",
    where: Callable[[Mapping[str, object]], bool] | None = None,
    sole: bool = False,
) -> Op:
    """Shorthand: `op("Relu", x)`."""
    return Op(name, inputs, bind, where, sole)


def _match_all(graph: Graph, patterns: Sequence[Pattern], values: Sequence[str], bound: Binding) -> Iterator[Binding]:
    if not patterns:
        yield bound
        return
    for first in patterns[0].match(graph, values[0], bound):
        yield from _match_all(graph, patterns[1:], values[1:], first)


def is_sole_use(graph: Graph, value: str) -> bool:
    """Whether one node uses the value, and the graph does not give it out."""
    return len(graph.users.get(value, ())) == 1 and value not in graph.outputs


def scalar(graph: Graph, value: str) -> float | None:
    """The number in a constant of one element."""
    array = graph.constants.get(value)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


Build = Callable[[Graph, Node, Binding], bool]


@dataclass(frozen=True)
class Rule:
    """Where `pattern` fits a node, `build(graph, node, bound)` rewrites the graph there and says True, or leaves it.

    `needs`: ops that the result is made of; the rule is off while one of them is not defined.
    """

    name: str
    pattern: Op
    build: Build
    needs: tuple[str, ...] = ()


def apply_rules(graph: Graph, rules: Sequence[Rule]) -> Graph:
    """The graph after one visit of each node in topological order; at a node the first rule that fits is applied."""
    by_op: dict[str, list[Rule]] = {}
    for rule in rules:
        if all(lookup(name) for name in rule.needs):
            by_op.setdefault(rule.pattern.op, []).append(rule)
    new: Graph | None = None  # rules that decline leave it as it is
    changed = False
    for name in [node.name for node in graph.topological() if node.op in by_op and not node.domain]:
        current = new or graph
        node = current.nodes.get(name)
        if node is None:
            continue
        for rule, bound in _fits(current, node, by_op.get(node.op, ())):
            new = new or graph.copy()
            if rule.build(new, node, bound):
                changed = True
                break
    return new if new is not None and changed else graph


def _fits(graph: Graph, node: Node, rules: Sequence[Rule]) -> Iterator[tuple[Rule, Binding]]:
    for rule in rules:
        bound = next(rule.pattern.match_node(graph, node, {}), None)
        if bound is not None:
            yield rule, bound
