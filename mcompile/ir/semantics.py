"""What each operation computes, as functions of numpy arrays or scalars of one dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mcompile.dtypes import DType
from mcompile.ir.expr import BinaryOp, CompareOp, Intrinsic, ReduceOp, UnaryOp

Values = Any  # an array or a numpy scalar


def _not(x: Values) -> Values:
    return np.logical_not(x) if x.dtype == np.bool_ else np.invert(x)


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _erf_of(x: Values) -> Values:
    return _erf(np.asarray(x, np.float64)).astype(x.dtype)[()]


def _sigmoid(x: Values) -> Values:
    one = x.dtype.type(1)
    return one / (one + np.exp(-x))


def _truncdiv(a: Values, b: Values) -> Values:
    if np.issubdtype(a.dtype, np.unsignedinteger):
        return np.floor_divide(a, b)
    quotient = np.floor_divide(a, b)
    inexact = (np.remainder(a, b) != 0) & ((a < 0) != (b < 0))
    return (quotient + inexact).astype(quotient.dtype)


def _power(a: Values, b: Values) -> Values:
    """Integers to a negative power give the truncated quotient 1 / a**-b."""
    if not np.issubdtype(a.dtype, np.integer) or not np.any(negative := b < 0):
        return np.power(a, b)
    zero = a.dtype.type(0)
    units = np.where(a == 1, 1, np.where(a == -1, np.where(b % 2 == 0, 1, -1), 0)).astype(a.dtype)
    return np.where(negative, units, np.power(a, np.where(negative, zero, b)))[()]


UNARY: dict[UnaryOp, Callable[[Values], Values]] = {
    UnaryOp.NEG: np.negative,
    UnaryOp.NOT: _not,
    UnaryOp.ABS: np.abs,
    UnaryOp.SIGN: np.sign,
    UnaryOp.SQRT: np.sqrt,
    UnaryOp.EXP: np.exp,
    UnaryOp.LOG: np.log,
    UnaryOp.SIN: np.sin,
    UnaryOp.COS: np.cos,
    UnaryOp.TAN: np.tan,
    UnaryOp.ASIN: np.arcsin,
    UnaryOp.ACOS: np.arccos,
    UnaryOp.ATAN: np.arctan,
    UnaryOp.SINH: np.sinh,
    UnaryOp.COSH: np.cosh,
    UnaryOp.TANH: np.tanh,
    UnaryOp.ASINH: np.arcsinh,
    UnaryOp.ACOSH: np.arccosh,
    UnaryOp.ATANH: np.arctanh,
    UnaryOp.ERF: _erf_of,
    UnaryOp.SIGMOID: _sigmoid,
    UnaryOp.FLOOR: np.floor,
    UnaryOp.CEIL: np.ceil,
    UnaryOp.ROUND: np.rint,
    UnaryOp.TRUNC: np.trunc,
    UnaryOp.IS_NAN: np.isnan,
    UnaryOp.IS_INF: np.isinf,
}
BINARY: dict[BinaryOp, Callable[[Values, Values], Values]] = {
    BinaryOp.ADD: np.add,
    BinaryOp.SUB: np.subtract,
    BinaryOp.MUL: np.multiply,
    BinaryOp.DIV: np.true_divide,
    BinaryOp.TRUNCDIV: _truncdiv,
    BinaryOp.TRUNCMOD: np.fmod,
    BinaryOp.FLOORDIV: np.floor_divide,
    BinaryOp.FLOORMOD: np.remainder,
    BinaryOp.MIN: np.minimum,
    BinaryOp.MAX: np.maximum,
    BinaryOp.POW: _power,
    BinaryOp.AND: np.bitwise_and,
    BinaryOp.OR: np.bitwise_or,
    BinaryOp.XOR: np.bitwise_xor,
    BinaryOp.SHL: np.left_shift,
    BinaryOp.SHR: np.right_shift,
}
COMPARE: dict[CompareOp, Callable[[Values, Values], Values]] = {
    CompareOp.EQ: np.equal,
    CompareOp.NE: np.not_equal,
    CompareOp.LT: np.less,
    CompareOp.LE: np.less_equal,
    CompareOp.GT: np.greater,
    CompareOp.GE: np.greater_equal,
}


def constant(value: int | float | bool, dtype: DType) -> Values:
    """A numpy scalar; an integer too large for `dtype` wraps around."""
    try:
        return dtype.numpy.type(value)
    except OverflowError:
        return np.asarray(value).astype(dtype.numpy)[()]


def cast(x: Values, dtype: DType) -> Values:
    """As numpy's astype; to BOOL it is x != 0."""
    return x != 0 if dtype is DType.BOOL else x.astype(dtype.numpy)


def fma(a: Values, b: Values, c: Values) -> Values:
    """a * b + c through a wider type (exact but for double rounding)."""
    wide = np.longdouble if a.dtype == np.float64 else np.float64
    return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(a.dtype)


INTRINSIC: dict[Intrinsic, Callable[..., Values]] = {Intrinsic.FMA: fma}


def accumulator(op: ReduceOp, dtype: DType) -> np.dtype[np.generic]:
    """In what sums and products of floats are accumulated: float64."""
    return np.dtype(np.float64) if dtype.is_float and op in (ReduceOp.SUM, ReduceOp.PROD) else dtype.numpy


def reduce_last(op: ReduceOp, values: np.ndarray, count: int, dtype: DType) -> np.ndarray:
    """`values` combined over its last `count` dims, in the accumulator's dtype."""
    dims = tuple(range(values.ndim - count, values.ndim))
    identity = np.asarray(op.identity(dtype).value)  # type: ignore[attr-defined]
    if op in (ReduceOp.AND, ReduceOp.OR):
        combine = np.logical_and if op is ReduceOp.AND else np.logical_or
        return np.asarray(combine.reduce(values, axis=dims))
    into = accumulator(op, dtype)
    if op in (ReduceOp.SUM, ReduceOp.PROD):
        return np.asarray(BINARY[op.combiner].reduce(values, axis=dims, dtype=into))  # type: ignore[attr-defined]
    if values.size == 0:
        return np.full(values.shape[: values.ndim - count], identity.astype(into))
    return np.asarray(BINARY[op.combiner].reduce(values, axis=dims))  # type: ignore[attr-defined]
