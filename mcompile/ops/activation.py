"""Activation functions. NaN passes through all of them but ThresholdedRelu and Shrink, whose comparisons drop it."""

from __future__ import annotations

from math import pi, sqrt

import numpy as np

from mcompile.ir.expr import Expr, Unary, UnaryOp, maximum, minimum, select
from mcompile.ops.elementwise import INF, NAN, in_floats, unary
from mcompile.ops.registry import Attrs
from mcompile.ops.sampling import numbers, sample


def _exp(x: Expr) -> Expr:
    return Unary(UnaryOp.EXP, x)


def _sigmoid(x: Expr) -> Expr:
    return Unary(UnaryOp.SIGMOID, x)


def _leaky_relu(x: Expr, attrs: Attrs) -> Expr:
    return select(x < 0, x * attrs["alpha"], x)


def _elu(x: Expr, attrs: Attrs) -> Expr:
    return select(x < 0, (_exp(x) - 1) * attrs["alpha"], x)


def _selu(x: Expr, attrs: Attrs) -> Expr:
    alpha, gamma = attrs["alpha"], attrs["gamma"]
    return select(x < 0, (_exp(x) - 1) * (alpha * gamma), x * gamma)


def _celu(x: Expr, attrs: Attrs) -> Expr:
    alpha = attrs["alpha"]
    return select(x < 0, (_exp(x / alpha) - 1) * alpha, x)


def _softplus(x: Expr) -> Expr:
    """log(1 + e^x) as max(x, 0) + log(1 + e^-|x|), which cannot overflow."""
    return maximum(x, 0) + Unary(UnaryOp.LOG, _exp(-Unary(UnaryOp.ABS, x)) + 1)


def _mish(x: Expr) -> Expr:
    """x * tanh(log(1 + e^x)): with w = e^x and n = w * (w + 2), the tanh is n / (n + 2), 1 in FLOAT32 from x = 20."""
    w = _exp(minimum(x, 20))
    n = w * (w + 2)
    return x * (n / (n + 2))


def _hard_sigmoid(x: Expr, attrs: Attrs) -> Expr:
    return maximum(minimum(x * attrs["alpha"] + attrs["beta"], 1), 0)


def _hard_swish(x: Expr) -> Expr:
    return x * maximum(minimum(x * (1 / 6) + 0.5, 1), 0)


def _gelu(x: Expr, attrs: Attrs) -> Expr:
    if attrs["approximate"] == "tanh":
        inner = Unary(UnaryOp.TANH, (x + x * x * x * 0.044715) * sqrt(2 / pi))
    else:
        inner = Unary(UnaryOp.ERF, x * sqrt(0.5))
    return x * 0.5 * (inner + 1)


def _swish(x: Expr, attrs: Attrs) -> Expr:
    alpha = attrs["alpha"]
    return x * _sigmoid(x if alpha == 1 else x * alpha)


def _shrink(x: Expr, attrs: Attrs) -> Expr:
    bias, lambd = attrs["bias"], attrs["lambd"]
    return select(x < -lambd, x + bias, select(x > lambd, x - bias, 0))


_SPECIALS = sample(np.array([NAN, INF, -INF, 0.0, 60.0, -60.0], np.float32))
_X = numbers(2, 7)

unary("Sigmoid", _sigmoid, extra=(_SPECIALS,))
unary("Relu", lambda x: maximum(x, 0), dtypes=("int8", "int32", "float16", "float32"), extra=(_SPECIALS,))
unary("LeakyRelu", _leaky_relu, attrs={"alpha": 0.01}, extra=(_SPECIALS, sample(_X, alpha=0.3)))
unary("Elu", _elu, attrs={"alpha": 1.0}, extra=(_SPECIALS, sample(_X, alpha=0.3)))
unary(
    "Selu",
    _selu,
    attrs={"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875},
    extra=(sample(_X, alpha=2.0, gamma=3.0),),
)
unary("Celu", _celu, attrs={"alpha": 1.0}, dtypes=("float32",), extra=(sample(_X, alpha=2.0),))
unary("Softplus", _softplus)
unary("Softsign", lambda x: x / (Unary(UnaryOp.ABS, x) + 1))
unary("HardSigmoid", _hard_sigmoid, attrs={"alpha": 0.2, "beta": 0.5}, extra=(sample(_X, alpha=0.5, beta=0.6),))
unary("HardSwish", _hard_swish, interval=(-5, 5))
unary("Mish", _mish, extra=(sample(np.array([-30.0, -4.0, 0.0, 19.0, 50.0], np.float32)),))
unary("Gelu", _gelu, attrs={"approximate": "none"}, extra=(sample(_X, approximate="tanh"),))
unary("Swish", _swish, attrs={"alpha": 1.0}, extra=(sample(_X, alpha=1.7),))
unary(
    "ThresholdedRelu",
    lambda x, attrs: select(x > attrs["alpha"], x, 0),
    attrs={"alpha": 1.0},
    extra=(_SPECIALS, sample(_X, alpha=0.2)),
)
unary(
    "Shrink",
    in_floats(_shrink),
    attrs={"bias": 0.0, "lambd": 0.5},
    dtypes=("int32", "float32"),
    extra=(sample(_X, bias=0.5, lambd=1.5), sample(_X, bias=1.5, lambd=1.5)),
)
