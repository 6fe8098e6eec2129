"""Each operation of ir.expr on values in registers."""

from __future__ import annotations

from collections.abc import Sequence

from mcompile.backend.cpu import vector_math
from mcompile.backend.cpu.builder import Builder, Value
from mcompile.backend.cpu.half import HALF_DTYPES, rounded
from mcompile.backend.cpu.llvm_types import BITS, REGISTER_TYPES
from mcompile.dtypes import DType, Kind
from mcompile.errors import InternalError
from mcompile.ir.expr import BinaryOp, CompareOp, UnaryOp

_EXACT = (UnaryOp.NEG, UnaryOp.ABS, UnaryOp.SIGN, UnaryOp.FLOOR, UnaryOp.CEIL, UnaryOp.ROUND, UnaryOp.TRUNC)
_FLOAT_INTRINSICS = {
    UnaryOp.ABS: "fabs",
    UnaryOp.SQRT: "sqrt",
    UnaryOp.FLOOR: "floor",
    UnaryOp.CEIL: "ceil",
    UnaryOp.ROUND: "roundeven",
    UnaryOp.TRUNC: "trunc",
}


def unary(b: Builder, op: UnaryOp, dtype: DType, x: Value) -> Value:
    """`op` applied to `x`, a value of `dtype`."""
    if op is UnaryOp.IS_NAN:
        return b.compare("fcmp uno", x, x) if dtype.is_float else b.constant("i1", 0, x.lanes)
    if op is UnaryOp.IS_INF:
        infinite = float("inf")
        return (
            b.compare("fcmp oeq", b.intrinsic("fabs", x), infinite) if dtype.is_float else b.constant("i1", 0, x.lanes)
        )
    if not dtype.is_float:
        return _integer_unary(b, op, dtype, x)
    result = _float_unary(b, op, x)
    return result if dtype not in HALF_DTYPES or op in _EXACT else rounded(b, dtype, result)


def _float_unary(b: Builder, op: UnaryOp, x: Value) -> Value:
    if op is UnaryOp.NEG:
        return b.neg(x)
    if op in _FLOAT_INTRINSICS:
        return b.intrinsic(_FLOAT_INTRINSICS[op], x)
    if op is UnaryOp.SIGN:
        negative = b.select(b.compare("fcmp olt", x, 0.0), -1.0, x)
        return b.select(b.compare("fcmp ogt", x, 0.0), 1.0, negative)
    if op in vector_math.FUNCTIONS:
        return vector_math.FUNCTIONS[op](b, x)
    raise InternalError(f"{op.value} of a float")


def _integer_unary(b: Builder, op: UnaryOp, dtype: DType, x: Value) -> Value:
    signed = dtype.kind is Kind.INT
    match op:
        case UnaryOp.NEG:
            return b.binary("sub", b.like(0, x), x)
        case UnaryOp.NOT:
            return b.binary("xor", x, -1)
        case UnaryOp.ABS:
            return b.intrinsic("abs", x, extra="i1 false") if signed else x
        case UnaryOp.SIGN:
            positive = b.convert("zext", b.compare("icmp sgt" if signed else "icmp ne", x, 0), x.element)
            return b.binary("or", b.binary("ashr", x, BITS[x.element] - 1), positive) if signed else positive
        case UnaryOp.IS_NAN | UnaryOp.IS_INF:
            return b.constant("i1", 0, x.lanes)
        case UnaryOp.FLOOR | UnaryOp.CEIL | UnaryOp.ROUND | UnaryOp.TRUNC:
            return x
    raise InternalError(f"{op.value} of {dtype.value}")


_FLOAT_OPCODES = {BinaryOp.ADD: "fadd", BinaryOp.SUB: "fsub", BinaryOp.MUL: "fmul", BinaryOp.DIV: "fdiv"}
_INTEGER_OPCODES = {
    BinaryOp.ADD: "add",
    BinaryOp.SUB: "sub",
    BinaryOp.MUL: "mul",
    BinaryOp.AND: "and",
    BinaryOp.OR: "or",
    BinaryOp.XOR: "xor",
}
_BOOL_OPCODES = _INTEGER_OPCODES | {
    BinaryOp.ADD: "or",
    BinaryOp.MUL: "and",
    BinaryOp.MIN: "and",
    BinaryOp.MAX: "or",
    BinaryOp.SUB: "xor",
}


