"""float16 and bfloat16: 16 bits in memory, a rounded float in a register."""

from __future__ import annotations

from mcompile.backend.cpu.builder import Builder, Value
from mcompile.dtypes import DType

HALF_DTYPES = (DType.FLOAT16, DType.BFLOAT16)


def rounded(b: Builder, dtype: DType, x: Value) -> Value:
    """A float rounded to what `dtype` can hold."""
    if dtype is DType.BFLOAT16:
        return b.from_bits(_bfloat16_bits(b, x))
    return unpack(b, dtype, pack(b, dtype, x))


def pack(b: Builder, dtype: DType, x: Value) -> Value:
    """The 16 bits of a float, rounded to nearest, ties to even."""
    if dtype is DType.BFLOAT16:
        return b.convert("trunc", b.binary("lshr", _bfloat16_bits(b, x), 16), "i16")
    if b.has_half:
        return b.convert("bitcast", b.convert("fptrunc", x, "half"), "i16")
    return _float16_bits(b, x)


def unpack(b: Builder, dtype: DType, bits: Value) -> Value:
    """The float that 16 bits stand for."""
    if dtype is DType.FLOAT16 and b.has_half:
        return b.convert("fpext", b.convert("bitcast", bits, "half"), "float")
    wide = b.convert("zext", bits, "i32")
    if dtype is DType.BFLOAT16:
        return b.from_bits(b.binary("shl", wide, 16))
    return _from_float16_bits(b, wide)


def _bfloat16_bits(b: Builder, x: Value) -> Value:
    """Bits of the nearest float whose low half is zero."""
    bits = b.bits(x)
    odd = b.binary("and", b.binary("lshr", bits, 16), 1)
    nearest = b.binary("add", b.binary("add", bits, 0x7FFF), odd)
    kept = b.select(b.compare("fcmp uno", x, x), b.binary("or", bits, 0x400000), nearest)
    return b.binary("and", kept, -0x10000)


def _float16_bits(b: Builder, x: Value) -> Value:
    bits = b.bits(x)
    sign = b.binary("and", bits, -0x80000000)
    magnitude = b.binary("xor", bits, sign)
    odd = b.binary("and", b.binary("lshr", magnitude, 13), 1)
    normal = b.binary("lshr", b.binary("add", b.binary("add", magnitude, 0xFFF - (112 << 23)), odd), 13)
    magic = 126 << 23  # adding 1/2 leaves a subnormal's digits, rounded, in the low bits
    aligned = b.add(b.from_bits(magnitude), b.from_bits(b.like(magic, bits)))
    subnormal = b.binary("sub", b.bits(aligned), magic)
    result = b.select(b.compare("icmp ult", magnitude, 113 << 23), subnormal, normal)
    special = b.select(b.compare("icmp ugt", magnitude, 0x7F800000), b.like(0x7E00, bits), 0x7C00)
    result = b.select(b.compare("icmp uge", magnitude, 143 << 23), special, result)
    return b.convert("trunc", b.binary("or", result, b.binary("lshr", sign, 16)), "i16")


def _from_float16_bits(b: Builder, wide: Value) -> Value:
    shifted = b.binary("shl", b.binary("and", wide, 0x7FFF), 13)
    exponent = b.binary("and", shifted, 0x7C00 << 13)
    normal = b.binary("add", shifted, 112 << 23)
    special = b.binary("add", normal, 112 << 23)
    low = b.from_bits(b.like(113 << 23, wide))
    subnormal = b.bits(b.sub(b.from_bits(b.binary("add", normal, 1 << 23)), low))
    result = b.select(b.compare("icmp eq", exponent, 0), subnormal, normal)
    result = b.select(b.compare("icmp eq", exponent, 0x7C00 << 13), special, result)
    sign = b.binary("shl", b.binary("and", wide, 0x8000), 16)
    return b.from_bits(b.binary("or", result, sign))
