"""Elementwise unary ops: math, rounding, predicates, casts, Clip, and those that only pass values on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from mcompile.dtypes import DType, Kind
from mcompile.errors import ModelError
from mcompile.ir.expr import Const, Expr, Unary, UnaryOp, maximum, minimum, select
from mcompile.ir.tensor import Compute, Tensor, compute
from mcompile.ops.broadcast import pointwise, quiet_reference
from mcompile.ops.index_math import operand
from mcompile.ops.precision import real
from mcompile.ops.registry import (
    REQUIRED,
    Array,
    Attrs,
    Inputs,
    OpKind,
    Sample,
    Unsupported,
    define,
    element_type,
    input_at,
)
from mcompile.ops.sampling import each, numbers, sample

NUMERIC = ("int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
FLOATS = ("float16", "float32", "float64")
NAN, INF = float("nan"), float("inf")


def unary(
    name: str,
    function: Callable[..., Expr],
    reference: Callable[[Array], Array] | None = None,
    *,
    attrs: Mapping[str, Any] | None = None,
    dtypes: tuple[str, ...] = FLOATS,
    interval: tuple[float, float] = (-3, 3),
    extra: tuple[Sample, ...] = (),
) -> None:
    """Define an op whose element is `function(x)`, or `function(x, attrs)` if it has attributes."""

    def build(inputs: Inputs, attrs_: Attrs) -> tuple[Compute, ...]:
        element = (lambda x: function(x, attrs_)) if attrs else function
        return (pointwise(name.lower(), [operand(inputs, 0)], element),)

    def samples() -> Iterator[Sample]:
        yield sample(numbers(low=interval[0], high=interval[1], dtype=dtypes[-1]))
        for dtype in dtypes:
            yield sample(numbers(2, 3, 5, low=interval[0], high=interval[1], dtype=dtype))
        yield from extra

    define(name, OpKind.ELEMENTWISE, build, reference=quiet_reference(reference), attrs=attrs, samples=samples)


def in_floats(function: Callable[..., Expr]) -> Callable[..., Expr]:
    """`function` for integers too: computed in FLOAT32, the result cast back (rounded towards zero)."""
    return lambda x, *rest: function(x.astype(real(x.dtype)), *rest).astype(x.dtype)


def _math(op: UnaryOp) -> Callable[[Expr], Expr]:
    return lambda x: Unary(op, x)


def _magnitude(x: Expr) -> Expr:
    return x if x.dtype.kind is Kind.UINT else Unary(UnaryOp.ABS, x)


def _sign(x: Expr) -> Expr:
    return select(x > 0, Const(1, x.dtype), 0) if x.dtype.kind is Kind.UINT else Unary(UnaryOp.SIGN, x)


def _is_inf(x: Expr, attrs: Attrs) -> Expr:
    match bool(attrs["detect_negative"]), bool(attrs["detect_positive"]):
        case True, True:
            return Unary(UnaryOp.IS_INF, x)
        case False, False:
            return Const(False, DType.BOOL)
        case negative, _:
            return x.eq(-INF if negative else INF)


_SPECIALS = np.array([NAN, INF, -INF, 0.0, -0.0, 1.5], np.float32)
_HALVES = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 2.6, 0.49999997], np.float32)

unary("Abs", _magnitude, np.abs, dtypes=NUMERIC)
unary("Neg", lambda x: -x, np.negative, dtypes=("int8", "int32", "int64", "float16", "float32"))
unary("Sign", _sign, np.sign, dtypes=NUMERIC, extra=(sample(np.array([0.0, -0.0, INF], np.float32)),))
unary("Exp", _math(UnaryOp.EXP), np.exp, extra=(sample(_SPECIALS),))
unary("Log", _math(UnaryOp.LOG), np.log, interval=(0.01, 5))
unary("Sqrt", _math(UnaryOp.SQRT), np.sqrt, interval=(0, 5))
unary("Reciprocal", lambda x: 1 / x, np.reciprocal, interval=(0.1, 5))
unary("Sin", _math(UnaryOp.SIN), np.sin)
unary("Cos", _math(UnaryOp.COS), np.cos)
unary("Tan", _math(UnaryOp.TAN), np.tan, interval=(-1.4, 1.4))
unary("Asin", _math(UnaryOp.ASIN), np.arcsin, interval=(-1, 1))
unary("Acos", _math(UnaryOp.ACOS), np.arccos, interval=(-1, 1))
unary("Atan", _math(UnaryOp.ATAN), np.arctan)
unary("Sinh", _math(UnaryOp.SINH), np.sinh)
unary("Cosh", _math(UnaryOp.COSH), np.cosh)
unary("Tanh", _math(UnaryOp.TANH), np.tanh)
unary("Asinh", _math(UnaryOp.ASINH), np.arcsinh)
unary("Acosh", _math(UnaryOp.ACOSH), np.arccosh, interval=(1, 5))
unary("Atanh", _math(UnaryOp.ATANH), np.arctanh, interval=(-0.9, 0.9))
unary("Erf", in_floats(_math(UnaryOp.ERF)))
unary("Floor", _math(UnaryOp.FLOOR), np.floor)
unary("Ceil", _math(UnaryOp.CEIL), np.ceil)
unary("Round", _math(UnaryOp.ROUND), np.round, extra=(sample(_HALVES),))
unary("Not", _math(UnaryOp.NOT), np.logical_not, dtypes=("bool",))
unary("BitwiseNot", _math(UnaryOp.NOT), np.invert, dtypes=("int8", "uint8", "int32", "uint64"))
unary("IsNaN", _math(UnaryOp.IS_NAN), np.isnan, extra=(sample(_SPECIALS),))
unary(
    "IsInf",
    _is_inf,
    attrs={"detect_negative": 1, "detect_positive": 1},
    extra=(
        sample(_SPECIALS),
        sample(_SPECIALS, detect_negative=0),
        sample(_SPECIALS, detect_positive=0),
        sample(_SPECIALS, detect_positive=0, detect_negative=0),
    ),
)
unary("Identity", lambda x: x, lambda x: x, dtypes=("bool", "int8", "float32"))


# --- Cast, CastLike ---


def _cast(inputs: Inputs, dtype: DType) -> tuple[Compute, ...]:
    x = operand(inputs, 0)
    return (compute("cast", x.shape, lambda *i: x[i].astype(dtype)),)


_CODES = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "float64": 11}


def _cast_samples() -> Iterator[Sample]:
    for source in ("float32", "int32", "bool", "float16", "uint8"):
        for target in _CODES:
            yield sample(numbers(3, 4, low=0, high=90, dtype=source), to=_CODES[target])
    yield sample(np.array([-2.7, 2.7, -0.2, 0.0], np.float32), to=_CODES["int32"])
    yield sample(np.array([-2.7, 0.2, NAN, 0.0], np.float32), to=_CODES["bool"])
    yield sample(np.array([200, -200, 70000], np.int32), to=_CODES["int8"])


def _cast_like_samples() -> Iterator[Sample]:
    for target in ("int64", "float64", "bool"):
        yield sample(numbers(2, 3), numbers(1, dtype=target))


define(
    "Cast",
    OpKind.ELEMENTWISE,
    lambda inputs, attrs: _cast(inputs, element_type(attrs["to"])),
    attrs={"to": REQUIRED, "saturate": 1, "round_mode": "up"},
    samples=_cast_samples,
)
define(
    "CastLike",
    OpKind.ELEMENTWISE,
    lambda inputs, _: _cast(inputs, operand(inputs, 1).dtype),
    attrs={"saturate": 1, "round_mode": "up"},
    samples=_cast_like_samples,
)


# --- Clip: Min(max, Max(x, min)) ---


def _bound(tensor: Tensor | None, number: float | None, dtype: DType) -> Expr | None:
    if tensor is not None:
        if any(extent != 1 for extent in tensor.shape):
            raise ModelError(f"Clip: a bound must be a scalar, got shape {list(tensor.shape)}")
        return tensor[(0,) * len(tensor.shape)].astype(dtype)
    return None if number is None else Const(number, dtype)


def _clip(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x = operand(inputs, 0)
    low = _bound(input_at(inputs, 1), attrs["min"], x.dtype)
    high = _bound(input_at(inputs, 2), attrs["max"], x.dtype)

    def element(*i: Expr) -> Expr:
        value = x[i] if low is None else maximum(x[i], low)
        return value if high is None else minimum(value, high)

    return (compute("clip", x.shape, element),)


def _clip_samples() -> Iterator[Sample]:
    x, low, high = numbers(2, 3, 4), np.float32(-1), np.float32(1.5)
    yield sample(x, np.asarray(low), np.asarray(high))
    yield sample(x, None, np.asarray(high))
    yield sample(x, np.asarray(low))
    yield sample(x)
    yield sample(x, np.asarray(high), np.asarray(low))
    yield sample(_SPECIALS, np.asarray(low), np.asarray(high))
    yield sample(numbers(3, 4, low=-9, high=9, dtype="int32"), np.int32(-4), np.int32(5))
    yield sample(numbers(3, 4, dtype="float16"), np.float16(0), np.float16(1))
    yield sample(x, opset=7, min=0.0, max=6.0)
    yield sample(x, opset=10, max=0.5)


define(
    "Clip",
    OpKind.ELEMENTWISE,
    _clip,
    attrs={"min": None, "max": None},
    scalars={1: "min", 2: "max"},
    samples=_clip_samples,
)


# --- Dropout, as in inference ---


def _dropout(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x = operand(inputs, 0)
    if attrs["training_mode"] is not None and bool(attrs["training_mode"]) and attrs["ratio"] != 0:
        raise Unsupported("Dropout in training mode draws random numbers")
    kept = compute("dropout", x.shape, lambda *i: x[i])
    mask_dtype = DType.BOOL if attrs["bool_mask"] else x.dtype
    return kept, compute("mask", x.shape, lambda *_: Const(1, mask_dtype))


def _mask_before_10(opset: int, attrs: dict[str, Any]) -> dict[str, Any]:
    """Before opset 10 the mask has the dtype of the data."""
    return {**attrs, "bool_mask": opset >= 10}


define(
    "Dropout",
    OpKind.ELEMENTWISE,
    _dropout,
    attrs={"ratio": 0.5, "training_mode": None, "seed": None, "bool_mask": True},
    adapt=_mask_before_10,
    operands={1: "ratio", 2: "training_mode"},
    samples=each(
        sample(numbers(2, 3)),
        sample(numbers(2, 3), ratio=np.float32(0.3), training_mode=np.array(False)),
        sample(numbers(2, 3), opset=7, ratio=0.25),
    ),
)