def binary(
    b: Builder, op: BinaryOp, dtype: DType, x: Value, y: Value, never_nan: tuple[bool, bool] = (False, False)
) -> Value:
    """`op` of two values of `dtype`; `never_nan` says which of them cannot be NaN."""
    if dtype.is_float:
        result = _float_binary(b, op, x, y, never_nan)
        exact = op in (BinaryOp.MIN, BinaryOp.MAX, BinaryOp.TRUNCMOD)
        return result if dtype not in HALF_DTYPES or exact else rounded(b, dtype, result)
    if dtype is DType.BOOL and op in _BOOL_OPCODES:
        return b.binary(_BOOL_OPCODES[op], x, y)
    if op in _INTEGER_OPCODES:
        return b.binary(_INTEGER_OPCODES[op], x, y)
    return _integer_binary(b, op, dtype.kind is Kind.INT, *b.unify(x, y))


def _float_binary(b: Builder, op: BinaryOp, x: Value, y: Value, never_nan: tuple[bool, bool]) -> Value:
    if op in _FLOAT_OPCODES:
        return b.binary(_FLOAT_OPCODES[op], x, y)
    if op in (BinaryOp.MIN, BinaryOp.MAX):
        return _extreme(b, "fcmp olt" if op is BinaryOp.MIN else "fcmp ogt", x, y, never_nan)
    if op in (BinaryOp.POW, BinaryOp.TRUNCMOD):
        function = vector_math.power if op is BinaryOp.POW else vector_math.remainder
        wide = function(b, b.convert("fpext", x, "double"), b.convert("fpext", y, "double"))
        return b.convert("fptrunc", wide, x.element)
    raise InternalError(f"{op.value} of floats")


def _extreme(b: Builder, predicate: str, x: Value, y: Value, never_nan: tuple[bool, bool]) -> Value:
    """MIN or MAX; x86's instructions give their second operand if either is NaN."""
    if never_nan[0]:
        return b.select(b.compare(predicate, x, y), x, y)
    if never_nan[1]:
        return b.select(b.compare(predicate, y, x), y, x)
    return b.select(b.compare("fcmp uno", x, x), x, b.select(b.compare(predicate, x, y), x, y))


def _integer_binary(b: Builder, op: BinaryOp, signed: bool, x: Value, y: Value) -> Value:
    match op:
        case BinaryOp.MIN | BinaryOp.MAX:
            return b.intrinsic(("s" if signed else "u") + op.value, x, y)
        case BinaryOp.SHL | BinaryOp.SHR:
            return _shift(b, op, signed, x, y)
        case BinaryOp.POW:
            return _integer_power(b, signed, x, y)
        case BinaryOp.TRUNCDIV | BinaryOp.TRUNCMOD | BinaryOp.FLOORDIV | BinaryOp.FLOORMOD:
            return divide(b, op, signed, x, y)
    raise InternalError(f"{op.value} of integers")


def _shift(b: Builder, op: BinaryOp, signed: bool, x: Value, y: Value) -> Value:
    """Shifts by the width or more give 0, or the sign."""
    bits = BITS[x.element]
    opcode = "shl" if op is BinaryOp.SHL else "ashr" if signed else "lshr"
    if isinstance(y.ints, int) and 0 <= y.ints < bits:
        return b.binary(opcode, x, y)
    within = b.intrinsic("umin", y, bits - 1)
    result = b.binary(opcode, x, within)
    return result if opcode == "ashr" else b.select(b.compare("icmp ult", y, bits), result, 0)


def divide(b: Builder, op: BinaryOp, signed: bool, x: Value, y: Value, *, nonnegative: bool = False) -> Value:
    """A quotient or remainder; division by 0 gives 0. `nonnegative` says that x cannot be negative."""
    quotient = op in (BinaryOp.TRUNCDIV, BinaryOp.FLOORDIV)
    floor = op in (BinaryOp.FLOORDIV, BinaryOp.FLOORMOD)
    divisor = y.ints if isinstance(y.ints, int) else None
    if divisor is not None and divisor > 0:
        if (floor or nonnegative or not signed) and divisor & (divisor - 1) == 0:
            shift = "ashr" if signed else "lshr"
            return b.binary(shift, x, divisor.bit_length() - 1) if quotient else b.binary("and", x, divisor - 1)
        if nonnegative:
            return b.binary("udiv" if quotient else "urem", x, y)
    safe, is_zero = _safe_divisor(b, signed, x, y)
    prefix = "s" if signed else "u"
    result = b.binary(prefix + ("div" if quotient else "rem"), x, safe)
    if floor and signed:
        result = _floored(b, quotient, result, x, safe)
    return result if is_zero is None else b.select(is_zero, 0, result)


def _floored(b: Builder, quotient: bool, result: Value, x: Value, divisor: Value) -> Value:
    rest = b.binary("sub", x, b.binary("mul", result, divisor)) if quotient else result
    signs_differ = b.compare("icmp slt", b.binary("xor", rest, divisor), 0)
    inexact = b.binary("and", b.compare("icmp ne", rest, 0), signs_differ)
    changed = b.binary("sub", result, 1) if quotient else b.binary("add", result, divisor)
    return b.select(inexact, changed, result)


