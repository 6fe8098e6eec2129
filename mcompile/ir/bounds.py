"""Intervals that hold an integer expression's value."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mcompile.dtypes import DType
from mcompile.ir.affine import Affine, as_affine
from mcompile.ir.expr import Binary, BinaryOp, Cast, Compare, Const, Expr, Load, Select, Unary, UnaryOp, Var

Interval = tuple[int, int]
Ranges = Mapping[Var, Interval]
_Rule = Callable[[Interval, Interval], Interval | None]


def bounds(expr: Expr, ranges: Ranges | None = None) -> Interval | None:
    """Inclusive (low, high) of an integer or BOOL expression; None where nothing is known.

    `ranges` gives inclusive ranges of variables; a variable without one is unknown. A loaded integer may be
    anything its dtype holds, and so may a result that could wrap around.
    """
    return Bounds(ranges)(expr)


class Bounds:
    """`bounds` under fixed ranges, remembering the answers."""

    def __init__(self, ranges: Ranges | None = None) -> None:
        self._ranges: Ranges = ranges or {}
        self._memo: dict[Expr, Interval | None] = {}

    def __call__(self, expr: Expr) -> Interval | None:
        if expr in self._memo:
            return self._memo[expr]
        if expr.dtype not in _LIMITS:
            result = None
        elif expr.dtype is DType.INT64 and isinstance(expr, Binary) and expr.op in _LINEAR:
            affine = as_affine(expr)
            result = self._node(expr) if affine.terms == {expr: 1} else self.affine(affine)
        else:
            result = self._node(expr)
        result = _wrapped(result, expr.dtype)
        self._memo[expr] = result
        return result

    def affine(self, affine: Affine) -> Interval | None:
        """Of a sum, in unbounded integers."""
        low = high = affine.const
        for atom, k in affine.terms.items():
            interval = self(atom)
            if interval is None:
                return None
            a, b = interval
            if k > 0:
                low += k * a
                high += k * b
            else:
                low += k * b
                high += k * a
        return low, high

    def _node(self, expr: Expr) -> Interval | None:
        match expr:
            case Const(value):
                return int(value), int(value)
            case Var():
                return self._ranges.get(expr) or _narrow(expr.dtype)
            case Load():
                return _LIMITS.get(expr.dtype)
            case Compare() | Unary(UnaryOp.IS_NAN | UnaryOp.IS_INF):
                return 0, 1
            case Select(_, a, b):
                return _both(self(a), self(b), _union)
            case Cast(dtype, x):
                return self._cast(dtype, x)
            case Unary(op, x):
                return _unary(op, self(x), expr.dtype)
            case Binary(op, a, b):
                if op in _BITWISE and expr.dtype is DType.BOOL:
                    return 0, 1
                rule = _BINARY.get(op)
                return _narrow(expr.dtype) if rule is None else _both(self(a), self(b), rule)
        return _narrow(expr.dtype)

    def _cast(self, dtype: DType, x: Expr) -> Interval | None:
        if dtype is DType.BOOL:
            return 0, 1
        if x.dtype.is_float:
            return _LIMITS.get(dtype)
        interval = self(x)
        return _narrow(dtype) if interval is None else interval


_LIMITS = {dtype: (int(dtype.min_value), int(dtype.max_value)) for dtype in DType if not dtype.is_float}


def _narrow(dtype: DType) -> Interval | None:
    """What is known of any value of `dtype`: of INT64 nothing, so that index arithmetic is not said to wrap."""
    return None if dtype is DType.INT64 else _LIMITS.get(dtype)


def _wrapped(interval: Interval | None, dtype: DType) -> Interval | None:
    if interval is None:
        return None
    limits = _LIMITS.get(dtype)
    if limits is None or (limits[0] <= interval[0] and interval[1] <= limits[1]):
        return interval
    return limits


def _both(a: Interval | None, b: Interval | None, rule: _Rule) -> Interval | None:
    if a is not None and b is not None:
        return rule(a, b)
    return _any_mod(b) if rule is _floormod and b is not None else None


def _unary(op: UnaryOp, interval: Interval | None, dtype: DType) -> Interval | None:
    if dtype is DType.BOOL:
        return 0, 1
    if op is UnaryOp.SIGN:
        low, high = interval or (-1, 1)
        return max(-1, min(low, 1)), max(-1, min(high, 1))
    if interval is None:
        return None
    low, high = interval
    match op:
        case UnaryOp.NEG:
            return -high, -low
        case UnaryOp.NOT:
            return (-1 - high, -1 - low) if dtype.min_value < 0 else _LIMITS.get(dtype)
        case UnaryOp.ABS:
            return (0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))
    return _LIMITS.get(dtype)


def _union(a: Interval, b: Interval) -> Interval:
    return min(a[0], b[0]), max(a[1], b[1])


def _add(a: Interval, b: Interval) -> Interval:
    return a[0] + b[0], a[1] + b[1]


def _sub(a: Interval, b: Interval) -> Interval:
    return a[0] - b[1], a[1] - b[0]


def _mul(a: Interval, b: Interval) -> Interval:
    products = [x * y for x in a for y in b]
    return min(products), max(products)


def _floordiv(a: Interval, b: Interval) -> Interval | None:
    """Extremes lie at the corners where the divisor does not change sign."""
    if b[0] <= 0 <= b[1]:
        return None
    quotients = [x // y for x in a for y in b]
    return min(quotients), max(quotients)


def _any_mod(b: Interval) -> Interval | None:
    """Of x % b for any x."""
    if b[0] > 0:
        return 0, b[1] - 1
    return (b[0] + 1, 0) if b[1] < 0 else None


def _floormod(a: Interval, b: Interval) -> Interval | None:
    if b[0] == b[1] and b[0] > 0:
        c = b[0]
        if a[0] // c == a[1] // c:
            return a[0] % c, a[1] % c
    any_mod = _any_mod(b)
    if any_mod is not None and a[0] >= 0 and b[0] > 0:
        return 0, min(any_mod[1], a[1])
    return any_mod


def _truncdiv(a: Interval, b: Interval) -> Interval | None:
    if b[0] <= 0 <= b[1]:
        return None
    quotients = [_toward_zero(x, y) for x in a for y in b]
    return min(quotients), max(quotients)


def _toward_zero(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x >= 0) == (y > 0) else -1)


def _truncmod(a: Interval, b: Interval) -> Interval | None:
    """The dividend's sign, and smaller than the divisor."""
    if b[0] <= 0 <= b[1]:
        return None
    most = max(abs(b[0]), abs(b[1])) - 1
    return max(min(a[0], 0), -most), min(max(a[1], 0), most)


def _min(a: Interval, b: Interval) -> Interval:
    return min(a[0], b[0]), min(a[1], b[1])


def _max(a: Interval, b: Interval) -> Interval:
    return max(a[0], b[0]), max(a[1], b[1])


def _and(a: Interval, b: Interval) -> Interval | None:
    """With a mask that is not negative the result lies in [0, mask]."""
    masks = [x[1] for x in (a, b) if x[0] >= 0]
    return (0, min(masks)) if masks else None


_LINEAR = (BinaryOp.ADD, BinaryOp.SUB, BinaryOp.MUL)
_BITWISE = (BinaryOp.AND, BinaryOp.OR, BinaryOp.XOR)
_BINARY: dict[BinaryOp, _Rule] = {
    BinaryOp.ADD: _add,
    BinaryOp.SUB: _sub,
    BinaryOp.MUL: _mul,
    BinaryOp.FLOORDIV: _floordiv,
    BinaryOp.FLOORMOD: _floormod,
    BinaryOp.TRUNCDIV: _truncdiv,
    BinaryOp.TRUNCMOD: _truncmod,
    BinaryOp.MIN: _min,
    BinaryOp.MAX: _max,
    BinaryOp.AND: _and,
}
