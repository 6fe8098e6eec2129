"""Expressions compiled to Python closures that compute one value, reading variables and buffers from an Env."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

from mcompile.dtypes import DType
from mcompile.errors import InternalError
from mcompile.ir import semantics
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
from mcompile.ir.stmt import Buffer

Env = dict[Any, Any]  # values of Vars, storage of Buffers; one for each thread
Value = Callable[[Env], Any]
_MODULUS = 1 << 64
_HALF = 1 << 63


def scalar_type(dtype: DType) -> Callable[[Any], Any]:
    """How a value of `dtype` is held: INT64 and BOOL as Python's, others as numpy scalars."""
    if dtype is DType.INT64:
        return int
    return bool if dtype is DType.BOOL else dtype.numpy.type


def compile_value(expr: Expr) -> Value:
    """A function of the Env. Subexpressions used more than once are computed once an evaluation."""
    uses = Counter(child for node in walk(expr) for child in node.children)
    compiled: dict[Expr, Value] = {}
    shared: list[Any] = []
    for node in walk(expr):
        function = _compile_node(node, [compiled[child] for child in node.children])
        if uses[node] > 1 and node.children and not _is_cheap(node):
            shared.append(node)
            function = _remembering(node, function)
        compiled[node] = function
    return _forgetting(shared, compiled[expr]) if shared else compiled[expr]


def _is_cheap(node: Expr) -> bool:
    return all(not child.children for child in node.children)


def _remembering(node: Expr, function: Value) -> Value:
    def remember(env: Env) -> Any:
        if node in env:
            return env[node]
        value = env[node] = function(env)
        return value

    return remember


def _forgetting(nodes: list[Any], function: Value) -> Value:
    def evaluate_once(env: Env) -> Any:
        for node in nodes:
            env.pop(node, None)
        return function(env)

    return evaluate_once


def _compile_node(node: Expr, args: list[Value]) -> Value:
    match node:
        case Var():
            return operator.itemgetter(node)
        case Const(value, dtype):
            held = value if dtype in (DType.INT64, DType.BOOL) else semantics.constant(value, dtype)
            return lambda env: held
        case Select():
            test, a, b = args
            return lambda env: a(env) if test(env) else b(env)
        case Cast(dtype, x):
            return _compile_cast(x.dtype, dtype, args[0])
        case Load(source, indices):
            return _compile_load(source, indices, args)
        case Call(function, _, _):
            intrinsic = semantics.INTRINSIC[function]
            return lambda env: intrinsic(*(arg(env) for arg in args))
        case Unary(op, x):
            return _applied(_INT_UNARY.get(op) if x.dtype is DType.INT64 else _unary(op, x.dtype), args, op)
        case Binary(op, a, _):
            return _applied(_INT_BINARY.get(op) if a.dtype is DType.INT64 else _binary(op), args, op)
        case Compare(op, _, _):
            return _applied(_COMPARE[op], args, op)
    raise InternalError(f"no value for {type(node).__name__} inside an expression")


def _applied(function: Callable[..., Any] | None, args: list[Value], op: Any) -> Value:
    if function is None:
        raise InternalError(f"{op.value}: not defined for INT64")
    if len(args) == 1:
        (x,) = args
        return lambda env: function(x(env))
    a, b = args
    return lambda env: function(a(env), b(env))


def _unary(op: UnaryOp, dtype: DType) -> Callable[..., Any]:
    return operator.not_ if op is UnaryOp.NOT and dtype is DType.BOOL else semantics.UNARY[op]


def _binary(op: BinaryOp) -> Callable[..., Any]:
    return _OPERATORS.get(op) or semantics.BINARY[op]


def _compile_cast(source: DType, dtype: DType, x: Value) -> Value:
    held = scalar_type(dtype)
    if dtype is DType.BOOL:
        return lambda env: bool(x(env) != 0)
    if source is DType.BOOL:
        return lambda env: held(x(env))
    return lambda env: held(semantics.cast(np.asarray(x(env), source.numpy), dtype)[()])


