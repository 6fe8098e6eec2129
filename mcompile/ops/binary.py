"""Elementwise ops of several inputs, with numpy's broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any

import numpy as np

from mcompile.dtypes import DType, Kind
from mcompile.ir.expr import (
    Binary,
    BinaryOp,
    CompareOp,
    Const,
    Expr,
    Unary,
    UnaryOp,
    binary,
    compare,
    select,
)
from mcompile.ir.tensor import Compute, Tensor, compute
from mcompile.ops.broadcast import broadcast_shape, load_broadcast, pointwise, quiet_reference
from mcompile.ops.index_math import operand
from mcompile.ops.precision import computed_in
from mcompile.ops.registry import Array, Attrs, Inputs, OpKind, Sample, define
from mcompile.ops.sampling import numbers, sample

_NUMERIC = ("int8", "uint8", "int32", "int64", "float16", "float32", "float64")
_INTEGERS = ("int8", "uint8", "int32", "int64", "uint64")
_SHAPES = (((2, 3, 4), (2, 3, 4)), ((2, 3, 4), (4,)), ((3, 1), (2, 1, 4)), ((), (2, 3)), ((1,), (1, 1)))


def _present(inputs: Inputs) -> list[Tensor]:
    return [operand(inputs, position) for position in range(len(inputs))]


def broadcasting(
    name: str,
    function: Callable[..., Expr],
    reference: Callable[[Array, Array], Array] | None = None,
    *,
    attrs: Mapping[str, Any] | None = None,
    dtypes: tuple[str, ...] = _NUMERIC,
    interval: tuple[float, float] = (-5, 5),
    extra: tuple[Sample, ...] = (),
) -> None:
    """Define an op of two inputs whose element is `function(a, b)`, or `function(a, b, attrs)` with attributes."""

    def build(inputs: Inputs, attrs_: Attrs) -> tuple[Compute, ...]:
        element = (lambda a, b: function(a, b, attrs_)) if attrs else function
        return (pointwise(name.lower(), [operand(inputs, 0), operand(inputs, 1)], element),)

    def samples() -> Iterator[Sample]:
        low, high = interval
        for a, b in _SHAPES:
            first, second = (numbers(*s, low=low, high=high, dtype=dtypes[-1], seed=n) for n, s in enumerate((a, b)))
            yield sample(first, second)
        for dtype in dtypes:
            yield sample(numbers(3, 4, low=low, high=high, dtype=dtype), numbers(4, low=1, high=high, dtype=dtype))
        yield from extra

    define(name, OpKind.BROADCAST, build, reference=quiet_reference(reference), attrs=attrs, samples=samples)


def variadic(name: str, function: Callable[[list[Expr]], Expr]) -> None:
    """Define an op of one input or more."""

    def build(inputs: Inputs, _: Attrs) -> tuple[Compute, ...]:
        return (pointwise(name.lower(), _present(inputs), lambda *loads: function(list(loads))),)

    def samples() -> Iterator[Sample]:
        yield sample(numbers(2, 3))
        yield sample(numbers(2, 3), numbers(3, seed=1))
        yield sample(numbers(2, 1, 3), numbers(4, 1, seed=1), numbers(seed=2), numbers(1, 3, seed=3))
        yield sample(numbers(2, 3, dtype="float16"), numbers(2, 3, dtype="float16", seed=1))
        yield sample(np.array([1, np.nan, 3], np.float32), np.array([np.nan, 2, 2], np.float32))

    define(name, OpKind.BROADCAST, build, samples=samples)


def _folded(op: BinaryOp) -> Callable[[list[Expr]], Expr]:
    return lambda values: reduce(lambda a, b: binary(op, a, b), values)


def _op(op: BinaryOp) -> Callable[[Expr, Expr], Expr]:
    return lambda a, b: binary(op, a, b)


def _comparison(op: CompareOp) -> Callable[[Expr, Expr], Expr]:
    return lambda a, b: compare(op, a, b)


def _divide(a: Expr, b: Expr) -> Expr:
    return binary(BinaryOp.DIV if a.dtype.is_float else BinaryOp.TRUNCDIV, a, b)


def _modulo(a: Expr, b: Expr, attrs: Attrs) -> Expr:
    """fmod=1: the sign of `a`; fmod=0: the sign of `b`."""
    if attrs["fmod"]:
        return binary(BinaryOp.TRUNCMOD, a, b)
    if a.dtype.is_integer:
        return binary(BinaryOp.FLOORMOD, a, b)
    rest = binary(BinaryOp.TRUNCMOD, a, b)
    other_sign = Binary(BinaryOp.XOR, rest < 0, b < 0)
    return select(Binary(BinaryOp.AND, rest.ne(0), other_sign), rest + b, rest)


def _shift(x: Expr, y: Expr, attrs: Attrs) -> Expr:
    """A shift by a negative count or by all bits leaves what sign extension gives."""
    signed, right = x.dtype.kind is Kind.INT, attrs["direction"] == "RIGHT"
    outside = y >= x.dtype.bits
    if signed:
        outside = Binary(BinaryOp.OR, outside, y < 0)
    rest = select(x < 0, Const(-1, x.dtype), 0) if signed and right else Const(0, x.dtype)
    return select(outside, rest, binary(BinaryOp.SHR if right else BinaryOp.SHL, x, y))


_SIGNED = (np.array([-7, 7, -7, 7, 5.5, -5.5], np.float32), np.array([3, -3, -3, 3, 2, 2], np.float32))
_MIXED = np.array([-9, -7, 7, 8], np.int32), np.array([4, 2, -2, 3], np.int32)
_BITS = np.array([1, 200, 255, 7], np.uint8), np.array([1, 2, 3, 9], np.uint8)

broadcasting("Add", _op(BinaryOp.ADD), np.add)
broadcasting("Sub", _op(BinaryOp.SUB), np.subtract)
broadcasting("Mul", _op(BinaryOp.MUL), np.multiply)
broadcasting("Div", _divide, interval=(1, 9), extra=(sample(*_MIXED),))
broadcasting("And", _op(BinaryOp.AND), np.logical_and, dtypes=("bool",))
broadcasting("Or", _op(BinaryOp.OR), np.logical_or, dtypes=("bool",))
broadcasting("Xor", _op(BinaryOp.XOR), np.logical_xor, dtypes=("bool",))
broadcasting("BitwiseAnd", _op(BinaryOp.AND), np.bitwise_and, dtypes=_INTEGERS)
broadcasting("BitwiseOr", _op(BinaryOp.OR), np.bitwise_or, dtypes=_INTEGERS)
broadcasting("BitwiseXor", _op(BinaryOp.XOR), np.bitwise_xor, dtypes=_INTEGERS)
broadcasting("Equal", _comparison(CompareOp.EQ), np.equal, dtypes=("bool", *_NUMERIC))
broadcasting("Less", _comparison(CompareOp.LT), np.less)
broadcasting("LessOrEqual", _comparison(CompareOp.LE), np.less_equal)
broadcasting("Greater", _comparison(CompareOp.GT), np.greater)
broadcasting("GreaterOrEqual", _comparison(CompareOp.GE), np.greater_equal)
broadcasting("PRelu", lambda x, slope: select(x < 0, x * slope, x), dtypes=("int32", "float16", "float32"))
broadcasting(
    "Mod",
    _modulo,
    attrs={"fmod": 0},
    dtypes=("int32",),
    interval=(1, 9),
    extra=(sample(*_MIXED), sample(*_MIXED, fmod=1), sample(*_SIGNED), sample(*_SIGNED, fmod=1)),
)
define(
    "BitShift",
    OpKind.BROADCAST,
    lambda inputs, attrs: (
        pointwise("bitshift", [operand(inputs, 0), operand(inputs, 1)], lambda x, y: _shift(x, y, attrs)),
    ),
    attrs={"direction": "LEFT"},
    samples=lambda: iter([sample(*_BITS, direction="LEFT"), sample(*_BITS, direction="RIGHT")]),
)
variadic("Max", _folded(BinaryOp.MAX))
variadic("Min", _folded(BinaryOp.MIN))
variadic("Sum", _folded(BinaryOp.ADD))
variadic("Mean", lambda values: _folded(BinaryOp.ADD)(values) / len(values) if len(values) > 1 else values[0])


# --- Where ---


def _where(inputs: Inputs, _: Attrs) -> tuple[Compute, ...]:
    condition, a, b = (operand(inputs, position) for position in range(3))
    shape = broadcast_shape([condition.shape, a.shape, b.shape])

    def element(*i: Expr) -> Expr:
        return select(load_broadcast(condition, i), load_broadcast(a, i), load_broadcast(b, i))

    return (compute("where", shape, element),)


def _where_samples() -> Iterator[Sample]:
    for shapes in (((2, 3), (2, 3), (2, 3)), ((3, 1), (1, 4), ()), ((), (2, 2), (2,)), ((1,), (2, 1), (1, 3))):
        yield sample(numbers(*shapes[0], dtype="bool"), numbers(*shapes[1]), numbers(*shapes[2], seed=1))
    yield sample(numbers(4, dtype="bool"), numbers(4, dtype="int64"), numbers(1, dtype="int64", seed=1))


define("Where", OpKind.BROADCAST, _where, samples=_where_samples)


# --- Pow ---


def _integer_power(x: Expr, y: Expr) -> Expr:
    """x ** y by repeated squaring, wrapping around; exact for 0 <= y < 64."""
    result: Expr = Const(1, x.dtype)
    square = x
    for bit in range(6):
        is_set = binary(BinaryOp.AND, binary(BinaryOp.SHR, y, bit), 1).ne(0)
        result = result * select(is_set, square, 1)
        square = square * square
    return result


def _power(x: Expr, y: Expr) -> Expr:
    if x.dtype.is_integer and y.dtype.is_integer:
        return _integer_power(x, y)
    dtype = x.dtype if x.dtype.is_float else DType.FLOAT64
    return binary(BinaryOp.POW, x.astype(dtype), y.astype(dtype)).astype(x.dtype)


def _fixed_power(x: Expr, exponent: float) -> Expr | None:
    """x ** exponent where that is a few multiplications, divisions or roots."""
    if exponent in (1, 2, 3):
        return {1: x, 2: x * x, 3: x * x * x}[int(exponent)]
    if not x.dtype.is_float:
        return None
    roots: dict[float, Callable[[], Expr]] = {
        -1: lambda: 1 / x,
        0.5: lambda: Unary(UnaryOp.SQRT, x),
        -0.5: lambda: 1 / Unary(UnaryOp.SQRT, x),
    }
    return roots[exponent]() if exponent in roots else None


def _pow(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x, exponent = operand(inputs, 0), attrs["exponent"]
    if exponent is None:
        return (pointwise("pow", [x, operand(inputs, 1)], _power),)

    def element(value: Expr) -> Expr:
        fixed = _fixed_power(value, exponent)
        dtype = computed_in(x.dtype) if x.dtype.is_float or isinstance(exponent, int) else DType.FLOAT64
        return _power(value, Const(exponent, dtype)) if fixed is None else fixed

    return (pointwise("pow", [x], element),)


def _pow_samples() -> Iterator[Sample]:
    positive = numbers(2, 3, low=0.2, high=3)
    for exponent in (-1.0, -0.5, 0.5, 1.0, 2.0, 3.0, 1.7):
        yield sample(positive, np.asarray(exponent, np.float32))
    yield sample(positive, numbers(3, seed=1))
    yield sample(numbers(2, 3), np.asarray(2, np.int64))
    yield sample(numbers(2, 1), np.array([1, 2, 3, 4], np.int32))
    yield sample(numbers(2, 3, dtype="int32"), np.array([0, 2, 5], np.int64))
    yield sample(numbers(2, 3, low=1, dtype="int64"), np.asarray(2.0, np.float32))
    yield sample(numbers(3, low=1, dtype="float16"), np.asarray(1.5, np.float16))


define("Pow", OpKind.BROADCAST, _pow, attrs={"exponent": None}, scalars={1: "exponent"}, samples=_pow_samples)
