"""Graph's mutators, its printer and its verifier."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mcompile.dtypes import DType, TensorType
from mcompile.errors import InternalError, ModelError
from mcompile.graph.graph import Graph, Node
from mcompile.graph.infer import become, derive, node_facts
from mcompile.graph.printer import print_graph
from mcompile.graph.verify import verify_graph
from mcompile.ops.registry import lookup
from tests.graph.graphs import Builder


def _graph() -> Graph:
    b = Builder()
    x = b.input(2, 3)
    return b.done(b.op("Reshape", b.op("Add", x, b.constant([1, 2, 3])), shape=np.array([6])))


def test_text() -> None:
    assert print_graph(_graph()) == (
        "graph g(x0: float32[2, 3]) -> (reshape)\n"
        "  const c: float32[3] = [1.0, 2.0, 3.0]\n"
        "  add: float32[2, 3] = Add(x0, c)\n"
        "  reshape: float32[6] = Reshape(add, allowzero=0, shape=int64[1] = [6])\n"
    )


def test_text_of_bodies_and_long_constants() -> None:
    b = Builder()
    graph = b.done(b.op("Add", b.input(9), b.weights(9)))
    outer = Graph("outer", ("s",), ("t",), {"s": graph.types["x0"]})
    outer.add(Node("scan", "Scan", ("s", ""), ("t",), {"body": graph, "axes": (0, 1)}), [graph.types["x0"]])
    assert print_graph(outer) == (
        "graph outer(s: float32[9]) -> (t)\n"
        "  t: float32[9] = Scan(s, -, axes=[0, 1], body={\n"
        "    graph g(x0: float32[9]) -> (add)\n"
        "      const c: float32[9]\n"
        "      add: float32[9] = Add(x0, c)\n"
        "  })\n"
    )


def test_copies_are_independent() -> None:
    graph = _graph()
    before, copy = print_graph(graph), graph.copy()
    copy.replace_uses("x0", "c")
    become(copy, copy.nodes["add"], "Identity", ("x0",))
    assert print_graph(graph) == before
    verify_graph(graph)


def test_become_checks_types() -> None:
    graph = _graph()
    with pytest.raises(InternalError, match=r"Shape gives int64\[2\], but Add gave"):
        become(graph, graph.nodes["add"], "Shape", ("x0",))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda g: g.types.update(add=TensorType((2, 4), DType.FLOAT32)), "cannot reshape"),
        (lambda g: g.types.update(reshape=TensorType((2, 4), DType.FLOAT32)), "expected output types float32"),
        (lambda g: g.types.update(c=TensorType((4,), DType.FLOAT32)), "constant c is"),
        (lambda g: g.nodes.update(add=replace(g.nodes["add"], inputs=("x0", "nope"))), "uses nope"),
        (lambda g: g.users["x0"].clear(), "users differ"),
        (lambda g: g.nx.remove_edge("add", "reshape"), "nx differs"),
        (lambda g: setattr(g, "outputs", ("nope",)), "output nope"),
        (lambda g: g.producers.update(add="reshape"), "producer"),
    ],
)
def test_broken_graphs_are_found(break_it: object, message: str) -> None:
    graph = _graph()
    break_it(graph)  # type: ignore[operator]
    with pytest.raises(InternalError, match=message):
        verify_graph(graph)


def test_cycles_are_found() -> None:
    graph = _graph()
    graph.replace(replace(graph.nodes["add"], inputs=("x0", "reshape")), [graph.types["add"]])
    with pytest.raises(InternalError, match="cycle through nodes"):
        verify_graph(graph)
    with pytest.raises(InternalError, match="cycle"):
        graph.topological()


def test_facts() -> None:
    graph = _graph()
    facts = node_facts(graph, graph.nodes["add"])
    assert facts is not None
    assert facts.types == (TensorType((2, 3), DType.FLOAT32),)
    assert facts.copied_input is None
    shape, concat = lookup("Shape"), lookup("LayerNormalization")
    assert shape is not None
    assert concat is not None
    assert derive(shape, (graph.types["x0"],), dict(shape.attrs)).reads_nothing
    with pytest.raises(ModelError, match="too small"):
        derive(concat, (graph.types["x0"], TensorType((2,), DType.FLOAT32)), dict(concat.attrs))
