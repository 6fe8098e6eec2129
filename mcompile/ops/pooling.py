"""Max, average and Lp pooling over windows, and over all spatial dims."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from mcompile.ir.expr import (
    Binary,
    BinaryOp,
    Const,
    Expr,
    ReduceOp,
    Unary,
    UnaryOp,
    all_of,
    binary,
    maximum,
    minimum,
    select,
)
from mcompile.ir.tensor import Compute, Tensor, compute, reduce_over
from mcompile.ops.index_math import ints, operand, ravel
from mcompile.ops.matmul import epilogue
from mcompile.ops.precision import widened
from mcompile.ops.reduction import mapped, reduce_dims
from mcompile.ops.registry import REQUIRED, Attrs, Inputs, LayoutHint, OpKind, Sample, define
from mcompile.ops.sampling import numbers, sample, series
from mcompile.ops.window import (
    WINDOW_ATTRS,
    Window,
    inside_conditions,
    pad_for,
    positions,
    spatial_names,
    tap_axes,
    windows,
)

_POOL_ATTRS = {**WINDOW_ATTRS, "kernel_shape": REQUIRED, "ceil_mode": 0}


def _pool_windows(x: Tensor, attrs: Attrs) -> tuple[Window, ...]:
    return windows(x.shape[2:], ints(attrs["kernel_shape"]), attrs, bool(attrs["ceil_mode"]))


def _pooled(
    name: str, op: ReduceOp, x: Tensor, spatial: Sequence[Window], value: Callable[[Expr, Expr, list[Expr]], Expr]
) -> Compute:
    """`value(n, c, padded positions)` combined over the taps of each placement."""
    taps = tap_axes(spatial)

    def element(n: Expr, c: Expr, *placements: Expr) -> Expr:
        return reduce_over(op, value(n, c, positions(spatial, placements, taps)), taps)

    shape = (*x.shape[:2], *(window.extent for window in spatial))
    return compute(name, shape, element, taps, ["n", "c", *spatial_names("o", len(spatial))])


# --- MaxPool ---


def _max_pool(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x = operand(inputs, 0)
    spatial = _pool_windows(x, attrs)
    source = pad_for(x, spatial, float("-inf") if x.dtype.is_float else x.dtype.min_value)
    peak = _pooled("maxpool", ReduceOp.MAX, x, spatial, lambda n, c, place: source[(n, c, *place)])
    return peak, _max_indices(x, source, peak, spatial, bool(attrs["storage_order"]))


def _max_indices(x: Tensor, source: Tensor, peak: Compute, spatial: Sequence[Window], column_major: bool) -> Compute:
    """The flat index in `x` of the first maximum of each placement: row-major, or with the spatial dims reversed."""
    taps = tap_axes(spatial)
    sizes = x.shape[2:]
    before, spans = [window.before for window in spatial], [window.span for window in spatial]

    def element(n: Expr, c: Expr, *placements: Expr) -> Expr:
        padded = positions(spatial, placements, taps)
        value = source[(n, c, *padded)]
        found = value.eq(peak[(n, c, *placements)])
        if x.dtype.is_float:
            found = Binary(BinaryOp.OR, found, Unary(UnaryOp.IS_NAN, value))
        places = [place - ahead for place, ahead in zip(padded, before, strict=True)]
        inside = inside_conditions(places, before, spans, sizes)
        index = select(all_of([found, *inside]), ravel(places, sizes), prod(sizes))
        return reduce_over(ReduceOp.MIN, index, taps)

    first = compute("maxpool_place", peak.shape, element, taps)

    def flat(n: Expr, c: Expr, *placements: Expr) -> Expr:
        place = first[(n, c, *placements)]
        if column_major:
            place = _reversed_index(place, sizes)
        return (n * x.shape[1] + c) * prod(sizes) + place

    return compute("maxpool_indices", peak.shape, flat)


def _reversed_index(flat: Expr, sizes: Sequence[int]) -> Expr:
    """A row-major flat index as a column-major one."""
    digits = []
    for size in reversed(sizes):
        digits.append(flat % size)
        flat = flat // size
    return ravel(digits, list(reversed(sizes)))


def _pool_samples() -> Iterator[Sample]:
    """Attributes that all three kinds of pooling know."""
    x = numbers(2, 3, 6, 7)
    yield sample(x, kernel_shape=[2, 2])
    yield sample(x, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1])
    for auto_pad in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        yield sample(x, kernel_shape=[3, 2], strides=[2, 2], auto_pad=auto_pad)
    yield sample(numbers(1, 2, 9), kernel_shape=[3], strides=[2])
    yield sample(numbers(1, 2, 4, 5, 4), kernel_shape=[2, 3, 2], pads=[1, 1, 0, 0, 1, 1])


def _ceil_samples() -> Iterator[Sample]:
    yield sample(series(1, 1, 4, 4, start=1), kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)
    yield sample(numbers(1, 2, 5, 6), kernel_shape=[3, 3], strides=[2, 3], pads=[1, 1, 1, 1], ceil_mode=1)
    yield sample(numbers(1, 1, 2, 2), kernel_shape=[1, 1], strides=[2, 2], ceil_mode=1)
    yield sample(numbers(1, 2, 8, 8), kernel_shape=[2, 2], strides=[2, 1], dilations=[2, 3], ceil_mode=1)


def _max_pool_samples() -> Iterator[Sample]:
    yield from _pool_samples()
    yield from _ceil_samples()
    yield sample(numbers(1, 2, 5, 5, low=-9, high=9, dtype="int8"), kernel_shape=[2, 2], strides=[2, 2])
    yield sample(numbers(1, 2, 5, 5, dtype="float16"), kernel_shape=[2, 2], pads=[1, 1, 1, 1])
    yield sample(numbers(1, 2, 5, 5), kernel_shape=[2, 2], opset=7)
    yield sample(numbers(1, 1, 5, 4), kernel_shape=[2, 2], strides=[2, 2], storage_order=1)


define(
    "MaxPool",
    OpKind.REDUCTION,
    _max_pool,
    attrs={**_POOL_ATTRS, "storage_order": 0},
    samples=_max_pool_samples,
    layout=LayoutHint.CHANNELS_LAST,
)


# --- AveragePool ---


def _counted(window: Window, placement: Expr, include_pad: bool) -> Expr | int:
    """How many taps of a placement count: those in the input, or in it and its padding (never behind that)."""
    low, high = (-window.before, window.size + window.after) if include_pad else (0, window.size)
    if window.before <= -low and window.span - window.before <= high:
        return window.kernel
    start = placement * window.stride - window.before
    first = maximum(_taps_below(low - start, window.dilation), 0)
    end = minimum(_taps_below(high - start, window.dilation), window.kernel)
    return end - first


def _taps_below(distance: Expr, dilation: int) -> Expr:
    """How many multiples of `dilation` lie in [0, distance): distance / dilation, rounded up."""
    return (distance + (dilation - 1)) // dilation


def _average_pool(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x, include_pad = operand(inputs, 0), bool(attrs["count_include_pad"])
    spatial = _pool_windows(x, attrs)
    source = pad_for(x, spatial, 0)
    total = _pooled("sum", ReduceOp.SUM, x, spatial, lambda n, c, place: widened(source[(n, c, *place)]))

    def element(n: Expr, c: Expr, *placements: Expr) -> Expr:
        pairs = zip(spatial, placements, strict=True)
        counts = [_counted(window, placement, include_pad) for window, placement in pairs]
        value = total[(n, c, *placements)]
        varying: Expr = Const(prod(count for count in counts if isinstance(count, int)), placements[0].dtype)
        for count in counts:
            varying = varying if isinstance(count, int) else varying * count
        factor = Const(1.0, value.dtype) / varying.astype(value.dtype)
        if isinstance(varying, Const):
            factor = Const(1 / varying.value, value.dtype)
        return (value * factor).astype(x.dtype)

    return (compute("averagepool", total.shape, element),)


def _average_pool_samples() -> Iterator[Sample]:
    for each in _pool_samples():
        yield each
        yield Sample(each.inputs, {**each.attrs, "count_include_pad": 1})
    for each in _ceil_samples():
        yield each
        yield Sample(each.inputs, {**each.attrs, "count_include_pad": 1})
    yield sample(numbers(1, 2, 7, 7), kernel_shape=[3, 2], dilations=[2, 2], pads=[1, 1, 2, 1])
    yield sample(numbers(1, 2, 7, 7), kernel_shape=[3, 2], dilations=[2, 2], pads=[1, 1, 2, 1], count_include_pad=1)
    yield sample(numbers(1, 2, 5, 5), kernel_shape=[3, 3], pads=[1, 1, 1, 1], opset=7)
    yield sample(numbers(1, 2, 5, 5, dtype="float16"), kernel_shape=[2, 2])


define(
    "AveragePool",
    OpKind.REDUCTION,
    _average_pool,
    attrs={**_POOL_ATTRS, "count_include_pad": 0},
    samples=_average_pool_samples,
    layout=LayoutHint.CHANNELS_LAST,
)


# --- LpPool ---


def _powered(x: Expr, p: int) -> Expr:
    if p == 2:
        return x * x
    magnitude = Unary(UnaryOp.ABS, x)
    return magnitude if p == 1 else binary(BinaryOp.POW, magnitude, float(p))


def _rooted(total: Expr, p: int) -> Expr:
    if p == 1:
        return total
    return Unary(UnaryOp.SQRT, total) if p == 2 else binary(BinaryOp.POW, total, 1 / p)


def _lp_pool(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x, p = operand(inputs, 0), int(attrs["p"])
    spatial = _pool_windows(x, attrs)
    source = pad_for(x, spatial, 0)
    total = _pooled("sum", ReduceOp.SUM, x, spatial, lambda n, c, place: _powered(widened(source[(n, c, *place)]), p))
    return (mapped("lppool", total, lambda value: _rooted(value, p).astype(x.dtype)),)


def _lp_pool_samples() -> Iterator[Sample]:
    yield from _pool_samples()
    for p in (1, 3):
        yield sample(numbers(1, 2, 5, 5), kernel_shape=[2, 2], p=p)
    yield sample(numbers(1, 2, 7, 7), kernel_shape=[2, 2], dilations=[2, 3])


define(
    "LpPool",
    OpKind.REDUCTION,
    _lp_pool,
    attrs={**_POOL_ATTRS, "p": 2},
    samples=_lp_pool_samples,
    layout=LayoutHint.CHANNELS_LAST,
)


# --- Global pooling ---


_Before = Callable[[Expr, Attrs], Expr]
_After = Callable[[Expr, int, Attrs], Expr]


def _global(
    name: str, op: ReduceOp, before: _Before | None, after: _After | None, attrs: Mapping[str, Any] | None = None
) -> None:
    """Define an op: `before` of each element, combined over all spatial dims, then `after(total, count, attrs)`."""
    stem = name.lower()

    def build(inputs: Inputs, attrs_: Attrs) -> tuple[Compute, ...]:
        x = operand(inputs, 0)
        count, dims = prod(x.shape[2:]), range(2, len(x.shape))

        def value(*i: Expr) -> Expr:
            return widened(x[i]) if before is None else before(widened(x[i]), attrs_)

        total = reduce_dims(stem, op, x.shape, dims, value)
        if after is None:
            return (epilogue(f"{stem}_result", total, x),)
        return (epilogue(f"{stem}_result", total, x, lambda value, _: after(value, count, attrs_)),)

    def samples() -> Iterator[Sample]:
        for shape in ((2, 3, 4, 5), (1, 2, 6), (2, 2, 3, 2, 3)):
            yield sample(numbers(*shape))
        yield sample(numbers(1, 2, 4, 4, dtype="float16"))

    define(name, OpKind.REDUCTION, build, attrs=attrs, samples=samples, layout=LayoutHint.CHANNELS_LAST)


_global("GlobalAveragePool", ReduceOp.SUM, None, lambda total, count, _: total * (1 / count))
_global("GlobalMaxPool", ReduceOp.MAX, None, None)
_global(
    "GlobalLpPool",
    ReduceOp.SUM,
    lambda x, attrs: _powered(x, attrs["p"]),
    lambda total, _, attrs: _rooted(total, attrs["p"]),
    {"p": 2},
)
