"""PrimFunc -> CUDA C. One kernel a PrimFunc; needs no header, so NVRTC compiles it with no CUDA toolkit."""

from __future__ import annotations

from math import prod

from mcompile.dtypes import DType
from mcompile.errors import BuildError
from mcompile.ir.expr import (
    Binary,
    BinaryOp,
    Call,
    Cast,
    Compare,
    Const,
    Expr,
    Load,
    Select,
    Unary,
    UnaryOp,
    Var,
)
from mcompile.ir.simplify import simplify
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

_TYPES = {
    DType.BOOL: "bool",
    DType.INT8: "signed char",
    DType.INT16: "short",
    DType.INT32: "int",
    DType.INT64: "long long",
    DType.UINT8: "unsigned char",
    DType.UINT16: "unsigned short",
    DType.UINT32: "unsigned int",
    DType.UINT64: "unsigned long long",
    DType.FLOAT32: "float",
    DType.FLOAT64: "double",
}
_INFIX = {
    BinaryOp.ADD: "+",
    BinaryOp.SUB: "-",
    BinaryOp.MUL: "*",
    BinaryOp.DIV: "/",
    BinaryOp.TRUNCDIV: "/",
    BinaryOp.AND: "&",
    BinaryOp.OR: "|",
    BinaryOp.XOR: "^",
    BinaryOp.SHL: "<<",
    BinaryOp.SHR: ">>",
}
_FUNCTIONS = {
    UnaryOp.SQRT: "sqrt", UnaryOp.EXP: "exp", UnaryOp.LOG: "log", UnaryOp.SIN: "sin", UnaryOp.COS: "cos",
    UnaryOp.TAN: "tan", UnaryOp.ASIN: "asin", UnaryOp.ACOS: "acos", UnaryOp.ATAN: "atan", UnaryOp.SINH: "sinh",
    UnaryOp.COSH: "cosh", UnaryOp.TANH: "tanh", UnaryOp.ASINH: "asinh", UnaryOp.ACOSH: "acosh",
    UnaryOp.ATANH: "atanh", UnaryOp.ERF: "erf", UnaryOp.FLOOR: "floor", UnaryOp.CEIL: "ceil",
    UnaryOp.ROUND: "rint", UnaryOp.TRUNC: "trunc",
}  # fmt: skip
_PRELUDE = """\
template <class T> __device__ T mc_floordiv(T a, T b) {
    T q = a / b;
    return q * b != a && (a < 0) != (b < 0) ? q - 1 : q;
}
template <class T> __device__ T mc_floormod(T a, T b) { return a - mc_floordiv(a, b) * b; }
template <class T> __device__ T mc_max(T a, T b) { return a != a || a > b ? a : b; }
template <class T> __device__ T mc_min(T a, T b) { return a != a || a < b ? a : b; }
template <class T> __device__ T mc_sign(T a) { return a != a ? a : T((a > 0) - (a < 0)); }
"""


def launch_dims(func: PrimFunc) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """(grid, block): the largest extent of each thread dimension."""
    extents = dict.fromkeys(Thread, 1)
    for stmt in walk_stmts(func.body):
        if isinstance(stmt, For) and stmt.thread is not None:
            extents[stmt.thread] = max(extents[stmt.thread], stmt.extent)
    values = list(extents.values())
    return (values[0], values[1], values[2]), (values[3], values[4], values[5])


def shared_bytes(func: PrimFunc) -> int:
    """Shared memory of one block."""
    buffers = [stmt.buffer for stmt in walk_stmts(func.body) if isinstance(stmt, Allocate)]
    return sum(buffer.size_bytes for buffer in buffers if buffer.scope is Scope.SHARED)


def emit_cuda(func: PrimFunc) -> str:
    """CUDA C of `func`; parameters are pointers in the PrimFunc's order. Raises BuildError for what it cannot say."""
    return _Emitter(func).text()


