"""Ops that index by data: no index may reach outside a tensor, and ties are settled as ONNX says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mcompile.ops  # noqa: F401  (registers the ops)
from mcompile.dtypes import DType
from mcompile.errors import ModelError
from mcompile.ir.evaluate import evaluate
from mcompile.ir.tensor import build_dag, placeholder
from mcompile.ops.registry import Array, lookup

WILD = np.array([-(2**62), -9, -1, 0, 3, 2**62], np.int64)


def apply(name: str, *arrays: Array | None, **attrs: Any) -> tuple[Array, ...]:
    op = lookup(name)
    assert op is not None
    given_arrays = {f"x{i}": array for i, array in enumerate(arrays) if array is not None}
    tensors = [
        None if array is None else placeholder(f"x{i}", array.shape, DType.from_numpy(array.dtype))
        for i, array in enumerate(arrays)
    ]
    outputs = op.compute(tensors, {**op.attrs, **attrs})
    dag = build_dag(outputs)
    values = evaluate(dag, {tensor.name: given_arrays[tensor.name] for tensor in dag.placeholders})
    return tuple(values[output.name] for output in outputs)


def test_gathers_clamp_wild_indices() -> None:
    x = np.arange(4, dtype=np.float32)
    clamped = [0, 0, 3, 0, 3, 3]
    assert apply("Gather", x, WILD)[0].tolist() == clamped
    assert apply("GatherElements", x, WILD)[0].tolist() == clamped
    assert apply("GatherND", x, WILD[:, None])[0].tolist() == clamped


def test_scatters_drop_wild_indices() -> None:
    x, updates = np.zeros(4, np.float32), np.arange(1, 7, dtype=np.float32)
    expected = [4, 0, 0, 5]
    assert apply("ScatterElements", x, WILD, updates)[0].tolist() == expected
    assert apply("ScatterND", x, WILD[:, None], updates)[0].tolist() == expected


def test_reverse_sequence_ignores_lengths_beyond_the_end() -> None:
    x = np.arange(3, dtype=np.float32)[:, None]
    assert apply("ReverseSequence", x, np.array([9], np.int64))[0].shape == x.shape


def test_last_of_several_updates_wins() -> None:
    x = np.zeros(3, np.float32)
    indices, updates = np.array([1, 1, 1], np.int64), np.array([5, 6, 7], np.float32)
    assert apply("ScatterElements", x, indices, updates)[0].tolist() == [0, 7, 0]
    assert apply("ScatterND", x, indices[:, None], updates)[0].tolist() == [0, 7, 0]


@pytest.mark.parametrize(
    ("data", "indices", "updates"), [((4, 3), (2, 2, 1), (2, 2, 3)), ((4, 3), (2,), ()), ((4,), (0, 1), (0,))]
)
def test_scatter_nd_shapes(data: tuple[int, ...], indices: tuple[int, ...], updates: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    x, u = random.standard_normal(data, np.float32), random.standard_normal(updates, np.float32)
    i = random.integers(0, 3, indices)
    expected = x.copy()
    for position in np.ndindex(indices[:-1]):
        expected[tuple(i[position])] = u[position]
    np.testing.assert_array_equal(apply("ScatterND", x, i, u)[0], expected)
    expected = x.copy()
    for position in np.ndindex(indices[:-1]):
        expected[tuple(i[position])] += u[position]
    np.testing.assert_allclose(apply("ScatterND", x, i, u, reduction="add")[0], expected, rtol=1e-6)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(0, 9), st.booleans())
def test_top_k_prefers_lower_indices(values: list[int], k: int, largest: bool) -> None:
    k = min(k, len(values))
    x = np.array(values, np.int32)
    order = np.argsort(-x if largest else x, kind="stable")[:k]
    top, indices = apply("TopK", x, k=np.array([k]), largest=int(largest))
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_array_equal(top, x[order])


def test_top_k_with_nan_stays_inside() -> None:
    x = np.array([np.nan, 1, np.nan], np.float32)
    _, indices = apply("TopK", x, k=np.array([3]))
    assert ((indices >= 0) & (indices < 3)).all()


def test_one_hot_out_of_range_is_off() -> None:
    x, values = np.array([-4, -1, 0, 3], np.int64), np.array([0, 1], np.float32)
    expected = [[0, 0, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0]]
    assert apply("OneHot", x, None, values, depth=np.array(3))[0].tolist() == expected


@pytest.mark.parametrize(
    ("op", "shapes", "attrs"),
    [
        ("Gather", [(2, 3), (2,)], {"axis": 2}),
        ("GatherND", [(2, 3), (2, 3)], {}),
        ("ScatterND", [(2, 3), (2, 1), (2, 2)], {}),
        ("ScatterElements", [(2, 3), (2, 1), (2, 2)], {}),
        ("ScatterElements", [(2, 3), (2, 1), (2, 1)], {"reduction": "median"}),
        ("TopK", [(2, 3)], {"k": np.array([4])}),
    ],
)
def test_malformed_use(op: str, shapes: list[tuple[int, ...]], attrs: dict[str, Any]) -> None:
    dtypes = (np.float32, np.int64, np.float32)
    with pytest.raises(ModelError):
        apply(op, *(np.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=False)), **attrs)
