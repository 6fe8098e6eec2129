"""Executes PrimFuncs in plain Python, for tests at small sizes; `evaluate` does the same for ComputeDags.

Every access is checked against its buffer's shape. A VECTORIZED loop evaluates all its lanes at once with numpy.
The threads of a block are generators that stop at each Barrier; all must arrive at it or none. What an Allocate
gives starts as NaN, or as a conspicuous integer.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from itertools import count
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
    Cast,
    Compare,
    CompareOp,
    Const,
    Expr,
    Intrinsic,
    Load,
    Select,
    Unary,
    UnaryOp,
    Var,
    walk,
)
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
    walk_stmts,
)

__all__ = ["evaluate", "interpret"]

Env = dict[Any, Any]  # values of Vars, storage of Buffers; one for each thread
Value = Callable[[Env], Any]
Steps = Generator[None, None, None]  # stops at each barrier
_MODULUS = 1 << 64
_HALF = 1 << 63


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
    raise InternalError(f"cannot execute {type(stmt).__name__}")


def _compile_loop(var: Var, extent: int, body: Callable[[Env], None]) -> Callable[[Env], None]:
    scalar = _scalar_type(var.dtype)

    def loop(env: Env) -> None:
        for value in range(extent):
            env[var] = scalar(value)
            body(env)

    return loop


def _compile_seq(statements: list[Callable[[Env], None]]) -> Callable[[Env], None]:
    def run(env: Env) -> None:
        for statement in statements:
            statement(env)

    return run


def _compile_if(condition: Expr, then: Stmt, otherwise: Stmt | None) -> Callable[[Env], None]:
    test, run = _compile_value(condition), _compile_plain(then)
    run_otherwise = None if otherwise is None else _compile_plain(otherwise)

    def branch(env: Env) -> None:
        if test(env):
            run(env)
        elif run_otherwise is not None:
            run_otherwise(env)

    return branch


def _compile_store(buffer: Buffer, indices: tuple[Expr, ...], value: Expr) -> Callable[[Env], None]:
    compute, address = _compile_value(value), _compile_address(buffer, indices, "stores")

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
            return _thread_steps(var, extent, _compile_stmt(body))
        case For(var, extent, body):
            return _loop_steps(var, extent, _compile_stmt(body))
        case If(condition, then, otherwise):
            return _if_steps(_compile_value(condition), then, otherwise)
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


def _thread_steps(var: Var, extent: int, body: Callable[[Env], Iterable[None]]) -> Callable[[Env], Steps]:
    """All threads of a loop in lockstep from barrier to barrier; the outermost thread loop makes a block."""

    def run(env: Env) -> Steps:
        outermost = _SHARED not in env
        if outermost:
            env = {**env, _SHARED: {}}
        threads = [iter(body({**env, var: value})) for value in range(extent)]
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


# Scalars


def _scalar_type(dtype: DType) -> Callable[[Any], Any]:
    """How a value of `dtype` is held: INT64 and BOOL as Python's, others as numpy scalars."""
    if dtype is DType.INT64:
        return int
    return bool if dtype is DType.BOOL else dtype.numpy.type


def _compile_value(expr: Expr) -> Value:
    """A function of the Env. Subexpressions used more than once are computed once an evaluation."""
    uses = Counter(child for node in walk(expr) for child in node.children)
    compiled: dict[Expr, Value] = {}
    shared: list[Any] = []
    for node in walk(expr):
        function = _compile_node(node, [compiled[child] for child in node.children])
        if uses[node] > 1 and node.children and not _is_cheap(node):
            shared.append(node)
            function = _remembering(node, function)
        compiled[node] = function
    return _forgetting(shared, compiled[expr]) if shared else compiled[expr]


def _is_cheap(node: Expr) -> bool:
    return all(not child.children for child in node.children)


def _remembering(node: Expr, function: Value) -> Value:
    def remember(env: Env) -> Any:
        if node in env:
            return env[node]
        value = env[node] = function(env)
        return value

    return remember


def _forgetting(nodes: list[Any], function: Value) -> Value:
    def evaluate_once(env: Env) -> Any:
        for node in nodes:
            env.pop(node, None)
        return function(env)

    return evaluate_once


def _compile_node(node: Expr, args: list[Value]) -> Value:
    match node:
        case Var():
            return operator.itemgetter(node)
        case Const(value, dtype):
            held = value if dtype in (DType.INT64, DType.BOOL) else np.asarray(value).astype(dtype.numpy)[()]
            return lambda env: held
        case Select():
            test, a, b = args
            return lambda env: a(env) if test(env) else b(env)
        case Cast(dtype, x):
            return _compile_cast(x.dtype, dtype, args[0])
        case Load(source, indices):
            return _compile_load(source, indices, args)
        case Call(function, _, _):
            intrinsic = semantics.INTRINSIC[function]
            return lambda env: intrinsic(*(arg(env) for arg in args))
        case Unary(op, x):
            return _applied(_INT_UNARY.get(op) if x.dtype is DType.INT64 else _unary(op, x.dtype), args, op)
        case Binary(op, a, _):
            return _applied(_INT_BINARY.get(op) if a.dtype is DType.INT64 else _binary(op), args, op)
        case Compare(op, _, _):
            return _applied(_COMPARE[op], args, op)
    raise InternalError(f"no value for {type(node).__name__} inside an expression")


