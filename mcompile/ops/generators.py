"""Ops that make values from positions alone: ranges, constants, masks, grids."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import numpy as np

from mcompile.dtypes import DType
from mcompile.errors import ModelError
from mcompile.ir.expr import Const, Expr, Var, select
from mcompile.ir.tensor import Compute, compute
from mcompile.ops.index_math import ints, is_given, operand
from mcompile.ops.precision import computed_in
from mcompile.ops.registry import REQUIRED, Array, Attrs, Inputs, OpKind, Sample, define, element_type
from mcompile.ops.sampling import numbers


def _int64(*values: int) -> Array:
    return np.array(values, np.int64)


def _constant_of_shape(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    value = np.zeros(1, np.float32) if attrs["value"] is None else np.asarray(attrs["value"])
    constant = Const(value.reshape(-1)[0].item(), DType.from_numpy(value.dtype))
    return (compute("constant", ints(attrs["shape"]), lambda *_: constant),)


def _constant_of_shape_samples() -> Iterator[Sample]:
    yield Sample((), {"shape": _int64(2, 3)})
    yield Sample((), {"shape": np.zeros(0, np.int64), "value": _int64(7)})


define(
    "ConstantOfShape",
    OpKind.INJECTIVE,
    _constant_of_shape,
    attrs={"shape": REQUIRED, "value": None},
    operands={0: "shape"},
    samples=_constant_of_shape_samples,
)


def _range(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    start, limit, delta = (np.asarray(attrs[name]).reshape(-1)[0] for name in ("start", "limit", "delta"))
    dtype = DType.from_numpy(start.dtype)
    if delta == 0:
        raise ModelError("Range has a delta of 0")
    first, last, step = start.item(), limit.item(), delta.item()
    count = max(0, -((first - last) // step) if dtype.is_integer else ceil((last - first) / step))
    wide = computed_in(dtype)
    return (compute("range", (count,), lambda i: (i.astype(wide) * step + first).astype(dtype)),)


def _range_samples() -> Iterator[Sample]:
    for start, limit, delta in ((2, 9, 3), (10, 4, -2), (1, 1, 1)):
        operands = (np.array(value, np.int64) for value in (start, limit, delta))
        yield Sample((), dict(zip(("start", "limit", "delta"), operands, strict=True)))
    operands32 = (np.array(value, np.float32) for value in (0.5, 3.0, 0.5))
    yield Sample((), dict(zip(("start", "limit", "delta"), operands32, strict=True)))


define(
    "Range",
    OpKind.INJECTIVE,
    _range,
    attrs={"start": REQUIRED, "limit": REQUIRED, "delta": REQUIRED, "stash_type": 1},
    operands={0: "start", 1: "limit", 2: "delta"},
    samples=_range_samples,
)


def _eye_like(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x = operand(inputs, 0)
    dtype = x.dtype if attrs["dtype"] is None else element_type(int(attrs["dtype"]))
    return (compute("eye", x.shape, lambda i, j: select(j.eq(i + int(attrs["k"])), Const(1, dtype), Const(0, dtype))),)


def _eye_like_samples() -> Iterator[Sample]:
    yield Sample((np.zeros((3, 4), np.float32),), {"k": 1})
    yield Sample((np.zeros((3, 2), np.int32),), {"k": -1, "dtype": 11})


define("EyeLike", OpKind.INJECTIVE, _eye_like, attrs={"dtype": None, "k": 0}, samples=_eye_like_samples)


def _trilu(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x = operand(inputs, 0)
    diagonal = ints(attrs["k"])[0] if is_given(attrs["k"]) else 0

    def element(*index: Var) -> Expr:
        row, column = index[-2:]
        kept = column >= row + diagonal if attrs["upper"] else column <= row + diagonal
        return select(kept, x[index], Const(0, x.dtype))

    return (compute("trilu", x.shape, element),)


def _trilu_samples() -> Iterator[Sample]:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    yield Sample((x,), {})
    yield Sample((x,), {"upper": 0, "k": np.array(-1, np.int64)})
    yield Sample((x,), {"upper": 1, "k": np.array(2, np.int64)})


define(
    "Trilu",
    OpKind.INJECTIVE,
    _trilu,
    attrs={"upper": 1, "k": None},
    operands={1: "k"},
    samples=_trilu_samples,
)


def _grid_coordinate(index: Expr, extent: int, align_corners: bool, dtype: DType) -> Expr:
    """The position of element `index` in [-1, 1]."""
    position = index.astype(dtype)
    if align_corners:
        return position * (2.0 / max(extent - 1, 1)) - 1.0
    return position * (2.0 / extent) + (1.0 / extent - 1.0)


def _affine_grid(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    theta = operand(inputs, 0)
    batch, _, *extents = ints(attrs["size"])
    rank = len(extents)
    if theta.shape != (batch, rank, rank + 1):
        raise ModelError(f"AffineGrid expects theta of shape {[batch, rank, rank + 1]}, got {list(theta.shape)}")

    def element(n: Var, *index: Var) -> Expr:
        *position, row = index
        total = theta[n, row, rank]
        for dim, (i, extent) in enumerate(zip(position, extents, strict=True)):
            coordinate = _grid_coordinate(i, extent, bool(attrs["align_corners"]), theta.dtype)
            total = total + theta[n, row, rank - 1 - dim] * coordinate
        return total

    return (compute("affine_grid", (batch, *extents, rank), element),)


def _affine_grid_samples() -> Iterator[Sample]:
    for size, align in (((2, 3, 4, 5), 0), ((2, 3, 4, 5), 1), ((1, 2, 2, 3, 4), 0)):
        rank = len(size) - 2
        theta = numbers(size[0], rank, rank + 1)
        yield Sample((theta,), {"size": _int64(*size), "align_corners": align})


define(
    "AffineGrid",
    OpKind.INJECTIVE,
    _affine_grid,
    attrs={"size": REQUIRED, "align_corners": 0},
    operands={1: "size"},
    samples=_affine_grid_samples,
)
