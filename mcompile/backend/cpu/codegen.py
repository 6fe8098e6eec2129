"""Loop IR to LLVM's text.

A kernel is two functions: the exported one unpacks the buffers' addresses and calls the other, whose pointer parameters
are declared not to alias (but for those named in the PrimFunc's `may_alias` attribute, a comma-separated list of
buffers that lie in memory shared with another at equal addresses).
"""

from __future__ import annotations

from dataclasses import dataclass

from mcompile.backend.cpu import arithmetic
from mcompile.backend.cpu.builder import Builder, Value
from mcompile.backend.cpu.expressions import Expressions
from mcompile.backend.cpu.llvm_types import MEMORY_TYPES, REGISTER_TYPES
from mcompile.backend.cpu.memory import MEMORY_ALIGNMENT, ZEROS, Address, Memory, Place
from mcompile.dtypes import DType
from mcompile.errors import InternalError
from mcompile.ir.affine import as_affine
from mcompile.ir.bounds import Bounds
from mcompile.ir.expr import Binary, BinaryOp, Expr, Load, ReduceOp, all_of, walk
from mcompile.ir.stmt import Allocate, Block, Buffer, For, ForKind, If, Prefetch, PrimFunc, Seq, Stmt, Store, walk_stmts
from mcompile.target import Target

MAX_OPERATIONS = 20_000  # instructions of one kernel before LLVM sees it
_STACK_BYTES = 16 << 10  # larger local buffers lie in scratch
_SLACK = 64  # elements after a local buffer, so that whole vectors may be accessed up to its end


@dataclass(frozen=True)
class Module:
    """LLVM text of one kernel, and the scratch memory that each of its threads needs."""

    text: str
    scratch_bytes: int


def emit_module(func: PrimFunc, target: Target) -> Module:
    """Raises BuildError if the unrolled kernel is too large."""
    return _Emitter(func, target).module()


