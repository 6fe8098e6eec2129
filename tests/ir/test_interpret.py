"""The interpreter of loops, and evaluation of dags, against numpy and against each other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcompile.dtypes import DType
from mcompile.errors import InternalError
from mcompile.ir.expr import (
    Binary,
    BinaryOp,
    Call,
    Cast,
    Const,
    Expr,
    Intrinsic,
    Reduce,
    ReduceOp,
    Select,
    Unary,
    UnaryOp,
    Var,
    all_of,
    binary,
    maximum,
    select,
    substitute,
    transform,
    var,
)
from mcompile.ir.expr import Load as LoadExpr
from mcompile.ir.interpret import evaluate, interpret
from mcompile.ir.semantics import cast
from mcompile.ir.stmt import Allocate, Barrier, Buffer, For, ForKind, If, PrimFunc, Scope, Stmt, Store, Thread, seq
from mcompile.ir.tensor import (
    Compute,
    ComputeDag,
    Tensor,
    build_dag,
    compute,
    placeholder,
    reduce_axis,
    reduce_over,
    row_major,
)
from mcompile.ir.verify import verify_func
from tests import strategies

F32, F64, I8, I32, I64, BOOL = (
    DType.FLOAT32,
    DType.FLOAT64,
    DType.INT8,
    DType.INT32,
    DType.INT64,
    DType.BOOL,
)
RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def value_of(result: Compute, **arrays: np.ndarray) -> np.ndarray:
    return evaluate(build_dag([result]), arrays)[result.name]


def loops_of(dag: ComputeDag, vector: bool = False) -> PrimFunc:
    """Plain loops for a dag; the innermost axis of each Compute vectorized if asked."""
    buffers = {t: Buffer(t.name, t.shape, t.dtype, row_major(t.shape)) for t in dag.tensors}

    def retarget(node: Expr) -> Expr | None:
        return buffers[node.source][node.indices] if isinstance(node, LoadExpr) else None

    statements = []
    for stage in dag.computes:
        axes = {axis.var: var(axis.var.name) for axis in (*stage.axes, *stage.reduce_axes)}
        body = transform(substitute(stage.body, dict(axes)), retarget)
        target, indices = buffers[stage], tuple(axes[axis.var] for axis in stage.axes)
        statement: Stmt = Store(target, indices, body)
        if isinstance(body, Reduce):
            update: Stmt = Store(target, indices, binary(body.op.combiner, target[indices], body.value))
            for axis in reversed(stage.reduce_axes):
                update = For(axes[axis.var], axis.extent, update)
            statement = seq(Store(target, indices, body.op.identity(stage.dtype)), update)
        for position, axis in reversed(list(enumerate(stage.axes))):
            kind = ForKind.VECTORIZED if vector and position == len(stage.axes) - 1 else ForKind.SERIAL
            statement = For(axes[axis.var], axis.extent, statement, kind)
        statements.append(statement)
    params = tuple(buffers.values())
    func = PrimFunc("f", params, tuple(buffers[stage] for stage in dag.computes), seq(*statements))
    verify_func(func)
    return func


def check_levels_agree(dag: ComputeDag, arrays: dict[str, np.ndarray], rtol: float = 1e-5) -> None:
    expected = evaluate(dag, arrays)
    for vector in (False, True):
        memory = {stage.name: np.zeros(stage.shape, stage.dtype.numpy) for stage in dag.computes}
        interpret(loops_of(dag, vector), {**arrays, **memory})
        for name, value in expected.items():
            np.testing.assert_allclose(memory[name], value, rtol=rtol, atol=rtol, strict=True)


def convolution() -> ComputeDag:
    x, w = placeholder("x", (2, 3, 6, 7), F32), placeholder("w", (4, 3, 3, 3), F32)

    def padded(n: Var, c: Var, h: Var, v: Var) -> Expr:
        return select(all_of([h >= 1, h < 7, v >= 1, v < 8]), x[n, c, h - 1, v - 1], 0.0)

    pad = compute("pad", (2, 3, 8, 9), padded)
    c, i, j = reduce_axis(3, "c"), reduce_axis(3, "i"), reduce_axis(3, "j")

    def body(n: Var, o: Var, h: Var, v: Var) -> Expr:
        product = pad[n, c.var, h * 2 + i.var, v * 2 + j.var] * w[o, c.var, i.var, j.var]
        return reduce_over(ReduceOp.SUM, product, [c, i, j])

    conv = compute("conv", (2, 4, 3, 4), body, [c, i, j])
    return build_dag([compute("relu", conv.shape, lambda *at: maximum(conv[at], 0.0))])


def test_convolution() -> None:
    arrays = {"x": normal(2, 3, 6, 7), "w": normal(4, 3, 3, 3)}
    padded = np.pad(arrays["x"], ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))[:, :, ::2, ::2]
    expected = np.einsum("nchwij,ocij->nohw", windows.astype(float), arrays["w"].astype(float))
    result = evaluate(convolution(), arrays)
    np.testing.assert_array_equal(result["pad"], padded)
    np.testing.assert_allclose(result["relu"], np.maximum(expected, 0), rtol=1e-6, atol=1e-6)
    check_levels_agree(convolution(), arrays)


@pytest.mark.parametrize(
    "spec", ["mk,kn->mn", "bmk,bkn->bmn", "bmk,kn->bmn", "mk,k->m", "bc,bc->b", "mk,n->mn", "m,n->q"]
)
def test_contractions(spec: str) -> None:
    """Sums of products, whatever axes the factors share."""
    extents = {"b": 3, "m": 4, "n": 5, "k": 6, "c": 7, "q": 2}
    (left, right), out = spec.split("->")[0].split(","), spec.split("->")[1]
    reduced = {name: reduce_axis(extents[name], name) for name in sorted({*left, *right} - {*out})}
    a = placeholder("a", [extents[name] for name in left], F32)
    b = placeholder("b", [extents[name] for name in right], F32)

    def body(*at: Var) -> Expr:
        variables = {**dict(zip(out, at, strict=True)), **{name: axis.var for name, axis in reduced.items()}}
        product = a[tuple(variables[name] for name in left)] * b[tuple(variables[name] for name in right)]
        return reduce_over(ReduceOp.SUM, product, list(reduced.values()))

    result = compute("y", [extents[name] for name in out], body, list(reduced.values()))
    arrays = {"a": normal(*a.shape), "b": normal(*b.shape)}
    expected = np.einsum(f"{left},{right}->{out.replace('q', '')}", *(x.astype(float) for x in arrays.values()))
    np.testing.assert_allclose(
        value_of(result, **arrays), np.broadcast_to(expected, result.shape), rtol=1e-5, atol=1e-6
    )


def test_pieces_bound_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {"x": normal(2, 3, 6, 7), "w": normal(4, 3, 3, 3)}
    whole = evaluate(convolution(), arrays)
    monkeypatch.setattr("mcompile.ir.evaluate._PIECE", 7)
    monkeypatch.setattr("mcompile.ir.evaluate._CONTRACTION_PIECE", 7)
    for name, value in evaluate(convolution(), arrays).items():
        np.testing.assert_allclose(value, whole[name], rtol=1e-6)


@pytest.mark.parametrize("op", list(ReduceOp))
@pytest.mark.parametrize("extent", [0, 1, 5])
def test_reductions(op: ReduceOp, extent: int) -> None:
    dtype = BOOL if op in (ReduceOp.AND, ReduceOp.OR) else F32
    x, k = placeholder("x", (3, extent), dtype), reduce_axis(extent)
    y = compute("y", (3,), lambda i: reduce_over(op, x[i, k.var], [k]), [k])
    array = normal(3, extent) if dtype is F32 else RANDOM.random((3, extent)) < 0.5
    references: dict[ReduceOp, Any] = {
        ReduceOp.SUM: np.sum,
        ReduceOp.PROD: np.prod,
        ReduceOp.MIN: lambda x, axis: np.min(x, axis=axis, initial=np.inf),
        ReduceOp.MAX: lambda x, axis: np.max(x, axis=axis, initial=-np.inf),
        ReduceOp.AND: np.all,
        ReduceOp.OR: np.any,
    }
    np.testing.assert_allclose(value_of(y, x=array), references[op](array, axis=1), rtol=1e-6, strict=False)
    check_levels_agree(build_dag([y]), {"x": array})


def test_integer_dot_products_are_exact() -> None:
    x, w, k = placeholder("x", (4, 300), I8), placeholder("w", (300, 5), I8), reduce_axis(300)
    y = compute(
        "y",
        (4, 5),
        lambda i, j: reduce_over(ReduceOp.SUM, x[i, k.var].astype(I32) * w[k.var, j].astype(I32), [k]),
        [k],
    )
    arrays = {name: RANDOM.integers(-128, 128, shape, np.int8) for name, shape in [("x", (4, 300)), ("w", (300, 5))]}
    expected = arrays["x"].astype(np.int32) @ arrays["w"].astype(np.int32)
    np.testing.assert_array_equal(value_of(y, **arrays), expected, strict=True)


def test_gather_with_data_as_index() -> None:
    x, index = placeholder("x", (5, 3), F32), placeholder("index", (4,), I64)

    def body(i: Var, j: Var) -> Expr:
        at = index[i]
        return x[select(at < 0, at + 5, at), j]

    arrays = {"x": normal(5, 3), "index": np.array([0, -1, 4, 2])}
    y = compute("y", (4, 3), body)
    np.testing.assert_array_equal(value_of(y, **arrays), arrays["x"][arrays["index"]])
    check_levels_agree(build_dag([y]), arrays)
    with pytest.raises(InternalError, match=r"index 5 is outside \[0, 5\)"):
        value_of(y, x=arrays["x"], index=np.array([0, 1, 2, 5]))


def test_evaluate_checks_bounds_and_types() -> None:
    x = placeholder("x", (4,), F32)
    with pytest.raises(InternalError, match="outside"):
        value_of(compute("y", (4,), lambda i: x[i + 1]), x=normal(4))
    with pytest.raises(InternalError, match="expected float32"):
        value_of(compute("y", (4,), lambda i: x[i]), x=np.zeros(4))


def test_guarded_loads_of_guarded_loads() -> None:
    x = placeholder("x", (4,), F32)

    def body(i: Var) -> Expr:
        inner = select(i < 6, x[i - 2], -1.0)
        return select(i >= 2, inner, 0.0)

    y = compute("y", (8,), body)
    array = normal(4)
    expected = np.array([0, 0, *array, -1, -1], np.float32)
    np.testing.assert_array_equal(value_of(y, x=array), expected)
    check_levels_agree(build_dag([y]), {"x": array})


@pytest.mark.parametrize("dtype", [F32, F64, DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize("op", [op for op in UnaryOp if op is not UnaryOp.NOT])  # which is not for floats
def test_unary_scalars_equal_arrays(op: UnaryOp, dtype: DType) -> None:
    """One element at a time and all at once give the same bits."""
    x = placeholder("x", (16,), dtype)
    y = compute("y", (16,), lambda i: Unary(op, x[i]))
    special = [0.0, -0.0, 0.5, 1.5, 2.5, -2.5, math.inf, -math.inf, math.nan, 1e-3, 30, -30]
    array = np.array([*special, 0.1, -0.7, 1.0, -1.0]).astype(dtype.numpy)
    check_levels_agree(build_dag([y]), {"x": array}, rtol=1e-3)


def test_unary_values() -> None:
    x = placeholder("x", (5,), F64)
    array = np.array([0.5, 1.5, 2.5, -0.5, -1.7])
    expected = {
        UnaryOp.ROUND: [0.0, 2.0, 2.0, -0.0, -2.0],
        UnaryOp.ERF: [math.erf(value) for value in array],
        UnaryOp.SIGMOID: [1 / (1 + math.exp(-value)) for value in array],
        UnaryOp.SIGN: [1.0, 1.0, 1.0, -1.0, -1.0],
    }
    for op, values in expected.items():
        y = compute("y", (5,), lambda i, op=op: Unary(op, x[i]))
        np.testing.assert_allclose(value_of(y, x=array), values, rtol=1e-15)


def test_min_and_max_propagate_nan() -> None:
    x = placeholder("x", (2,), F32)
    y = compute("y", (2,), lambda i: maximum(x[i], 0.0))
    array = np.array([np.nan, -1], np.float32)
    np.testing.assert_array_equal(value_of(y, x=array), np.array([np.nan, 0], np.float32))
    check_levels_agree(build_dag([y]), {"x": array})


_INTEGER_OPS = [op for op in BinaryOp if op not in (BinaryOp.DIV, BinaryOp.SHL, BinaryOp.SHR, BinaryOp.POW)]


@pytest.mark.parametrize("dtype", [I8, I32, I64, DType.UINT8, DType.UINT64])
@pytest.mark.parametrize("op", [*_INTEGER_OPS, BinaryOp.SHL, BinaryOp.POW], ids=lambda op: op.name)
def test_integer_scalars_equal_arrays(op: BinaryOp, dtype: DType) -> None:
    info = np.iinfo(dtype.numpy)
    small = [1, 2, 3, 7, 5, 6, 4, 3]
    a = np.array([info.min, info.max, 7, 100, 0, 3, info.max - 1, 1], dtype.numpy)
    b = np.array(small).astype(dtype.numpy)
    if info.min < 0 and op is not BinaryOp.SHL:
        b[1::2] *= -1
    x, y = placeholder("x", (8,), dtype), placeholder("y", (8,), dtype)
    z = compute("z", (8,), lambda i: Binary(op, x[i], y[i]))
    check_levels_agree(build_dag([z]), {"x": a, "y": b}, rtol=0)


def test_integer_division_rounds_as_said() -> None:
    x = placeholder("x", (4,), I32)
    array = np.array([7, -7, 8, -8], np.int32)
    expected = {
        BinaryOp.FLOORDIV: [2, -3, 2, -3],
        BinaryOp.FLOORMOD: [1, 2, 2, 1],
        BinaryOp.TRUNCDIV: [2, -2, 2, -2],
        BinaryOp.TRUNCMOD: [1, -1, 2, -2],
    }
    for op, values in expected.items():
        y = compute("y", (4,), lambda i, op=op: Binary(op, x[i], Const(3, I32)))
        np.testing.assert_array_equal(value_of(y, x=array), values)


def test_casts() -> None:
    x = placeholder("x", (4,), F32)
    array = np.array([-1.7, 0.0, 0.3, 250.9], np.float32)
    for dtype, expected in [(I32, [-1, 0, 0, 250]), (BOOL, [True, False, True, True]), (F64, array.astype(float))]:
        y = compute("y", (4,), lambda i, dtype=dtype: Cast(dtype, x[i]))
        np.testing.assert_array_equal(value_of(y, x=array), np.array(expected, dtype.numpy), strict=True)
        check_levels_agree(build_dag([y]), {"x": array})
    assert cast(np.int64(300), I8) == 44


def test_fma_is_fused() -> None:
    x = placeholder("x", (1,), F32)
    y = compute("y", (1,), lambda i: Call(Intrinsic.FMA, (x[i], x[i], Const(-1.0, F32)), F32))
    array = np.array([1 + 2**-12], np.float32)
    assert value_of(y, x=array)[0] == np.float32(2**-11 + 2**-24)


@given(strategies.index_exprs(), strategies.ranges())
@settings(max_examples=60, deadline=None)
def test_index_expression_at_both_levels(expr: Expr, ranges: dict[Var, tuple[int, int]]) -> None:
    _check_expression(expr, ranges)


@given(strategies.float_exprs(), strategies.ranges())
@settings(max_examples=60, deadline=None)
def test_float_expression_at_both_levels(expr: Expr, ranges: dict[Var, tuple[int, int]]) -> None:
    _check_expression(expr, ranges)


def _check_expression(expr: Expr, ranges: dict[Var, tuple[int, int]]) -> None:
    """Every variable becomes an element of a tensor of samples."""
    count = 20
    points = strategies.samples(ranges, count)
    sources = {v: placeholder(v.name, (count,), v.dtype) for v in points}

    def body(at: Var) -> Expr:
        return substitute(expr, {v: source[at] for v, source in sources.items()})

    dag = build_dag([compute("result", (count,), body)])
    arrays = {v.name: points[v] for v, source in sources.items() if source in dag.tensors}
    check_levels_agree(dag, arrays, rtol=0)


# Loops


def run(body: Stmt, params: tuple[Buffer, ...], **arrays: np.ndarray) -> None:
    func = PrimFunc("f", params, params, body)
    verify_func(func)
    interpret(func, arrays)


def test_strided_views() -> None:
    """A transposed buffer is other strides over the same memory."""
    x, y = Buffer("x", (3, 4), F32, (1, 3)), Buffer("y", (3, 4), F32, (8, 2))
    i, j = var("i"), var("j")
    memory, out = normal(12), np.zeros(23, np.float32)
    run(For(i, 3, For(j, 4, Store(y, (i, j), x[i, j]))), (x, y), x=memory, y=out)
    view = np.lib.stride_tricks.as_strided(out, (3, 4), (32, 8))
    np.testing.assert_array_equal(view, memory.reshape(4, 3).T)


def test_out_of_bounds_raises() -> None:
    x = Buffer("x", (4,), F32, (1,))
    i = var("i")
    with pytest.raises(InternalError, match="stores x out of bounds: index 4 of dim 0 of 4"):
        run(For(i, 5, Store(x, (i,), Const(0, F32))), (x,), x=normal(4))
    with pytest.raises(InternalError, match="loads x out of bounds: index -1"):
        run(For(i, 4, Store(x, (i,), x[i - 1,])), (x,), x=normal(4))
    with pytest.raises(InternalError, match="outside"):
        run(For(i, 5, Store(x, (i,), Const(0, F32)), ForKind.VECTORIZED), (x,), x=normal(4))


def test_array_must_fit_its_buffer() -> None:
    x = Buffer("x", (4,), F32, (2,))
    body = Store(x, (Const(0, I64),), Const(0, F32))
    for array in (normal(6), np.zeros(7), normal(14)[::2]):
        with pytest.raises(InternalError, match="x: expected contiguous float32 memory of at least 7"):
            run(body, (x,), x=array)


def test_vector_loop_reads_before_it_writes() -> None:
    x = Buffer("x", (5,), F32, (1,))
    i = var("i")
    vector, serial = np.arange(5, dtype=np.float32), np.arange(5, dtype=np.float32)
    run(For(i, 4, Store(x, (i + 1,), x[i,]), ForKind.VECTORIZED), (x,), x=vector)
    run(For(i, 4, Store(x, (i + 1,), x[i,])), (x,), x=serial)
    assert vector.tolist() == [0, 0, 1, 2, 3]
    assert serial.tolist() == [0, 0, 0, 0, 0]


def test_vector_loop_with_mask_and_inner_loop() -> None:
    x, y = Buffer("x", (5, 3), F32, (3, 1)), Buffer("y", (5,), F32, (1,))
    i, j = var("i"), var("j")
    update = For(j, 3, Store(y, (i,), y[i,] + x[i, j]), ForKind.UNROLLED)
    body = seq(If(i < 5, seq(Store(y, (i,), Const(0, F32)), update), None))
    array, out = normal(5, 3), normal(5)
    run(For(i, 8, body, ForKind.VECTORIZED), (x, y), x=array, y=out)
    np.testing.assert_allclose(out, array.sum(1), rtol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_vector_loop_reduces_to_one_element(fused: bool) -> None:
    x, y = Buffer("x", (8,), F32, (1,)), Buffer("y", (1,), F32, (1,))
    i, zero = var("i"), Const(0, I64)
    square = Call(Intrinsic.FMA, (x[i,], x[i,], y[zero,]), F32) if fused else y[zero,] + x[i,] * x[i,]
    array, out = normal(8), np.ones(1, np.float32)
    run(For(i, 8, Store(y, (zero,), square), ForKind.VECTORIZED), (x, y), x=array, y=out)
    np.testing.assert_allclose(out[0], 1 + (array**2).sum(), rtol=1e-6)
    with pytest.raises(InternalError, match="no reduction"):
        run(For(i, 8, Store(y, (zero,), x[i,]), ForKind.VECTORIZED), (x, y), x=array, y=out)


def test_local_memory_starts_undefined() -> None:
    tile, y = Buffer("tile", (2,), F32, (1,), Scope.LOCAL), Buffer("y", (2,), F32, (1,))
    i = var("i")
    out = np.zeros(2, np.float32)
    run(Allocate(tile, For(i, 2, Store(y, (i,), tile[i,]))), (y,), y=out)
    assert np.isnan(out).all()


def _block_reversal(guard_barrier: bool) -> tuple[Buffer, Buffer, Stmt]:
    """Each block of 4x2 threads reverses 8 elements through shared memory."""
    x, y = Buffer("x", (3, 8), F32, (8, 1)), Buffer("y", (3, 8), F32, (8, 1))
    tile = Buffer("tile", (8,), F32, (1,), Scope.SHARED)
    block, row, column = var("b"), var("ty"), var("tx")
    lane = row * 4 + column
    wait: Stmt = If(column < 2, Barrier()) if guard_barrier else Barrier()
    step = seq(Store(tile, (lane,), x[block, lane]), wait, Store(y, (block, lane), tile[Const(7, I64) - lane,]))
    threads = For(column, 4, Allocate(tile, step), ForKind.THREAD, Thread.THREAD_X)
    rows = For(row, 2, threads, ForKind.THREAD, Thread.THREAD_Y)
    return x, y, For(block, 3, rows, ForKind.THREAD, Thread.BLOCK_X)


def test_threads_meet_at_barriers() -> None:
    x, y, body = _block_reversal(guard_barrier=False)
    array, out = normal(3, 8), np.zeros((3, 8), np.float32)
    run(body, (x, y), x=array, y=out)
    np.testing.assert_array_equal(out, array[:, ::-1])


def test_threads_that_miss_a_barrier_are_found() -> None:
    x, y, body = _block_reversal(guard_barrier=True)
    with pytest.raises(InternalError, match="2 of 4 threads of tx arrive at a barrier"):
        run(body, (x, y), x=normal(3, 8), y=normal(3, 8))


def test_barriers_inside_serial_loops() -> None:
    """A log-step sum over shared memory: each round needs all of the one before."""
    x, tile = Buffer("x", (8,), F32, (1,)), Buffer("tile", (8,), F32, (1,), Scope.SHARED)
    t, step = var("t"), var("step")
    width = select(step.eq(0), 4, select(step.eq(1), 2, 1))
    add = If(t < width, Store(tile, (t,), tile[t,] + tile[Select(t < width, t + width, t),]))
    rounds = For(step, 3, seq(add, Barrier()))
    first = If(t.eq(0), Store(x, (t,), tile[t,]))
    body = Allocate(tile, seq(Store(tile, (t,), x[t,]), Barrier(), rounds, first))
    array = np.arange(8, dtype=np.float32)
    run(For(t, 8, body, ForKind.THREAD, Thread.THREAD_X), (x,), x=array)
    assert array[0] == 28


def test_shared_subexpressions_are_computed_once() -> None:
    """A chain that doubles 60 times must not take 2^60 steps."""
    x = placeholder("x", (2,), F32)

    def body(i: Var) -> Expr:
        value: Expr = x[i]
        for _ in range(60):
            value = (value + value) * 0.5
        return value

    array = normal(2)
    check_levels_agree(build_dag([compute("y", (2,), body)]), {"x": array})


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_small_dags_at_both_levels(data: st.DataObject) -> None:
    """Chains of broadcasts, permutations, shifts, sums and products."""
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    x = placeholder("x", shape, F32)
    tensor: Tensor = x
    for step in range(data.draw(st.integers(1, 4))):
        tensor = data.draw(st.sampled_from([_transposed, _shifted, _row_sum, _squared]))(tensor, f"t{step}")
    assert isinstance(tensor, Compute)
    check_levels_agree(build_dag([tensor]), {"x": normal(*shape)}, rtol=1e-4)


def _transposed(x: Tensor, name: str) -> Compute:
    return compute(name, x.shape[::-1], lambda i, j: x[j, i])


def _shifted(x: Tensor, name: str) -> Compute:
    return compute(name, x.shape, lambda i, j: select(j >= 1, x[i, j - 1], 0.5) + x[i, j])


def _row_sum(x: Tensor, name: str) -> Compute:
    k = reduce_axis(x.shape[1])
    return compute(name, (x.shape[0], 2), lambda i, j: reduce_over(ReduceOp.SUM, x[i, k.var] * 0.5, [k]), [k])


def _squared(x: Tensor, name: str) -> Compute:
    k = reduce_axis(x.shape[1])
    shape = (x.shape[0], x.shape[0])
    return compute(name, shape, lambda i, j: reduce_over(ReduceOp.SUM, x[i, k.var] * x[j, k.var], [k]), [k])
