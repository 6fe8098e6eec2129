"""The error bounds that backend/cpu/vector_math.py states, against references in double."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mcompile.dtypes import DType
from mcompile.ir.expr import Binary, BinaryOp, Unary, UnaryOp
from mcompile.target import Target
from tests.backend.kernels import elementwise
from tests.backend.native import run, runnable_targets

Array = np.ndarray[Any, Any]
_SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 1e-30, -1e-30, 3e38, -3e38]
_erf = np.vectorize(math.erf, otypes=[np.float64])

# op: (reference in double, lowest and highest argument tried, ulp allowed in float32)
_FUNCTIONS: dict[UnaryOp, tuple[Callable[[Array], Array], float, float, float]] = {
    UnaryOp.EXP: (np.exp, -86.9, 88.7, 2),
    UnaryOp.LOG: (np.log, 1e-38, 1e6, 2),
    UnaryOp.TANH: (np.tanh, -12, 12, 6),
    UnaryOp.ERF: (_erf, -5, 5, 6),
    UnaryOp.SIGMOID: (lambda x: 1 / (1 + np.exp(-x)), -80, 30, 4),
    UnaryOp.SIN: (np.sin, -1e4, 1e4, 1),
    UnaryOp.COS: (np.cos, -1e4, 1e4, 1),
    UnaryOp.TAN: (np.tan, -100, 100, 1),
    UnaryOp.ASIN: (np.arcsin, -1, 1, 1),
    UnaryOp.ACOS: (np.arccos, -1, 1, 1),
    UnaryOp.ATAN: (np.arctan, -20, 20, 1),
    UnaryOp.SINH: (np.sinh, -88, 88, 1),
    UnaryOp.COSH: (np.cosh, -88, 88, 1),
    UnaryOp.ASINH: (np.arcsinh, -1e5, 1e5, 1),
    UnaryOp.ACOSH: (np.arccosh, 1, 1e5, 1),
    UnaryOp.ATANH: (np.arctanh, -1, 1, 1),
}
# arguments where a double's result is near zero or huge lose relative precision with their reduction
_ABSOLUTE_IN_DOUBLE = {UnaryOp.SIN, UnaryOp.COS, UnaryOp.TAN, UnaryOp.LOG, UnaryOp.ACOS}

targets = pytest.mark.parametrize("target", runnable_targets(), ids=lambda target: target.cpu)
functions = pytest.mark.parametrize("op", list(_FUNCTIONS), ids=lambda op: op.value)


def evaluate(op: UnaryOp, x: Array, target: Target, lanes: int = 16) -> Array:
    func = elementwise(len(x), lanes, [DType.from_numpy(x.dtype)], lambda a: Unary(op, a))
    out = np.zeros_like(x)
    run(func, target, {"x0": x, "out0": out})
    return out


def arguments(low: float, high: float, dtype: Any) -> Array:
    """Evenly spread, and spread by magnitude."""
    rng = np.random.default_rng(0)
    spread = rng.uniform(low, high, 20000)
    small = np.abs(rng.uniform(low, high, 20000)) * 10.0 ** rng.uniform(-12, 0, 20000)
    small = np.where(rng.random(20000) < 0.5, small, -small)
    return np.concatenate([spread, np.clip(small, low, high)]).astype(dtype)


def ulps(got: Array, exact: Array) -> float:
    """The largest distance in units in the last place of the exact result."""
    with np.errstate(over="ignore"):
        unit = np.spacing(np.maximum(np.abs(exact), np.finfo(np.float32).tiny).astype(np.float32)).astype(np.float64)
    finite = np.isfinite(exact) & (np.abs(exact) < np.finfo(np.float32).max)
    return float(np.max(np.abs(got.astype(np.float64) - exact)[finite] / unit[finite]))


@targets
@functions
def test_float32_error(op: UnaryOp, target: Target) -> None:
    reference, low, high, allowed = _FUNCTIONS[op]
    x = arguments(low, high, np.float32)
    with np.errstate(all="ignore"):
        exact = reference(x.astype(np.float64))
    assert ulps(evaluate(op, x, target), exact) <= allowed


@targets
@functions
def test_double_error(op: UnaryOp, target: Target) -> None:
    reference, low, high, _ = _FUNCTIONS[op]
    x = arguments(low, high, np.float64)
    with np.errstate(all="ignore"):
        exact = reference(x)
    atol = 1e-13 if op in _ABSOLUTE_IN_DOUBLE else 0.0
    np.testing.assert_allclose(evaluate(op, x, target), exact, rtol=1e-13, atol=atol)


@targets
@functions
def test_special_values(op: UnaryOp, target: Target) -> None:
    x = np.array(_SPECIAL, np.float32)
    with np.errstate(all="ignore"):
        expected = _FUNCTIONS[op][0](x.astype(np.float64)).astype(np.float32)
    if op in (UnaryOp.SIN, UnaryOp.COS, UnaryOp.TAN):
        x, expected = x[:-2], expected[:-2]
    np.testing.assert_allclose(evaluate(op, x, target), expected, rtol=1e-6)


@targets
@functions
def test_a_scalar_is_a_lane(op: UnaryOp, target: Target) -> None:
    _, low, high, _ = _FUNCTIONS[op]
    x = arguments(low, high, np.float32)[::100]
    np.testing.assert_array_equal(evaluate(op, x, target, 16), evaluate(op, x, target, 0))


@targets
def test_power(target: Target) -> None:
    rng = np.random.default_rng(0)
    base = [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, np.inf, -np.inf, np.nan, 0.5]
    power = [0.0, 1.0, -1.0, 2.0, 3.0, -3.0, 0.5, np.inf, -np.inf, np.nan]
    x = np.repeat(np.array(base), len(power))
    y = np.tile(np.array(power), len(base))
    x, y = np.concatenate([x, rng.uniform(0, 20, 5000)]), np.concatenate([y, rng.uniform(-20, 20, 5000)])
    for dtype, rtol in ((np.float32, 1e-7), (np.float64, 1e-13)):
        a, b = x.astype(dtype), y.astype(dtype)
        with np.errstate(all="ignore"):
            exact = np.power(a.astype(np.float64), b.astype(np.float64))
            exact = np.where(np.abs(exact) < np.finfo(np.float32).tiny, 0.0, exact).astype(dtype)
        kind = DType.from_numpy(a.dtype)
        func = elementwise(len(a), 16, [kind, kind], lambda p, q: Binary(BinaryOp.POW, p, q))
        out = np.zeros_like(a)
        run(func, target, {"x0": a, "x1": b, "out0": out})
        np.testing.assert_allclose(out, exact, rtol=rtol, atol=1e-37)
