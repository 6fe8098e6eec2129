"""Scalar expressions: few node classes, op enums, interned so that identity is structural equality.

Semantics. Integers wrap at their width; FLOORDIV and FLOORMOD round towards minus infinity (as Python's) and are
for integers only; DIV is the true division of floats; MIN and MAX propagate NaN; comparisons give BOOL. Select
evaluates only the branch it takes, so a load that would be out of bounds may stand under its guard. Index
arithmetic is INT64. Reduce may only stand at the top of a Compute's body.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from mcompile.dtypes import DType


class UnaryOp(Enum):
    """Float math unless said; NEG, ABS and SIGN take integers too; NOT takes BOOL or integers (bitwise)."""

    NEG = "neg"
    NOT = "not"
    ABS = "abs"
    SIGN = "sign"
    SQRT = "sqrt"
    EXP = "exp"
    LOG = "log"
    SIN = "sin"
    COS = "cos"
    TAN = "tan"
    ASIN = "asin"
    ACOS = "acos"
    ATAN = "atan"
    SINH = "sinh"
    COSH = "cosh"
    TANH = "tanh"
    ASINH = "asinh"
    ACOSH = "acosh"
    ATANH = "atanh"
    ERF = "erf"
    SIGMOID = "sigmoid"
    FLOOR = "floor"
    CEIL = "ceil"
    ROUND = "round"  # half to even
    TRUNC = "trunc"
    IS_NAN = "is_nan"  # -> BOOL
    IS_INF = "is_inf"  # -> BOOL


class BinaryOp(Enum):
    ADD = "+"
    SUB = "-"
    MUL = "*"
    DIV = "/"  # floats
    TRUNCDIV = "truncdiv"  # integers, towards zero (C's /)
    TRUNCMOD = "truncmod"  # integers and floats, sign of the dividend (C's % and fmod)
    FLOORDIV = "//"
    FLOORMOD = "%"
    MIN = "min"
    MAX = "max"
    POW = "pow"
    AND = "&"  # BOOL or integers (bitwise)
    OR = "|"
    XOR = "^"
    SHL = "<<"
    SHR = ">>"


class CompareOp(Enum):
    EQ = "=="
    NE = "!="
    LT = "<"
    LE = "<="
    GT = ">"
    GE = ">="


class ReduceOp(Enum):
    SUM = "sum"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    AND = "and"
    OR = "or"

    @property
    def combiner(self) -> BinaryOp:
        return _COMBINERS[self]

    def identity(self, dtype: DType) -> Expr:
        """The neutral element: combining it with x gives x (for MIN and MAX of floats, the infinities)."""
        infinity = float("inf")
        match self:
            case ReduceOp.SUM:
                return Const(0, dtype)
            case ReduceOp.PROD:
                return Const(1, dtype)
            case ReduceOp.MIN:
                return Const(infinity if dtype.is_float else dtype.max_value, dtype)
            case ReduceOp.MAX:
                return Const(-infinity if dtype.is_float else dtype.min_value, dtype)
            case ReduceOp.AND:
                return Const(True, DType.BOOL)
            case ReduceOp.OR:
                return Const(False, DType.BOOL)


_COMBINERS = {
    ReduceOp.SUM: BinaryOp.ADD,
    ReduceOp.PROD: BinaryOp.MUL,
    ReduceOp.MIN: BinaryOp.MIN,
    ReduceOp.MAX: BinaryOp.MAX,
    ReduceOp.AND: BinaryOp.AND,
    ReduceOp.OR: BinaryOp.OR,
}


class Intrinsic(Enum):
    """Named functions of several arguments."""

    FMA = "fma"  # a * b + c in one rounding


class Source(Protocol):
    """What a Load reads: a Tensor (tensor level) or a Buffer (loop level). Compared by identity."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> DType: ...


class _Interned(type):
    """Metaclass that gives back the live node of the same class and fields, if there is one.

    A node class's `key` turns its arguments into the table's key (Const: dtype and bit pattern).
    """

    def __call__(cls, *args: Any) -> Any:
        key = (cls, *cls.intern_key(*args))  # type: ignore[attr-defined]
        node = _TABLE.get(key)
        if node is None:
            node = super().__call__(*args)
            _TABLE[key] = node
        return node


