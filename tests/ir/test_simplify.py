from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings

from mcompile.dtypes import DType
from mcompile.ir.affine import as_affine
from mcompile.ir.bounds import bounds
from mcompile.ir.expr import (
    Binary,
    BinaryOp,
    Cast,
    Compare,
    CompareOp,
    Const,
    Expr,
    Select,
    Unary,
    UnaryOp,
    Var,
    all_of,
    compare,
    maximum,
    minimum,
    select,
    var,
)
from mcompile.ir.printer import print_expr
from mcompile.ir.simplify import Simplifier, simplify
from mcompile.ir.tensor import placeholder
from tests import strategies

M, J, K, X, Y = (var(name) for name in "ijkxy")
RANGES = {M: (0, 6), J: (0, 11), K: (0, 3)}
FLAT = M * 12 + J


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (FLAT // 12, "i"),
        (FLAT % 12, "j"),
        (FLAT // 3 % 4, "j // 3"),
        (FLAT // 3, "i * 4 + j // 3"),
        (FLAT // 24 * 24 + FLAT % 24, "i * 12 + j"),
        (FLAT // 24, "i // 2"),
        (FLAT % 24, "j + i % 2 * 12"),
        ((FLAT * 5 + 4) // 60, "i"),
        (X // 7 * 7 * 5 + X % 7 * 5, "x * 5"),
        (X // 7 * 7 + X % 7 + Y, "x + y"),
        (X - X // 4 * 4, "x % 4"),
        (X // 3 // 4, "x // 12"),
        (X % 12 // 3, "x // 3 % 4"),
        (X % 12 % 4, "x % 4"),
        ((X % 12 + Y) % 4, "(x + y) % 4"),
        (X // 12 * 12 + X // 3 % 4 * 3 + X % 3, "x"),
        ((X * 4 + 5) // 4, "x + 1"),
        ((X + 5) // 4, "(x + 1) // 4 + 1"),
        ((6 * X + 3) // 9, "(x * 2 + 1) // 3"),
        (X // -1, "x * -1"),
        (X * 3 + Y - X * 2 - Y, "x"),
        (X * Y * 2 - Y * X * 2, "0"),
        (Binary(BinaryOp.TRUNCDIV, J, Const(3, DType.INT64)), "j // 3"),
        (minimum(M, 10), "i"),
        (maximum(minimum(J, 20), -1), "j"),
        (minimum(minimum(X, 3), minimum(5, X)), "min(x, 3)"),
        (minimum(X + 3, X + 1), "x + 1"),
        (select(M < 7, X, J), "x"),
        (select(X < 7, J, J + 0), "j"),
        (select(Unary(UnaryOp.NOT, X < 7), M, J), "select(x >= 7, i, j)"),
        (K // 4 + K % 4, "k"),
    ],
)
def test_index_rule(expr: Expr, expected: str) -> None:
    assert print_expr(simplify(expr, RANGES)) == expected


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (M >= 0, "true"),
        (M > 6, "false"),
        (M * 12 + J < 84, "true"),
        (M * 4 + K < 12, "i < 3"),
        ((M * 4 + K) // 4 < 3, "i < 3"),
        (X // 4 < 3, "x < 12"),
        (X // 4 >= 3, "x >= 12"),
        (X * 2 < 7, "x < 4"),
        (X + 1 <= Y, "x < y"),
        (X * 2 - 3 >= 0, "x >= 2"),
        ((X * 2).eq(3), "false"),
        ((X * 2).ne(Y * 4), "x != y * 2"),
        (X.eq(X), "true"),
        (all_of([X < 3, M >= 0, X < 3, Y < 4]), "x < 3 and y < 4"),
        ((X < 3) | (M >= 0), "true"),
        (Unary(UnaryOp.NOT, X < 3), "x >= 3"),
        (select(X < 3, Const(True, DType.BOOL), Const(False, DType.BOOL)), "x < 3"),
    ],
)
def test_condition_rule(expr: Expr, expected: str) -> None:
    assert print_expr(simplify(expr, RANGES)) == expected


def test_ravel_and_unravel_collapse() -> None:
    """(n, c, h, w) -> flat -> (n * c, h * w) -> flat -> (n, c, h, w)."""
    shape = (2, 6, 5, 7)
    axes = [var(name) for name in "nchw"]
    ranges = {axis: (0, extent - 1) for axis, extent in zip(axes, shape, strict=True)}
    n, c, h, w = axes
    flat = ((n * 6 + c) * 5 + h) * 7 + w
    rows, columns = flat // 35, flat % 35
    again = rows * 35 + columns
    simplifier = Simplifier(ranges)
    assert [simplifier(x) for x in (again // 210, again // 35 % 6, again // 7 % 5, again % 7)] == axes
    assert as_affine(simplifier(again)) == as_affine(flat)


def test_split_dims_join() -> None:
    """Axes that a reshape splits, indexed by the fused axis, are that axis again."""
    fused = var("f")
    assert simplify((fused // 20) * 20 + (fused // 4 % 5) * 4 + fused % 4, {fused: (0, 59)}) is fused
    assert simplify((fused // 20 * 5 + fused // 4 % 5) * 4 + fused % 4) is fused


def test_loaded_values_may_wrap() -> None:
    load = placeholder("t", (4,), DType.INT64)[M]
    assert simplify((load * 4) // 4) is not load
    assert print_expr(simplify(load + 1 < load)) == "t[i] + 1 < t[i]"
    small = placeholder("s", (4,), DType.UINT8)[M].astype(DType.INT64)
    assert simplify((small * 4) // 4) is small
    assert simplify(small < 256) is Const(True, DType.BOOL)


def test_floats_keep_their_order() -> None:
    x, y = strategies.FLOAT_VARS
    kept = (x + 0.0) + (y - x)
    assert simplify(kept) is kept
    assert simplify(x * 1.0 - 0.0) is x
    assert simplify(x - -0.0) is not x
    assert simplify(Unary(UnaryOp.NOT, x < y)) is not (x >= y)


def test_constants_are_cast() -> None:
    assert simplify(Cast(DType.INT8, Const(300, DType.INT64))) is Const(44, DType.INT8)
    assert simplify(Const(2, DType.INT64).astype(DType.FLOAT32)) is Const(2.0, DType.FLOAT32)


@given(strategies.index_exprs(), strategies.ranges())
@settings(max_examples=400, deadline=None)
def test_index_value_is_kept(expr: Expr, ranges: dict[Var, tuple[int, int]]) -> None:
    _check(expr, ranges)


@given(strategies.conditions(), strategies.ranges())
@settings(max_examples=200, deadline=None)
def test_condition_value_is_kept(expr: Expr, ranges: dict[Var, tuple[int, int]]) -> None:
    _check(expr, ranges)


@given(strategies.float_exprs(), strategies.ranges())
@settings(max_examples=100, deadline=None)
def test_float_value_is_kept(expr: Expr, ranges: dict[Var, tuple[int, int]]) -> None:
    _check(expr, ranges)


def _check(expr: Expr, ranges: dict[Var, tuple[int, int]]) -> None:
    points = strategies.samples(ranges)
    expected = strategies.values_at(expr, points)
    for known in (ranges, {}):
        result = simplify(expr, known)
        np.testing.assert_array_equal(strategies.values_at(result, points), expected)
        assert simplify(result, known) is result, (print_expr(expr), print_expr(result))


@given(strategies.index_exprs(), strategies.ranges())
@settings(max_examples=200, deadline=None)
def test_bounds_contain_the_value(expr: Expr, ranges: dict[Var, tuple[int, int]]) -> None:
    interval = bounds(expr, ranges)
    values = strategies.values_at(expr, strategies.samples(ranges))
    if interval is not None:
        assert interval[0] <= values.min()
        assert values.max() <= interval[1]


@given(strategies.index_exprs())
@settings(max_examples=100, deadline=None)
def test_affine_round_trip(expr: Expr) -> None:
    affine = as_affine(expr)
    assert as_affine(affine.to_expr()) == affine
    points = strategies.samples(dict.fromkeys(strategies.INDEX_VARS, (-30, 30)))
    np.testing.assert_array_equal(strategies.values_at(affine.to_expr(), points), strategies.values_at(expr, points))


@pytest.mark.parametrize("op", list(CompareOp))
def test_compare_folds_where_ranges_part(op: CompareOp) -> None:
    tables: dict[CompareOp, Callable[[int, int], bool]] = {
        CompareOp.EQ: lambda a, b: a == b,
        CompareOp.NE: lambda a, b: a != b,
        CompareOp.LT: lambda a, b: a < b,
        CompareOp.LE: lambda a, b: a <= b,
        CompareOp.GT: lambda a, b: a > b,
        CompareOp.GE: lambda a, b: a >= b,
    }
    for low in range(-8, 9):
        expr = compare(op, K, low)
        outcomes = {tables[op](value, low) for value in range(4)}
        result = simplify(expr, RANGES)
        if len(outcomes) == 1:
            assert result is Const(outcomes.pop(), DType.BOOL)
        else:
            assert isinstance(result, Compare)


def test_select_branches_may_be_lazy() -> None:
    table = placeholder("t", (4,), DType.FLOAT32)
    expr = Select(K < 4, table[K], Const(0, DType.FLOAT32))
    assert simplify(expr, RANGES) is table[K]
