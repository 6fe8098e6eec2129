"""How element types and constants are written in LLVM's text."""

from __future__ import annotations

import math
import struct
from functools import cache

from mcompile.dtypes import DType

REGISTER_TYPES = {
    DType.BOOL: "i1",
    DType.INT8: "i8",
    DType.INT16: "i16",
    DType.INT32: "i32",
    DType.INT64: "i64",
    DType.UINT8: "i8",
    DType.UINT16: "i16",
    DType.UINT32: "i32",
    DType.UINT64: "i64",
    DType.FLOAT16: "float",
    DType.BFLOAT16: "float",
    DType.FLOAT32: "float",
    DType.FLOAT64: "double",
}
"""A value in a register: half-precision numbers are held (rounded) as float."""

MEMORY_TYPES = REGISTER_TYPES | {DType.BOOL: "i8", DType.FLOAT16: "i16", DType.BFLOAT16: "i16"}

BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "half": 16, "float": 32, "double": 64}
_SUFFIXES = {"float": "f32", "double": "f64", "half": "f16"}


def type_text(element: str, lanes: int) -> str:
    """`float`, or `<16 x float>` where lanes is not 0."""
    return f"<{lanes} x {element}>" if lanes else element


def suffix(element: str, lanes: int) -> str:
    """The part of an overloaded intrinsic's name that tells the type: `v16f32`."""
    scalar = _SUFFIXES.get(element, element)
    return f"v{lanes}{scalar}" if lanes else scalar


def literal(element: str, value: int | float) -> str:
    """A scalar constant's text; a float is written as the bits of the double that equals it."""
    if element in ("float", "double"):
        return f"0x{struct.pack('>d', _as_float(value) if element == 'float' else value).hex().upper()}"
    bits = BITS[element]
    wrapped = int(value) & ((1 << bits) - 1)
    return str(wrapped if bits == 1 or wrapped < 1 << (bits - 1) else wrapped - (1 << bits))


def _as_float(value: float) -> float:
    """`value` rounded to single precision."""
    if value - value != 0:
        return value
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def splat_text(element: str, text: str, lanes: int) -> str:
    """The constant `text` in all lanes."""
    return f"splat ({element} {text})" if lanes else text


@cache
def lane_text(element: str, values: tuple[int, ...]) -> str:
    return f"<{', '.join(f'{element} {value}' for value in values)}>"