_TABLE: weakref.WeakValueDictionary[tuple[Any, ...], Expr] = weakref.WeakValueDictionary()


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True, repr=False)
class Expr(metaclass=_Interned):
    """Base of all expressions. Operators build nodes; `==` is identity (use `eq` for the comparison)."""

    if TYPE_CHECKING:  # every subclass has it, as a field or a property

        @property
        def dtype(self) -> DType: ...

    @staticmethod
    def intern_key(*args: Any) -> tuple[Any, ...]:
        return args

    @property
    def children(self) -> tuple[Expr, ...]:
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as a call of the class, so that the copy is interned where it arrives (a build worker)."""
        return type(self), tuple(getattr(self, each.name) for each in fields(self))

    def __add__(self, other: Any) -> Expr:
        return binary(BinaryOp.ADD, self, other)

    def __radd__(self, other: Any) -> Expr:
        return binary(BinaryOp.ADD, other, self)

    def __sub__(self, other: Any) -> Expr:
        return binary(BinaryOp.SUB, self, other)

    def __rsub__(self, other: Any) -> Expr:
        return binary(BinaryOp.SUB, other, self)

    def __mul__(self, other: Any) -> Expr:
        return binary(BinaryOp.MUL, self, other)

    def __rmul__(self, other: Any) -> Expr:
        return binary(BinaryOp.MUL, other, self)

    def __truediv__(self, other: Any) -> Expr:
        return binary(BinaryOp.DIV, self, other)

    def __rtruediv__(self, other: Any) -> Expr:
        return binary(BinaryOp.DIV, other, self)

    def __floordiv__(self, other: Any) -> Expr:
        return binary(BinaryOp.FLOORDIV, self, other)

    def __mod__(self, other: Any) -> Expr:
        return binary(BinaryOp.FLOORMOD, self, other)

    def __and__(self, other: Any) -> Expr:
        return binary(BinaryOp.AND, self, other)

    def __or__(self, other: Any) -> Expr:
        return binary(BinaryOp.OR, self, other)

    def __neg__(self) -> Expr:
        return Unary(UnaryOp.NEG, self)

    def __lt__(self, other: Any) -> Expr:
        return compare(CompareOp.LT, self, other)

    def __le__(self, other: Any) -> Expr:
        return compare(CompareOp.LE, self, other)

    def __gt__(self, other: Any) -> Expr:
        return compare(CompareOp.GT, self, other)

    def __ge__(self, other: Any) -> Expr:
        return compare(CompareOp.GE, self, other)

    def eq(self, other: Any) -> Expr:
        return compare(CompareOp.EQ, self, other)

    def ne(self, other: Any) -> Expr:
        return compare(CompareOp.NE, self, other)

    def astype(self, dtype: DType) -> Expr:
        return self if self.dtype is dtype else Cast(dtype, self)

    def __repr__(self) -> str:
        from mcompile.ir.printer import print_expr  # which imports this module

        return print_expr(self)

    def __bool__(self) -> bool:
        raise TypeError("an Expr has no truth value; compare with `is`, or build a Select")


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Var(Expr):
    """A loop variable or a run-time extent. Two Vars of one name are different variables: identity is `key`."""

    name: str
    dtype: DType
    key: int

    @property
    def children(self) -> tuple[Expr, ...]:
        return ()

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_var, (self.name, self.dtype, self.key)


_var_count = 0


def var(name: str, dtype: DType = DType.INT64) -> Var:
    """A fresh variable."""
    global _var_count
    _var_count += 1
    return Var(name, dtype, _var_count)


def _restore_var(name: str, dtype: DType, key: int) -> Var:
    """A variable of another process; those made here later get other keys."""
    global _var_count
    _var_count = max(_var_count, key)
    return Var(name, dtype, key)


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Const(Expr):
    value: int | float | bool
    dtype: DType

    @staticmethod
    def intern_key(value: int | float | bool, dtype: DType) -> tuple[Any, ...]:
        bits = struct.pack("<d", value) if dtype.is_float else int(value)
        return bits, dtype

    def __post_init__(self) -> None:
        kind = float if self.dtype.is_float else bool if self.dtype is DType.BOOL else int
        object.__setattr__(self, "value", kind(self.value))

    @property
    def children(self) -> tuple[Expr, ...]:
        return ()


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Unary(Expr):
    op: UnaryOp
    x: Expr

    @property
    def dtype(self) -> DType:
        return DType.BOOL if self.op in (UnaryOp.IS_NAN, UnaryOp.IS_INF) else self.x.dtype

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.x,)


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Binary(Expr):
    op: BinaryOp
    a: Expr
    b: Expr

    @property
    def dtype(self) -> DType:
        return self.a.dtype

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.a, self.b)


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Compare(Expr):
    op: CompareOp
    a: Expr
    b: Expr

    @property
    def dtype(self) -> DType:
        return DType.BOOL

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.a, self.b)


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Select(Expr):
    """`a` where `condition`, else `b`; the branch not taken is not evaluated."""

    condition: Expr
    a: Expr
    b: Expr

    @property
    def dtype(self) -> DType:
        return self.a.dtype

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.condition, self.a, self.b)


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Cast(Expr):
    """Conversion as numpy's astype (float to integer truncates); to BOOL it is `x != 0`."""

    dtype: DType
    x: Expr

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.x,)


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Call(Expr):
    function: Intrinsic
    args: tuple[Expr, ...]
    dtype: DType

    @property
    def children(self) -> tuple[Expr, ...]:
        return self.args


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Load(Expr):
    """An element of a Tensor (tensor level) or Buffer (loop level), one index for each of its dims."""

    source: Any  # a Source: Tensor or Buffer
    indices: tuple[Expr, ...]

    @property
    def dtype(self) -> DType:
        return self.source.dtype  # type: ignore[no-any-return]

    @property
    def children(self) -> tuple[Expr, ...]:
        return self.indices


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Reduce(Expr):
    """`value` combined over all values of `axes` (reduce-axis Vars; their extents stand in the Compute)."""

    op: ReduceOp
    value: Expr
    axes: tuple[Var, ...]

    @property
    def dtype(self) -> DType:
        return self.value.dtype

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.value,)


