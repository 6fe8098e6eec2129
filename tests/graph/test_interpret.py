"""The graph-level interpreter: Scan's directions and axes, wrong feeds, host ops."""

from __future__ import annotations

import numpy as np
import pytest

import mcompile.ops  # noqa: F401  (registers the ops)
from mcompile.dtypes import DType, TensorType
from mcompile.errors import InternalError, ModelError
from mcompile.graph.graph import Graph, Node
from mcompile.graph.interpret import evaluate_graph

STATE, SEQUENCE = TensorType((2,), DType.FLOAT32), TensorType((2, 3), DType.FLOAT32)


def running_sum(directions: tuple[int, int], axes: tuple[int, int]) -> Graph:
    body = Graph("body", ("sum", "x"), ("next", "next"), {"sum": STATE, "x": STATE})
    body.add(Node("add", "Add", ("sum", "x"), ("next",)), [STATE])
    graph = Graph("scan", ("start", "xs"), ("end", "sums"), {"start": STATE, "xs": SEQUENCE})
    attrs = {
        "body": body,
        "num_scan_inputs": 1,
        "scan_input_axes": axes[:1],
        "scan_input_directions": directions[:1],
        "scan_output_axes": axes[1:],
        "scan_output_directions": directions[1:],
    }
    stacked = SEQUENCE if axes[1] == 1 else TensorType((3, 2), DType.FLOAT32)
    graph.add(Node("scan", "Scan", ("start", "xs"), ("end", "sums"), attrs), [STATE, stacked])
    return graph


@pytest.mark.parametrize("directions", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("output_axis", [0, 1])
def test_scan(directions: tuple[int, int], output_axis: int) -> None:
    start, xs = np.array([10, 20], np.float32), np.arange(6, dtype=np.float32).reshape(2, 3)
    results = evaluate_graph(running_sum(directions, (1, output_axis)), {"start": start, "xs": xs})
    steps = xs[:, ::-1] if directions[0] else xs
    sums = start[:, None] + np.cumsum(steps, axis=1)
    np.testing.assert_array_equal(results["end"], sums[:, -1])
    stacked = sums[:, ::-1] if directions[1] else sums
    np.testing.assert_array_equal(results["sums"], stacked if output_axis == 1 else stacked.T)


def test_wrong_feed() -> None:
    graph = running_sum((0, 0), (1, 1))
    with pytest.raises(ModelError, match="input xs: expected"):
        evaluate_graph(graph, {"start": np.zeros(2, np.float32), "xs": np.zeros((2, 4), np.float32)})


def test_host_op() -> None:
    graph = Graph("host", ("x",), ("y",), {"x": STATE})
    graph.add(Node("node", "Strange", ("x",), ("y",)), [STATE])
    feeds = {"x": np.array([1, 2], np.float32)}
    with pytest.raises(InternalError, match="nothing evaluates Strange"):
        evaluate_graph(graph, feeds)
    results = evaluate_graph(graph, feeds, run_host_op=lambda _, inputs: [-x for x in inputs if x is not None])
    assert results["y"].tolist() == [-1, -2]


def test_result_of_another_type_is_our_bug() -> None:
    graph = Graph("wrong", ("x",), ("y",), {"x": STATE})
    graph.add(Node("node", "Abs", ("x",), ("y",)), [SEQUENCE])
    with pytest.raises(InternalError, match="declared"):
        evaluate_graph(graph, {"x": np.zeros(2, np.float32)})
