"""Hand-made PrimFuncs as schedules produce them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mcompile.dtypes import DType
from mcompile.ir.expr import Const, Expr, Select, all_of, as_expr, maximum, var
from mcompile.ir.stmt import Allocate, Block, Buffer, For, ForKind, If, PrimFunc, Scope, Stmt, Store, seq
from mcompile.ir.tensor import row_major

F32 = DType.FLOAT32
Bodies = Callable[..., Expr]


def buffer(name: str, shape: Sequence[int], dtype: DType = F32, scope: Scope = Scope.GLOBAL) -> Buffer:
    return Buffer(name, tuple(shape), dtype, row_major(shape), scope)


def elementwise(size: int, lanes: int, inputs: Sequence[DType], *bodies: Bodies) -> PrimFunc:
    """`outK[i] = bodies[K](x0[i], x1[i], ...)`, vectorised with a masked tail, or one by one where lanes is 0."""
    params = [buffer(f"x{index}", [size], dtype) for index, dtype in enumerate(inputs)]
    outer, inner = var("i.0"), var("i.1")
    index = outer * lanes + inner if lanes else outer
    outs, stores = [], []
    for number, body in enumerate(bodies):
        value = body(*(param[index,] for param in params))
        outs.append(buffer(f"out{number}", [size], value.dtype))
        stores.append(Store(outs[-1], (index,), value))
    stmt = seq(*stores)
    if lanes and size % lanes:
        stmt = If(index < size, stmt)
    if lanes:
        stmt = For(inner, lanes, stmt, ForKind.VECTORIZED)
    return PrimFunc("elementwise", (*params, *outs), tuple(outs), For(outer, -(-size // max(lanes, 1)), stmt))


def tile_loops(rows: int, vectors: int, lanes: int, body: Callable[[Expr, Expr], Stmt]) -> Stmt:
    """`body(row, column)` over a register tile, columns vectorised."""
    m, n0, n1 = var("m"), var("n.0"), var("n.1")
    inner = For(n1, lanes, body(m, n0 * lanes + n1), ForKind.VECTORIZED)
    return For(m, rows, For(n0, vectors, inner, ForKind.UNROLLED), ForKind.UNROLLED)


def gemm(rows: int, vectors: int, m: int, n: int, k: int, lanes: int = 16) -> PrimFunc:
    """C = relu(A B) on packed operands A[m / rows][k][rows], B[n / width][k][width], in tiles of rows * width."""
    width = vectors * lanes
    a, b = buffer("a", [m // rows, k, rows]), buffer("b", [n // width, k, width])
    c, acc = buffer("c", [m, n]), buffer("acc", [rows, width], scope=Scope.LOCAL)
    mo, no, ko = var("m.0"), var("n.o"), var("k")
    clear = tile_loops(rows, vectors, lanes, lambda i, j: Store(acc, (i, j), Const(0.0, F32)))
    update = tile_loops(rows, vectors, lanes, lambda i, j: Store(acc, (i, j), acc[i, j] + a[mo, ko, i] * b[no, ko, j]))
    write = tile_loops(
        rows, vectors, lanes, lambda i, j: Store(c, (mo * rows + i, no * width + j), maximum(acc[i, j], 0.0))
    )
    tile = Allocate(acc, seq(clear, For(ko, k, update), write))
    body = For(no, n // width, For(mo, m // rows, tile), ForKind.PARALLEL)
    return PrimFunc("gemm", (a, b, c), (c,), Block("gemm", body))


def conv(
    pixels: int, vectors: int, channels: int, size: int, filters: int, kernel: int, stride: int, padding: int,
    lanes: int = 16, guarded: bool = False,
) -> PrimFunc:  # fmt: skip
    """Direct channels-last convolution, weights [filters / width][kh][kw][channels][width].

    The input is padded in memory, or with `guarded` read under a Select.
    """
    width, halo = vectors * lanes, 0 if guarded else padding
    out_size = (size + 2 * padding - kernel) // stride + 1
    x = buffer("x", [size + 2 * halo, size + 2 * halo, channels])
    w = buffer("w", [filters // width, kernel, kernel, channels, width])
    out, acc = buffer("out", [out_size, out_size, filters]), buffer("acc", [pixels, width], scope=Scope.LOCAL)
    oo, oh, ow, kh, kw, ci = (var(name) for name in ("oc.0", "oh", "ow.0", "kh", "kw", "ci"))

    def element(i: Expr) -> Expr:
        row, column = oh * stride + kh - (padding - halo), (ow * pixels + i) * stride + kw - (padding - halo)
        if not guarded:
            return x[row, column, ci]
        inside = all_of([row >= 0, row < size, column >= 0, column < size])
        return Select(inside, x[row, column, ci], as_expr(0.0, F32))

    clear = tile_loops(pixels, vectors, lanes, lambda i, j: Store(acc, (i, j), Const(0.0, F32)))
    update = tile_loops(
        pixels, vectors, lanes, lambda i, j: Store(acc, (i, j), acc[i, j] + element(i) * w[oo, kh, kw, ci, j])
    )
    write = tile_loops(
        pixels, vectors, lanes, lambda i, j: Store(out, (oh, ow * pixels + i, oo * width + j), acc[i, j])
    )
    reduction = For(kh, kernel, For(kw, kernel, For(ci, channels, update)))
    tile = Allocate(acc, seq(clear, reduction, write))
    rows = For(oh, out_size, For(ow, out_size // pixels, tile))
    return PrimFunc("conv", (x, w, out), (out,), For(oo, filters // width, rows, ForKind.PARALLEL))