def as_expr(value: Any, dtype: DType = DType.INT64) -> Expr:
    """Expressions as they are, Python numbers as a Const of `dtype`."""
    return value if isinstance(value, Expr) else Const(value, dtype)


def _pair(a: Any, b: Any) -> tuple[Expr, Expr]:
    if isinstance(a, Expr):
        b = as_expr(b, a.dtype)
    elif isinstance(b, Expr):
        a = as_expr(a, b.dtype)
    else:
        a, b = as_expr(a), as_expr(b)
    if a.dtype is not b.dtype:
        raise TypeError(f"operands of two dtypes: {a.dtype.value} and {b.dtype.value}; cast one with astype")
    return a, b


_PYTHON_INT: dict[BinaryOp, Callable[[int, int], int]] = {
    BinaryOp.ADD: lambda a, b: a + b,
    BinaryOp.SUB: lambda a, b: a - b,
    BinaryOp.MUL: lambda a, b: a * b,
    BinaryOp.FLOORDIV: lambda a, b: a // b,
    BinaryOp.FLOORMOD: lambda a, b: a % b,
    BinaryOp.MIN: min,
    BinaryOp.MAX: max,
}


def binary(op: BinaryOp, a: Any, b: Any) -> Expr:
    """A Binary node; Python numbers take the other operand's dtype, and index arithmetic on constants folds.

    Only the rules that index arithmetic needs at once (x + 0, x * 1, constants) are applied here; `ir.simplify`
    has the rest. Floats are never folded here.
    """
    left, right = _pair(a, b)
    if left.dtype is not DType.INT64:
        return Binary(op, left, right)
    match left, right:
        case Const(int(x)), Const(int(y)) if op in _PYTHON_INT and not (y == 0 and op in _DIVISIONS):
            return Const(_PYTHON_INT[op](x, y), DType.INT64)
        case Const(0), _ if op is BinaryOp.ADD:
            return right
        case _, Const(0) if op in (BinaryOp.ADD, BinaryOp.SUB):
            return left
        case (Const(0), _) | (_, Const(0)) if op is BinaryOp.MUL:
            return Const(0, DType.INT64)
        case _, Const(1) if op in (BinaryOp.MUL, BinaryOp.FLOORDIV):
            return left
        case Const(1), _ if op is BinaryOp.MUL:
            return right
    return Binary(op, left, right)


_DIVISIONS = (BinaryOp.FLOORDIV, BinaryOp.FLOORMOD)


def compare(op: CompareOp, a: Any, b: Any) -> Expr:
    return Compare(op, *_pair(a, b))


def minimum(a: Any, b: Any) -> Expr:
    return binary(BinaryOp.MIN, a, b)


def maximum(a: Any, b: Any) -> Expr:
    return binary(BinaryOp.MAX, a, b)


def select(condition: Expr, a: Any, b: Any) -> Expr:
    return Select(condition, *_pair(a, b))


def all_of(conditions: list[Expr]) -> Expr:
    """Conjunction; True for none."""
    result: Expr | None = None
    for condition in conditions:
        result = condition if result is None else Binary(BinaryOp.AND, result, condition)
    return Const(True, DType.BOOL) if result is None else result


def walk(expr: Expr) -> Iterator[Expr]:
    """Each distinct node of `expr` once, children before parents."""
    seen: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(expr, False)]
    while stack:
        node, done = stack.pop()
        if done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(node.children))


def with_children(expr: Expr, children: tuple[Expr, ...]) -> Expr:
    """`expr` with other children (index arithmetic on constants folds)."""
    match expr:
        case Unary(op, _):
            return Unary(op, children[0])
        case Binary(op, _, _):
            return binary(op, *children)
        case Compare(op, _, _):
            return Compare(op, *children)
        case Select():
            return Select(*children)
        case Cast(dtype, _):
            return Cast(dtype, children[0])
        case Call(function, _, dtype):
            return Call(function, children, dtype)
        case Load(source, _):
            return Load(source, children)
        case Reduce(op, _, axes):
            return Reduce(op, children[0], axes)
    return expr


def transform(expr: Expr, visit: Any, memo: dict[Expr, Expr] | None = None) -> Expr:
    """Rebuild bottom-up: `visit(node)` sees each node with its new children and returns a replacement or None."""
    memo = {} if memo is None else memo
    for node in walk(expr):
        if node in memo:
            continue
        children = node.children
        new_children = tuple(memo[child] for child in children)
        unchanged = all(a is b for a, b in zip(children, new_children, strict=True))
        new = node if unchanged else with_children(node, new_children)
        replacement = visit(new)
        memo[node] = new if replacement is None else replacement
    return memo[expr]


def substitute(expr: Expr, values: dict[Var, Expr]) -> Expr:
    """`expr` with variables replaced."""
    if not values:
        return expr
    return transform(expr, lambda node: values.get(node))
