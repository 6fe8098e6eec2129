"""Turns expressions into values: scalars, and lanes where the loop being vectorised says so."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np

from mcompile.backend.cpu import arithmetic
from mcompile.backend.cpu.builder import Builder, Value
from mcompile.backend.cpu.llvm_types import BITS, REGISTER_TYPES
from mcompile.backend.cpu.memory import Address, Memory
from mcompile.backend.cpu.vector_math import FUNCTIONS
from mcompile.dtypes import DType, Kind
from mcompile.errors import InternalError
from mcompile.ir.affine import Affine, as_affine
from mcompile.ir.bounds import Bounds
from mcompile.ir.expr import (
    Binary,
    BinaryOp,
    Call,
    Cast,
    Compare,
    CompareOp,
    Const,
    Expr,
    Load,
    Select,
    Unary,
    UnaryOp,
    Var,
    walk,
)
from mcompile.ir.stmt import Buffer, Scope

_INTEGER_FOLDS: dict[BinaryOp, Callable[[int, int], int]] = {
    BinaryOp.ADD: operator.add,
    BinaryOp.SUB: operator.sub,
    BinaryOp.MUL: operator.mul,
    BinaryOp.MIN: min,
    BinaryOp.MAX: max,
    BinaryOp.FLOORDIV: lambda a, b: a // b if b else 0,
    BinaryOp.FLOORMOD: lambda a, b: a % b if b else 0,
}
_BOOL_FOLDS: dict[BinaryOp, Callable[[int, int], int]] = {BinaryOp.AND: operator.and_, BinaryOp.OR: operator.or_}
_COMPARE_FOLDS: dict[CompareOp, Callable[[int, int], bool]] = {
    CompareOp.EQ: operator.eq,
    CompareOp.NE: operator.ne,
    CompareOp.LT: operator.lt,
    CompareOp.LE: operator.le,
    CompareOp.GT: operator.gt,
    CompareOp.GE: operator.ge,
}
_SLOW = (BinaryOp.POW, BinaryOp.TRUNCMOD, BinaryOp.TRUNCDIV, BinaryOp.FLOORDIV, BinaryOp.FLOORMOD)
_DIVISIONS = (BinaryOp.FLOORDIV, BinaryOp.FLOORMOD, BinaryOp.TRUNCDIV, BinaryOp.TRUNCMOD)
_Ints = int | tuple[int, ...]
_MAX_ZEROS = 4096  # elements that a load may read instead
_MAX_CHEAP_NODES = 8
_LANES_LEVEL = 1 << 30


class Expressions:
    """Emits expressions under what the loops around have bound.

    `lanes` is the extent of the VECTORIZED loop one is in (0: none), `mask` the lanes that guards have left.
    """

    def __init__(self, builder: Builder, memory: Memory, bounds: Bounds) -> None:
        self.lanes = 0
        self.mask: Value | None = None
        self._guard: Value | None = None  # a scalar condition without which loads read zeros
        self._b = builder
        self._memory = memory
        self._bounds = bounds
        self._bound: dict[Var, Value] = {}
        self._vector_var: Var | None = None
        self._values: dict[Expr, Value] = {}  # in this statement, under this mask and branch
        self._addresses: dict[tuple[Buffer, tuple[Expr, ...]], Affine] = {}
        self._facts: dict[Expr, tuple[bool, frozenset[Var]]] = {}

    # -- bindings ----------------------------------------------------------------------------------------------

    @contextmanager
    def binding(self, variable: Var, value: Value) -> Iterator[None]:
        self._bound[variable] = value
        self._values = {}
        yield
        del self._bound[variable]
        self._values = {}

    @contextmanager
    def vectorizing(self, variable: Var, extent: int) -> Iterator[None]:
        """`variable` takes all its values at once."""
        if self.lanes:
            raise InternalError(f"loop {variable.name}: a vectorized loop inside another")
        self.lanes, self._vector_var = extent, variable
        with self.binding(variable, self._b.pattern("i64", tuple(range(extent)))):
            yield
        self.lanes, self._vector_var = 0, None

    @contextmanager
    def under(self, mask: Value) -> Iterator[None]:
        """Only the lanes of `mask`."""
        outer, values = self.mask, self._values
        self.mask = mask if outer is None else self._b.binary("and", outer, mask)
        self._values = {}
        yield
        self.mask, self._values = outer, values

    @contextmanager
    def branch(self) -> Iterator[None]:
        """Code that may not run: what it computes is not there afterwards."""
        values = self._values
        self._values = dict(values)
        with self._memory.branch():
            yield
        self._values = values

    def start_statement(self) -> None:
        """Memory may have changed since the last one."""
        self._values = {}

    # -- facts -------------------------------------------------------------------------------------------------

    def _fact(self, expr: Expr) -> tuple[bool, frozenset[Var]]:
        """(whether it loads, its variables)"""
        known = self._facts.get(expr)
        if known is not None:
            return known
        for node in walk(expr):
            if node not in self._facts:
                below = [self._facts[child] for child in node.children]
                loads = isinstance(node, Load) or any(fact[0] for fact in below)
                own = frozenset([node]) if isinstance(node, Var) else frozenset()
                self._facts[node] = loads, own.union(*(fact[1] for fact in below))
        return self._facts[expr]

    def varies(self, expr: Expr) -> bool:
        """Whether it may differ from lane to lane."""
        return self._vector_var is not None and self._vector_var in self._fact(expr)[1]

    def _loads(self, expr: Expr) -> bool:
        return self._fact(expr)[0]

    # -- values ------------------------------------------------------------------------------------------------

    def value(self, expr: Expr) -> Value:
        found = self._values.get(expr)
        if found is None:
            found = self._emit(expr)
            self._values[expr] = found
        return found

    def _emit(self, expr: Expr) -> Value:
        match expr:
            case Const(value, dtype):
                return self._constant(value, dtype)
            case Var():
                return self._bound[expr]
            case Load(buffer, indices):
                return self._load(buffer, indices)
            case Unary(op, x):
                return self._unary(op, x)
            case Binary():
                return self._binary(expr)
            case Compare():
                return self._compare(expr)
            case Select():
                return self._select(expr)
            case Cast(dtype, x):
                return arithmetic.cast(self._b, x.dtype, dtype, self.value(x))
            case Call(_, args, dtype):
                values = [self.value(arg) for arg in args]
                return arithmetic.fused(self._b, dtype, *values)
        raise InternalError(f"no code for {type(expr).__name__} in loop IR")

    def _constant(self, value: int | float | bool, dtype: DType) -> Value:
        if dtype.is_float and dtype is not DType.FLOAT64:
            with np.errstate(all="ignore"):
                value = float(np.asarray(value).astype(dtype.numpy))
        return self._b.constant(REGISTER_TYPES[dtype], value if dtype.is_float else int(value))

    def _unary(self, op: UnaryOp, x: Expr) -> Value:
        value = self.value(x)
        if value.ints is not None and x.dtype is DType.BOOL and op is UnaryOp.NOT:
            return self._known("i1", _each(lambda a, _: 1 - a, value.ints, 0))
        if value.ints is not None and x.dtype is DType.INT64 and op is UnaryOp.NEG:
            return self._known("i64", _each(lambda a, _: -a, value.ints, 0))
        return arithmetic.unary(self._b, op, x.dtype, value)

    def _known(self, element: str, ints: _Ints) -> Value:
        if isinstance(ints, tuple):
            return self._b.pattern(element, ints)
        return self._b.constant(element, ints)

    def _binary(self, expr: Binary) -> Value:
        op, dtype = expr.op, expr.a.dtype
        if op is BinaryOp.POW and (special := self._constant_power(expr)) is not None:
            return special
        a, b = self.value(expr.a), self.value(expr.b)
        if dtype in (DType.INT64, DType.BOOL):
            folds = _INTEGER_FOLDS if dtype is DType.INT64 else _BOOL_FOLDS
            if a.ints is not None and b.ints is not None and op in folds:
                return self._known(a.element, _each(folds[op], a.ints, b.ints))
            if dtype is DType.BOOL and (decided := _decided(op, a, b)) is not None:
                return decided
        if op in _DIVISIONS and dtype.is_integer:
            return self._divide(expr, a, b)
        never_nan = (_never_nan(expr.a), _never_nan(expr.b))
        return arithmetic.binary(self._b, op, dtype, a, b, never_nan)

    def _constant_power(self, expr: Binary) -> Value | None:
        """Products and roots for the common exponents."""
        if not isinstance(expr.b, Const) or not expr.a.dtype.is_float:
            return None
        dtype, exponent = expr.a.dtype, expr.b.value
        if exponent == 0.5:
            return arithmetic.unary(self._b, UnaryOp.SQRT, dtype, self.value(expr.a))
        if exponent not in (1.0, 2.0, 3.0, 4.0):
            return None
        x = self.value(expr.a)
        if exponent == 1.0:
            return x
        square = arithmetic.binary(self._b, BinaryOp.MUL, dtype, x, x)
        if exponent == 2.0:
            return square
        return arithmetic.binary(self._b, BinaryOp.MUL, dtype, square, x if exponent == 3.0 else square)

    def _divide(self, expr: Binary, a: Value, b: Value) -> Value:
        """With what bounds say: no care for signs, and vectors of 64-bit indices in 32 bits."""
        a, b = self._b.unify(a, b)
        signed = expr.dtype.kind is Kind.INT
        interval = self._bounds(expr.a) if isinstance(expr.b, Const) else None
        nonnegative = not signed or (interval is not None and interval[0] >= 0)
        fits = interval is not None and interval[0] >= 0 and interval[1] < 1 << 31
        if a.lanes and BITS[a.element] == 64 and fits and isinstance(b.ints, int) and 0 < b.ints < 1 << 31:
            narrow = self._b.convert("trunc", a, "i32")
            divisor = self._b.constant("i32", b.ints, a.lanes)
            result = arithmetic.divide(self._b, expr.op, signed, narrow, divisor, nonnegative=True)
            return self._b.convert("zext", result, "i64")
        return arithmetic.divide(self._b, expr.op, signed, a, b, nonnegative=nonnegative)

    # -- conditions --------------------------------------------------------------------------------------------

    def _compare(self, expr: Compare) -> Value:
        if expr.a.dtype is DType.INT64 and self.varies(expr):
            fast = self._compare_lanes(expr)
            if fast is not None:
                return fast
        a, b = self.value(expr.a), self.value(expr.b)
        if a.ints is not None and b.ints is not None:
            return self._known("i1", _each(_COMPARE_FOLDS[expr.op], a.ints, b.ints))
        return arithmetic.compare(self._b, expr.op, expr.a.dtype, a, b)

    def _compare_lanes(self, expr: Compare) -> Value | None:
        """`lane constant + scalar <op> 0` as a comparison of 32-bit lanes with -scalar, clamped to their range."""
        difference = self.linear(as_affine(expr.b).plus(as_affine(expr.a), -1))  # b - a
        if difference.vectors or not difference.lanes:
            return None
        lanes = tuple(-lane for lane in difference.lanes)
        if not difference.terms:
            return self._known("i1", _each(_COMPARE_FOLDS[expr.op], lanes, difference.const))
        low, high = min(lanes) - 1, max(lanes) + 1
        if not -(1 << 30) < low <= high < 1 << 30:
            return None
        bound = self._b.intrinsic("smin", self._b.intrinsic("smax", self._scalar_sum(difference), low), high)
        narrow = self._b.convert("trunc", bound, "i32")
        return arithmetic.compare(self._b, expr.op, DType.INT32, self._b.pattern("i32", lanes), narrow)

    def _scalar_sum(self, address: Address) -> Value:
        total: Value | None = None
        for value, coefficient in sorted(address.terms, key=lambda term: term[0].level):
            term = self._b.binary("mul", value, coefficient) if coefficient != 1 else value
            total = term if total is None else self._b.binary("add", total, term)
        assert total is not None
        return self._b.binary("add", total, address.const) if address.const else total

    def _select(self, expr: Select) -> Value:
        condition = self.value(expr.condition)
        if condition.ints is not None and len(set(_as_tuple(condition.ints))) == 1:
            return self.value(expr.a if _as_tuple(condition.ints)[0] else expr.b)
        if not self._loads(expr.a) and not self._loads(expr.b):
            return self._b.select(condition, self.value(expr.a), self.value(expr.b))
        if condition.lanes:
            a = self._guarded(condition, expr.a)
            return self._b.select(condition, a, self._guarded(self._b.binary("xor", condition, 1), expr.b))
        if self.mask is None and self._is_redirectable(expr.a) and self._is_redirectable(expr.b):
            return self._select_redirected(condition, expr)
        lanes = self.lanes if self.varies(expr.a) or self.varies(expr.b) else 0
        result = self._b.branch(condition, self._arm(expr.a, lanes), self._arm(expr.b, lanes))
        assert result is not None
        return result

    def _select_redirected(self, condition: Value, expr: Select) -> Value:
        """Without a branch: loads of the arm that is not taken read zeros."""
        a = self._with_guard(condition, expr.a)
        if isinstance(expr.a, Load) and isinstance(expr.b, Const) and _is_zero(expr.b):
            return a
        b = self._with_guard(self._b.binary("xor", condition, 1), expr.b)
        if isinstance(expr.b, Load) and isinstance(expr.a, Const) and _is_zero(expr.a):
            return b
        return self._b.select(condition, a, b)

    def _with_guard(self, condition: Value, expr: Expr) -> Value:
        if not self._loads(expr):
            return self.value(expr)
        outer, values = self._guard, self._values
        self._guard = condition if outer is None else self._b.binary("and", outer, condition)
        self._values = {}
        result = self.value(expr)
        self._guard, self._values = outer, values
        return result

    def _load(self, buffer: Buffer, indices: tuple[Expr, ...]) -> Value:
        affine = self._affine(buffer, indices)
        address = self.linear(affine) if self._guard is None else self._redirected(self._guard, buffer, affine)
        mask = None if self.mask is None or self._is_inside(buffer, affine) else self.mask
        return self._memory.load(buffer, address, mask)

    def _is_inside(self, buffer: Buffer, affine: Affine) -> bool:
        """Whether every iteration and lane, wanted or not, stays in the buffer's memory."""
        interval = self._bounds.affine(affine)
        return interval is not None and interval[0] >= 0 and interval[1] < self._memory.elements(buffer)

    def _is_redirectable(self, expr: Expr) -> bool:
        """Whether `expr` is cheap, and the lanes of its loads lie near each other."""
        if not _is_cheap(expr):
            return False
        for load in _walk_values(expr):
            if isinstance(load, Load):
                affine = self._affine(load.source, load.indices)
                lanes = Affine({atom: k for atom, k in affine.terms.items() if self.varies(atom)}, 0)
                interval = self._bounds.affine(lanes)
                if interval is None or interval[1] - interval[0] >= _MAX_ZEROS:
                    return False
        return True

    def _redirected(self, condition: Value, buffer: Buffer, affine: Affine) -> Address:
        """Terms of loops inside those that `condition` depends on are added to the pointer it selects."""
        outer, inner = dict(affine.terms), {}
        low = high = 0
        for atom in sorted(affine.terms, key=lambda atom: -self._level(atom)):
            interval = self._bounds(atom)
            if interval is None or self._level(atom) <= condition.level:
                break
            ends = (affine.terms[atom] * interval[0], affine.terms[atom] * interval[1])
            if high + max(ends) - low - min(ends) >= _MAX_ZEROS:
                break
            low, high = low + min(ends), high + max(ends)
            inner[atom] = outer.pop(atom)
        start, rest = self.linear(Affine(outer, affine.const)), self.linear(Affine(inner, 0))
        rest.base = self._memory.redirected(buffer, condition, start, low, high - low + 1)
        return rest

    def _level(self, atom: Expr) -> int:
        """How deep `atom` is defined; lanes are deepest."""
        return _LANES_LEVEL if self.varies(atom) else self.value(atom).level

    def _guarded(self, mask: Value, expr: Expr) -> Value:
        if not self._loads(expr):
            return self.value(expr)
        with self.under(mask):
            return self.value(expr)

    def _arm(self, expr: Expr, lanes: int) -> Callable[[], Value]:
        def emit() -> Value:
            with self.branch():
                return self._b.broadcast(self.value(expr), lanes)

        return emit

    # -- addresses ---------------------------------------------------------------------------------------------

    def address(self, buffer: Buffer, indices: tuple[Expr, ...]) -> Address:
        return self.linear(self._affine(buffer, indices))

    def _affine(self, buffer: Buffer, indices: tuple[Expr, ...]) -> Affine:
        key = (buffer, indices)
        affine = self._addresses.get(key)
        if affine is None:
            affine = Affine({}, 0)
            for index, stride in zip(indices, buffer.strides, strict=True):
                affine = affine.plus(as_affine(index), stride)
            self._addresses[key] = affine
        return affine

    def linear(self, affine: Affine) -> Address:
        """The sum under the present bindings: constants folded, scalars, constant lanes and other lanes apart."""
        const = affine.const
        terms: list[tuple[Value, int]] = []
        vectors: list[tuple[Value, int]] = []
        lanes: tuple[int, ...] = ()
        for atom, coefficient in affine.terms.items():
            value = self._bound[atom] if isinstance(atom, Var) else self.value(atom)
            if isinstance(value.ints, int):
                const += coefficient * value.ints
            elif value.ints is not None:
                lanes = _lane_sum(lanes, coefficient, value.ints)
            elif value.lanes:
                vectors.append((value, coefficient))
            else:
                terms.append((value, coefficient))
        if vectors and not lanes:
            lanes = (0,) * vectors[0][0].lanes
        return Address(tuple(terms), const, lanes, tuple(vectors))

    # -- accumulation ------------------------------------------------------------------------------------------

    def accumulated(self, target: Load, value: Expr) -> Value:
        """`value`, where it is a sum of `target` and products: by fused multiply-adds, `target` first."""
        if value.dtype not in (DType.FLOAT32, DType.FLOAT64):
            return self.value(value)
        terms = list(_sum_terms(value))
        if (1, target) not in terms or not any(_is_product(term) for _, term in terms):
            return self.value(value)
        terms.remove((1, target))
        result = self.value(target)
        for sign, term in terms:
            if isinstance(term, Binary) and _is_product(term):
                a = self.value(term.a)
                result = self._b.fma(self._b.neg(a) if sign < 0 else a, self.value(term.b), result)
            else:
                result = self._b.binary("fadd" if sign > 0 else "fsub", result, self.value(term))
        return result


