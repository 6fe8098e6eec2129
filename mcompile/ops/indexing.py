"""Ops that read elements at positions found in data. No index leaves its tensor: negatives count from the end,
the rest is clamped, so memory outside is never read whatever the data are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mcompile.dtypes import DType
from mcompile.errors import ModelError
from mcompile.ir.expr import (
    CompareOp,
    Expr,
    ReduceOp,
    Var,
    compare,
    select,
)
from mcompile.ir.tensor import Compute, Tensor, compute, reduce_axis, reduce_over
from mcompile.ops.index_math import ZERO, clamp, ints, normalize_axis, operand, wrap_index
from mcompile.ops.registry import REQUIRED, Array, Attrs, Inputs, OpKind, Sample, define
from mcompile.ops.sampling import series


def _indices(*values: Any) -> Array:
    return np.array(values, np.int64)


def _gather(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x, indices = operand(inputs, 0), operand(inputs, 1)
    axis = normalize_axis(int(attrs["axis"]), len(x.shape))
    rank = len(indices.shape)

    def element(*index: Var) -> Expr:
        position = wrap_index(indices[tuple(index[axis : axis + rank])], x.shape[axis])
        return x[(*index[:axis], position, *index[axis + rank :])]

    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    return (compute("gather", shape, element),)


def _gather_samples() -> Iterator[Sample]:
    yield Sample((series(4, 3), _indices([0, -1], [2, 1])), {"axis": 0})
    yield Sample((series(4, 3, 2), np.array(-2, np.int32)), {"axis": 1})


def _gather_reference(arrays: Sequence[Array | None], attrs: Attrs) -> tuple[Array, ...]:
    x, indices = arrays[:2]
    assert x is not None
    assert indices is not None
    axis = int(attrs["axis"])
    return (np.take(x, np.where(indices < 0, indices + x.shape[axis], indices), axis, mode="clip"),)


define(
    "Gather",
    OpKind.INJECTIVE,
    _gather,
    reference=_gather_reference,
    attrs={"axis": 0},
    samples=_gather_samples,
)


def _gather_elements(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x, indices = operand(inputs, 0), operand(inputs, 1)
    axis = normalize_axis(int(attrs["axis"]), len(x.shape))

    def element(*index: Var) -> Expr:
        position = wrap_index(indices[index], x.shape[axis])
        return x[(*index[:axis], position, *index[axis + 1 :])]

    return (compute("gather_elements", indices.shape, element),)


define(
    "GatherElements",
    OpKind.INJECTIVE,
    _gather_elements,
    attrs={"axis": 0},
    samples=lambda: iter([Sample((series(2, 3), _indices([1, 0], [-1, 2])), {"axis": 1})]),
)


def _gather_nd(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x, indices = operand(inputs, 0), operand(inputs, 1)
    batch, depth, outer = int(attrs["batch_dims"]), indices.shape[-1], len(indices.shape) - 1
    if batch + depth > len(x.shape):
        raise ModelError(f"GatherND index tuples of {depth} do not fit shape {list(x.shape)}")

    def element(*index: Var) -> Expr:
        position = [wrap_index(indices[(*index[:outer], k)], x.shape[batch + k]) for k in range(depth)]
        return x[(*index[:batch], *position, *index[outer:])]

    return (compute("gather_nd", (*indices.shape[:-1], *x.shape[batch + depth :]), element),)


def _gather_nd_samples() -> Iterator[Sample]:
    yield Sample((series(2, 3, 4), _indices([0, 1], [-1, 2])), {})
    yield Sample((series(2, 3, 4), _indices([1], [0])), {"batch_dims": 1})


define("GatherND", OpKind.INJECTIVE, _gather_nd, attrs={"batch_dims": 0}, samples=_gather_nd_samples)


def _reverse_sequence(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x, lengths = operand(inputs, 0), operand(inputs, 1)
    batch, time = (normalize_axis(int(attrs[name]), len(x.shape)) for name in ("batch_axis", "time_axis"))

    def element(*index: Var) -> Expr:
        length = lengths[index[batch]].astype(DType.INT64)
        step = clamp(select(index[time] < length, length - 1 - index[time], index[time]), x.shape[time])
        return x[tuple(step if dim == time else i for dim, i in enumerate(index))]

    return (compute("reverse_sequence", x.shape, element),)


define(
    "ReverseSequence",
    OpKind.INJECTIVE,
    _reverse_sequence,
    attrs={"batch_axis": 1, "time_axis": 0},
    samples=lambda: iter([Sample((series(4, 4), _indices(4, 3, 2, 1)), {"batch_axis": 1, "time_axis": 0})]),
)


def _one_hot(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    indices, values = operand(inputs, 0), operand(inputs, 2)
    depth = ints(attrs["depth"])[0]
    axis = normalize_axis(int(attrs["axis"]), len(indices.shape) + 1)

    def element(*index: Var) -> Expr:
        hot = indices[(*index[:axis], *index[axis + 1 :])].astype(DType.INT64)
        hot = select(hot < 0, hot + depth, hot)
        return select(hot.eq(index[axis]), values[1], values[0])

    return (compute("one_hot", (*indices.shape[:axis], depth, *indices.shape[axis:]), element),)


def _one_hot_samples() -> Iterator[Sample]:
    values = np.array([0.5, 2.0], np.float32)
    yield Sample((_indices([1, 9], [2, 4]), None, values), {"depth": np.array(10, np.int64), "axis": 1})
    yield Sample((_indices(0, -1, 2), None, values), {"depth": np.array(3, np.int64)})


define(
    "OneHot",
    OpKind.INJECTIVE,
    _one_hot,
    attrs={"depth": REQUIRED, "axis": -1},
    operands={1: "depth"},
    samples=_one_hot_samples,
)


# --- TopK ---


def _rank(x: Tensor, axis: int, largest: bool) -> Compute:
    """How many elements along `axis` stand ahead of each: all beyond it, and its equals with a lower index."""
    axes = [reduce_axis(x.shape[axis])]

    def element(*index: Var) -> Expr:
        other = axes[0].var
        mine, its = x[index], x[(*index[:axis], other, *index[axis + 1 :])]
        ahead = compare(CompareOp.GT if largest else CompareOp.LT, its, mine)
        tie = its.eq(mine) & (other < index[axis])
        return reduce_over(ReduceOp.SUM, (ahead | tie).astype(DType.INT64), axes)

    return compute("rank", x.shape, element, reduce_axes=axes)


def _top_k(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    """By counting ranks: O(n * n) comparisons a row, all of them parallel; NaNs have no place in the order."""
    x = operand(inputs, 0)
    axis, count = normalize_axis(int(attrs["axis"]), len(x.shape)), ints(attrs["k"])[0]
    if not 0 <= count <= x.shape[axis]:
        raise ModelError(f"TopK asks for {count} of {x.shape[axis]} elements")
    rank = _rank(x, axis, bool(attrs["largest"]))
    shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
    axes = [reduce_axis(x.shape[axis])]

    def at(index: Sequence[Expr], position: Expr) -> tuple[Expr, ...]:
        return (*index[:axis], position, *index[axis + 1 :])

    def find(*index: Var) -> Expr:
        position = axes[0].var
        found = select(rank[at(index, position)].eq(index[axis]), position, ZERO)
        return reduce_over(ReduceOp.MAX, found, axes)

    indices = compute("indices", shape, find, reduce_axes=axes)
    values = compute("values", shape, lambda *index: x[at(index, clamp(indices[index], x.shape[axis]))])
    return values, indices


def _top_k_samples() -> Iterator[Sample]:
    x = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], np.float32)
    yield Sample((x,), {"k": _indices(3)})
    yield Sample((x,), {"k": _indices(2), "largest": 0, "axis": 1})
    yield Sample((x,), {"k": _indices(1), "axis": 0})


define(
    "TopK",
    OpKind.REDUCTION,
    _top_k,
    attrs={"k": REQUIRED, "axis": -1, "largest": 1, "sorted": 1},
    operands={1: "k"},
    samples=_top_k_samples,
)