class _Emitter:
    def __init__(self, func: PrimFunc, target: Target) -> None:
        features = target.features
        on_x86 = target.triple.startswith("x86_64")
        self._func, self._target = func, target
        self._b = Builder(
            "begin",
            has_fma=not on_x86 or "fma" in features,
            has_half=not on_x86 or "f16c" in features,
            limit=MAX_OPERATIONS,
        )
        ranges = {node.var: (0, node.extent - 1) for node in walk_stmts(func.body) if isinstance(node, For)}
        self._memory = Memory(self._b, has_gather="avx512f" in features)
        self._e = Expressions(self._b, self._memory, Bounds(ranges))
        self._stack: list[str] = []
        self._scratch: list[tuple[str, int]] = []  # parameter of the inner function, offset into scratch
        self._scratch_bytes = 0

    # -- functions ---------------------------------------------------------------------------------------------

    def module(self) -> Module:
        params = self._bind_params()
        body = self._func.body
        while isinstance(body, Block):
            body = body.body
        parallel = isinstance(body, For) and body.kind is ForKind.PARALLEL
        if isinstance(body, For) and parallel:
            begin, end = (Value(f"%{name}", "i64", 0, 0) for name in ("first", "last"))
            if body.extent > 0:
                self._loop(body, begin, end)
        else:
            self._stmt(body)
        params += [f"ptr noalias noundef align {MEMORY_ALIGNMENT} {name}" for name, _ in self._scratch]
        return Module(self._text(params, parallel), self._scratch_bytes)

    def _bind_params(self) -> list[str]:
        may_alias = {name for name in self._func.attrs.get("may_alias", "").split(",") if name}
        written = {stmt.buffer for stmt in walk_stmts(self._func.body) if isinstance(stmt, Store)}
        params = []
        for index, buffer in enumerate(self._func.params):
            alias, read_only = buffer.name in may_alias, buffer not in written
            attributes = ["noundef"] if alias else ["noalias", "noundef"]
            if read_only and not alias:
                attributes += (
                    ["readonly", f"dereferenceable({buffer.size_bytes})"] if buffer.size_bytes else ["readonly"]
                )
            pointer = Value(f"%p{index}", "ptr", 0, 0)
            self._memory.bind(buffer, Place(pointer, buffer.span, buffer.dtype.bytes, read_only and not alias, alias))
            params.append(f"ptr {' '.join(attributes)} {pointer.text}")
        return params

    def _text(self, params: list[str], parallel: bool) -> str:
        name = self._func.name
        inner = f'@"{name}.body"'
        signature = ", ".join([*params, "i64 noundef %first", "i64 noundef %last"])
        guard = ["%some = icmp slt i64 %first, %last", "br i1 %some, label %begin, label %end"]
        return "\n".join(
            [
                f'source_filename = "{name}"',
                f'target triple = "{self._target.triple}"',
                *sorted(self._b.declarations),
                *self._zeros(),
                f"define internal void {inner}({signature}) #0 {{",
                "entry:",
                *self._stack,
                *(guard if parallel else ["br label %begin"]),
                "begin:",
                *self._b.lines,
                "br label %end",
                "end:",
                "ret void",
                "}",
                *self._entry(inner),
                f'attributes #0 = {{ noinline nounwind "no-builtins" {self._vector_width()} }}',
                "attributes #1 = { nounwind }",
                "!0 = !{}",
                "",
            ]
        )

    def _zeros(self) -> list[str]:
        """What guarded loads read instead."""
        size = self._memory.zero_bytes
        kind = f"[{size} x i8] zeroinitializer, align {MEMORY_ALIGNMENT}"
        return [f"{ZEROS} = internal unnamed_addr constant {kind}"] if size else []

    def _entry(self, inner: str) -> list[str]:
        """The exported function."""
        lines = [f'define void @"{self._func.name}"(ptr %buffers, ptr %scratch, i64 %first, i64 %last) #1 {{']
        args = []
        for index in range(len(self._func.params)):
            lines.append(f"%a{index} = getelementptr ptr, ptr %buffers, i64 {index}")
            lines.append(f"%p{index} = load ptr, ptr %a{index}, align 8")
            args.append(f"ptr %p{index}")
        for name, offset in self._scratch:
            lines.append(f"{name} = getelementptr i8, ptr %scratch, i64 {offset}")
            args.append(f"ptr {name}")
        call = ", ".join([*args, "i64 %first", "i64 %last"])
        return [*lines, f"call void {inner}({call})", "ret void", "}"]

    def _vector_width(self) -> str:
        bits = 8 * self._target.vector_bytes
        return f'"prefer-vector-width"="{bits}" "min-legal-vector-width"="{bits}"'

    # -- statements --------------------------------------------------------------------------------------------

    def _stmt(self, stmt: Stmt) -> None:
        match stmt:
            case Seq(body):
                for child in body:
                    self._stmt(child)
            case Store():
                self._store(stmt)
            case For():
                self._for(stmt)
            case If():
                self._if(stmt)
            case Allocate(buffer, body):
                self._allocate(buffer)
                self._stmt(body)
            case Block(_, body):
                self._stmt(body)
            case Prefetch(buffer, offset):
                self._memory.prefetch(buffer, self._e.linear(as_affine(offset)))
            case _:
                raise InternalError(f"{self._func.name}: no CPU code for a {type(stmt).__name__}")

    def _for(self, loop: For) -> None:
        if loop.extent <= 0:
            return
        if loop.extent == 1 and loop.kind is not ForKind.PARALLEL:
            self._iteration(loop, self._b.constant("i64", 0))
            return
        match loop.kind:
            case ForKind.SERIAL:
                self._loop(loop, self._b.constant("i64", 0), self._b.constant("i64", loop.extent))
            case ForKind.UNROLLED:
                for index in range(loop.extent):
                    self._iteration(loop, self._b.constant("i64", index))
            case ForKind.VECTORIZED:
                with self._e.vectorizing(loop.var, loop.extent):
                    self._stmt(loop.body)
            case _:
                raise InternalError(f"{self._func.name}: loop {loop.var.name}: no place for {loop.kind.value} here")

    def _iteration(self, loop: For, value: Value) -> None:
        with self._e.binding(loop.var, value):
            self._stmt(loop.body)

    def _loop(self, loop: For, start: Value, end: Value) -> None:
        self._memory.forget()
        self._b.loop(start, end, lambda index: self._iteration(loop, index))
        self._memory.forget()

    def _if(self, stmt: If) -> None:
        self._e.start_statement()
        conjuncts = list(_conjuncts(stmt.condition))
        varying = [term for term in conjuncts if self._e.varies(term)]
        if varying and len(varying) < len(conjuncts) and stmt.otherwise is None:
            uniform = [term for term in conjuncts if not self._e.varies(term)]
            self._if(If(all_of(uniform), If(all_of(varying), stmt.then)))
            return
        condition = self._e.value(stmt.condition)
        if isinstance(condition.ints, int):
            taken = stmt.then if condition.ints else stmt.otherwise
            if taken is not None:
                self._stmt(taken)
        elif condition.lanes:
            self._masked(condition, stmt.then)
            if stmt.otherwise is not None:
                self._masked(self._b.binary("xor", condition, 1), stmt.otherwise)
        else:
            self._branch(condition, stmt)

    def _masked(self, mask: Value, stmt: Stmt) -> None:
        with self._e.under(mask):
            self._stmt(stmt)

    def _branch(self, condition: Value, stmt: If) -> None:
        def arm(body: Stmt) -> None:
            with self._e.branch():
                self._stmt(body)

        otherwise = stmt.otherwise
        self._b.branch(condition, lambda: arm(stmt.then), (lambda: arm(otherwise)) if otherwise else None)
        self._memory.forget()

    def _allocate(self, buffer: Buffer) -> None:
        """On the stack (from where what is only accessed at constant indices moves to registers), or in scratch."""
        name = f"%{self._b.fresh('m')}"
        elements = buffer.span + _SLACK
        place = Place(Value(name, "ptr", 0, 0), elements, MEMORY_ALIGNMENT, is_private=True)
        self._memory.bind(buffer, place)
        size = elements * buffer.dtype.bytes
        if buffer.size_bytes <= _STACK_BYTES:
            kind = f"[{elements} x {MEMORY_TYPES[buffer.dtype]}]"
            self._stack.append(f"{name} = alloca {kind}, align {MEMORY_ALIGNMENT}")
            return
        self._scratch.append((name, self._scratch_bytes))
        self._scratch_bytes += -(-size // MEMORY_ALIGNMENT) * MEMORY_ALIGNMENT

    # -- stores ------------------------------------------------------------------------------------------------

    def _store(self, store: Store) -> None:
        self._e.start_statement()
        address = self._e.address(store.buffer, store.indices)
        target = Load(store.buffer, store.indices)
        if self._e.lanes and address.is_uniform and (self._e.varies(store.value) or target in walk(store.value)):
            self._reduce(store, target, address)
            return
        value = self._e.accumulated(target, store.value)
        self._memory.store(store.buffer, address, value, self._e.mask)

    def _reduce(self, store: Store, target: Load, address: Address) -> None:
        """`x = combine(x, lanes)`: the lanes combined first."""
        name = f"{self._func.name}: store to {store.buffer.name}"
        if not isinstance(store.value, Binary) or store.value.op not in _IDENTITIES:
            raise InternalError(f"{name}: lanes meet at one address, but it is no reduction")
        op, dtype = store.value.op, store.value.dtype
        lanes = self._b.broadcast(self._e.value(_rest(store.value, target, name)), self._e.lanes)
        if self._e.mask is not None:
            identity = _IDENTITIES[op].identity(dtype).value  # type: ignore[attr-defined]
            lanes = self._b.select(self._e.mask, lanes, self._b.constant(REGISTER_TYPES[dtype], identity))
        total = self._b.reduce(lambda a, b: arithmetic.binary(self._b, op, dtype, a, b), lanes)
        uniform = Address(address.terms, address.const + (address.lanes[0] if address.lanes else 0))
        mask, self._e.mask = self._e.mask, None
        before = self._memory.load(store.buffer, uniform, mask)
        self._memory.store(store.buffer, uniform, arithmetic.binary(self._b, op, dtype, before, total), mask)
        self._e.mask = mask


_IDENTITIES = {op.combiner: op for op in ReduceOp}


def _conjuncts(condition: Expr) -> list[Expr]:
    match condition:
        case Binary(BinaryOp.AND, a, b) if condition.dtype is DType.BOOL:
            return [*_conjuncts(a), *_conjuncts(b)]
    return [condition]


def _rest(value: Binary, target: Load, name: str) -> Expr:
    """What a reduction combines with `target`, found anywhere in a chain of one operation."""
    match value:
        case Binary(_, a, b) if a is target:
            return b
        case Binary(_, a, b) if b is target:
            return a
        case Binary(op, Binary(inner, _, _) as a, b) if inner is op:
            return Binary(op, _rest(a, target, name), b)
        case Binary(op, a, Binary(inner, _, _) as b) if inner is op:
            return Binary(op, a, _rest(b, target, name))
    raise InternalError(f"{name}: lanes meet at one address, but it is no reduction")