@cache
def _lane_sum(lanes: tuple[int, ...], coefficient: int, other: tuple[int, ...]) -> tuple[int, ...]:
    """`lanes + coefficient * other`, no lanes counting as zeros."""
    if not lanes:
        return other if coefficient == 1 else tuple(coefficient * lane for lane in other)
    return tuple(lane + coefficient * own for lane, own in zip(lanes, other, strict=True))


def _sum_terms(expr: Expr) -> Iterator[tuple[int, Expr]]:
    """(sign, term) of a sum's terms in order."""
    match expr:
        case Binary(BinaryOp.ADD | BinaryOp.SUB as op, a, b):
            yield from _sum_terms(a)
            sign = 1 if op is BinaryOp.ADD else -1
            yield from ((sign * own, term) for own, term in _sum_terms(b))
        case _:
            yield 1, expr


def _is_product(expr: Expr) -> bool:
    return isinstance(expr, Binary) and expr.op is BinaryOp.MUL


def _is_cheap(expr: Expr) -> bool:
    """Whether computing it in vain costs less than a branch: few nodes, and loads of parameters at plain indices."""
    nodes = list(_walk_values(expr))
    loads = [node for node in nodes if isinstance(node, Load)]
    plain = all(node.source.scope is Scope.GLOBAL and not _has_inner_load(node) for node in loads)
    return plain and len(nodes) <= _MAX_CHEAP_NODES and not any(_is_slow(node) for node in nodes)


