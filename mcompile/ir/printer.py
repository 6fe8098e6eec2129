"""Stable text of expressions, dags and PrimFuncs: for people, golden tests and hash keys.

Variables are printed by name; a second variable of one name gets the suffix `_1`, the next `_2`, in order of first
appearance, so that the text never depends on when a variable was made. Two structures with one text are the same up
to a renaming of their variables. Big subexpressions that occur more than once are printed once, as
`let %0 = ... in ...`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mcompile.dtypes import DType
from mcompile.ir.expr import (
    Binary,
    BinaryOp,
    Call,
    Cast,
    Compare,
    Const,
    Expr,
    Load,
    Reduce,
    Select,
    Unary,
    UnaryOp,
    Var,
    walk,
)
from mcompile.ir.stmt import Allocate, Barrier, Block, Buffer, For, If, Prefetch, PrimFunc, Seq, Stmt, Store
from mcompile.ir.tensor import Axis, Compute, ComputeDag, Tensor

_SHORT = {
    DType.BOOL: "bool",
    DType.BFLOAT16: "bf16",
    **{d: f"f{d.bits}" for d in (DType.FLOAT16, DType.FLOAT32, DType.FLOAT64)},
    **{d: f"i{d.bits}" for d in (DType.INT8, DType.INT16, DType.INT32, DType.INT64)},
    **{d: f"u{d.bits}" for d in (DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64)},
}
_INFIX = {
    BinaryOp.OR: 5,
    BinaryOp.XOR: 6,
    BinaryOp.AND: 7,
    BinaryOp.SHL: 8,
    BinaryOp.SHR: 8,
    BinaryOp.ADD: 9,
    BinaryOp.SUB: 9,
    BinaryOp.MUL: 10,
    BinaryOp.DIV: 10,
    BinaryOp.FLOORDIV: 10,
    BinaryOp.FLOORMOD: 10,
}
_LOGICAL = {BinaryOp.OR: (1, "or"), BinaryOp.XOR: (2, "xor"), BinaryOp.AND: (3, "and")}
_COMPARE = 4
_PREFIX = 11
_ATOM = 12
_LET_SIZE = 24  # nodes; smaller shared subexpressions are repeated


class _Names:
    """Unique names by order of first appearance."""

    def __init__(self) -> None:
        self._names: dict[object, str] = {}
        self._used: set[str] = set()

    def __call__(self, item: object, name: str) -> str:
        known = self._names.get(item)
        if known is not None:
            return known
        unique, count = name, 0
        while unique in self._used:
            count += 1
            unique = f"{name}_{count}"
        self._used.add(unique)
        self._names[item] = unique
        return unique


class _Printer:
    def __init__(self) -> None:
        self._vars = _Names()
        self._buffers = _Names()

    def var(self, var: Var) -> str:
        name = self._vars(var, var.name)
        return name if var.dtype is DType.INT64 else f"{name}:{_SHORT[var.dtype]}"

    def source(self, source: object) -> str:
        assert isinstance(source, Tensor | Buffer)
        return self._buffers(source, source.name) if isinstance(source, Buffer) else source.name

    def expr(self, expr: Expr) -> str:
        """One line for `expr`, with its big shared subexpressions bound first."""
        texts: dict[Expr, tuple[int, str]] = {}
        lets: list[str] = []
        shared = _shared_nodes(expr)
        for node in walk(expr):
            texts[node] = self._node(node, texts)
            if node in shared:
                name = f"%{len(lets)}"
                lets.append(f"{name} = {texts[node][1]}")
                texts[node] = (_ATOM, name)
        text = texts[expr][1]
        return f"let {', '.join(lets)} in {text}" if lets else text

    def _node(self, node: Expr, texts: dict[Expr, tuple[int, str]]) -> tuple[int, str]:
        """Precedence and text of a node whose children have theirs."""

        def at(child: Expr, level: int) -> str:
            precedence, text = texts[child]
            return text if precedence >= level else f"({text})"

        match node:
            case Var():
                return _ATOM, self.var(node)
            case Const(value, dtype):
                return _ATOM, _const(value, dtype)
            case Unary(UnaryOp.NEG, x):
                return _PREFIX, f"-({texts[x][1]})" if isinstance(x, Const) else f"-{at(x, _ATOM)}"
            case Unary(UnaryOp.NOT, x):
                return _PREFIX, f"!{at(x, _ATOM)}"
            case Binary(op, a, b) if op in _INFIX:
                logical = _LOGICAL.get(op) if node.dtype is DType.BOOL else None
                level, symbol = logical or (_INFIX[op], op.value)
                return level, f"{at(a, level)} {symbol} {at(b, level + 1)}"
            case Compare(op, a, b):
                return _COMPARE, f"{at(a, _COMPARE + 1)} {op.value} {at(b, _COMPARE + 1)}"
        return _ATOM, self._function(node, [texts[child][1] for child in node.children])

    def _function(self, node: Expr, args: list[str]) -> str:
        text = ", ".join(args)
        match node:
            case Unary(op, _) | Binary(op, _, _):
                return f"{op.value}({text})"
            case Select():
                return f"select({text})"
            case Cast(dtype, _):
                return f"{_SHORT[dtype]}({text})"
            case Call(function, _, _):
                return f"{function.value}({text})"
            case Load(source, _):
                return f"{self.source(source)}[{text}]"
            case Reduce(op, _, axes):
                return f"reduce_{op.value}({text}; {', '.join(map(self.var, axes))})"
        raise TypeError(f"no text for {type(node).__name__}")

    def axes(self, axes: Iterable[Axis]) -> str:
        return ", ".join(f"{self.var(axis.var)} < {axis.extent}" for axis in axes)

    def compute(self, compute: Compute) -> str:
        reduced = f"; {self.axes(compute.reduce_axes)}" if compute.reduce_axes else ""
        head = f"{compute.name}[{self.axes(compute.axes)}{reduced}]: {_SHORT[compute.dtype]}"
        return f"{head} = {self.expr(compute.body)}"

    def buffer(self, buffer: Buffer) -> str:
        shape = ", ".join(map(str, buffer.shape))
        strides = ", ".join(map(str, buffer.strides))
        return f"{self.source(buffer)}: {_SHORT[buffer.dtype]}[{shape}] strides [{strides}]"

    def stmt(self, stmt: Stmt, indent: int) -> list[str]:
        pad = "    " * indent
        match stmt:
            case For(var, extent, body, kind, thread):
                suffix = "" if thread is None else f" {thread.value}"
                head = f"{pad}{kind.value}{suffix} {self.var(var)} < {extent}:"
                return [head, *self.stmt(body, indent + 1)]
            case Store(buffer, indices, value):
                where = ", ".join(map(self.expr, indices))
                return [f"{pad}{self.source(buffer)}[{where}] = {self.expr(value)}"]
            case If(condition, then, otherwise):
                lines = [f"{pad}if {self.expr(condition)}:", *self.stmt(then, indent + 1)]
                if otherwise is not None:
                    lines += [f"{pad}else:", *self.stmt(otherwise, indent + 1)]
                return lines
            case Seq(body):
                return [line for child in body for line in self.stmt(child, indent)] or [f"{pad}pass"]
            case Allocate(buffer, body):
                head = f"{pad}allocate {buffer.scope.value} {self.buffer(buffer)}:"
                return [head, *self.stmt(body, indent + 1)]
            case Block(name, body):
                return [f"{pad}block {name}:", *self.stmt(body, indent + 1)]
            case Barrier():
                return [f"{pad}barrier"]
            case Prefetch(buffer, offset):
                return [f"{pad}prefetch {self.source(buffer)} + {self.expr(offset)}"]
        raise TypeError(f"no text for {type(stmt).__name__}")


def _const(value: int | float | bool, dtype: DType) -> str:
    if dtype is DType.BOOL:
        return "true" if value else "false"
    return str(value) if dtype is DType.INT64 else f"{value!r}_{_SHORT[dtype]}"


def _shared_nodes(expr: Expr) -> set[Expr]:
    """Nodes below `expr` with several parents whose text would be long."""
    sizes: dict[Expr, int] = {}
    uses: Counter[Expr] = Counter()
    shared: set[Expr] = set()
    for node in walk(expr):
        sizes[node] = 1 + sum(min(sizes[child], _LET_SIZE) for child in node.children)
        uses.update(node.children)
    for node, count in uses.items():
        if count > 1 and sizes[node] >= _LET_SIZE and not isinstance(node, Load):
            shared.add(node)
    return shared


def print_expr(expr: Expr) -> str:
    return _Printer().expr(expr)


def print_dag(dag: ComputeDag) -> str:
    """One line a tensor, then the results. Tensor names are printed as they are."""
    printer = _Printer()
    lines = []
    for tensor in dag.tensors:
        if isinstance(tensor, Compute):
            lines.append(printer.compute(tensor))
        else:
            lines.append(f"{tensor.name}: placeholder {_SHORT[tensor.dtype]}[{', '.join(map(str, tensor.shape))}]")
    lines.append(f"return {', '.join(output.name for output in dag.outputs)}")
    return "\n".join(lines)


def print_func(func: PrimFunc) -> str:
    """The whole kernel, one statement a line."""
    printer = _Printer()
    lines = [f"func {func.name}:"]
    lines += [f"    param {printer.buffer(param)}" for param in func.params]
    lines.append(f"    writes {', '.join(map(printer.source, func.outputs))}")
    lines += [f"    attr {key} = {value}" for key, value in sorted(func.attrs.items())]
    return "\n".join([*lines, *printer.stmt(func.body, 1)])
