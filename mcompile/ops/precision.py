"""In which dtype values are computed: 16-bit floats are storage formats only, their arithmetic is FLOAT32's."""

from __future__ import annotations

from mcompile.dtypes import DType
from mcompile.ir.expr import Const, Expr

_HALVES = (DType.FLOAT16, DType.BFLOAT16)


def computed_in(dtype: DType) -> DType:
    """The dtype that arithmetic on `dtype` is done in."""
    return DType.FLOAT32 if dtype in _HALVES else dtype


def real(dtype: DType) -> DType:
    """The float dtype that functions such as sqrt are done in: FLOAT32 for integers and 16-bit floats."""
    return computed_in(dtype) if dtype.is_float else DType.FLOAT32


def widened(x: Expr) -> Expr:
    return x.astype(computed_in(x.dtype))


def narrowed(x: Expr, dtype: DType) -> Expr:
    """`x` as a value of `dtype` if it is one widened; anything else (a comparison's BOOL) as it is."""
    return x.astype(dtype) if dtype in _HALVES and x.dtype is DType.FLOAT32 else x


def scaled(x: Expr, factor: float) -> Expr:
    """`x * factor`, rounded towards zero for integers; no multiplication by 1."""
    if factor == 1:
        return x
    if x.dtype.is_float:
        return x * factor
    return (x.astype(DType.FLOAT64) * Const(factor, DType.FLOAT64)).astype(x.dtype)
