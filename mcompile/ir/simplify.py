"""Canonical form of expressions, made for index arithmetic.

INT64 expressions become linear sums over atoms (see `ir.affine`), with the rules of floor division:

    (c*q + r) // c            ->  q + r // c         (r // c is folded by bounds)
    (c*q + r) % c             ->  r % c
    (g*s + t) // (g*d)        ->  s // d             0 <= t < g
    (g*s + t) % (g*d)         ->  g * (s % d) + t    0 <= t < g
    (x // a) // b             ->  x // (a*b)
    (x % (a*b)) // a          ->  (x // a) % b
    k*c*(x // c) + k*(x % c)  ->  k*x
    k*x - k*c*(x // c)        ->  k * (x % c)

which together collapse an unravel of a ravel. Comparisons, MIN and MAX fold by the bounds of the difference of their
sides. Index arithmetic on variables is taken not to wrap around; where values that were loaded could make it
wrap, the rules that need that are not applied. Floats are never reordered nor folded.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

import numpy as np

from mcompile.dtypes import DType
from mcompile.ir.affine import ZERO, Affine, as_affine, atom, constant, order_key
from mcompile.ir.bounds import Bounds, Interval, Ranges
from mcompile.ir.expr import (
    Binary,
    BinaryOp,
    Cast,
    Compare,
    CompareOp,
    Const,
    Expr,
    Select,
    Unary,
    UnaryOp,
    Var,
    with_children,
)

_INT64 = DType.INT64
_HALF = 1 << 63
_TRUE: Expr = Const(True, DType.BOOL)
_FALSE: Expr = Const(False, DType.BOOL)
_INVERSE = {
    CompareOp.EQ: CompareOp.NE,
    CompareOp.NE: CompareOp.EQ,
    CompareOp.LT: CompareOp.GE,
    CompareOp.LE: CompareOp.GT,
    CompareOp.GT: CompareOp.LE,
    CompareOp.GE: CompareOp.LT,
}


def simplify(expr: Expr, ranges: Ranges | None = None) -> Expr:
    """`expr` in canonical form, of equal value wherever each variable lies in its (inclusive) range.

    A variable without a range may be anything. To simplify many expressions under the same ranges, keep a
    `Simplifier`.
    """
    return Simplifier(ranges)(expr)


class Simplifier:
    """`simplify` under fixed ranges, remembering what it did."""

    def __init__(self, ranges: Ranges | None = None) -> None:
        self.bounds = Bounds(ranges)
        self._affines: dict[Expr, Affine] = {}  # of INT64 nodes
        self._exprs: dict[Expr, Expr] = {}

    def __call__(self, expr: Expr) -> Expr:
        stack = [(expr, False)]
        while stack:
            node, ready = stack.pop()
            if node in self._affines or node in self._exprs:
                continue
            if ready or not node.children:
                self._visit(node)
            else:
                stack.append((node, True))
                stack.extend((child, False) for child in node.children)
        return self._expr(expr)

    def affine(self, expr: Expr) -> Affine:
        """The canonical sum of an INT64 expression."""
        self(expr)
        return self._affines[expr]

    def _visit(self, node: Expr) -> None:
        if node.dtype is _INT64:
            self._affines[node] = self._index(node)
        else:
            self._exprs[node] = self._other(node)

    def _expr(self, node: Expr) -> Expr:
        """The new form of a visited node."""
        known = self._exprs.get(node)
        if known is None:
            affine = self._affines[node]
            known = self._exprs[node] = affine.to_expr()
            self._affines.setdefault(known, affine)
            self._exprs.setdefault(known, known)
        return known

    def _rebuilt(self, node: Expr) -> Expr:
        children = node.children
        new = tuple(self._expr(child) for child in children)
        return node if all(a is b for a, b in zip(children, new, strict=True)) else with_children(node, new)

    # INT64

    def _index(self, node: Expr) -> Affine:
        match node:
            case Const(value):
                return constant(int(value))
            case Binary(op, a, b):
                return self._binary(op, a, b)
            case Unary(UnaryOp.NEG, x):
                return self._affines[x].scaled(-1)
            case Unary(UnaryOp.ABS, x):
                interval = self.bounds.affine(self._affines[x])
                if interval is not None and interval[0] >= 0:
                    return self._affines[x]
            case Select(condition, a, b):
                return self._select_index(condition, a, b)
        return self._atom(node if isinstance(node, Var) else self._rebuilt(node))

    def _atom(self, expr: Expr) -> Affine:
        """A term of its own, unless its bounds leave one value."""
        if isinstance(expr, Const):
            return constant(int(expr.value))
        interval = self.bounds(expr)
        return constant(interval[0]) if interval is not None and interval[0] == interval[1] else atom(expr)

    def _binary(self, op: BinaryOp, a: Expr, b: Expr) -> Affine:
        x, y = self._affines[a], self._affines[b]
        match op:
            case BinaryOp.ADD:
                return self._merged(x + y)
            case BinaryOp.SUB:
                return self._merged(x - y)
            case BinaryOp.MUL:
                return self._product(x, y)
            case BinaryOp.FLOORDIV if y.is_const and y.const:
                return self._div(x, y.const)
            case BinaryOp.FLOORMOD if y.is_const and y.const:
                return self._mod(x, y.const)
            case BinaryOp.TRUNCDIV if y.is_const and y.const > 0 and self._is_natural(x):
                return self._div(x, y.const)
            case BinaryOp.TRUNCMOD if y.is_const and y.const > 0 and self._is_natural(x):
                return self._mod(x, y.const)
            case BinaryOp.MIN | BinaryOp.MAX:
                return self._extremum(op, a, b)
        return self._atom(Binary(op, self._expr(a), self._expr(b)))

    def _product(self, x: Affine, y: Affine) -> Affine:
        if y.is_const:
            return x.scaled(y.const)
        if x.is_const:
            return y.scaled(x.const)
        factor = 1
        sides = []
        for side in (x, y):
            if len(side.terms) == 1 and side.const == 0:
                ((only, k),) = side.terms.items()
                factor *= k
                sides.append(only)
            else:
                sides.append(side.to_expr())
        return self._atom(Binary(BinaryOp.MUL, *sorted(sides, key=order_key))).scaled(factor)

    def _is_natural(self, x: Affine) -> bool:
        interval = self.bounds.affine(x)
        return interval is not None and interval[0] >= 0

    def _may_wrap(self, x: Affine) -> bool:
        interval = self.bounds.affine(x)
        return interval is not None and not (-_HALF <= interval[0] <= interval[1] < _HALF)

    def _div(self, x: Affine, c: int) -> Affine:
        """x // c for c != 0."""
        if c < 0:
            x, c = x.scaled(-1), -c
        if c == 1:
            return x
        if self._may_wrap(x):
            return self._atom(Binary(BinaryOp.FLOORDIV, x.to_expr(), Const(c, _INT64)))
        quotient, rest = _split(x, c)
        q = _quotient(self.bounds.affine(rest), c)
        if q is not None:
            return quotient + q
        for g, scaled, _ in self._factorings(rest, c):
            return self._merged(quotient + self._div(scaled, c // g))
        return self._merged(quotient + self._div_rest(rest, c))

    def _div_rest(self, rest: Affine, c: int) -> Affine:
        """Rules for a numerator of one term."""
        if len(rest.terms) == 1:
            ((only, k),) = rest.terms.items()
            match self._exact(only):
                case Binary(BinaryOp.FLOORDIV, y, Const(int(a))) if k == 1:
                    return self._div(as_affine(y) + a * rest.const, a * c)
                case Binary(BinaryOp.FLOORMOD, y, Const(int(m))) if k == 1 and rest.const == 0 and m % c == 0:
                    return self._mod(self._div(as_affine(y), c), m // c)
        return self._atom(Binary(BinaryOp.FLOORDIV, rest.to_expr(), Const(c, _INT64)))

    def _mod(self, x: Affine, c: int) -> Affine:
        """x % c for c != 0."""
        if c < 0:
            return self._mod(x.scaled(-1), -c).scaled(-1)
        if c == 1:
            return ZERO
        if self._may_wrap(x):
            return self._atom(Binary(BinaryOp.FLOORMOD, x.to_expr(), Const(c, _INT64)))
        _, rest = _split(x, c)
        q = _quotient(self.bounds.affine(rest), c)
        if q is not None:
            return self._merged(rest - q * c)
        for only, k in rest.terms.items():
            match self._exact(only):
                case Binary(BinaryOp.FLOORMOD, y, Const(int(m))) if k * m % c == 0:
                    return self._mod(rest.plus(atom(only), -k).plus(as_affine(y), k), c)
        for g, scaled, low in self._factorings(rest, c):
            return self._merged(self._mod(scaled, c // g).scaled(g) + low)
        return self._atom(Binary(BinaryOp.FLOORMOD, rest.to_expr(), Const(c, _INT64)))

    def _factorings(self, x: Affine, c: int) -> Iterator[tuple[int, Affine, Affine]]:
        """Ways to write x = g*s + t with 0 <= t < g, 1 < g < c a divisor of c: (g, s, t), largest g first."""
        divisors: set[int] = set()
        for k in x.terms.values():
            divisors |= {gcd(k, g) for g in (*divisors, c)}
        for g in sorted(divisors, reverse=True):
            if not 1 < g < c:
                continue
            low = Affine({term: k for term, k in x.terms.items() if k % g}, x.const)
            m = _quotient(self.bounds.affine(low), g)
            if m is not None:
                high = Affine({term: k // g for term, k in x.terms.items() if k % g == 0}, m)
                yield g, high, low - m * g

    def _merged(self, x: Affine) -> Affine:
        """Joins a quotient and a remainder of the same numerator, until none are left."""
        while True:
            for term, k in x.terms.items():
                division = self._exact(term)
                joined = None if division is None else self._joined(x, division, k)
                if joined is not None:
                    x = joined
                    break
            else:
                return x

    def _exact(self, term: Expr) -> Binary | None:
        """`term` if it is a division by a positive constant whose numerator does not wrap."""
        match term:
            case Binary(BinaryOp.FLOORDIV | BinaryOp.FLOORMOD, y, Const(c)) if c > 0:
                return None if self._may_wrap(as_affine(y)) else term
        return None

    def _joined(self, x: Affine, term: Binary, k: int) -> Affine | None:
        y, c = as_affine(term.a), as_affine(term.b).const
        if term.op is BinaryOp.FLOORMOD:
            quotient = self._div(y, c)
            if quotient.terms and _contains(x, quotient, k * c):
                return x.plus(atom(term), -k).plus(quotient, -k * c).plus(y, k)
        elif k % c == 0 and _contains(x, y, -(k // c)):
            return x.plus(atom(term), -k).plus(y, k // c).plus(self._mod(y, c), -(k // c))
        return None

    def _extremum(self, op: BinaryOp, a: Expr, b: Expr) -> Affine:
        """MIN or MAX of all that stand under the same op, without those that another one always beats."""
        sign = 1 if op is BinaryOp.MIN else -1
        kept: list[tuple[Expr, Affine]] = []
        for candidate in dict.fromkeys([*_flat(op, self._expr(a)), *_flat(op, self._expr(b))]):
            affine = as_affine(candidate)
            if any(self._never_above(other, affine, sign) for _, other in kept):
                continue
            kept = [(e, other) for e, other in kept if not self._never_above(affine, other, sign)]
            kept.append((candidate, affine))
        if len(kept) == 1:
            return kept[0][1]
        kept.sort(key=lambda pair: order_key(pair[0]))
        result = kept[0][0]
        for candidate, _ in kept[1:]:
            result = Binary(op, result, candidate)
        return self._atom(result)

    def _never_above(self, x: Affine, y: Affine, sign: int) -> bool:
        if self._may_wrap(x) or self._may_wrap(y):
            return False
        interval = self.bounds.affine(x - y)
        return interval is not None and (interval[1] <= 0 if sign > 0 else interval[0] >= 0)

    def _select_index(self, condition: Expr, a: Expr, b: Expr) -> Affine:
        condition, x, y = self._expr(condition), self._affines[a], self._affines[b]
        if condition is _TRUE or x == y:
            return x
        if condition is _FALSE:
            return y
        if isinstance(condition, Unary):
            return self._atom(Select(condition.x, y.to_expr(), x.to_expr()))
        return self._atom(Select(condition, x.to_expr(), y.to_expr()))

    # every other dtype

    def _other(self, node: Expr) -> Expr:
        match node:
            case Compare(op, a, b) if a.dtype is _INT64:
                return self._compare(op, self._affines[a], self._affines[b])
            case Compare() | Select() | Cast():
                return _fold(self._rebuilt(node), self.bounds)
            case Binary(op, a, b) if node.dtype is DType.BOOL and op in _LOGICAL:
                return self._logical(op, self._expr(a), self._expr(b))
            case Unary(UnaryOp.NOT, x) if node.dtype is DType.BOOL:
                return self._negation(self._expr(x))
            case Binary():
                return _identity_free(self._rebuilt(node))
        return self._rebuilt(node) if node.children else node

    def _compare(self, op: CompareOp, a: Affine, b: Affine) -> Expr:
        if self._may_wrap(a) or self._may_wrap(b):
            return Compare(op, a.to_expr(), b.to_expr())
        result = self._compare_difference(op, self._merged(a - b))
        if isinstance(result, Compare) and any(self._may_wrap(as_affine(side)) for side in result.children):
            return Compare(op, a.to_expr(), b.to_expr())
        return result

    def _compare_difference(self, op: CompareOp, difference: Affine) -> Expr:
        """difference op 0."""
        if op in (CompareOp.EQ, CompareOp.NE):
            return self._equality(op, difference)
        if op in (CompareOp.GT, CompareOp.GE):
            difference = difference.scaled(-1)
        return self._negative(difference if op in (CompareOp.LT, CompareOp.GT) else difference - 1)

    def _negative(self, x: Affine) -> Expr:
        """x < 0."""
        interval = self.bounds.affine(x)
        if interval is not None and interval[1] < 0:
            return _TRUE
        if interval is not None and interval[0] >= 0:
            return _FALSE
        scale = gcd(*x.terms.values())
        if scale > 1:
            return self._negative(Affine({term: k // scale for term, k in x.terms.items()}, x.const // scale))
        for _, high, _ in self._factorings(x, 2 * _product_of(x)):
            return self._negative(high)
        if len(x.terms) == 1:
            ((only, k),) = x.terms.items()
            match self._exact(only):
                case Binary(BinaryOp.FLOORDIV, y, Const(int(c))) if k == 1:
                    return self._negative(as_affine(y) + x.const * c)
                case Binary(BinaryOp.FLOORDIV, y, Const(int(c))) if k == -1:
                    return self._negative(as_affine(y).scaled(-1) + ((x.const + 1) * c - 1))
        return self._order(x)

    def _order(self, x: Affine) -> Expr:
        """x < 0 with what is added to the left, what is subtracted to the right."""
        left, right = _sides(x)
        if not left.terms:
            return Compare(CompareOp.GE, right.to_expr(), Const(x.const + 1, _INT64))
        if right.terms and x.const == -1:
            return Compare(CompareOp.LE, left.to_expr(), right.to_expr())
        return Compare(CompareOp.LT, left.to_expr(), (right - x.const).to_expr())

    def _equality(self, op: CompareOp, x: Affine) -> Expr:
        """x == 0, or x != 0."""
        interval = self.bounds.affine(x)
        if interval == (0, 0):
            return _truth(op is CompareOp.EQ)
        scale = gcd(*x.terms.values()) if x.terms else 1
        if x.const % scale or (interval is not None and not interval[0] <= 0 <= interval[1]):
            return _truth(op is CompareOp.NE)
        x = Affine({term: k // scale for term, k in x.terms.items()}, x.const // scale)
        if x.terms[min(x.terms, key=order_key)] < 0:
            x = x.scaled(-1)
        left, right = _sides(x)
        return Compare(op, left.to_expr(), (right - x.const).to_expr())

    def _logical(self, op: BinaryOp, a: Expr, b: Expr) -> Expr:
        if op is BinaryOp.XOR:
            return self._exclusive(a, b)
        neutral, absorbing = (_TRUE, _FALSE) if op is BinaryOp.AND else (_FALSE, _TRUE)
        operands = [x for x in dict.fromkeys([*_flat(op, a), *_flat(op, b)]) if x is not neutral]
        if absorbing in operands:
            return absorbing
        result = neutral
        for operand in operands:
            result = operand if result is neutral else Binary(op, result, operand)
        return result

    def _exclusive(self, a: Expr, b: Expr) -> Expr:
        if a is b:
            return _FALSE
        if isinstance(a, Const):
            a, b = b, a
        if isinstance(b, Const):
            return self._negation(a) if b is _TRUE else a
        return Binary(BinaryOp.XOR, a, b)

    def _negation(self, x: Expr) -> Expr:
        match x:
            case Const(value):
                return _truth(not value)
            case Unary(UnaryOp.NOT, y):
                return y
            case Compare(op, a, b) if a.dtype is _INT64:
                return self._compare(_INVERSE[op], as_affine(a), as_affine(b))
            case Compare(op, a, b) if not a.dtype.is_float or op in (CompareOp.EQ, CompareOp.NE):
                return Compare(_INVERSE[op], a, b)
        return Unary(UnaryOp.NOT, x)


_LOGICAL = (BinaryOp.AND, BinaryOp.OR, BinaryOp.XOR)


def _truth(value: bool) -> Expr:
    return _TRUE if value else _FALSE


def _split(x: Affine, c: int) -> tuple[Affine, Affine]:
    """x as c * quotient + rest, every coefficient of the rest smaller than c, its constant in [0, c)."""
    quotients, rests = {}, {}
    for term, k in x.terms.items():
        q = k // c if k >= 0 else -(-k // c)
        if q:
            quotients[term] = q
        if k != q * c:
            rests[term] = k - q * c
    return Affine(quotients, x.const // c), Affine(rests, x.const % c)


def _quotient(interval: Interval | None, c: int) -> int | None:
    """The one value that x // c takes for x in `interval`, if it is one."""
    if interval is None:
        return None
    low, high = interval[0] // c, interval[1] // c
    return low if low == high else None


def _contains(x: Affine, part: Affine, factor: int) -> bool:
    """Whether the terms of factor * part are terms of x."""
    return bool(part.terms) and all(x.terms.get(term) == factor * k for term, k in part.terms.items())


def _sides(x: Affine) -> tuple[Affine, Affine]:
    """The terms that are added and, negated, those that are subtracted."""
    left = {term: k for term, k in x.terms.items() if k > 0}
    right = {term: -k for term, k in x.terms.items() if k < 0}
    return Affine(left, 0), Affine(right, 0)


def _product_of(x: Affine) -> int:
    """A common multiple of the coefficients."""
    result = 1
    for k in x.terms.values():
        result *= abs(k)
    return result


def _flat(op: BinaryOp, expr: Expr) -> Iterator[Expr]:
    if isinstance(expr, Binary) and expr.op is op:
        yield from _flat(op, expr.a)
        yield from _flat(op, expr.b)
    else:
        yield expr


def _fold(node: Expr, bounds: Bounds) -> Expr:
    """Selects, casts and comparisons of dtypes other than INT64."""
    match node:
        case Select(condition, a, b) if a is b or condition is _TRUE:
            return a
        case Select(condition, _, b) if condition is _FALSE:
            return b
        case Select(condition, a, b) if a is _TRUE and b is _FALSE:
            return condition
        case Select(Unary(UnaryOp.NOT, condition), a, b):
            return Select(condition, b, a)
        case Cast(dtype, x) if dtype is x.dtype:
            return x
        case Cast(dtype, Const(value, source)):
            return _cast_constant(value, source, dtype)
        case Compare(op, a, b) if not a.dtype.is_float:
            return _compare_bounds(node, op, bounds(a), bounds(b)) if a is not b else _truth(op in _REFLEXIVE)
    return node


_REFLEXIVE = (CompareOp.EQ, CompareOp.LE, CompareOp.GE)


def _cast_constant(value: float, source: DType, dtype: DType) -> Expr:
    with np.errstate(all="ignore"):
        return Const(np.asarray(value, source.numpy).astype(dtype.numpy).item(), dtype)


def _compare_bounds(node: Expr, op: CompareOp, a: Interval | None, b: Interval | None) -> Expr:
    if a is None or b is None:
        return node
    if op in (CompareOp.GT, CompareOp.GE):
        a, b = b, a
    match op:
        case CompareOp.LT | CompareOp.GT:
            always, never = a[1] < b[0], a[0] >= b[1]
        case CompareOp.LE | CompareOp.GE:
            always, never = a[1] <= b[0], a[0] > b[1]
        case _:
            equal, apart = a[0] == a[1] == b[0] == b[1], a[1] < b[0] or b[1] < a[0]
            always, never = (equal, apart) if op is CompareOp.EQ else (apart, equal)
    return _TRUE if always else _FALSE if never else node


def _identity_free(node: Expr) -> Expr:
    """Operations that give back their operand: exact for floats too (but x + 0.0 is not, for -0.0)."""
    match node:
        case Binary(BinaryOp.MUL | BinaryOp.DIV | BinaryOp.FLOORDIV | BinaryOp.TRUNCDIV, a, Const(1)):
            return a
        case Binary(BinaryOp.MUL, Const(1), b):
            return b
        case Binary(BinaryOp.ADD, a, Const(0)) | Binary(BinaryOp.ADD, Const(0), a) if not node.dtype.is_float:
            return a
        case Binary(BinaryOp.SUB, a, Const(0, dtype) as zero) if not dtype.is_float or str(zero.value) == "0.0":
            return a
        case Binary(BinaryOp.MIN | BinaryOp.MAX, a, b) if a is b:
            return a
    return node