class _Emitter:
    def __init__(self, func: PrimFunc) -> None:
        self.func = func
        self.lines: list[str] = []
        self.names: dict[Var | Buffer, str] = {}
        self.extents: dict[Thread, int] = {}
        self.block = launch_dims(func)[1]

    def text(self) -> str:
        params = []
        for param in self.func.params:
            const = "" if param in self.func.outputs else "const "
            params.append(f"{const}{self._type(param.dtype)} *__restrict__ {self._name(param)}")
        self._statement(self.func.body, 1)
        bounds = f"__launch_bounds__({prod(self.block)})"
        head = f'extern "C" __global__ void {bounds} {self.func.name}({", ".join(params)})'
        return "\n".join([_PRELUDE + head, "{", *self.lines, "}", ""])

    def _name(self, thing: Var | Buffer) -> str:
        if thing not in self.names:
            stem = "".join(c if c.isalnum() else "_" for c in thing.name)
            self.names[thing] = f"{stem}_{len(self.names)}"
        return self.names[thing]

    def _type(self, dtype: DType) -> str:
        if dtype not in _TYPES:
            raise BuildError(f"{self.func.name}: {dtype.value} is not supported on the GPU yet")
        return _TYPES[dtype]

    def _line(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    # --- statements ---

    def _statement(self, stmt: Stmt, depth: int) -> None:
        match stmt:
            case For():
                self._loop(stmt, depth)
            case Store(buffer, indices, value):
                self._line(depth, f"{self._element(buffer, indices)} = {self._expr(value)};")
            case If(condition, then, otherwise):
                self._line(depth, f"if ({self._expr(condition)}) {{")
                self._statement(then, depth + 1)
                if otherwise is not None:
                    self._line(depth, "} else {")
                    self._statement(otherwise, depth + 1)
                self._line(depth, "}")
            case Seq(body):
                for child in body:
                    self._statement(child, depth)
            case Allocate(buffer, body):
                shared = "__shared__ " if buffer.scope is Scope.SHARED else ""
                self._line(depth, f"{shared}{self._type(buffer.dtype)} {self._name(buffer)}[{buffer.span}];")
                self._statement(body, depth)
            case Block(name, body):
                self._line(depth, f"{{  // {name}")
                self._statement(body, depth + 1)
                self._line(depth, "}")
            case Barrier():
                self._line(depth, "__syncthreads();")
            case Prefetch():
                pass  # a block's other warps hide latency
            case _:
                raise BuildError(f"{self.func.name}: cannot print {type(stmt).__name__} as CUDA C")

    def _loop(self, loop: For, depth: int) -> None:
        name = self._name(loop.var)
        if loop.thread is not None:
            self._line(depth, f"const int {name} = {loop.thread.value};")
            whole = self.extents.setdefault(loop.thread, loop.extent) == loop.extent
            if whole:
                self._statement(loop.body, depth)
                return
            self._line(depth, f"if ({name} < {loop.extent}) {{")
        else:
            if loop.kind in (ForKind.UNROLLED, ForKind.VECTORIZED):
                self._line(depth, "#pragma unroll")
            self._line(depth, f"for (int {name} = 0; {name} < {loop.extent}; ++{name}) {{")
        self._statement(loop.body, depth + 1)
        self._line(depth, "}")

    def _element(self, buffer: Buffer, indices: tuple[Expr, ...]) -> str:
        offset: Expr = Const(0, DType.INT64)
        for index, stride in zip(indices, buffer.strides, strict=True):
            offset = offset + index * stride
        return f"{self._name(buffer)}[{self._expr(simplify(offset))}]"

    # --- expressions ---

    def _expr(self, expr: Expr) -> str:
        match expr:
            case Var():
                return self._name(expr)
            case Const():
                return self._constant(expr)
            case Load(source, indices):
                return self._element(source, indices)
            case Unary(op, x):
                return self._unary(op, x)
            case Binary(op, a, b):
                return self._binary(op, a, b)
            case Compare(op, a, b):
                return f"({self._expr(a)} {op.value} {self._expr(b)})"
            case Select(condition, a, b):
                return f"({self._expr(condition)} ? {self._expr(a)} : {self._expr(b)})"
            case Cast(DType.BOOL, x):
                return f"({self._expr(x)} != 0)"
            case Cast(dtype, x):
                return f"(({self._type(dtype)}){self._expr(x)})"
            case Call(_, args, dtype):
                function = "fma" if dtype is DType.FLOAT64 else "fmaf"
                return f"{function}({', '.join(map(self._expr, args))})"
        raise BuildError(f"{self.func.name}: cannot print {type(expr).__name__} as CUDA C")

    def _constant(self, const: Const) -> str:
        value, dtype = const.value, const.dtype
        if not dtype.is_float:
            return str(value).lower() if dtype is DType.BOOL else f"{value}" if abs(value) < 1 << 31 else f"{value}ll"
        suffix = "" if dtype is DType.FLOAT64 else "f"
        if value != value:
            return f"__int_as_float(0x7fc00000){'' if suffix else ' * 1.0'}"
        if value in (float("inf"), float("-inf")):
            return f"({'-' if value < 0 else ''}__int_as_float(0x7f800000))"
        return f"{float(value)!r}{suffix}" if value >= 0 else f"({float(value)!r}{suffix})"

    def _unary(self, op: UnaryOp, x: Expr) -> str:
        text, suffix = self._expr(x), "f" if x.dtype is DType.FLOAT32 else ""
        match op:
            case UnaryOp.NEG:
                return f"(-{text})"
            case UnaryOp.NOT:
                return f"(!{text})" if x.dtype is DType.BOOL else f"(~{text})"
            case UnaryOp.ABS:
                return f"fabs{suffix}({text})" if x.dtype.is_float else f"abs({text})"
            case UnaryOp.SIGN:
                return f"mc_sign({text})"
            case UnaryOp.SIGMOID:
                return f"(1.0{suffix} / (1.0{suffix} + exp{suffix}(-{text})))"
            case UnaryOp.IS_NAN:
                return f"isnan({text})"
            case UnaryOp.IS_INF:
                return f"isinf({text})"
        return f"{_FUNCTIONS[op]}{suffix}({text})"

    def _binary(self, op: BinaryOp, a: Expr, b: Expr) -> str:
        left, right = self._expr(a), self._expr(b)
        if op in _INFIX:
            return f"({left} {_INFIX[op]} {right})"
        suffix = "f" if a.dtype is DType.FLOAT32 else ""
        type_ = self._type(a.dtype)
        match op:
            case BinaryOp.MAX | BinaryOp.MIN:
                return f"mc_{op.value}<{type_}>({left}, {right})"
            case BinaryOp.POW:
                return f"pow{suffix}({left}, {right})"
            case BinaryOp.TRUNCMOD:
                return f"fmod{suffix}({left}, {right})" if a.dtype.is_float else f"({left} % {right})"
        if a.dtype is DType.INT64 and _is_index(a):  # loop indices are ints and never negative
            return f"({left} {'/' if op is BinaryOp.FLOORDIV else '%'} {right})"
        function = "mc_floordiv" if op is BinaryOp.FLOORDIV else "mc_floormod"
        return f"{function}<{type_}>({left}, {right})"


def _is_index(expr: Expr) -> bool:
    """Built of loop variables and non-negative constants by operations that keep it non-negative."""
    match expr:
        case Var():
            return True
        case Const(value):
            return value >= 0
        case Binary(BinaryOp.ADD | BinaryOp.MUL | BinaryOp.FLOORDIV | BinaryOp.FLOORMOD, a, b):
            return _is_index(a) and _is_index(b)
    return False
