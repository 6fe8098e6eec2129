"""Small graphs for the passes' tests, and the check that a pass keeps what a graph computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mcompile.dtypes import DType, TensorType
from mcompile.graph.graph import Array, Graph
from mcompile.graph.infer import apply
from mcompile.graph.interpret import evaluate_graph
from mcompile.graph.printer import print_graph
from mcompile.graph.verify import verify_graph


class Builder:
    """A graph under construction; values are their names."""

    def __init__(self) -> None:
        self.graph = Graph("g")
        self.seed = 0

    def input(self, *shape: int, dtype: DType = DType.FLOAT32) -> str:
        name = self.graph.fresh(f"x{len(self.graph.inputs)}")
        self.graph.inputs = (*self.graph.inputs, name)
        self.graph.types[name] = TensorType(shape, dtype)
        return name

    def constant(self, value: Any, dtype: DType = DType.FLOAT32) -> str:
        array = np.asarray(value, dtype.numpy)
        return self.graph.add_constant(self.graph.fresh("c"), array, TensorType(array.shape, dtype))

    def weights(self, *shape: int) -> str:
        self.seed += 1
        return self.constant(np.random.default_rng(self.seed).standard_normal(shape))

    def op(self, name: str, *inputs: str, **attrs: Any) -> str:
        return apply(self.graph, name, inputs, attrs, stem=name.lower())

    def outputs_of(self, value: str) -> tuple[str, ...]:
        return self.graph.nodes[self.graph.producers[value]].outputs

    def done(self, *outputs: str) -> Graph:
        self.graph.outputs = outputs
        verify_graph(self.graph)
        return self.graph


def ops(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes.values())


def random_feeds(graph: Graph, seed: int = 0) -> dict[str, Array]:
    generator = np.random.default_rng(seed)
    return {
        name: (generator.standard_normal(graph.types[name].dims) * 2).astype(graph.types[name].dtype.numpy)
        for name in graph.inputs
    }


def changed(
    run: Callable[[Graph], Graph] | Sequence[Callable[[Graph], Graph]], graph: Graph, rtol: float = 1e-4
) -> Graph:
    """The graph after the pass(es): legal, with the same outputs; the pass left its argument alone."""
    before = print_graph(graph)
    new = graph
    for step in [run] if callable(run) else run:
        new = step(new)
    assert print_graph(graph) == before
    verify_graph(new)
    feeds = random_feeds(graph)
    expected, got = evaluate_graph(graph, feeds), evaluate_graph(new, feeds)
    assert len(graph.outputs) == len(new.outputs)
    for old, now in zip(graph.outputs, new.outputs, strict=True):
        np.testing.assert_allclose(got[now], expected[old], rtol=rtol, atol=1e-5)
    return new


def unchanged(run: Callable[[Graph], Graph], graph: Graph) -> None:
    """The pass finds nothing to do, and says so by returning its argument."""
    assert run(graph) is graph