def _safe_divisor(b: Builder, signed: bool, x: Value, y: Value) -> tuple[Value, Value | None]:
    """A divisor that does not trap, and where it was 0 (None: nowhere)."""
    if isinstance(y.ints, int) and y.ints not in (0, -1):
        return y, None
    is_zero = b.compare("icmp eq", y, 0)
    traps = is_zero
    if signed:
        lowest = b.compare("icmp eq", x, -(1 << (BITS[x.element] - 1)))
        traps = b.binary("or", is_zero, b.binary("and", lowest, b.compare("icmp eq", y, -1)))
    return b.select(traps, 1, y), is_zero


def _integer_power(b: Builder, signed: bool, x: Value, y: Value) -> Value:
    """By squaring; a negative power gives the truncated quotient 1 / x**-y."""
    negative = b.compare("icmp slt", y, 0) if signed else b.constant("i1", 0, y.lanes)
    exponent = b.select(negative, 0, y)

    def step(state: Sequence[Value]) -> tuple[Value, list[Value]]:
        result, base, left = state
        taken = b.compare("icmp ne", b.binary("and", left, 1), 0)
        result = b.select(taken, b.binary("mul", result, base), result)
        left = b.binary("lshr", left, 1)
        return b.any_lane(b.compare("icmp ne", left, 0)), [result, b.binary("mul", base, base), left]

    result = b.while_loop([b.like(1, x), x, exponent], step)[0]
    if not signed:
        return result
    odd = b.compare("icmp ne", b.binary("and", y, 1), 0)
    of_minus_one = b.select(odd, b.like(-1, x), 1)
    unit = b.select(b.compare("icmp eq", x, -1), of_minus_one, b.convert("zext", b.compare("icmp eq", x, 1), x.element))
    return b.select(negative, unit, result)


_PREDICATES = {
    CompareOp.EQ: ("oeq", "eq", "eq"),
    CompareOp.NE: ("une", "ne", "ne"),
    CompareOp.LT: ("olt", "slt", "ult"),
    CompareOp.LE: ("ole", "sle", "ule"),
    CompareOp.GT: ("ogt", "sgt", "ugt"),
    CompareOp.GE: ("oge", "sge", "uge"),
}


def compare(b: Builder, op: CompareOp, dtype: DType, x: Value, y: Value) -> Value:
    of_float, of_signed, of_unsigned = _PREDICATES[op]
    if dtype.is_float:
        return b.compare(f"fcmp {of_float}", x, y)
    return b.compare(f"icmp {of_signed if dtype.kind is Kind.INT else of_unsigned}", x, y)


def cast(b: Builder, source: DType, dtype: DType, x: Value) -> Value:
    """`x` of `source` as `dtype`."""
    if source is dtype:
        return x
    element = REGISTER_TYPES[dtype]
    if dtype is DType.BOOL:
        return b.compare("fcmp une" if source.is_float else "icmp ne", x, 0.0 if source.is_float else 0)
    if dtype.is_float:
        result = _to_float(b, source, element, x)
        return rounded(b, dtype, result) if dtype in HALF_DTYPES else result
    if source.is_float:
        return _float_to_integer(b, dtype, element, x)
    if BITS[element] <= BITS[x.element]:
        return b.convert("trunc", x, element)
    return b.convert("sext" if source.kind is Kind.INT else "zext", x, element)


def _to_float(b: Builder, source: DType, element: str, x: Value) -> Value:
    if source.is_float:
        return b.convert("fpext" if BITS[element] > BITS[x.element] else "fptrunc", x, element)
    return b.convert("sitofp" if source.kind is Kind.INT else "uitofp", x, element)


def _float_to_integer(b: Builder, dtype: DType, element: str, x: Value) -> Value:
    """Truncated; what does not fit gives some integer. Narrow types go through a wider signed one, as numpy's do."""
    if dtype is DType.UINT64:
        return _frozen(b, b.convert("fptoui", x, "i64"))
    wide = "i32" if BITS[element] < 32 or dtype is DType.INT32 else "i64"
    return b.convert("trunc", _frozen(b, b.convert("fptosi", x, wide)), element)


def _frozen(b: Builder, x: Value) -> Value:
    return b.pure(f"freeze {x.typed}", x.element, x.lanes, x.level)


def fused(b: Builder, dtype: DType, x: Value, y: Value, z: Value) -> Value:
    """x * y + z."""
    if not dtype.is_float:
        return b.binary("add", b.binary("mul", x, y), z)
    result = b.fma(x, y, z)
    return rounded(b, dtype, result) if dtype in HALF_DTYPES else result
