import pytest

from mcompile.dtypes import DType
from mcompile.errors import InternalError
from mcompile.ir.expr import Binary, BinaryOp, Const, Load, ReduceOp, Select, var
from mcompile.ir.stmt import (
    Allocate,
    Barrier,
    Block,
    Buffer,
    For,
    ForKind,
    If,
    PrimFunc,
    Scope,
    Seq,
    Stmt,
    Store,
    Thread,
)
from mcompile.ir.tensor import placeholder, reduce_axis, reduce_over
from mcompile.ir.verify import verify_func

F32, I64 = DType.FLOAT32, DType.INT64
X = Buffer("x", (4,), F32, (1,))
Y = Buffer("y", (4,), F32, (1,))
LOCAL = Buffer("acc", (4,), F32, (1,), Scope.LOCAL)
AT, OTHER = var("i"), var("j")
ZERO = Const(0.0, F32)
COPY = Store(Y, (AT,), X[AT,])
CLEAR = Store(Y, (OTHER,), ZERO)


def check(body: Stmt) -> None:
    verify_func(PrimFunc("f", (X, Y), (Y,), body))


@pytest.mark.parametrize(
    "body",
    [
        For(AT, 4, COPY),
        Block("y", For(AT, 4, COPY, ForKind.PARALLEL)),
        Seq((For(AT, 4, COPY), For(AT, 4, COPY, ForKind.VECTORIZED))),
        For(AT, 4, For(OTHER, 2, COPY, ForKind.UNROLLED), ForKind.VECTORIZED),
        For(AT, 4, Allocate(LOCAL, Store(LOCAL, (AT,), ZERO))),
        For(AT, 4, Seq((COPY, Barrier())), ForKind.THREAD, Thread.THREAD_X),
        For(AT, 0, COPY),
    ],
)
def test_rules_kept(body: Stmt) -> None:
    check(body)


_MIXED = Binary(BinaryOp.ADD, X[AT,], Const(0, DType.FLOAT64))
_K = reduce_axis(4)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (COPY, "variable i is bound by no enclosing loop"),
        (For(AT, 4, For(AT, 4, COPY)), "an enclosing loop binds this variable"),
        (For(AT, -1, COPY), "a loop of -1 iterations"),
        (For(var("f", F32), 4, CLEAR), "must be an integer"),
        (For(AT, 4, Store(X, (AT,), ZERO)), "x: stored to, but neither an output nor allocated here"),
        (For(AT, 4, Store(Y, (AT, AT), ZERO)), "expected 1 indices, got 2"),
        (For(AT, 4, Store(Y, (AT,), Load(X, ()))), "expected 1 indices, got 0"),
        (For(AT, 4, Store(Y, (Const(0, DType.INT32),), ZERO)), "an index is int32"),
        (For(AT, 4, Store(Y, (AT,), Const(0, DType.FLOAT64))), "expected a value of float32, got float64"),
        (For(AT, 4, Store(Y, (AT,), _MIXED)), r"\+ of float32 and float64"),
        (For(AT, 4, Store(Y, (AT,), Select(AT, ZERO, ZERO))), "a select on int64"),
        (For(AT, 4, If(AT, COPY)), "the condition is int64"),
        (For(AT, 4, Store(Y, (AT,), LOCAL[AT,])), "loads acc, which is not in scope"),
        (For(AT, 4, Seq((Allocate(LOCAL, COPY), Store(LOCAL, (AT,), ZERO)))), "acc: stored to"),
        (For(AT, 4, Allocate(LOCAL, Allocate(LOCAL, COPY))), "inside its own scope"),
        (For(AT, 4, Allocate(Buffer("g", (1,), F32, (1,)), COPY)), "must be LOCAL or SHARED"),
        (For(AT, 4, Allocate(Buffer("g", (1,), F32, (), Scope.LOCAL), COPY)), "one stride for each dim"),
        (For(AT, 4, Store(Y, (AT,), placeholder("p", (4,), F32)[AT])), "which is no buffer"),
        (For(AT, 4, Store(Y, (AT,), reduce_over(ReduceOp.SUM, X[_K.var,], [_K]))), "bound by no|Reduce"),
        (For(OTHER, 4, For(AT, 4, COPY, ForKind.PARALLEL)), "a parallel loop must be outermost"),
        (Seq((For(AT, 4, COPY, ForKind.PARALLEL), For(OTHER, 4, CLEAR))), "a parallel loop must be outermost"),
        (
            For(AT, 4, For(OTHER, 4, COPY, ForKind.VECTORIZED), ForKind.VECTORIZED),
            "vectorized loop inside a vectorized",
        ),
        (For(AT, 4, Allocate(LOCAL, COPY), ForKind.VECTORIZED), "allocated inside a vectorized loop"),
        (For(AT, 4, Barrier()), "it lies inside no thread loop"),
        (For(AT, 4, COPY, ForKind.THREAD), "`thread` goes with the kind THREAD"),
        (For(AT, 4, COPY, ForKind.SERIAL, Thread.THREAD_X), "`thread` goes with the kind THREAD"),
        (
            For(OTHER, 2, For(AT, 4, COPY, ForKind.THREAD, Thread.THREAD_X), ForKind.THREAD, Thread.THREAD_X),
            "more iterations than its enclosing thread loop",
        ),
        (
            For(OTHER, 2, For(AT, 4, COPY, ForKind.THREAD, Thread.THREAD_X), ForKind.PARALLEL),
            "a thread loop inside a parallel loop",
        ),
    ],
)
def test_rules_broken(body: Stmt, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        check(body)


def test_parameters() -> None:
    with pytest.raises(InternalError, match="distinct names"):
        verify_func(PrimFunc("f", (X, Buffer("x", (1,), F32, (1,))), (), Seq(())))
    with pytest.raises(InternalError, match="output y is no parameter"):
        verify_func(PrimFunc("f", (X,), (Y,), Seq(())))
    with pytest.raises(InternalError, match="has scope local"):
        verify_func(PrimFunc("f", (LOCAL,), (), Seq(())))