def _applied(function: Callable[..., Any] | None, args: list[Value], op: Any) -> Value:
    if function is None:
        raise InternalError(f"{op.value}: not defined for INT64")
    if len(args) == 1:
        (x,) = args
        return lambda env: function(x(env))
    a, b = args
    return lambda env: function(a(env), b(env))


def _unary(op: UnaryOp, dtype: DType) -> Callable[..., Any]:
    return operator.not_ if op is UnaryOp.NOT and dtype is DType.BOOL else semantics.UNARY[op]


def _binary(op: BinaryOp) -> Callable[..., Any]:
    return _OPERATORS.get(op) or semantics.BINARY[op]


def _compile_cast(source: DType, dtype: DType, x: Value) -> Value:
    held = _scalar_type(dtype)
    if dtype is DType.BOOL:
        return lambda env: bool(x(env) != 0)
    if source is DType.BOOL:
        return lambda env: held(x(env))
    return lambda env: held(semantics.cast(np.asarray(x(env), source.numpy), dtype)[()])


def _compile_load(source: Any, indices: tuple[Expr, ...], args: list[Value]) -> Value:
    if not isinstance(source, Buffer):
        raise InternalError(f"{source.name}: a PrimFunc loads from Buffers only")
    address = _compile_address(source, indices, "loads", args)
    if source.dtype in (DType.INT64, DType.BOOL):
        return lambda env: env[source].item(address(env))
    return lambda env: env[source][address(env)]


def _compile_address(
    buffer: Buffer, indices: tuple[Expr, ...], verb: str, args: list[Value] | None = None
) -> Callable[[Env], int]:
    args = [_compile_value(index) for index in indices] if args is None else args
    dims = list(zip(args, buffer.shape, buffer.strides, count()))

    def address(env: Env) -> int:
        offset = 0
        for index, extent, stride, dim in dims:
            value = index(env)
            if not 0 <= value < extent:
                raise InternalError(f"{verb} {buffer.name} out of bounds: index {value} of dim {dim} of {extent}")
            offset += value * stride
        return offset

    return address


def _wrapping(function: Callable[..., int]) -> Callable[..., int]:
    def wrap(*args: int) -> int:
        result = function(*args)
        return result if -_HALF <= result < _HALF else (result + _HALF) % _MODULUS - _HALF

    return wrap


def _int_truncdiv(a: int, b: int) -> int:
    return 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _int_power(a: int, b: int) -> int:
    if b < 0:
        return {1: 1, -1: 1 if b % 2 == 0 else -1}.get(a, 0)
    return pow(a, b, _MODULUS)


_INT_UNARY: dict[UnaryOp, Callable[..., Any]] = {
    UnaryOp.NEG: _wrapping(operator.neg),
    UnaryOp.NOT: operator.invert,
    UnaryOp.ABS: _wrapping(abs),
    UnaryOp.SIGN: lambda x: (x > 0) - (x < 0),
}
_INT_BINARY: dict[BinaryOp, Callable[..., Any]] = {
    BinaryOp.ADD: _wrapping(operator.add),
    BinaryOp.SUB: _wrapping(operator.sub),
    BinaryOp.MUL: _wrapping(operator.mul),
    BinaryOp.FLOORDIV: _wrapping(lambda a, b: a // b if b else 0),
    BinaryOp.FLOORMOD: lambda a, b: a % b if b else 0,
    BinaryOp.TRUNCDIV: _wrapping(_int_truncdiv),
    BinaryOp.TRUNCMOD: lambda a, b: a - _int_truncdiv(a, b) * b if b else 0,
    BinaryOp.MIN: min,
    BinaryOp.MAX: max,
    BinaryOp.POW: _wrapping(_int_power),
    BinaryOp.AND: operator.and_,
    BinaryOp.OR: operator.or_,
    BinaryOp.XOR: operator.xor,
    BinaryOp.SHL: _wrapping(lambda a, b: a << b if 0 <= b < 64 else 0),
    BinaryOp.SHR: lambda a, b: a >> min(b, 63) if b >= 0 else 0,
}
_OPERATORS: dict[BinaryOp, Callable[..., Any]] = {
    BinaryOp.ADD: operator.add,
    BinaryOp.SUB: operator.sub,
    BinaryOp.MUL: operator.mul,
    BinaryOp.DIV: operator.truediv,
    BinaryOp.AND: operator.and_,
    BinaryOp.OR: operator.or_,
    BinaryOp.XOR: operator.xor,
}
_COMPARE: dict[CompareOp, Callable[..., Any]] = {
    CompareOp.EQ: operator.eq,
    CompareOp.NE: operator.ne,
    CompareOp.LT: operator.lt,
    CompareOp.LE: operator.le,
    CompareOp.GT: operator.gt,
    CompareOp.GE: operator.ge,
}


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
