"""Executes PrimFuncs in plain Python, for tests at small sizes; `evaluate` does the same for ComputeDags.

Every access is checked against its buffer's shape. A VECTORIZED loop evaluates all its lanes at once with numpy.
The threads of a block are generators that stop at each Barrier; all must arrive at it or none. What an Allocate
gives starts as NaN, or as a conspicuous integer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import numpy as np

from mcompile.dtypes import DType
from mcompile.errors import InternalError
from mcompile.ir import semantics
from mcompile.ir.evaluate import Array, Lanes, evaluate
from mcompile.ir.expr import (
    Binary,
    BinaryOp,
    Call,
    Expr,
    Intrinsic,
    Load,
    Var,
    walk,
)
from mcompile.ir.scalars import Env, Value, compile_address, compile_value, scalar_type
from mcompile.ir.stmt import (
    Allocate,
    Barrier,
    Block,
    Buffer,
    For,
    ForKind,
    If,
    Prefetch,
    PrimFunc,
    Scope,
    Seq,
    Stmt,
    Store,
    Thread,
    walk_stmts,
)

__all__ = ["evaluate", "interpret"]

Steps = Generator[None, None, None]  # stops at each barrier


def interpret(func: PrimFunc, arrays: Mapping[str, Array]) -> None:
    """Run `func` on `arrays`, its parameters' memory by name, changing the outputs in place.

    An array may have any shape, but must be contiguous, of the buffer's dtype and hold its whole span. INT64 and
    BOOL scalars are computed as Python's, wrapped to their width; all others as numpy's. Raises InternalError for
    an access out of bounds and for a barrier that not all threads reach.
    """
    env: Env = {param: _memory(param, arrays[param.name]) for param in func.params}
    with np.errstate(all="ignore"):
        for _ in _compile_stmt(func.body)(env):
            pass  # a barrier outside of thread loops


def _memory(buffer: Buffer, array: Array) -> Array:
    if not array.flags.c_contiguous or array.dtype != buffer.dtype.numpy or array.size < buffer.span:
        expected = f"contiguous {buffer.dtype.value} memory of at least {buffer.span} elements"
        raise InternalError(f"{buffer.name}: expected {expected}, got {array.dtype}{list(array.shape)}")
    return array.reshape(-1)


# Statements


def _compile_stmt(stmt: Stmt) -> Callable[[Env], Iterable[None]]:
    """A function that executes `stmt`; what it returns must be iterated, and yields at each barrier."""
    if any(isinstance(node, Barrier) for node in walk_stmts(stmt)):
        return _compile_steps(stmt)
    run = _compile_plain(stmt)

    def execute(env: Env) -> Iterable[None]:
        run(env)
        return ()

    return execute


def _compile_plain(stmt: Stmt) -> Callable[[Env], None]:
    """For statements without a barrier."""
    match stmt:
        case For(kind=ForKind.VECTORIZED):
            return _compile_vector_loop(stmt)
        case For(var, extent, body, ForKind.THREAD, thread):
            return _compile_thread_loop(var, extent, thread, _compile_plain(body))
        case For(var, extent, body):
            return _compile_loop(var, extent, _compile_plain(body))
        case Store(buffer, indices, value):
            return _compile_store(buffer, indices, value)
        case If(condition, then, otherwise):
            return _compile_if(condition, then, otherwise)
        case Seq(body):
            return _compile_seq([_compile_plain(child) for child in body])
        case Allocate(buffer, body):
            return _compile_allocate(buffer, _compile_plain(body))
        case Block(_, body):
            return _compile_plain(body)
        case Prefetch():
            return _compile_seq([])
    raise InternalError(f"cannot execute {type(stmt).__name__}")


def _compile_loop(var: Var, extent: int, body: Callable[[Env], None]) -> Callable[[Env], None]:
    scalar = scalar_type(var.dtype)

    def loop(env: Env) -> None:
        for value in range(extent):
            env[var] = scalar(value)
            body(env)

    return loop


def _compile_thread_loop(var: Var, extent: int, thread: Any, body: Callable[[Env], None]) -> Callable[[Env], None]:
    def loop(env: Env) -> None:
        if thread in env:  # an enclosing loop runs over this thread: one iteration, the thread's own
            if env[thread] < extent:
                body({**env, var: env[thread]})
            return
        for value in range(extent):
            body({**env, var: value, thread: value})

    return loop


def _compile_seq(statements: list[Callable[[Env], None]]) -> Callable[[Env], None]:
    def run(env: Env) -> None:
        for statement in statements:
            statement(env)

    return run


def _compile_if(condition: Expr, then: Stmt, otherwise: Stmt | None) -> Callable[[Env], None]:
    test, run = compile_value(condition), _compile_plain(then)
    run_otherwise = None if otherwise is None else _compile_plain(otherwise)

    def branch(env: Env) -> None:
        if test(env):
            run(env)
        elif run_otherwise is not None:
            run_otherwise(env)

    return branch


def _compile_store(buffer: Buffer, indices: tuple[Expr, ...], value: Expr) -> Callable[[Env], None]:
    compute, address = compile_value(value), compile_address(buffer, indices, "stores")

    def store(env: Env) -> None:
        result = compute(env)
        env[buffer][address(env)] = result

    return store


def _compile_allocate(buffer: Buffer, body: Callable[[Env], None]) -> Callable[[Env], None]:
    def run(env: Env) -> None:
        _allocate(buffer, env)
        body(env)

    return run


def _allocate(buffer: Buffer, env: Env) -> None:
    """LOCAL memory afresh; SHARED memory the same for all threads of the block."""
    shared = env.get(_SHARED) if buffer.scope is Scope.SHARED else None
    if shared is not None and buffer in shared:
        env[buffer] = shared[buffer]
        return
    env[buffer] = _undefined(buffer)
    if shared is not None:
        shared[buffer] = env[buffer]


_SHARED = "shared"  # key of the block's shared memory in an Env


def _undefined(buffer: Buffer) -> Array:
    if buffer.dtype.is_float:
        return np.full(buffer.span, np.nan, buffer.dtype.numpy)
    return np.full(buffer.span * buffer.dtype.bytes, 1 if buffer.dtype is DType.BOOL else 0x5A, np.uint8).view(
        buffer.dtype.numpy
    )


# Statements with barriers, as generators


def _compile_steps(stmt: Stmt) -> Callable[[Env], Steps]:
    match stmt:
        case Barrier():
            return _barrier
        case For(kind=ForKind.VECTORIZED):
            raise InternalError(f"loop {stmt.var.name}: a barrier inside a vectorized loop")
        case For(var, extent, body, ForKind.THREAD, thread) if thread not in _GRID:
            return _thread_steps(var, extent, thread, _compile_stmt(body))
        case For(var, extent, body):
            return _loop_steps(var, extent, _compile_stmt(body))
        case If(condition, then, otherwise):
            return _if_steps(compile_value(condition), then, otherwise)
        case Seq(body):
            return _seq_steps([_compile_stmt(child) for child in body])
        case Allocate(buffer, body):
            return _allocate_steps(buffer, _compile_stmt(body))
        case Block(_, body):
            return _compile_steps(body)
    raise InternalError(f"cannot execute {type(stmt).__name__}")


_GRID = (Thread.BLOCK_X, Thread.BLOCK_Y, Thread.BLOCK_Z)


def _barrier(env: Env) -> Steps:
    yield


def _loop_steps(var: Var, extent: int, body: Callable[[Env], Iterable[None]]) -> Callable[[Env], Steps]:
    def loop(env: Env) -> Steps:
        for value in range(extent):
            env[var] = value
            yield from body(env)

    return loop


def _seq_steps(statements: list[Callable[[Env], Iterable[None]]]) -> Callable[[Env], Steps]:
    def run(env: Env) -> Steps:
        for statement in statements:
            yield from statement(env)

    return run


def _if_steps(test: Value, then: Stmt, otherwise: Stmt | None) -> Callable[[Env], Steps]:
    run = _compile_stmt(then)
    run_otherwise = None if otherwise is None else _compile_stmt(otherwise)

    def branch(env: Env) -> Steps:
        if test(env):
            yield from run(env)
        elif run_otherwise is not None:
            yield from run_otherwise(env)

    return branch


def _allocate_steps(buffer: Buffer, body: Callable[[Env], Iterable[None]]) -> Callable[[Env], Steps]:
    def run(env: Env) -> Steps:
        _allocate(buffer, env)
        yield from body(env)

    return run


def _thread_steps(var: Var, extent: int, thread: Any, body: Callable[[Env], Iterable[None]]) -> Callable[[Env], Steps]:
    """All threads of a loop in lockstep from barrier to barrier; the outermost thread loop makes a block."""

    def run(env: Env) -> Steps:
        if thread in env:
            if env[thread] < extent:
                yield from body({**env, var: env[thread]})
            return
        outermost = _SHARED not in env
        if outermost:
            env = {**env, _SHARED: {}}
        threads = [iter(body({**env, var: value, thread: value})) for value in range(extent)]
        while True:
            stopped = [thread for thread in threads if next(thread, _DONE) is not _DONE]
            if not stopped:
                return
            if len(stopped) != len(threads):
                raise InternalError(f"{len(stopped)} of {len(threads)} threads of {var.name} arrive at a barrier")
            if not outermost:
                yield

    return run


_DONE = object()


# Vectorized loops


def _compile_vector_loop(loop: For) -> Callable[[Env], None]:
    variables = {node for node in _free_vars(loop.body) if node is not loop.var}
    lanes_of_var = np.arange(loop.extent).astype(loop.var.dtype.numpy)

    def run(env: Env) -> None:
        def load(expr: Load, lanes: Lanes) -> Any:
            return env[expr.source][_vector_address(expr.source, expr.indices, lanes, "loads")]

        values = {var: np.asarray(env[var], var.dtype.numpy)[()] for var in variables if var in env}
        values[loop.var] = lanes_of_var
        _run_vector(loop.body, values, lambda: Lanes(values, load), None, env, loop.extent)

    return run if loop.extent else lambda env: None


def _free_vars(stmt: Stmt) -> set[Var]:
    found: set[Var] = set()
    for node in walk_stmts(stmt):
        for expr in _expressions(node):
            found.update(x for x in walk(expr) if isinstance(x, Var))
    return found


def _expressions(stmt: Stmt) -> tuple[Expr, ...]:
    match stmt:
        case Store(_, indices, value):
            return (*indices, value)
        case If(condition, _, _):
            return (condition,)
    return ()


def _vector_address(buffer: Buffer, indices: tuple[Expr, ...], lanes: Lanes, verb: str) -> Any:
    offset: Any = np.int64(0)
    for index, extent, stride in zip(indices, buffer.shape, buffer.strides, strict=True):
        offset = offset + lanes.checked(lanes(index), extent, f"{verb} {buffer.name}") * stride
    return offset


def _run_vector(
    stmt: Stmt, values: dict[Var, Any], fresh: Callable[[], Lanes], mask: Any, env: Env, extent: int
) -> None:
    """Execute the body of a vectorized loop for the lanes of `mask` (None: all)."""
    if mask is not None and not np.any(mask):
        return
    match stmt:
        case Store():
            lanes = fresh() if mask is None else fresh().masked(mask)
            _store_lanes(stmt, lanes, mask, env, extent)
        case Seq(body):
            for child in body:
                _run_vector(child, values, fresh, mask, env, extent)
        case Block(_, body):
            _run_vector(body, values, fresh, mask, env, extent)
        case For(var, count, body, ForKind.SERIAL | ForKind.UNROLLED):
            for value in range(count):
                values[var] = np.asarray(value, var.dtype.numpy)[()]
                _run_vector(body, values, fresh, mask, env, extent)
        case If(condition, then, otherwise):
            lanes = fresh() if mask is None else fresh().masked(mask)
            test = lanes(condition)
            _run_vector(then, values, fresh, test if mask is None else mask & test, env, extent)
            if otherwise is not None:
                _run_vector(otherwise, values, fresh, ~test if mask is None else mask & ~test, env, extent)
        case _:
            raise InternalError(f"{type(stmt).__name__} inside a vectorized loop")


def _store_lanes(store: Store, lanes: Lanes, mask: Any, env: Env, extent: int) -> None:
    buffer, memory = store.buffer, env[store.buffer]
    address = _vector_address(buffer, store.indices, lanes, "stores")
    active = np.broadcast_to(True if mask is None else mask, extent)
    if np.ndim(address):
        value = np.broadcast_to(lanes(store.value), extent)
        memory[address[active]] = value[active]
        return
    combined = _reduction(store)
    if combined is None:
        value = lanes(store.value)
        if np.ndim(value):
            raise InternalError(f"{buffer.name}: vector lanes store to one element and it is no reduction")
        memory[address] = value
        return
    op, operand = combined
    reduce = semantics.BINARY[op].reduce  # type: ignore[attr-defined]
    total = reduce(np.broadcast_to(operand(lanes), extent)[active], dtype=memory.dtype)
    memory[address] = semantics.BINARY[op](memory[address], total)


def _reduction(store: Store) -> tuple[BinaryOp, Callable[[Lanes], Any]] | None:
    """The combiner and operand of `x[i] = combine(x[i], operand)`; fma(a, b, x[i]) adds a * b."""
    old = Load(store.buffer, store.indices)
    match store.value:
        case Binary(op, a, b) if op in _COMBINERS and (a is old) != (b is old):
            operand = b if a is old else a
            return op, lambda lanes: lanes(operand)
        case Call(Intrinsic.FMA, (a, b, c), _) if c is old:
            return BinaryOp.ADD, lambda lanes: lanes(a) * lanes(b)
    return None


_COMBINERS = (BinaryOp.ADD, BinaryOp.MUL, BinaryOp.MIN, BinaryOp.MAX, BinaryOp.AND, BinaryOp.OR)