def _compile_load(source: Any, indices: tuple[Expr, ...], args: list[Value]) -> Value:
    if not isinstance(source, Buffer):
        raise InternalError(f"{source.name}: a PrimFunc loads from Buffers only")
    address = compile_address(source, indices, "loads", args)
    if source.dtype in (DType.INT64, DType.BOOL):
        return lambda env: env[source].item(address(env))
    return lambda env: env[source][address(env)]


def compile_address(
    buffer: Buffer, indices: tuple[Expr, ...], verb: str, args: list[Value] | None = None
) -> Callable[[Env], int]:
    args = [compile_value(index) for index in indices] if args is None else args
    dims = list(zip(args, buffer.shape, buffer.strides, count()))

    def address(env: Env) -> int:
        offset = 0
        for index, extent, stride, dim in dims:
            value = index(env)
            if not 0 <= value < extent:
                raise InternalError(f"{verb} {buffer.name} out of bounds: index {value} of dim {dim} of {extent}")
            offset += value * stride
        return offset

    return address


def _wrapping(function: Callable[..., int]) -> Callable[..., int]:
    def wrap(*args: int) -> int:
        result = function(*args)
        return result if -_HALF <= result < _HALF else (result + _HALF) % _MODULUS - _HALF

    return wrap


def _int_truncdiv(a: int, b: int) -> int:
    return 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _int_power(a: int, b: int) -> int:
    if b < 0:
        return {1: 1, -1: 1 if b % 2 == 0 else -1}.get(a, 0)
    return pow(a, b, _MODULUS)


_INT_UNARY: dict[UnaryOp, Callable[..., Any]] = {
    UnaryOp.NEG: _wrapping(operator.neg),
    UnaryOp.NOT: operator.invert,
    UnaryOp.ABS: _wrapping(abs),
    UnaryOp.SIGN: lambda x: (x > 0) - (x < 0),
}
_INT_BINARY: dict[BinaryOp, Callable[..., Any]] = {
    BinaryOp.ADD: _wrapping(operator.add),
    BinaryOp.SUB: _wrapping(operator.sub),
    BinaryOp.MUL: _wrapping(operator.mul),
    BinaryOp.FLOORDIV: _wrapping(lambda a, b: a // b if b else 0),
    BinaryOp.FLOORMOD: lambda a, b: a % b if b else 0,
    BinaryOp.TRUNCDIV: _wrapping(_int_truncdiv),
    BinaryOp.TRUNCMOD: lambda a, b: a - _int_truncdiv(a, b) * b if b else 0,
    BinaryOp.MIN: min,
    BinaryOp.MAX: max,
    BinaryOp.POW: _wrapping(_int_power),
    BinaryOp.AND: operator.and_,
    BinaryOp.OR: operator.or_,
    BinaryOp.XOR: operator.xor,
    BinaryOp.SHL: _wrapping(lambda a, b: a << b if 0 <= b < 64 else 0),
    BinaryOp.SHR: lambda a, b: a >> min(b, 63) if b >= 0 else 0,
}
_OPERATORS: dict[BinaryOp, Callable[..., Any]] = {
    BinaryOp.ADD: operator.add,
    BinaryOp.SUB: operator.sub,
    BinaryOp.MUL: operator.mul,
    BinaryOp.DIV: operator.truediv,
    BinaryOp.AND: operator.and_,
    BinaryOp.OR: operator.or_,
    BinaryOp.XOR: operator.xor,
}
_COMPARE: dict[CompareOp, Callable[..., Any]] = {
    CompareOp.EQ: operator.eq,
    CompareOp.NE: operator.ne,
    CompareOp.LT: operator.lt,
    CompareOp.LE: operator.le,
    CompareOp.GT: operator.gt,
    CompareOp.GE: operator.ge,
}
