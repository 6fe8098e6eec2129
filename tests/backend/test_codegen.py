"""Whole kernels: native code against the interpreter and numpy, and what the machine code looks like."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcompile.backend.cpu import llvm
from mcompile.backend.cpu.build import assembly, build_kernel, undefined_symbols
from mcompile.backend.cpu.codegen import emit_module
from mcompile.dtypes import DType
from mcompile.errors import BuildError
from mcompile.ir.expr import (
    Binary,
    BinaryOp,
    Cast,
    Const,
    Expr,
    Select,
    Unary,
    UnaryOp,
    Var,
    all_of,
    as_expr,
    maximum,
    minimum,
    select,
    substitute,
    var,
)
from mcompile.ir.interpret import interpret
from mcompile.ir.stmt import Allocate, Buffer, For, ForKind, If, PrimFunc, Scope, Stmt, Store, seq
from mcompile.target import Target, parse_target
from tests.backend.kernels import F32, buffer, conv, elementwise, gemm
from tests.backend.native import Loaded, run, runnable_targets
from tests.strategies import FLOAT_VARS, INDEX_VARS, float_exprs, index_exprs

Array = np.ndarray[Any, Any]
VECTORIZED, UNROLLED, PARALLEL = ForKind.VECTORIZED, ForKind.UNROLLED, ForKind.PARALLEL
targets = pytest.mark.parametrize("target", runnable_targets(), ids=lambda target: target.cpu)


@pytest.fixture(scope="session")
def host() -> Target:
    return parse_target("cpu", threads=1)


def memory_for(func: PrimFunc, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    arrays = {}
    for param in func.params:
        if param.dtype.is_float:
            arrays[param.name] = rng.standard_normal(param.span).astype(param.dtype.numpy)
        else:
            arrays[param.name] = rng.integers(0, 2 if param.dtype is DType.BOOL else 7, param.span).astype(
                param.dtype.numpy
            )
    return arrays


def check(func: PrimFunc, target: Target, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    """Native code leaves in every buffer what the interpreter leaves."""
    got, expected = memory_for(func), memory_for(func)
    run(func, target, got)
    interpret(func, expected)
    for param in func.params:
        np.testing.assert_allclose(got[param.name], expected[param.name], rtol=rtol, atol=atol, err_msg=param.name)


def function(body: Stmt, params: list[Buffer], outputs: list[Buffer], **attrs: str) -> PrimFunc:
    return PrimFunc("kernel", tuple(params), tuple(outputs), body, dict(attrs))


def copy(shape: tuple[int, ...], lanes: int, index: Any, out_index: Any = None, dtype: DType = F32) -> PrimFunc:
    """out[out_index(i, v)] = x[index(i, v)] for i < 3, v < lanes."""
    x, out = buffer("x", shape, dtype), buffer("out", [3, lanes * 3], dtype)
    i, v = var("i"), var("v")
    where = (i, v) if out_index is None else out_index(i, v)
    body = For(i, 3, For(v, lanes, Store(out, where, x[index(i, v)]), VECTORIZED))
    return function(body, [x, out], [out])


# -- loops, masks, addresses


@targets
@pytest.mark.parametrize(("size", "lanes"), [(1, 16), (15, 16), (16, 16), (17, 16), (99, 32), (33, 8), (10, 3), (7, 0)])
def test_tail(size: int, lanes: int, target: Target) -> None:
    check(elementwise(size, lanes, [F32, F32], lambda a, b: a * b + 1.0), target)


@targets
@pytest.mark.parametrize("lanes", [16, 6])
@pytest.mark.parametrize(
    "index",
    [
        lambda i, v: (i, v),
        lambda i, v: (i, v * 2),
        lambda i, v: (i, v * 3 + 1),
        lambda i, v: (v, i),
        lambda i, v: (i, -v + 20),
        lambda i, v: (i, v // 4),
        lambda i, v: (i, v % 3),
        lambda i, v: (i, v // 2 * 2 + i),
        lambda i, v: (i, Const(5, DType.INT64)),
        lambda i, v: (i, (v + i) // 3),
        lambda i, v: (i, v * i),
        lambda i, v: (v % 2, (v * 7 + i) % 11),
    ],
    ids=["row", "stride2", "stride3", "column", "reverse", "repeat", "cycle", "pairs", "same", "div", "scaled", "odd"],
)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.INT64, DType.UINT8, DType.FLOAT16])
def test_loads(dtype: DType, index: Any, lanes: int, target: Target) -> None:
    check(copy((16, 48), lanes, index, dtype=dtype), target)


@targets
@pytest.mark.parametrize(
    "index",
    [lambda i, v: (i, v), lambda i, v: (i, v * 2), lambda i, v: (i, -v + 17), lambda i, v: (v % 3, v + i)],
    ids=["row", "stride2", "reverse", "rows"],
)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.INT64, DType.UINT8, DType.BOOL, DType.BFLOAT16])
def test_stores(dtype: DType, index: Any, target: Target) -> None:
    check(copy((3, 8), 6, lambda i, v: (i, v), index, dtype), target)


@targets
def test_masked_gather_and_scatter(target: Target) -> None:
    """Lanes outside the guard touch no memory: their addresses would be out of bounds."""
    x, out, v, i = buffer("x", [3, 20]), buffer("out", [3, 40]), var("v"), var("i")
    store = Store(out, (i, v * 3), x[i, v * 2] + x[i, v + 7] + x[i, Const(0, DType.INT64)])
    body = For(i, 3, For(v, 16, If(v * 2 < Const(19, DType.INT64), store), VECTORIZED))
    check(function(body, [x, out], [out]), target)


@targets
@pytest.mark.parametrize("condition", range(6))
def test_guards(condition: int, target: Target) -> None:
    x, out, i, v = buffer("x", [40]), buffer("out", [64]), var("i"), var("v")
    index = i * 16 + v
    guard = [
        index < 37,
        all_of([i < 2, index >= 5]),
        (index % 3).eq(0) & (index < 40),
        Binary(BinaryOp.OR, index < 3, (index > 20) & (index <= 39)),
        (-index + 30).ne(4) & (index < 39),
        i < 2,
    ][condition]
    otherwise = Store(out, (index,), as_expr(-1.0, F32))
    for other in (None, otherwise):
        body = For(i, 4, For(v, 16, If(guard, Store(out, (index,), x[index,] * 2.0), other), VECTORIZED))
        check(function(body, [x, out], [out]), target)


@targets
def test_select_guards_its_loads(target: Target) -> None:
    x, out, i, v = buffer("x", [20]), buffer("out", [4, 16]), var("i"), var("v")
    column = i * 8 + v - 4
    inside = (column >= 0) & (column < 20)
    row_inside = i < 2
    value = select(inside, x[column,], as_expr(0.0, F32)) + select(row_inside, x[i * 4 + v,], x[v,] * x[i,])
    body = For(i, 4, For(v, 16, Store(out, (i, v), value), VECTORIZED))
    check(function(body, [x, out], [out]), target)


@targets
def test_select_between_far_lanes_branches(target: Target) -> None:
    x, out, i, v = buffer("x", [4, 5000]), buffer("out", [4, 4]), var("i"), var("v")
    value = select(i.ne(2), x[v, i * 1249], x[v, i]) + select(i.eq(2), x[v, i * 1249 + 4], as_expr(1.0, F32))
    body = For(i, 4, For(v, 4, Store(out, (i, v), value), VECTORIZED))
    check(function(body, [x, out], [out]), target)


@targets
def test_select_of_computed_arms(target: Target) -> None:
    """Cheap arms are both computed, others are not; nothing is read out of bounds."""
    x, out, i, v = buffer("x", [3, 8]), buffer("out", [5, 8]), var("i"), var("v")
    row = i - 1
    inside = (row >= 0) & (row < 3)
    relu = select(inside, maximum(x[row, v], 0.0) * 2.0, as_expr(-7.0, F32))
    slow = select(inside, Unary(UnaryOp.EXP, x[row, v]), x[i % 3, v])
    nested = select(i > 0, select(row < 3, x[row, v], x[row - 3, v]), as_expr(0.0, F32))
    body = For(i, 5, For(v, 8, Store(out, (i, v), relu + slow + nested), VECTORIZED))
    check(function(body, [x, out], [out]), target)


@targets
def test_a_scalar_under_a_mask_is_read_where_a_lane_wants_it(target: Target) -> None:
    x, out, i, v = buffer("x", [2]), buffer("out", [3, 8]), var("i"), var("v")
    body = For(i, 3, For(v, 8, If(i * 8 + v < 13, Store(out, (i, v), x[i,] + 1.0)), VECTORIZED))
    check(function(body, [x, out], [out]), target)


@targets
@pytest.mark.parametrize("lanes", [2, 7, 32])
@pytest.mark.parametrize("op", [BinaryOp.ADD, BinaryOp.MUL, BinaryOp.MIN, BinaryOp.MAX], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.INT32])
def test_reduction_of_lanes(dtype: DType, op: BinaryOp, lanes: int, target: Target) -> None:
    size = lanes * 2 + 1
    x, out, k, v = buffer("x", [size], dtype), buffer("out", [1], dtype), var("k"), var("v")
    zero = Const(0, DType.INT64)
    update = Store(out, (zero,), Binary(op, out[zero,], x[k * lanes + v,]))
    body = For(k, 3, For(v, lanes, If(k * lanes + v < size, update), VECTORIZED))
    check(function(body, [x, out], [out]), target)


@targets
def test_dot_product(target: Target) -> None:
    x, w, out, k, v = buffer("x", [64]), buffer("w", [64]), buffer("out", [1]), var("k"), var("v")
    zero = Const(0, DType.INT64)
    update = Store(out, (zero,), out[zero,] + x[k * 16 + v,] * w[k * 16 + v,])
    check(function(For(k, 4, For(v, 16, update, VECTORIZED)), [x, w, out], [out]), target)


@targets
def test_reduction_of_bools(target: Target) -> None:
    x, out, v, i = buffer("x", [4, 16], DType.BOOL), buffer("out", [4], DType.BOOL), var("v"), var("i")
    for op in (BinaryOp.AND, BinaryOp.OR):
        update = Store(out, (i,), Binary(op, out[i,], x[i, v]))
        check(function(For(i, 4, For(v, 16, update, VECTORIZED)), [x, out], [out]), target)


@targets
def test_serial_loop_inside_vectorized(target: Target) -> None:
    x, out, k, v = buffer("x", [5, 16]), buffer("out", [16]), var("k"), var("v")
    acc = buffer("acc", [16], scope=Scope.LOCAL)
    inner = For(k, 5, Store(acc, (v,), maximum(acc[v,], x[k, v])))
    body = seq(Store(acc, (v,), as_expr(float("-inf"), F32)), inner, Store(out, (v,), acc[v,]))
    check(function(Allocate(acc, For(v, 16, body, VECTORIZED)), [x, out], [out]), target)


@targets
@pytest.mark.parametrize("size", [20, 5000, 50000])
def test_local_memory(size: int, target: Target) -> None:
    """On the stack or in scratch, addressed by loop variables."""
    x, out, local = buffer("x", [size]), buffer("out", [size]), buffer("local", [size], scope=Scope.LOCAL)
    i, j = var("i"), var("j")
    fill = For(i, size, Store(local, (i,), x[i,] * 2.0))
    drain = For(j, size, Store(out, (j,), local[-j + (size - 1),]))
    func = function(Allocate(local, seq(fill, drain)), [x, out], [out])
    arrays = memory_for(func)
    kernel = build_kernel(func, target)
    Loaded(kernel)(arrays["x"], arrays["out"])
    np.testing.assert_array_equal(arrays["out"], (arrays["x"] * 2)[::-1])
    assert (kernel.scratch_bytes > 0) == (size * 4 > 16 << 10)
    assert kernel.scratch_bytes % 64 == 0


@targets
def test_loads_see_stores(target: Target) -> None:
    """Also through another parameter that may share memory."""
    x, out, i = buffer("x", [8]), buffer("out", [8]), var("i")
    body = For(i, 7, seq(Store(out, (i + 1,), x[i,] + 1.0), Store(out, (i,), x[i + 1,] * 2.0)))
    func = function(body, [x, out], [out], may_alias="x,out")
    memory = np.arange(8, dtype=np.float32)
    expected = memory.copy()
    for index in range(7):
        expected[index + 1] = expected[index] + 1
        expected[index] = expected[index + 1] * 2
    Loaded(build_kernel(func, target))(memory, memory)
    np.testing.assert_array_equal(memory, expected)


@targets
def test_prefix_sum(target: Target) -> None:
    x, out, i = buffer("x", [50]), buffer("out", [50]), var("i")
    value = select(i.eq(0), x[i,], out[maximum(i - 1, 0),] + x[i,])
    check(function(For(i, 50, Store(out, (i,), value)), [x, out], [out]), target)


@targets
def test_indices_from_memory(target: Target) -> None:
    table, rows, out = buffer("table", [7, 16]), buffer("rows", [5], DType.INT64), buffer("out", [5, 16])
    i, v = var("i"), var("v")
    by_row = Store(out, (i, v), table[rows[i,], v])
    check(function(For(i, 5, For(v, 16, by_row, VECTORIZED)), [table, rows, out], [out]), target)
    lane_rows, picked = buffer("rows", [16], DType.INT32), buffer("out", [16])
    by_lane = Store(picked, (v,), table[Cast(DType.INT64, lane_rows[v,]), v])
    check(function(For(v, 16, by_lane, VECTORIZED), [table, lane_rows, picked], [picked]), target)


def test_parallel_ranges(host: Target) -> None:
    func = gemm(4, 2, 16, 128, 8)
    whole, parts = memory_for(func), memory_for(func)
    loaded = Loaded(build_kernel(func, host))
    assert loaded.kernel.parallel_extent == 4
    loaded(*whole.values())
    for begin, end in ((2, 2), (1, 4), (0, 1)):
        loaded.run_range(list(parts.values()), begin, end)
    np.testing.assert_array_equal(whole["c"], parts["c"])


def test_strides_and_views(host: Target) -> None:
    """A transposed source and a slice of a larger result."""
    x = Buffer("x", (16, 8), F32, (1, 16))
    out = Buffer("out", (16, 8), F32, (20, 1))
    i, v = var("i"), var("v")
    check(function(For(i, 16, For(v, 8, Store(out, (i, v), x[i, v] + 1.0), VECTORIZED)), [x, out], [out]), host)


# -- contractions


@targets
@pytest.mark.parametrize(("rows", "vectors"), [(14, 2), (12, 2), (6, 4), (1, 1)])
def test_gemm(rows: int, vectors: int, target: Target) -> None:
    m, n, k, width = rows * 2, vectors * 32, 37, vectors * 16
    func = gemm(rows, vectors, m, n, k)
    arrays = memory_for(func)
    run(func, target, arrays)
    a = arrays["a"].reshape(2, k, rows).transpose(0, 2, 1).reshape(m, k)
    b = arrays["b"].reshape(2, k, width).transpose(1, 0, 2).reshape(k, n)
    np.testing.assert_allclose(arrays["c"].reshape(m, n), np.maximum(a @ b, 0), rtol=1e-4, atol=1e-4)


@targets
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (1, 1, 0), (3, 2, 1)])
def test_conv(kernel: int, stride: int, padding: int, guarded: bool, target: Target) -> None:
    size, channels, filters = 8, 5, 64
    func = conv(4, 2, channels, size, filters, kernel, stride, padding, guarded=guarded)
    arrays = memory_for(func)
    run(func, target, arrays)
    halo = 0 if guarded else padding
    x = arrays["x"].reshape(size + 2 * halo, size + 2 * halo, channels)
    x = np.pad(x, ((padding - halo,) * 2, (padding - halo,) * 2, (0, 0)))
    w = arrays["w"].reshape(2, kernel, kernel, channels, 32).transpose(1, 2, 3, 0, 4)
    w = w.reshape(kernel, kernel, channels, 64)
    windows = np.lib.stride_tricks.sliding_window_view(x, (kernel, kernel), (0, 1))[::stride, ::stride]
    expected = np.einsum("hwcij,ijco->hwo", windows, w)
    np.testing.assert_allclose(arrays["out"].reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)


def _inner_loop(text: str) -> list[str]:
    """The instructions of the one-block loop with the most fused multiply-adds."""
    loops = re.findall(r"^(\.LBB\w+):.*\n((?:\t.*\n)*?\tj\w+\t\1)\n", text, flags=re.MULTILINE)
    bodies = [body.splitlines() for _, body in loops]
    return max(bodies, key=lambda lines: sum("vfmadd" in line for line in lines))


@pytest.mark.parametrize(("rows", "vectors"), [(14, 2), (12, 2), (8, 3), (6, 4)])
def test_register_tile_stays_in_registers(rows: int, vectors: int) -> None:
    """One fused multiply-add for each accumulator, the operands loaded once, nothing spilled."""
    target = parse_target("x86-64-v4", threads=1)
    for func in (gemm(rows, vectors, rows * 2, 64 * vectors, 64), conv(rows, vectors, 64, rows, 64 * vectors, 3, 1, 1)):
        loop = _inner_loop(assembly(func, target))
        fused = [line for line in loop if "vfmadd" in line]
        assert len(fused) == rows * vectors
        assert all("zmm" in line for line in fused)
        assert not any("rsp" in line for line in loop)
        assert sum(bool(re.search(r"vmov[au]ps\t.*\(.*zmm", line)) for line in loop) == vectors
        assert len(loop) <= rows * vectors + 2 * rows + vectors + 8


def test_relu_is_one_instruction() -> None:
    target = parse_target("x86-64-v4", threads=1)
    text = assembly(elementwise(64, 16, [F32], lambda a: maximum(a, 0.0)), target)
    assert text.count("vmaxps") == 1
    assert "vcmp" not in text
    clip = assembly(elementwise(64, 16, [F32], lambda a: minimum(maximum(a, 0.0), 6.0)), target)
    assert clip.count("vmaxps") == clip.count("vminps") == 1
    assert "vcmp" not in clip


def test_full_vectors_are_used() -> None:
    """512 bits where the target has them, even where LLVM's tuning prefers 256."""
    text = assembly(elementwise(1024, 16, [F32, F32], lambda a, b: a + b), parse_target("x86-64-v4", threads=1))
    assert "zmm" in text
    assert "ymm" not in text


