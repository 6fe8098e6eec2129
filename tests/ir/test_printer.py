import pytest
from hypothesis import given, settings

from mcompile.dtypes import DType
from mcompile.ir.expr import (
    BinaryOp,
    Cast,
    Const,
    Expr,
    ReduceOp,
    Unary,
    UnaryOp,
    Var,
    binary,
    maximum,
    select,
    substitute,
    var,
)
from mcompile.ir.printer import print_dag, print_expr, print_func
from mcompile.ir.stmt import Allocate, Barrier, Block, Buffer, For, ForKind, If, PrimFunc, Scope, Store, Thread, seq
from mcompile.ir.tensor import ComputeDag, build_dag, compute, placeholder, reduce_axis, reduce_over
from tests import strategies

A, B, C = (var(name) for name in "abc")
F32 = DType.FLOAT32


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (A + (B + C), "a + (b + c)"),
        ((A + B) + C, "a + b + c"),
        (A - (B - C) * 2, "a - (b - c) * 2"),
        (A * (B // C), "a * (b // c)"),
        (-(A + B), "-(a + b)"),
        (-Const(3, DType.INT64), "-(3)"),
        ((A < B) & (B < C) | (A.eq(C)), "a < b and b < c or a == c"),
        (Unary(UnaryOp.NOT, A < B), "!(a < b)"),
        (select(A < 3, A, -1), "select(a < 3, a, -1)"),
        (binary(BinaryOp.TRUNCDIV, A, B), "truncdiv(a, b)"),
        (Cast(F32, Const(3, DType.INT64)), "f32(3)"),
        (Const(3.0, F32), "3.0_f32"),
        (Const(-0.0, F32), "-0.0_f32"),
        (Const(3, DType.INT32), "3_i32"),
        (Const(float("inf"), DType.BFLOAT16), "inf_bf16"),
        (var("n", DType.INT32) + 1, "n:i32 + 1_i32"),
    ],
)
def test_print_expr(expr: Expr, text: str) -> None:
    assert print_expr(expr) == text


def test_variables_of_one_name_are_told_apart_by_order_of_appearance() -> None:
    first, second = var("i"), var("i")
    assert print_expr(first * 2 + second) == "i * 2 + i_1"
    assert print_expr(second * 2 + first) == "i * 2 + i_1"


def test_big_shared_subexpressions_are_printed_once() -> None:
    x: Expr = var("x", F32)
    for _ in range(40):
        x = x * Unary(UnaryOp.SIGMOID, x)
    text = print_expr(x)
    assert len(text) < 4000
    assert text.startswith("let %0 = ")


@given(strategies.index_exprs(), strategies.index_exprs())
@settings(max_examples=200, deadline=None)
def test_text_is_stable_and_tells_expressions_apart(a: Expr, b: Expr) -> None:
    older: dict[Var, Expr] = {old: var(old.name) for old in strategies.INDEX_VARS}
    newer: dict[Var, Expr] = {old: var(old.name) for old in reversed(strategies.INDEX_VARS)}
    assert print_expr(substitute(a, older)) == print_expr(substitute(a, newer))
    if a is not b:
        assert print_expr(a) != print_expr(b)


def _dag() -> ComputeDag:
    x = placeholder("x", (4, 8), F32)
    k = reduce_axis(8)
    total = compute("total", (4,), lambda i: reduce_over(ReduceOp.SUM, x[i, k.var], [k]), [k])
    scaled = compute("scaled", (4, 8), lambda i, j: maximum(x[i, j] / total[i], 0.0))
    return build_dag([scaled])


def test_print_dag() -> None:
    assert print_dag(_dag()) == print_dag(_dag())
    assert print_dag(_dag()) == "\n".join(
        [
            "x: placeholder f32[4, 8]",
            "total[i0 < 4; k < 8]: f32 = reduce_sum(x[i0, k]; k)",
            "scaled[i0_1 < 4, i1 < 8]: f32 = max(x[i0_1, i1] / total[i0_1], 0.0_f32)",
            "return scaled",
        ]
    )


def test_print_func() -> None:
    x = Buffer("x", (4, 8), F32, (8, 1))
    y = Buffer("y", (4,), F32, (1,))
    tile = Buffer("tile", (8,), F32, (1,), Scope.SHARED)
    i, j = var("i"), var("j")
    zero = Const(0.0, F32)
    inner = seq(
        Store(tile, (j,), x[i, j]),
        Barrier(),
        If(j.eq(0), Store(y, (i,), tile[j,] + tile[j + 1,]), Store(y, (i,), zero)),
    )
    threads = For(j, 8, Allocate(tile, inner), ForKind.THREAD, Thread.THREAD_X)
    func = PrimFunc("f", (x, y), (y,), For(i, 4, Block("y", threads), ForKind.THREAD, Thread.BLOCK_X), {"flops": "4"})
    assert print_func(func).splitlines() == [
        "func f:",
        "    param x: f32[4, 8] strides [8, 1]",
        "    param y: f32[4] strides [1]",
        "    writes y",
        "    attr flops = 4",
        "    thread blockIdx.x i < 4:",
        "        block y:",
        "            thread threadIdx.x j < 8:",
        "                allocate shared tile: f32[8] strides [1]:",
        "                    tile[j] = x[i, j]",
        "                    barrier",
        "                    if j == 0:",
        "                        y[i] = tile[j] + tile[j + 1]",
        "                    else:",
        "                        y[i] = 0.0_f32",
    ]
