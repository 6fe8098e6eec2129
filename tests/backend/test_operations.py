"""Every operation of ir.expr in native code against numpy, as lanes and one by one, on every level of x86."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mcompile.dtypes import DType
from mcompile.ir import semantics
from mcompile.ir.expr import Binary, BinaryOp, Call, Cast, Compare, CompareOp, Const, Intrinsic, Select, Unary, UnaryOp
from mcompile.target import Target, parse_target
from tests.backend.kernels import Bodies, elementwise
from tests.backend.native import run, runnable_targets

Array = np.ndarray[Any, Any]
FLOATS = [DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16]
INTS = [dtype for dtype in DType if dtype.is_integer]
TOLERANCE = {DType.FLOAT32: 2e-6, DType.FLOAT64: 1e-12, DType.FLOAT16: 2e-3, DType.BFLOAT16: 1.6e-2}
LANES = [0, 8, 3]
_INT_UNARY = [UnaryOp.NEG, UnaryOp.NOT, UnaryOp.ABS, UnaryOp.SIGN]
_FLOAT_BINARY = [BinaryOp.ADD, BinaryOp.SUB, BinaryOp.MUL, BinaryOp.DIV, BinaryOp.MIN, BinaryOp.MAX, BinaryOp.POW]

lanes_ = pytest.mark.parametrize("lanes", LANES)
targets = pytest.mark.parametrize("target", runnable_targets(), ids=lambda target: target.cpu)


def values_of(dtype: DType, seed: int = 0) -> Array:
    """Small, large and special values."""
    rng = np.random.default_rng(seed)
    if dtype is DType.BOOL:
        return rng.integers(0, 2, 37).astype(bool)
    if dtype.is_integer:
        limits = [int(dtype.min_value), int(dtype.max_value), 0, 1, 2, 3, 7]
        small = rng.integers(-9 if int(dtype.min_value) < 0 else 0, 20, 30)
        return np.concatenate([np.array(limits, dtype.numpy), small.astype(dtype.numpy)])
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 0.5, 1.5, 2.5, -2.5, 1.0, -1.0, 1e-3, 30.0]
    return np.concatenate([special, rng.standard_normal(24) * 3]).astype(dtype.numpy)


def native(bodies: Sequence[Bodies], arrays: Sequence[Array], lanes: int, target: Target) -> list[Array]:
    """What one kernel computes with each of `bodies`."""
    dtypes = [DType.from_numpy(array.dtype) for array in arrays]
    func = elementwise(len(arrays[0]), lanes, dtypes, *bodies)
    outs = {out.name: np.zeros(len(arrays[0]), out.dtype.numpy) for out in func.outputs}
    run(func, target, {**{f"x{i}": array for i, array in enumerate(arrays)}, **outs})
    return list(outs.values())


def check(got: Array, expected: Array, dtype: DType, what: str = "") -> None:
    if dtype.is_float:
        tolerance = TOLERANCE[dtype]
        a, b = got.astype(np.float64), expected.astype(np.float64)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=what)
    else:
        np.testing.assert_array_equal(got, expected, what)


def unary(op: UnaryOp) -> Bodies:
    return lambda a: Unary(op, a)


def binary(op: BinaryOp) -> Bodies:
    return lambda a, b: Binary(op, a, b)


@targets
@lanes_
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.value)
def test_unary_of_floats(dtype: DType, lanes: int, target: Target) -> None:
    x = values_of(dtype)
    ops = [op for op in UnaryOp if op is not UnaryOp.NOT]
    for op, got in zip(ops, native([unary(op) for op in ops], [x], lanes, target), strict=True):
        with np.errstate(all="ignore"):
            expected = semantics.UNARY[op](x)
        check(got, expected, DType.from_numpy(expected.dtype), op.value)


@targets
@lanes_
@pytest.mark.parametrize("dtype", INTS, ids=lambda dtype: dtype.value)
def test_integers(dtype: DType, lanes: int, target: Target) -> None:
    x, y = values_of(dtype), values_of(dtype, 1)[::-1].copy()
    for op, got in zip(_INT_UNARY, native([unary(op) for op in _INT_UNARY], [x], lanes, target), strict=True):
        check(got, semantics.UNARY[op](x), dtype, op.value)
    ops = [op for op in BinaryOp if op not in (BinaryOp.DIV, BinaryOp.POW, BinaryOp.SHL, BinaryOp.SHR)]
    for op, got in zip(ops, native([binary(op) for op in ops], [x, y], lanes, target), strict=True):
        with np.errstate(all="ignore"):
            expected = semantics.BINARY[op](x, y)
        if op in (BinaryOp.TRUNCDIV, BinaryOp.TRUNCMOD):
            expected[y == 0] = 0
        check(got, expected, dtype, op.value)


@targets
@lanes_
@pytest.mark.parametrize("dtype", INTS, ids=lambda dtype: dtype.value)
def test_shifts_and_powers(dtype: DType, lanes: int, target: Target) -> None:
    x, y = values_of(dtype), np.abs(values_of(dtype, 3)) % dtype.numpy.type(dtype.bits + 2)
    ops = [BinaryOp.SHL, BinaryOp.SHR, BinaryOp.POW]
    for op, got in zip(ops, native([binary(op) for op in ops], [x, y], lanes, target), strict=True):
        check(got, semantics.BINARY[op](x, y), dtype, op.value)


@targets
@lanes_
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.value)
def test_binary_of_floats(dtype: DType, lanes: int, target: Target) -> None:
    x, y = values_of(dtype), values_of(dtype, 1)[::-1].copy()
    wide = np.float32 if dtype in (DType.FLOAT16, DType.BFLOAT16) else dtype.numpy
    for op, got in zip(_FLOAT_BINARY, native([binary(op) for op in _FLOAT_BINARY], [x, y], lanes, target), strict=True):
        with np.errstate(all="ignore"):
            expected = semantics.BINARY[op](x.astype(wide), y.astype(wide)).astype(dtype.numpy)
        check(got, expected, dtype, op.value)


@targets
def test_fmod(target: Target) -> None:
    rng = np.random.default_rng(0)
    for dtype in (DType.FLOAT32, DType.FLOAT64):
        x = (rng.standard_normal(64) * 10.0 ** rng.integers(-3, 6, 64)).astype(dtype.numpy)
        y = (rng.standard_normal(64) * 10.0 ** rng.integers(-2, 3, 64)).astype(dtype.numpy)
        x[:6], y[:6] = [np.inf, 1, np.nan, 5, -5, 6], [2, np.inf, 1, 0, 3, -3]
        with np.errstate(all="ignore"):
            expected = np.fmod(x, y)
        exact = "fma" in target.features
        for lanes in LANES:
            (got,) = native([binary(BinaryOp.TRUNCMOD)], [x, y], lanes, target)
            np.testing.assert_allclose(got, expected, rtol=0, atol=0 if exact else 1e-7)


@pytest.mark.parametrize("dtype", [DType.INT32, DType.INT64, DType.INT8, DType.UINT8], ids=lambda dtype: dtype.value)
@lanes_
def test_division_by_constants(dtype: DType, lanes: int, host: Target) -> None:
    x = values_of(dtype)
    divisors = [1, 2, 3, 8, 10, 0] + ([-1, -4, -7] if int(dtype.min_value) < 0 else [])
    ops = [BinaryOp.FLOORDIV, BinaryOp.FLOORMOD, BinaryOp.TRUNCDIV, BinaryOp.TRUNCMOD]
    cases = [(op, divisor) for op in ops for divisor in divisors]
    bodies = [lambda a, op=op, divisor=divisor: Binary(op, a, Const(divisor, a.dtype)) for op, divisor in cases]
    for (op, divisor), got in zip(cases, native(bodies, [x], lanes, host), strict=True):
        with np.errstate(all="ignore"):
            expected = semantics.BINARY[op](x, np.full_like(x, divisor)) if divisor else np.zeros_like(x)
        check(got, expected, dtype, f"{op.value} {divisor}")


@lanes_
def test_power_of_constants(lanes: int, host: Target) -> None:
    x = np.abs(values_of(DType.FLOAT32))
    exponents = [0.5, 1.0, 2.0, 3.0, 4.0, -0.5, 2.5, 0.0]
    bodies = [lambda a, e=e: Binary(BinaryOp.POW, a, Const(e, a.dtype)) for e in exponents]
    for exponent, got in zip(exponents, native(bodies, [x], lanes, host), strict=True):
        with np.errstate(all="ignore"):
            check(got, np.power(x, np.float32(exponent)), DType.FLOAT32, str(exponent))


@targets
@lanes_
def test_booleans(lanes: int, target: Target) -> None:
    x, y = values_of(DType.BOOL), values_of(DType.BOOL, 5)
    ops = [BinaryOp.AND, BinaryOp.OR, BinaryOp.XOR]
    bodies = [binary(op) for op in ops]
    bodies += [lambda a, b: Unary(UnaryOp.NOT, a), lambda a, b: Select(a, b, Unary(UnaryOp.NOT, b))]
    expected = [x & y, x | y, x ^ y, ~x, x == y]
    for got, wanted in zip(native(bodies, [x, y], lanes, target), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


@targets
@lanes_
def test_comparisons(lanes: int, target: Target) -> None:
    bodies = [lambda a, b, op=op: Compare(op, a, b) for op in CompareOp]
    for dtype in [*FLOATS, *INTS]:
        x, y = values_of(dtype), values_of(dtype, 1)
        y[::3] = x[::3]
        for op, got in zip(CompareOp, native(bodies, [x, y], lanes, target), strict=True):
            np.testing.assert_array_equal(got, np.asarray(semantics.COMPARE[op](x, y)).astype(bool), op.value)


@targets
@lanes_
@pytest.mark.parametrize("source", list(DType), ids=lambda dtype: dtype.value)
def test_casts(source: DType, lanes: int, target: Target) -> None:
    """Numbers that fit; what does not is any number."""
    for kinds, x in _cast_samples(source):
        bodies = [lambda a, dtype=dtype: Cast(dtype, a) for dtype in kinds]
        for dtype, got in zip(kinds, native(bodies, [x], lanes, target), strict=True):
            through_float = source is DType.FLOAT64 and dtype in (DType.FLOAT16, DType.BFLOAT16)
            with np.errstate(all="ignore"):
                expected = semantics.cast(x.astype(np.float32) if through_float else x, dtype)
            np.testing.assert_array_equal(got, expected, dtype.value)


def _cast_samples(source: DType) -> list[tuple[list[DType], Array]]:
    if not source.is_float:
        return [(list(DType), values_of(source))]
    signed = [dtype for dtype in INTS if int(dtype.min_value) < 0]
    unsigned = [dtype for dtype in INTS if int(dtype.min_value) == 0]
    return [
        ([*FLOATS, DType.BOOL], values_of(source)),
        (signed, np.linspace(-100, 100, 37).astype(source.numpy)),
        (unsigned, np.linspace(0, 200, 37).astype(source.numpy)),
    ]


@targets
@lanes_
def test_fma(lanes: int, target: Target) -> None:
    x, y, z = (values_of(DType.FLOAT32, seed) for seed in range(3))
    with np.errstate(all="ignore"):
        expected = semantics.fma(x, y, z)
    (got,) = native([lambda a, b, c: Call(Intrinsic.FMA, (a, b, c), a.dtype)], [x, y, z], lanes, target)
    check(got, expected, DType.FLOAT32)


@targets
def test_half_precision_is_exact(target: Target) -> None:
    """All float16 numbers survive, and every float is rounded to the nearest."""
    everything = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    (got,) = native([lambda a: Cast(DType.FLOAT32, a)], [everything], 16, target)
    np.testing.assert_array_equal(got, everything.astype(np.float32))
    rng = np.random.default_rng(0)
    floats = rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint32).view(np.float32)
    floats[: 1 << 15] = (rng.standard_normal(1 << 15) * 10.0 ** rng.integers(-8, 5, 1 << 15)).astype(np.float32)
    for dtype in (DType.FLOAT16, DType.BFLOAT16):
        (got,) = native([lambda a, dtype=dtype: Cast(dtype, a)], [floats], 16, target)
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(got, floats.astype(dtype.numpy))


@pytest.fixture(scope="session")
def host() -> Target:
    return parse_target("cpu", threads=1)
