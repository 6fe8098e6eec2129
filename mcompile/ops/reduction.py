"""Reductions over dims: ReduceX, ArgMax and ArgMin, the softmax family, cumulative sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from mcompile.dtypes import DType
from mcompile.ir.expr import (
    Binary,
    BinaryOp,
    CompareOp,
    Const,
    Expr,
    ReduceOp,
    Unary,
    UnaryOp,
    compare,
    select,
)
from mcompile.ir.tensor import Compute, Tensor, compute, reduce_axis, reduce_over
from mcompile.ops.index_math import ints, is_given, normalize_axes, normalize_axis, operand, ravel
from mcompile.ops.precision import real, widened
from mcompile.ops.registry import Attrs, Inputs, OpKind, Sample, define
from mcompile.ops.sampling import numbers, sample


def reduce_dims(
    name: str,
    op: ReduceOp,
    shape: Sequence[int],
    dims: Sequence[int],
    value: Callable[..., Expr],
    keepdims: bool = True,
) -> Compute:
    """`value(i0, i1, ...)` over all of `shape`, combined over `dims`; they stay as dims of 1 with `keepdims`."""
    axes = {dim: reduce_axis(shape[dim], f"k{dim}") for dim in sorted(dims)}
    kept = [dim for dim in range(len(shape)) if keepdims or dim not in axes]
    result_shape = [1 if dim in axes else shape[dim] for dim in kept]

    def element(*i: Expr) -> Expr:
        outer = dict(zip(kept, i, strict=True))
        full = [axes[dim].var if dim in axes else outer[dim] for dim in range(len(shape))]
        return reduce_over(op, value(*full), list(axes.values())) if axes else value(*full)

    return compute(name, result_shape, element, list(axes.values()))


def keep_index(i: Sequence[Expr], dims: Sequence[int]) -> tuple[Expr | int, ...]:
    """The index into a tensor that keeps its reduced `dims` as 1."""
    return tuple(0 if dim in dims else index for dim, index in enumerate(i))


def mapped(name: str, x: Tensor, function: Callable[[Expr], Expr]) -> Compute:
    return compute(name, x.shape, lambda *i: function(x[i]))


# --- ReduceX ---


def _reduced_dims(x: Tensor, attrs: Attrs) -> tuple[int, ...]:
    if is_given(attrs["axes"]):
        return normalize_axes(attrs["axes"], len(x.shape))
    return () if attrs["noop_with_empty_axes"] else tuple(range(len(x.shape)))


Before = Callable[[Expr], Expr]
After = Callable[[Expr, int], Expr]
_REDUCE_ATTRS = {"axes": None, "keepdims": 1, "noop_with_empty_axes": 0}


def _reduction(name: str, op: ReduceOp, before: Before, after: After | None) -> Callable[..., tuple[Compute, ...]]:
    """The stages of op(before(x)) and, where there is `after` or a wider accumulator, after(total, element count)."""

    def build(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
        x = operand(inputs, 0)
        dims, keepdims = _reduced_dims(x, attrs), bool(attrs["keepdims"])
        total = reduce_dims(name, op, x.shape, dims, lambda *i: before(widened(x[i])), keepdims)
        if after is not None:
            count = prod(x.shape[dim] for dim in dims)
            total = mapped(f"{name}_result", total, lambda value: after(value, count).astype(x.dtype))
        elif total.dtype is not x.dtype:
            total = mapped(f"{name}_result", total, lambda value: value.astype(x.dtype))
        return (total,)

    return build


def _log_sum_exp(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x = operand(inputs, 0)
    dims = _reduced_dims(x, attrs)
    dtype = real(x.dtype)
    peak = reduce_dims("max", ReduceOp.MAX, x.shape, dims, lambda *i: x[i].astype(dtype))
    shift = mapped("shift", peak, lambda m: select(Unary(UnaryOp.IS_INF, m), 0, m))

    def exponential(*i: Expr) -> Expr:
        return Unary(UnaryOp.EXP, x[i].astype(dtype) - shift[keep_index(i, dims)])

    total = reduce_dims("sum", ReduceOp.SUM, x.shape, dims, exponential)
    kept = [dim for dim in range(len(x.shape)) if attrs["keepdims"] or dim not in dims]

    def element(*i: Expr) -> Expr:
        outer = dict(zip(kept, i, strict=True))
        index = tuple(outer.get(dim, 0) for dim in range(len(x.shape)))
        return (Unary(UnaryOp.LOG, total[index]) + shift[index]).astype(x.dtype)

    return (compute("reducelogsumexp", [total.shape[dim] for dim in kept], element),)


def _mean(total: Expr, count: int) -> Expr:
    return total / count if total.dtype.is_float else Binary(BinaryOp.TRUNCDIV, total, Const(count, total.dtype))


def _extremum(name: str, op: ReduceOp, bool_op: ReduceOp) -> Callable[..., tuple[Compute, ...]]:
    def build(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
        x = operand(inputs, 0)
        chosen = bool_op if x.dtype is DType.BOOL else op
        dims = _reduced_dims(x, attrs)
        return (reduce_dims(name, chosen, x.shape, dims, lambda *i: x[i], bool(attrs["keepdims"])),)

    return build


def _as_real(x: Expr) -> Expr:
    return x.astype(real(x.dtype))


def _root(total: Expr, _: int) -> Expr:
    return Unary(UnaryOp.SQRT, total)


def _log(total: Expr, _: int) -> Expr:
    return Unary(UnaryOp.LOG, total)


def _absolute(x: Expr) -> Expr:
    return Unary(UnaryOp.ABS, x)


def _square(x: Expr) -> Expr:
    return x * x


def _square_as_real(x: Expr) -> Expr:
    return _square(_as_real(x))


def _axes_samples(low: float, dtypes: Sequence[str]) -> Iterator[Sample]:
    x = numbers(2, 3, 4, low=low)
    yield sample(x)
    yield sample(x, axes=np.array([1]), keepdims=0)
    yield sample(x, axes=np.array([-1, 0]))
    yield sample(x, axes=np.array([], np.int64), noop_with_empty_axes=1)
    yield sample(x, axes=np.array([], np.int64), keepdims=0)
    yield sample(x, opset=11, axes=[0, 2], keepdims=0)
    yield sample(x, opset=12, axes=[-2])
    yield sample(numbers(low=low), keepdims=0)
    for dtype in dtypes:
        yield sample(numbers(3, 5, low=low, dtype=dtype), axes=np.array([1]))


def _define_reduction(
    name: str,
    build: Callable[..., tuple[Compute, ...]],
    *,
    low: float = -3,
    dtypes: Sequence[str] = ("int32", "float16"),
) -> None:
    define(
        name,
        OpKind.REDUCTION,
        build,
        attrs=_REDUCE_ATTRS,
        operands={1: "axes"},
        samples=lambda: _axes_samples(low, dtypes),
    )


def _identity(x: Expr) -> Expr:
    return x


_define_reduction("ReduceSum", _reduction("reducesum", ReduceOp.SUM, _identity, None))
_define_reduction("ReduceMean", _reduction("reducemean", ReduceOp.SUM, _identity, _mean))
_define_reduction("ReduceProd", _reduction("reduceprod", ReduceOp.PROD, _identity, None))
_define_reduction("ReduceL1", _reduction("reducel1", ReduceOp.SUM, _absolute, None))
_define_reduction("ReduceL2", _reduction("reducel2", ReduceOp.SUM, _square_as_real, _root))
_define_reduction("ReduceSumSquare", _reduction("reducesumsquare", ReduceOp.SUM, _square, None))
_define_reduction(
    "ReduceLogSum", _reduction("reducelogsum", ReduceOp.SUM, _as_real, _log), low=0.1, dtypes=("float16",)
)
_define_reduction("ReduceLogSumExp", _log_sum_exp, dtypes=("float16",))
_define_reduction("ReduceMax", _extremum("reducemax", ReduceOp.MAX, ReduceOp.OR), dtypes=("int8", "float16", "bool"))
_define_reduction("ReduceMin", _extremum("reducemin", ReduceOp.MIN, ReduceOp.AND), dtypes=("int8", "float16", "bool"))


# --- ArgMax, ArgMin: the extremum, then the first (or last) place where it stands ---


def first_place(
    x: Tensor, peak: Tensor, dims: Sequence[int], *, last: bool = False, keepdims: bool = True, name: str = "place"
) -> Compute:
    """The flat index within `dims` of the first element of `x` that equals `peak` (or is NaN where `peak` is)."""
    sizes = [x.shape[dim] for dim in dims]
    outside = -1 if last else prod(sizes)

    def candidate(*i: Expr) -> Expr:
        found = x[i].eq(peak[keep_index(i, dims)])
        if x.dtype.is_float:
            found = Binary(BinaryOp.OR, found, Unary(UnaryOp.IS_NAN, x[i]))
        return select(found, ravel([i[dim] for dim in dims], sizes), outside)

    return reduce_dims(name, ReduceOp.MAX if last else ReduceOp.MIN, x.shape, dims, candidate, keepdims)


def _arg_extremum(name: str, op: ReduceOp) -> Callable[..., tuple[Compute, ...]]:
    def build(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
        x = operand(inputs, 0)
        dims = (normalize_axis(int(attrs["axis"]), len(x.shape)),)
        peak = reduce_dims("peak", op, x.shape, dims, lambda *i: x[i])
        last, keepdims = bool(attrs["select_last_index"]), bool(attrs["keepdims"])
        return (first_place(x, peak, dims, last=last, keepdims=keepdims, name=name),)

    return build


def _arg_samples() -> Iterator[Sample]:
    ties = numbers(3, 4, 5, low=0, high=2, dtype="int32")
    for attrs in ({}, {"axis": 1}, {"axis": -1, "keepdims": 0}, {"axis": 2, "select_last_index": 1}):
        yield sample(ties, **attrs)
    yield sample(numbers(3, 7), axis=1)
    yield sample(np.array([[1, np.nan, 5, np.nan]], np.float32), axis=1)


for _name, _reduce_op in (("ArgMax", ReduceOp.MAX), ("ArgMin", ReduceOp.MIN)):
    define(
        _name,
        OpKind.REDUCTION,
        _arg_extremum(_name.lower(), _reduce_op),
        attrs={"axis": 0, "keepdims": 1, "select_last_index": 0},
        samples=_arg_samples,
    )


# --- Softmax, LogSoftmax, Hardmax ---


def _flatten_before_13(opset: int, attrs: dict[str, Any]) -> dict[str, Any]:
    """Before opset 13 all dims from `axis` (1 by default) on are one."""
    return attrs if opset >= 13 else {"axis": 1, **attrs, "flatten": True}


def _softmax_dims(x: Tensor, attrs: Attrs) -> tuple[int, ...]:
    rank, axis = len(x.shape), int(attrs["axis"])
    if attrs["flatten"] and axis == rank:
        return ()
    axis = normalize_axis(axis, rank)
    return tuple(range(axis, rank)) if attrs["flatten"] else (axis,)


def softmax(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x = operand(inputs, 0)
    dims = _softmax_dims(x, attrs)
    peak = reduce_dims("max", ReduceOp.MAX, x.shape, dims, lambda *i: widened(x[i]))
    shifted = compute("exp", x.shape, lambda *i: Unary(UnaryOp.EXP, widened(x[i]) - peak[keep_index(i, dims)]))
    total = reduce_dims("sum", ReduceOp.SUM, x.shape, dims, lambda *i: shifted[i])
    scale = mapped("scale", total, lambda value: 1 / value)
    result = compute("softmax", x.shape, lambda *i: (shifted[i] * scale[keep_index(i, dims)]).astype(x.dtype))
    return (result,)


def _log_softmax(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x = operand(inputs, 0)
    dims = _softmax_dims(x, attrs)
    peak = reduce_dims("max", ReduceOp.MAX, x.shape, dims, lambda *i: widened(x[i]))

    def shifted(*i: Expr) -> Expr:
        return widened(x[i]) - peak[keep_index(i, dims)]

    total = reduce_dims("sum", ReduceOp.SUM, x.shape, dims, lambda *i: Unary(UnaryOp.EXP, shifted(*i)))
    log = mapped("log", total, lambda value: Unary(UnaryOp.LOG, value))
    result = compute("logsoftmax", x.shape, lambda *i: (shifted(*i) - log[keep_index(i, dims)]).astype(x.dtype))
    return (result,)


def _hardmax(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x = operand(inputs, 0)
    dims = _softmax_dims(x, attrs)
    peak = reduce_dims("max", ReduceOp.MAX, x.shape, dims, lambda *i: x[i])
    place = first_place(x, peak, dims)
    sizes = [x.shape[dim] for dim in dims]

    def element(*i: Expr) -> Expr:
        is_first = ravel([i[dim] for dim in dims], sizes).eq(place[keep_index(i, dims)])
        return select(is_first, Const(1, x.dtype), 0)

    return (compute("hardmax", x.shape, element),)


def _softmax_samples() -> Iterator[Sample]:
    x = numbers(2, 3, 4)
    for axis in (0, 1, -1):
        yield sample(x, axis=axis)
    yield sample(x)
    yield sample(x * 100)
    yield sample(numbers(3, 5, dtype="float16"))
    yield sample(x, opset=11)
    yield sample(x, opset=12, axis=2)
    yield sample(x, opset=7, axis=0)


_SOFTMAX_ATTRS = {"axis": -1, "flatten": False}
for _name, _build in (("Softmax", softmax), ("LogSoftmax", _log_softmax), ("Hardmax", _hardmax)):
    define(
        _name,
        OpKind.REDUCTION,
        _build,
        attrs=_SOFTMAX_ATTRS,
        adapt=_flatten_before_13,
        samples=_softmax_samples,
    )


# --- CumSum, CumProd ---


def _cumulative(name: str, op: ReduceOp) -> Callable[..., tuple[Compute, ...]]:
    def build(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
        x = operand(inputs, 0)
        axis = normalize_axis(ints(attrs["axis"])[0], len(x.shape))
        k = reduce_axis(x.shape[axis], "k")
        order = (
            (CompareOp.GT if attrs["exclusive"] else CompareOp.GE)
            if attrs["reverse"]
            else (CompareOp.LT if attrs["exclusive"] else CompareOp.LE)
        )

        def element(*i: Expr) -> Expr:
            load = widened(x[(*i[:axis], k.var, *i[axis + 1 :])])
            return reduce_over(op, select(compare(order, k.var, i[axis]), load, op.identity(load.dtype)), [k])

        total = compute(name, x.shape, element, [k])
        if total.dtype is not x.dtype:
            total = mapped(f"{name}_result", total, lambda value: value.astype(x.dtype))
        return (total,)

    return build


def _cumulative_samples() -> Iterator[Sample]:
    x = numbers(3, 4)
    for exclusive in (0, 1):
        for reverse in (0, 1):
            yield sample(x, axis=np.asarray(1), exclusive=exclusive, reverse=reverse)
    yield sample(x, axis=np.asarray(-2))
    yield sample(numbers(5, dtype="int32"), axis=np.asarray(0))


for _name, _reduce_op in (("CumSum", ReduceOp.SUM), ("CumProd", ReduceOp.PROD)):
    define(
        _name,
        OpKind.REDUCTION,
        _cumulative(_name.lower(), _reduce_op),
        attrs={"axis": None, "exclusive": 0, "reverse": 0},
        operands={1: "axis"},
        samples=_cumulative_samples,
    )