# -- what is built


@pytest.mark.parametrize("name", ["aarch64", "x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_cross_compilation(name: str) -> None:
    target = parse_target(name, threads=1)
    transcendental = elementwise(
        50, 8, [F32, DType.FLOAT16], lambda a, b: Unary(UnaryOp.TANH, Unary(UnaryOp.EXP, a)) + Cast(F32, b)
    )
    for func in (gemm(4, 2, 16, 64, 8), conv(4, 2, 8, 8, 64, 3, 1, 1), transcendental):
        kernel = build_kernel(func, target)
        assert kernel.code[:4] == b"\x7fELF"
        assert kernel.code[18] == (183 if name == "aarch64" else 62)  # e_machine
        assert not list(undefined_symbols(kernel.code))


def test_the_bytes_are_always_the_same(host: Target) -> None:
    first, second = (build_kernel(conv(4, 2, 8, 8, 64, 3, 1, 1), host) for _ in range(2))
    assert first == second
    assert b"/" not in first.code  # no path


def test_a_kernel_that_unrolls_too_far_is_refused(host: Target) -> None:
    x, out, i, j = buffer("x", [300, 300]), buffer("out", [300, 300]), var("i"), var("j")
    body = For(i, 300, For(j, 300, Store(out, (i, j), x[i, j] + 1.0), UNROLLED), UNROLLED)
    with pytest.raises(BuildError, match="unroll"):
        emit_module(function(body, [x, out], [out]), host)


def test_undefined_symbols_are_found(host: Target) -> None:
    text = f'target triple = "{host.triple}"\ndeclare float @sinf(float)\n'
    text += "define float @f(float %x) {\n%y = call float @sinf(float %x)\nret float %y\n}\n"
    assert list(undefined_symbols(llvm.object_code(text, host))) == ["sinf"]


# -- random programs


@settings(max_examples=60, deadline=None)
@given(expr=index_exprs(), lanes=st.sampled_from([0, 4, 16]))
def test_random_index_arithmetic(expr: Expr, lanes: int) -> None:
    """INDEX_VARS become loops, the last one vectorised."""
    host = parse_target("cpu", threads=1)
    extents = dict(zip(INDEX_VARS, (2, 3, 2, lanes or 5), strict=True))
    out = buffer("out", list(extents.values()), DType.INT64)
    body: Stmt = Store(out, INDEX_VARS, expr)
    for variable, extent in reversed(extents.items()):
        body = For(variable, extent, body, _kind(variable, lanes))
    func = function(body, [out], [out])
    got, expected = memory_for(func), memory_for(func)
    interpret(func, expected)
    run(func, host, got)
    np.testing.assert_array_equal(got["out"], expected["out"])


def _kind(variable: Var, lanes: int) -> ForKind:
    if variable is INDEX_VARS[-1]:
        return VECTORIZED if lanes else ForKind.SERIAL
    return UNROLLED if variable is INDEX_VARS[1] else ForKind.SERIAL


@settings(max_examples=60, deadline=None)
@given(expr=float_exprs(), lanes=st.sampled_from([0, 8, 16]))
def test_random_float_expressions(expr: Expr, lanes: int) -> None:
    host = parse_target("cpu", threads=1)
    x, y = FLOAT_VARS

    def body(a: Expr, b: Expr) -> Expr:
        zero: dict[Var, Expr] = {variable: Const(1, DType.INT64) for variable in INDEX_VARS}
        return substitute(expr, {x: a, y: b, **zero})

    func = elementwise(20, lanes, [F32, F32], body)
    if func.outputs[0].dtype is not F32:
        return
    got, expected = memory_for(func), memory_for(func)
    interpret(func, expected)
    run(func, host, got)
    np.testing.assert_allclose(got["out0"], expected["out0"], rtol=1e-5, atol=1e-6)


def test_select_of_scalars(host: Target) -> None:
    x, out, i = buffer("x", [9]), buffer("out", [9]), var("i")
    value = Select(x[i,] > 0.0, x[i,], x[i,] * 0.1)
    check(function(For(i, 9, Store(out, (i,), value)), [x, out], [out]), host)


@targets
def test_masked_accumulators_stay_whole(target: Target) -> None:
    """A register tile whose columns end inside a vector."""
    x, w, out = buffer("x", [5, 6]), buffer("w", [6, 20]), buffer("out", [5, 20])
    acc = buffer("acc", [5, 32], scope=Scope.LOCAL)
    k = var("k")

    def tile(body: Any) -> Stmt:
        m, n, v = var("m"), var("n"), var("v")
        inner = If(n * 16 + v < 20, body(m, n * 16 + v))
        return For(m, 5, For(n, 2, For(v, 16, inner, VECTORIZED), UNROLLED), UNROLLED)

    clear = tile(lambda i, j: Store(acc, (i, j), as_expr(0.0, F32)))
    update = tile(lambda i, j: Store(acc, (i, j), acc[i, j] + x[i, k] * w[k, j]))
    write = tile(lambda i, j: Store(out, (i, j), acc[i, j]))
    func = function(Allocate(acc, seq(clear, For(k, 6, update), write)), [x, w, out], [out])
    check(func, target)
    if "avx512f" in target.features:
        assert "rsp" not in assembly(func, target).split("retq")[0]
