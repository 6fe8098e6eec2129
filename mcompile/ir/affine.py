"""Integer expressions as linear sums: const + sum of coefficient * atom, where an atom is what is not linear."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcompile.dtypes import DType
from mcompile.ir.expr import Binary, BinaryOp, Cast, Const, Expr, Load, Unary, UnaryOp, Var, binary


@dataclass(frozen=True)
class Affine:
    """`const + sum(coefficient * atom)`; no coefficient is 0. Equal if the sums are, in whatever order."""

    terms: Mapping[Expr, int]
    const: int

    @property
    def is_const(self) -> bool:
        return not self.terms

    def coefficient(self, atom: Expr) -> int:
        return self.terms.get(atom, 0)

    def __add__(self, other: Affine | int) -> Affine:
        return self.plus(other, 1)

    def __sub__(self, other: Affine | int) -> Affine:
        return self.plus(other, -1)

    def plus(self, other: Affine | int, factor: int) -> Affine:
        """`self + factor * other`."""
        if isinstance(other, int):
            return Affine(self.terms, self.const + factor * other)
        if factor == 0:
            return self
        terms = dict(self.terms)
        for atom, coefficient in other.terms.items():
            total = terms.get(atom, 0) + factor * coefficient
            if total:
                terms[atom] = total
            else:
                del terms[atom]
        return Affine(terms, self.const + factor * other.const)

    def scaled(self, factor: int) -> Affine:
        if factor == 1:
            return self
        if factor == 0:
            return ZERO
        return Affine({atom: k * factor for atom, k in self.terms.items()}, self.const * factor)

    def to_expr(self) -> Expr:
        """The sum in canonical order: what is added, what is subtracted, the constant."""
        if not self.terms:
            return Const(self.const, DType.INT64)
        atoms = list(self.terms) if len(self.terms) == 1 else sorted(self.terms, key=order_key)
        result: Expr | None = None
        for atom in atoms:
            if self.terms[atom] > 0:
                term = binary(BinaryOp.MUL, atom, self.terms[atom])
                result = term if result is None else Binary(BinaryOp.ADD, result, term)
        const = self.const
        if result is None and const > 0:
            result, const = Const(const, DType.INT64), 0
        for atom in atoms:
            k = self.terms[atom]
            if k < 0 and result is None:
                result = binary(BinaryOp.MUL, atom, k)
            elif k < 0 and result is not None:
                result = Binary(BinaryOp.SUB, result, binary(BinaryOp.MUL, atom, -k))
        assert result is not None
        return binary(BinaryOp.ADD, result, const) if const >= 0 else binary(BinaryOp.SUB, result, -const)


ZERO = Affine({}, 0)


def constant(value: int) -> Affine:
    return Affine({}, value)


def atom(expr: Expr) -> Affine:
    return Affine({expr: 1}, 0)


def as_affine(expr: Expr) -> Affine:
    """`expr` (INT64) as a linear sum; subterms that are not linear are atoms, taken as they are."""
    match expr:
        case Const(value):
            return Affine({}, int(value))
        case Binary(BinaryOp.ADD, a, b):
            return as_affine(a) + as_affine(b)
        case Binary(BinaryOp.SUB, a, b):
            return as_affine(a) - as_affine(b)
        case Unary(UnaryOp.NEG, x):
            return as_affine(x).scaled(-1)
        case Binary(BinaryOp.MUL, a, b):
            left, right = as_affine(a), as_affine(b)
            if not right.terms:
                return left.scaled(right.const)
            if not left.terms:
                return right.scaled(left.const)
    return Affine({expr: 1}, 0)


def order_key(expr: Expr) -> tuple[Any, ...]:
    """A total order for the terms of a sum: variables by age, then the rest by structure."""
    match expr:
        case Var(_, _, key):
            return (0, key)
        case Const(value, dtype):
            return (1, dtype.value, repr(value) if dtype.is_float else int(value))
        case Load(source, _):
            head: tuple[Any, ...] = ("Load", source.name, len(expr.children))
        case Cast(dtype, _):
            head = ("Cast", dtype.value)
        case Binary(op, _, _) | Unary(op, _):
            head = (type(expr).__name__, op.value)
        case _:
            head = (type(expr).__name__, str(getattr(expr, "op", getattr(expr, "function", ""))), len(expr.children))
    return (2, *head, *map(order_key, expr.children))
