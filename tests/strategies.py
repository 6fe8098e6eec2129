"""hypothesis strategies: integer, boolean and float expressions over a few variables with ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

from mcompile.dtypes import DType
from mcompile.errors import InternalError
from mcompile.ir.evaluate import Lanes
from mcompile.ir.expr import (
    Binary,
    BinaryOp,
    Cast,
    Compare,
    CompareOp,
    Const,
    Expr,
    Load,
    Select,
    Unary,
    UnaryOp,
    Var,
    var,
)

INDEX_VARS = tuple(var(name) for name in ("i", "j", "k", "n"))
FLOAT_VARS = tuple(var(name, DType.FLOAT32) for name in ("x", "y"))

_DIVISORS = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, -1, -3, -4])
_FACTORS = st.sampled_from([-12, -4, -3, -1, 1, 2, 3, 4, 5, 6, 8, 12, 24])
_INDEX_OPS = st.sampled_from([BinaryOp.ADD, BinaryOp.SUB, BinaryOp.ADD, BinaryOp.MUL, BinaryOp.MIN, BinaryOp.MAX])
_DIVISION_OPS = st.sampled_from([BinaryOp.FLOORDIV, BinaryOp.FLOORMOD] * 3 + [BinaryOp.TRUNCDIV, BinaryOp.TRUNCMOD])
_FLOAT_OPS = st.sampled_from([BinaryOp.ADD, BinaryOp.SUB, BinaryOp.MUL, BinaryOp.DIV, BinaryOp.MIN, BinaryOp.MAX])
_FLOAT_UNARY = st.sampled_from(
    [UnaryOp.NEG, UnaryOp.ABS, UnaryOp.FLOOR, UnaryOp.CEIL, UnaryOp.ROUND, UnaryOp.TRUNC, UnaryOp.SQRT]
)
_COMPARES = st.sampled_from(list(CompareOp))


def int64(value: int) -> Const:
    return Const(value, DType.INT64)


def ranges() -> st.SearchStrategy[dict[Var, tuple[int, int]]]:
    """An inclusive range for each of INDEX_VARS; most begin at 0."""
    one = st.tuples(st.sampled_from([0, 0, 0, -5, 1, 3]), st.integers(0, 24)).map(lambda pair: (pair[0], sum(pair)))
    return st.fixed_dictionaries(dict.fromkeys(INDEX_VARS, one))


def index_exprs(max_leaves: int = 12) -> st.SearchStrategy[Expr]:
    """INT64 expressions over INDEX_VARS, rich in divisions and remainders by constants."""
    leaves = st.one_of(st.sampled_from(INDEX_VARS), st.integers(-20, 40).map(int64))

    def extend(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        return st.one_of(
            st.builds(Binary, _INDEX_OPS, inner, inner),
            st.builds(lambda x, k: x * k, inner, _FACTORS),
            st.builds(lambda op, x, c: Binary(op, x, int64(c)), _DIVISION_OPS, inner, _DIVISORS),
            st.builds(Unary, st.sampled_from([UnaryOp.NEG, UnaryOp.ABS]), inner),
            st.builds(Select, _compare(inner), inner, inner),
        )

    return st.recursive(leaves, extend, max_leaves=max_leaves)


def _compare(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    return st.builds(Compare, _COMPARES, inner, inner)


def conditions(max_leaves: int = 6) -> st.SearchStrategy[Expr]:
    """BOOL expressions over INDEX_VARS."""
    leaves = st.one_of(_compare(index_exprs(5)), st.booleans().map(lambda value: Const(value, DType.BOOL)))

    def extend(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        logical = st.sampled_from([BinaryOp.AND, BinaryOp.OR, BinaryOp.XOR])
        return st.one_of(
            st.builds(Binary, logical, inner, inner),
            inner.map(lambda x: Unary(UnaryOp.NOT, x)),
            st.builds(Select, inner, inner, inner),
        )

    return st.recursive(leaves, extend, max_leaves=max_leaves)


def float_exprs(max_leaves: int = 10) -> st.SearchStrategy[Expr]:
    """FLOAT32 expressions over FLOAT_VARS and INDEX_VARS; every operation is exactly rounded."""
    constants = st.sampled_from([0.0, -0.0, 1.0, -1.5, 2.0, 0.1]).map(lambda value: Const(value, DType.FLOAT32))
    casts = index_exprs(3).map(lambda x: Cast(DType.FLOAT32, x))
    leaves = st.one_of(st.sampled_from(FLOAT_VARS), constants, casts)

    def extend(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        return st.one_of(
            st.builds(Binary, _FLOAT_OPS, inner, inner),
            st.builds(Unary, _FLOAT_UNARY, inner),
            st.builds(Select, st.one_of(_compare(inner), conditions(3)), inner, inner),
        )

    return st.recursive(leaves, extend, max_leaves=max_leaves)


def samples(variables: Mapping[Var, tuple[int, int]], count: int = 200) -> dict[Var, Any]:
    """`count` points in the ranges, corners more often than chance; floats, special values included, for FLOAT_VARS."""
    random = np.random.default_rng(0)
    points: dict[Var, Any] = {}
    for variable, (low, high) in variables.items():
        inner = random.integers(low, high + 1, count)
        corner = np.where(random.random(count) < 0.5, low, high)
        points[variable] = np.where(random.random(count) < 0.3, corner, inner)
    for variable in FLOAT_VARS:
        values = random.standard_normal(count).astype(np.float32)
        special = np.array([0, -0.0, np.nan, np.inf, -np.inf, 1, 2.5, -3.5], np.float32)
        points[variable] = np.where(random.random(count) < 0.4, random.choice(special, count), values)
    return points


def values_at(expr: Expr, points: Mapping[Var, Any]) -> Any:
    """The values of an expression without loads at `points`."""

    def load(expr: Load, lanes: Lanes) -> Any:
        raise InternalError(f"nothing to load {expr.source.name} from")

    count = len(next(iter(points.values())))
    with np.errstate(all="ignore"):
        return np.broadcast_to(Lanes(points, load)(expr), count)
