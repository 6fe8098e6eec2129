"""Checks the rules of the loop IR that every PrimFunc must keep (see `ir.stmt`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mcompile.dtypes import DType
from mcompile.errors import InternalError
from mcompile.ir.expr import Binary, Compare, Expr, Load, Reduce, Select, Var, walk
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
)


def verify_func(func: PrimFunc) -> None:
    """Raises InternalError unless the rules hold.

    - Every variable is bound by one enclosing loop (loops side by side may share one); extents are not negative.
    - Buffers are parameters (GLOBAL) or allocated (LOCAL, SHARED) around their use; names of parameters are
      distinct; every access has one INT64 index for each dim, a shape has a stride for each dim.
    - Only parameters named in `outputs` and allocated buffers are stored to, values of the buffer's dtype.
    - A PARALLEL loop is the outermost statement, under Blocks only, and there are then no THREAD loops; a THREAD loop
      says which thread and lies inside no other loop of that thread.
    - A VECTORIZED loop holds Stores, Ifs, Seqs, Blocks and SERIAL or UNROLLED loops: no other loop, no Allocate and
      no Barrier.
    - A Barrier lies inside a THREAD loop.
    - Both operands of a Binary, both sides of a Compare and both values of a Select have one dtype; conditions are
      BOOL; no Reduce is left.
    """
    names = [param.name for param in func.params]
    _require(len(set(names)) == len(names), func.name, f"parameters need distinct names, got {names}")
    for param in func.params:
        _require(param.scope is Scope.GLOBAL, func.name, f"parameter {param.name} has scope {param.scope.value}")
        _check_buffer(param)
    for output in func.outputs:
        _require(output in func.params, func.name, f"output {output.name} is no parameter")
    context = _Context(frozenset(), frozenset(func.params), frozenset(func.outputs))
    _check(func.body, context)


@dataclass(frozen=True)
class _Context:
    """What surrounds a statement."""

    variables: frozenset[Var]
    readable: frozenset[Buffer]
    writable: frozenset[Buffer]
    loops: tuple[For, ...] = ()
    outermost: bool = True  # nothing but Blocks around it

    @property
    def is_vector(self) -> bool:
        return any(loop.kind is ForKind.VECTORIZED for loop in self.loops)

    @property
    def is_threaded(self) -> bool:
        return any(loop.kind is ForKind.THREAD for loop in self.loops)


def _require(holds: bool, where: str, problem: str) -> None:
    if not holds:
        raise InternalError(f"{where}: {problem}")


def _check_buffer(buffer: Buffer) -> None:
    _require(len(buffer.shape) == len(buffer.strides), buffer.name, "a buffer needs one stride for each dim")


def _check(stmt: Stmt, context: _Context) -> None:
    inner = replace(context, outermost=False)
    match stmt:
        case For():
            _check_loop(stmt, context)
            variables = context.variables | {stmt.var}
            _check(stmt.body, replace(inner, variables=variables, loops=(*context.loops, stmt)))
        case Store():
            _check_store(stmt, context)
        case If(condition, then, otherwise):
            _check_expr(condition, context, "condition")
            _require(condition.dtype is DType.BOOL, "if", f"the condition is {condition.dtype.value}, not bool")
            for branch in (then, *([] if otherwise is None else [otherwise])):
                _check(branch, inner)
        case Seq(body):
            for child in body:
                _check(child, inner)
        case Allocate():
            _check_allocate(stmt, inner)
        case Block(_, body):
            _check(body, context)
        case Prefetch(buffer, offset):
            _require(buffer in context.readable, buffer.name, "prefetched, but not in scope")
            _check_expr(offset, context, "prefetch")
        case Barrier():
            _require(context.is_threaded, "barrier", "it lies inside no thread loop")
            _require(not context.is_vector, "barrier", "it lies inside a vectorized loop")
        case _:
            raise InternalError(f"{type(stmt).__name__} is no statement")


def _check_loop(loop: For, context: _Context) -> None:
    name, kind = loop.var.name, loop.kind
    _require(loop.extent >= 0, name, f"a loop of {loop.extent} iterations")
    _require(loop.var.dtype.is_integer, name, "a loop variable must be an integer")
    _require((kind is ForKind.THREAD) == (loop.thread is not None), name, "`thread` goes with the kind THREAD")
    _require(loop.var not in context.variables, name, "an enclosing loop binds this variable")
    if context.is_vector:
        allowed = kind in (ForKind.SERIAL, ForKind.UNROLLED)
        _require(allowed, name, f"a {kind.value} loop inside a vectorized loop")
    if kind is ForKind.PARALLEL:
        _require(context.outermost, name, "a parallel loop must be outermost")
    if kind is ForKind.THREAD:
        parallel = any(outer.kind is ForKind.PARALLEL for outer in context.loops)
        _require(not parallel, name, "a thread loop inside a parallel loop")
        same = [outer.extent for outer in context.loops if outer.thread is loop.thread]
        _require(all(loop.extent <= extent for extent in same), name, "more iterations than its enclosing thread loop")


def _check_allocate(stmt: Allocate, context: _Context) -> None:
    buffer = stmt.buffer
    _check_buffer(buffer)
    _require(not context.is_vector, buffer.name, "allocated inside a vectorized loop")
    _require(buffer.scope is not Scope.GLOBAL, buffer.name, "an allocated buffer must be LOCAL or SHARED")
    _require(buffer not in context.readable, buffer.name, "allocated inside its own scope")
    readable, writable = context.readable | {buffer}, context.writable | {buffer}
    _check(stmt.body, replace(context, readable=readable, writable=writable))


def _check_store(store: Store, context: _Context) -> None:
    buffer = store.buffer
    _require(buffer in context.writable, buffer.name, "stored to, but neither an output nor allocated here")
    _check_indices(buffer, store.indices)
    for index in store.indices:
        _check_expr(index, context, buffer.name)
    _check_expr(store.value, context, buffer.name)
    expected, got = buffer.dtype.value, store.value.dtype.value
    _require(expected == got, buffer.name, f"expected a value of {expected}, got {got}")


def _check_indices(buffer: Buffer, indices: tuple[Expr, ...]) -> None:
    expected, got = len(buffer.shape), len(indices)
    _require(expected == got, buffer.name, f"expected {expected} indices, got {got}")
    for index in indices:
        _require(index.dtype is DType.INT64, buffer.name, f"an index is {index.dtype.value}, not int64")


def _check_expr(expr: Expr, context: _Context, where: str) -> None:
    for node in walk(expr):
        match node:
            case Var(name):
                _require(node in context.variables, where, f"variable {name} is bound by no enclosing loop")
            case Binary(op, a, b) | Compare(op, a, b):
                _require(a.dtype is b.dtype, where, f"{op.value} of {a.dtype.value} and {b.dtype.value}")
            case Select(condition, a, b):
                _require(condition.dtype is DType.BOOL, where, f"a select on {condition.dtype.value}")
                _require(a.dtype is b.dtype, where, f"select of {a.dtype.value} and {b.dtype.value}")
            case Load(source, indices):
                _require(isinstance(source, Buffer), where, f"loads {source.name}, which is no buffer")
                _require(source in context.readable, where, f"loads {source.name}, which is not in scope")
                _check_indices(source, indices)
            case Reduce():
                _require(False, where, "a Reduce is left")