def _walk_values(expr: Expr) -> Iterator[Expr]:
    """The nodes of `expr`, but for indices."""
    yield expr
    if not isinstance(expr, Load):
        for child in expr.children:
            yield from _walk_values(child)


def _has_inner_load(load: Load) -> bool:
    return any(isinstance(node, Load) for index in load.indices for node in walk(index))


def _is_slow(expr: Expr) -> bool:
    return (isinstance(expr, Unary) and expr.op in FUNCTIONS) or (isinstance(expr, Binary) and expr.op in _SLOW)


def _is_zero(expr: Const) -> bool:
    return expr.value == 0 and not (expr.dtype.is_float and math.copysign(1.0, expr.value) < 0)


def _never_nan(expr: Expr) -> bool:
    match expr:
        case Const(value):
            return value == value
        case Cast(_, x):
            return not x.dtype.is_float or _never_nan(x)
    return False


def _decided(op: BinaryOp, a: Value, b: Value) -> Value | None:
    """A conjunction or disjunction where one side is known and decides, or drops out."""
    for known, other in ((a, b), (b, a)):
        if isinstance(known.ints, int) and op in (BinaryOp.AND, BinaryOp.OR):
            return known if bool(known.ints) is (op is BinaryOp.OR) else other
    return None


def _as_tuple(ints: _Ints) -> tuple[int, ...]:
    return ints if isinstance(ints, tuple) else (ints,)


def _each(function: Callable[[int, int], int | bool], a: _Ints, b: _Ints) -> _Ints:
    """`function` on known integers, lane by lane."""
    if isinstance(a, int) and isinstance(b, int):
        return int(function(a, b))
    count = max(len(_as_tuple(a)), len(_as_tuple(b)))
    left = a if isinstance(a, tuple) else (a,) * count
    right = b if isinstance(b, tuple) else (b,) * count
    return tuple(int(function(x, y)) for x, y in zip(left, right, strict=True))
