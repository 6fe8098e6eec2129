"""Loop IR: a PrimFunc is one loop nest over buffers, ready for a backend.

Semantics. A loop's variable runs from 0 to extent - 1. SERIAL runs in order; PARALLEL iterations are independent and
may run on any thread (at most one, outermost, in a CPU PrimFunc: the kernel's grid); UNROLLED is SERIAL with its
body repeated; VECTORIZED executes all its iterations' expressions at once, lane by lane, stores last; a store whose
address does not depend on the vector variable must be a reduction `x[i] = combine(x[i], value)` and combines all
lanes. THREAD loops are a GPU's grid and block dims: `thread` says which, and one inside another of the same thread
stands for the same index (where it is below the inner extent). A Barrier separates what the threads of one block do
before it from what they do after it. If guards; nothing under a false guard is evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from mcompile.dtypes import DType
from mcompile.ir.expr import Expr, Load, Var, as_expr


class Scope(Enum):
    GLOBAL = "global"  # a parameter: memory all threads see
    SHARED = "shared"  # GPU: one block of threads
    LOCAL = "local"  # one thread: registers where the indices are constant, else its stack or scratch


class ForKind(Enum):
    SERIAL = "serial"
    PARALLEL = "parallel"
    UNROLLED = "unrolled"
    VECTORIZED = "vectorized"
    THREAD = "thread"


class Thread(Enum):
    BLOCK_X = "blockIdx.x"
    BLOCK_Y = "blockIdx.y"
    BLOCK_Z = "blockIdx.z"
    THREAD_X = "threadIdx.x"
    THREAD_Y = "threadIdx.y"
    THREAD_Z = "threadIdx.z"


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory with a shape and strides (both in elements); element (i, j) lies at i * strides[0] + j * strides[1]."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    strides: tuple[int, ...]
    scope: Scope = Scope.GLOBAL

    @property
    def span(self) -> int:
        """Elements from the first to one past the last addressed."""
        if 0 in self.shape:
            return 0
        return 1 + sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))

    @property
    def size_bytes(self) -> int:
        return self.span * self.dtype.bytes

    def __getitem__(self, indices: tuple[Expr | int, ...]) -> Load:
        return Load(self, tuple(as_expr(index) for index in indices))


@dataclass(frozen=True, eq=False)
class Stmt:
    """Base of statements; compared by identity, or by their printed text."""


@dataclass(frozen=True, eq=False)
class For(Stmt):
    var: Var
    extent: int
    body: Stmt
    kind: ForKind = ForKind.SERIAL
    thread: Thread | None = None  # of a THREAD loop


@dataclass(frozen=True, eq=False)
class Store(Stmt):
    """buffer[indices] = value"""

    buffer: Buffer
    indices: tuple[Expr, ...]
    value: Expr


@dataclass(frozen=True, eq=False)
class If(Stmt):
    condition: Expr
    then: Stmt
    otherwise: Stmt | None = None


@dataclass(frozen=True, eq=False)
class Seq(Stmt):
    body: tuple[Stmt, ...]


@dataclass(frozen=True, eq=False)
class Allocate(Stmt):
    """`buffer` (LOCAL or SHARED) lives while `body` runs; its contents start undefined."""

    buffer: Buffer
    body: Stmt


@dataclass(frozen=True, eq=False)
class Block(Stmt):
    """Names the stage that `body` computes; no meaning of its own."""

    name: str
    body: Stmt


@dataclass(frozen=True, eq=False)
class Barrier(Stmt):
    """All threads of a block arrive before any goes on."""


@dataclass(frozen=True, eq=False)
class Prefetch(Stmt):
    """Hint that `buffer`'s element at flat `offset` will be read soon; it may lie beyond the end. No meaning."""

    buffer: Buffer
    offset: Expr


@dataclass(frozen=True, eq=False)
class PrimFunc:
    """A kernel: parameters in call order (all GLOBAL), which of them it writes, and its body."""

    name: str
    params: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    body: Stmt
    attrs: dict[str, str] = field(default_factory=dict)

    @property
    def parallel_extent(self) -> int:
        """Iterations of the outermost PARALLEL loop; 1 for a serial kernel."""
        body = self.body
        while isinstance(body, Block):
            body = body.body
        return body.extent if isinstance(body, For) and body.kind is ForKind.PARALLEL else 1


def seq(*statements: Stmt | None) -> Stmt:
    """One statement of several; nested Seqs are flattened, Nones dropped."""
    flat: list[Stmt] = []
    for statement in statements:
        if isinstance(statement, Seq):
            flat.extend(statement.body)
        elif statement is not None:
            flat.append(statement)
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def walk_stmts(stmt: Stmt) -> Iterator[Stmt]:
    """Every statement, parents before children."""
    yield stmt
    for child in stmt_children(stmt):
        yield from walk_stmts(child)


def stmt_children(stmt: Stmt) -> tuple[Stmt, ...]:
    match stmt:
        case For(body=body) | Allocate(body=body) | Block(body=body):
            return (body,)
        case If(then=then, otherwise=otherwise):
            return (then,) if otherwise is None else (then, otherwise)
        case Seq(body=body):
            return body
    return ()
