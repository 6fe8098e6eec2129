"""The whole pipeline: random graphs keep their results, and what whole patterns become."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mcompile.config import Config
from mcompile.graph.graph import Graph
from mcompile.graph.pipeline import optimize
from mcompile.target import parse_target
from tests.graph.graphs import Builder, changed, ops

_TARGET = parse_target("x86-64-v3", 1)
_UNARY = ("Relu", "Neg", "Tanh", "Sigmoid", "Identity", "Abs", "Softmax")
_BINARY = ("Add", "Mul", "Sub", "Max")


def _optimize(graph: Graph) -> Graph:
    return optimize(graph, _TARGET, Config(verify=2))


def _int64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@st.composite
def _graphs(draw: st.DrawFn) -> Graph:
    """A few inputs and constants of rank 1 to 3, then nodes on values drawn from those before."""
    b = Builder()
    dims = st.integers(1, 4)
    values = [b.input(*draw(st.lists(dims, min_size=2, max_size=3))) for _ in range(draw(st.integers(1, 2)))]

    def shape(value: str) -> tuple[int, ...]:
        return b.graph.types[value].dims

    def node() -> str:
        x = draw(st.sampled_from(values))
        match draw(st.integers(0, 8)):
            case 0 | 1:
                return b.op(draw(st.sampled_from(_UNARY)), x)
            case 2:
                return b.op(
                    draw(st.sampled_from(_BINARY)),
                    x,
                    draw(st.sampled_from([v for v in values if shape(v) == shape(x)])),
                )
            case 3:
                number = draw(st.sampled_from([0.0, 1.0, 0.5, 2.0, 3.0]))
                return b.op(draw(st.sampled_from(("Add", "Sub", "Mul"))), x, b.constant(number))
            case 4:
                return b.op(draw(st.sampled_from(_BINARY)), x, b.weights(*shape(x)[1:]))
            case 5:
                return b.op("Transpose", x, perm=tuple(draw(st.permutations(range(len(shape(x)))))))
            case 6:
                flat = int(np.prod(shape(x)))
                return b.op(
                    "Reshape", x, shape=_int64(*draw(st.sampled_from([shape(x), (flat, 1), (1, flat), (1, 1, flat)])))
                )
            case 7:
                return b.op("MatMul", x, b.weights(shape(x)[-1], draw(dims)))
            case _:
                cut = draw(st.integers(0, shape(x)[0]))
                parts = b.outputs_of(b.op("Split", x, axis=0, split=_int64(cut, shape(x)[0] - cut)))
                return b.op("Concat", *draw(st.permutations(parts)), axis=0)

    for _ in range(draw(st.integers(1, 10))):
        values.append(node())
    outputs = draw(st.lists(st.sampled_from(values[len(b.graph.inputs) :]), min_size=1, max_size=3, unique=True))
    return b.done(*outputs)


@settings(max_examples=60, deadline=None)
@given(_graphs())
def test_random_graphs_keep_their_results(graph: Graph) -> None:
    changed(_optimize, graph)


def test_the_argument_is_left_alone_and_a_second_run_changes_nothing() -> None:
    b = Builder()
    y = b.op("Gemm", b.op("Flatten", b.input(2, 3, 1)), b.weights(4, 3), b.weights(4), transB=1)
    once = changed(_optimize, b.done(b.op("Relu", y)))
    assert ops(once) == {"Reshape": 1, "MatMul": 1, "Add": 1, "Relu": 1}
    assert optimize(once, _TARGET, Config()) is once


def test_a_block_of_a_residual_network() -> None:
    b = Builder()
    x = b.input(1, 4, 6, 6)

    def conv_bn(value: str) -> str:
        variance = b.constant([0.5, 1, 2, 3])
        return b.op(
            "BatchNormalization",
            b.op("Conv", value, b.weights(4, 4, 3, 3), pads=(1, 1, 1, 1)),
            *(b.weights(4) for _ in range(3)),
            variance,
        )

    y = b.op("Relu", b.op("Add", conv_bn(b.op("Relu", conv_bn(x))), b.op("Dropout", x)))
    new = changed(_optimize, b.done(y))
    assert ops(new) == {"Conv": 2, "Relu": 2, "Add": 1}


def test_attention_written_out() -> None:
    b = Builder()
    x = b.input(1, 5, 8)

    def heads(perm: tuple[int, ...]) -> str:
        y = b.op("Add", b.weights(8), b.op("MatMul", x, b.weights(8, 8)))
        return b.op("Transpose", b.op("Reshape", y, shape=_int64(0, -1, 2, 4)), perm=perm)

    q, k, v = heads((0, 2, 1, 3)), heads((0, 2, 3, 1)), heads((0, 2, 1, 3))
    scores = b.op("Div", b.op("MatMul", q, k), b.constant(2.0))
    y = b.op("MatMul", b.op("Softmax", scores), v)
    y = b.op("Reshape", b.op("Transpose", y, perm=(0, 2, 1, 3)), shape=_int64(1, 5, 8))
    new = changed(_optimize, b.done(y))
    counts = {"MatMul": 3, "Add": 1, "Split": 1, "Reshape": 4, "Transpose": 4, "Mul": 1, "Softmax": 1}
    assert ops(new) == counts


def test_dumps_follow_the_passes(tmp_path: Path) -> None:
    b = Builder()
    optimize(b.done(b.op("Relu", b.op("Identity", b.input(3)))), _TARGET, Config(dump=tmp_path))
    names = [path.name for path in sorted((tmp_path / "graph_g").iterdir())]
    assert names[0] == "000_input.txt"
    assert any("eliminate_identity.txt" in name for name in names)
