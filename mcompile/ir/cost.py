"""Static costs of a PrimFunc."""

from __future__ import annotations

from mcompile.ir.expr import Const, Expr, Load, Unary, UnaryOp, Var
from mcompile.ir.stmt import Allocate, Block, For, If, PrimFunc, Seq, Stmt, Store

_CHEAP = (UnaryOp.NEG, UnaryOp.ABS, UnaryOp.NOT, UnaryOp.SIGN)
_TRANSCENDENTAL_FLOPS = 12  # a polynomial's worth


def count_flops(func: PrimFunc) -> int:
    """Arithmetic on values that running `func` once performs (a multiply-add is 2; guards are taken as true)."""
    return _flops(func.body)


def _flops(stmt: Stmt) -> int:
    match stmt:
        case For(extent=extent, body=body):
            return extent * _flops(body)
        case Store(value=value):
            return expression_flops(value)
        case If(then=then, otherwise=otherwise):
            return max(_flops(then), 0 if otherwise is None else _flops(otherwise))
        case Seq(body=body):
            return sum(_flops(child) for child in body)
        case Allocate(body=body) | Block(body=body):
            return _flops(body)
    return 0


def expression_flops(expr: Expr) -> int:
    """Operations of an expression; index arithmetic does not count."""
    count = 0
    stack, seen = [expr], set()
    while stack:
        node = stack.pop()
        if node in seen or isinstance(node, Load | Const | Var):
            continue
        seen.add(node)
        is_costly = isinstance(node, Unary) and node.op not in _CHEAP
        count += _TRANSCENDENTAL_FLOPS if is_costly else 1
        stack.extend(node.children)
    return count
