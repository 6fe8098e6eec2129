"""GridSample: the input read at positions given by data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from mcompile.dtypes import DType
from mcompile.errors import ModelError
from mcompile.ir.expr import Const, Expr, Unary, UnaryOp, Var, all_of, maximum, minimum, select
from mcompile.ir.tensor import Compute, Tensor, compute
from mcompile.ops.index_math import clamp, operand
from mcompile.ops.precision import real
from mcompile.ops.registry import Attrs, Inputs, OpKind, Sample, define
from mcompile.ops.sampling import numbers

_MODES = {"linear": "linear", "bilinear": "linear", "cubic": "cubic", "bicubic": "cubic", "nearest": "nearest"}
_PADDINGS = ("zeros", "border", "reflection")
_CUBIC = -0.75  # Keys' coefficient

_Taps = list[tuple[Expr, Expr | None]]  # (source index, its weight or None for 1)


def _denormalized(value: Expr, extent: int, align_corners: bool) -> Expr:
    """A coordinate in [-1, 1] as a position in the input, in elements."""
    if align_corners:
        return (value + 1.0) * 0.5 * float(extent - 1)
    return ((value + 1.0) * float(extent) - 1.0) * 0.5


def _mirrored(position: Expr, low: float, high: float) -> Expr:
    """`position` reflected at `low` and `high`, as often as it takes."""
    span = high - low
    if span == 0:
        return position * 0.0
    distance = Unary(UnaryOp.ABS, position - low)
    flips = Unary(UnaryOp.FLOOR, distance / span)
    rest = distance - flips * span
    is_even = (flips - Unary(UnaryOp.FLOOR, flips * 0.5) * 2.0).eq(0.0)
    return select(is_even, rest + low, -rest + high)


def _padded(position: Expr, extent: int, padding: str, align_corners: bool) -> Expr:
    """`position` after the padding mode, made finite; zeros keeps what lies outside outside."""
    if padding == "reflection":
        low, high = (0.0, extent - 1.0) if align_corners else (-0.5, extent - 0.5)
        position = _mirrored(position, low, high)
    if padding in ("border", "reflection"):
        return minimum(maximum(position, 0.0), float(extent - 1))
    return minimum(maximum(position, -4.0), float(extent + 3))


def _cubic_weights(ratio: Expr) -> list[Expr]:
    """Keys' kernel at the distances 1 + r, r, 1 - r, 2 - r."""

    def inner(x: Expr) -> Expr:
        return (x * (_CUBIC + 2) - (_CUBIC + 3)) * x * x + 1.0

    def outer(x: Expr) -> Expr:
        return ((x * _CUBIC - 5 * _CUBIC) * x + 8 * _CUBIC) * x - 4 * _CUBIC

    return [outer(ratio + 1.0), inner(ratio), inner(1.0 - ratio), outer(2.0 - ratio)]


def _taps(position: Expr, extent: int, mode: str, padding: str, align_corners: bool) -> _Taps:
    """The elements around `position`. Cubic pads each of them, the others the position itself."""
    if mode != "cubic":
        position = _padded(position, extent, padding, align_corners)
    if mode == "nearest":
        return [(Unary(UnaryOp.ROUND, position).astype(DType.INT64), None)]
    floor = Unary(UnaryOp.FLOOR, position)
    ratio = position - floor
    if mode == "linear":
        index = floor.astype(DType.INT64)
        return [(index, 1.0 - ratio), (index + 1, ratio)]
    indices = [_padded(floor + float(tap), extent, padding, align_corners).astype(DType.INT64) for tap in range(-1, 3)]
    return list(zip(indices, _cubic_weights(ratio), strict=True))


def _grid_sample(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x, grid = operand(inputs, 0), operand(inputs, 1)
    padding, align_corners = str(attrs["padding_mode"]), bool(attrs["align_corners"])
    if attrs["mode"] not in _MODES or padding not in _PADDINGS:
        raise ModelError(f"GridSample has no mode {attrs['mode']!r} with padding {padding!r}")
    mode, extents = _MODES[attrs["mode"]], x.shape[2:]

    def element(n: Var, c: Var, *index: Var) -> Expr:
        axes = []
        for dim, extent in enumerate(extents):
            value = grid[(n, *index, len(extents) - 1 - dim)].astype(real(grid.dtype))
            value = select(Unary(UnaryOp.IS_NAN, value), 0.0, value)
            axes.append(_taps(_denormalized(value, extent, align_corners), extent, mode, padding, align_corners))
        corners = [_corner(x, n, c, corner) for corner in product(*axes)]
        total = corners[0]
        for corner in corners[1:]:
            total = total + corner
        return total.astype(x.dtype)

    return (compute("grid_sample", (*x.shape[:2], *grid.shape[1:-1]), element),)


def _corner(x: Tensor, n: Expr, c: Expr, corner: Sequence[tuple[Expr, Expr | None]]) -> Expr:
    """One element times its weights; 0 outside."""
    inside = [check for (i, _), size in zip(corner, x.shape[2:], strict=True) for check in (i >= 0, i < size)]
    position = [clamp(index, extent) for (index, _), extent in zip(corner, x.shape[2:], strict=True)]
    value = select(all_of(inside), x[(n, c, *position)], Const(0, x.dtype))
    for _, weight in corner:
        if weight is not None:
            dtype = real(x.dtype)
            value = value.astype(dtype) * weight.astype(dtype)
    return value


def _samples() -> Iterator[Sample]:
    x, grid = numbers(1, 2, 4, 5), numbers(1, 3, 3, 2, low=-1.4, high=1.4)
    for mode, padding, align in product(("linear", "nearest", "cubic"), _PADDINGS, (0, 1)):
        yield Sample((x, grid), {"mode": mode, "padding_mode": padding, "align_corners": align})
    yield Sample((x, grid), {"mode": "bilinear"}, opset=16)
    yield Sample(
        (numbers(1, 1, 3, 4, 2), numbers(1, 2, 2, 2, 3, low=-1, high=1)), {"mode": "linear", "padding_mode": "zeros"}
    )


define(
    "GridSample",
    OpKind.INJECTIVE,
    _grid_sample,
    attrs={"mode": "linear", "padding_mode": "zeros", "align_corners": 0},
    samples=_samples,
)
