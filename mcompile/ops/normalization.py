"""Normalizations. Variances are two-pass: the mean first, then the mean of the squared deviations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from mcompile.dtypes import DType
from mcompile.errors import ModelError
from mcompile.ir.expr import BinaryOp, Const, Expr, ReduceOp, Unary, UnaryOp, all_of, binary, select
from mcompile.ir.tensor import Compute, Tensor, compute, reduce_axis, reduce_over
from mcompile.ops.broadcast import load_broadcast
from mcompile.ops.index_math import ints, normalize_axes, normalize_axis, operand
from mcompile.ops.precision import computed_in, widened
from mcompile.ops.reduction import keep_index, mapped, reduce_dims
from mcompile.ops.registry import (
    REQUIRED,
    Attrs,
    Inputs,
    OpKind,
    Sample,
    Unsupported,
    define,
    element_type,
    input_at,
)
from mcompile.ops.sampling import numbers, sample

Load = Callable[..., Expr]


def _mean(name: str, shape: Sequence[int], dims: Sequence[int], load: Load) -> Compute:
    """The mean of `load` over `dims`, kept as 1."""
    count = prod(shape[dim] for dim in dims)
    total = reduce_dims(f"{name}_sum", ReduceOp.SUM, shape, dims, load)
    return mapped(name, total, lambda value: value * (1 / count))


def _moments(shape: Sequence[int], dims: Sequence[int], load: Load) -> tuple[Compute, Compute]:
    """Mean and variance over `dims`, kept as 1."""
    mean = _mean("mean", shape, dims, load)

    def squared(*i: Expr) -> Expr:
        deviation = load(*i) - mean[keep_index(i, dims)]
        return deviation * deviation

    return mean, _mean("variance", shape, dims, squared)


def _inverse_root(name: str, variance: Compute, epsilon: float) -> Compute:
    return mapped(name, variance, lambda value: 1 / Unary(UnaryOp.SQRT, value + epsilon))


def _affine(value: Expr, scale: Expr, bias: Expr | None) -> Expr:
    scaled = value * scale.astype(value.dtype)
    return scaled if bias is None else scaled + bias.astype(value.dtype)


# --- BatchNormalization, as in inference: a multiplication and an addition by constants of the channel ---


def _batch_normalization(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x, scale, bias, mean, variance = (operand(inputs, position) for position in range(5))
    if attrs["training_mode"]:
        raise Unsupported("BatchNormalization in training mode updates its statistics")
    dtype, epsilon = computed_in(x.dtype), attrs["epsilon"]

    def factor_of(*c: Expr) -> Expr:
        return scale[c].astype(dtype) / Unary(UnaryOp.SQRT, variance[c].astype(dtype) + epsilon)

    factor = compute("factor", scale.shape, factor_of)
    offset = compute("offset", scale.shape, lambda *c: bias[c].astype(dtype) - mean[c].astype(dtype) * factor[c])

    def element(*i: Expr) -> Expr:
        c = i[1 : 1 + len(scale.shape)]
        return (widened(x[i]) * factor[c] + offset[c]).astype(x.dtype)

    return (compute("batchnormalization", x.shape, element),)


def _channels(*shape: int, dtype: str = "float32") -> list[np.ndarray[Any, Any]]:
    """scale, bias, mean and (positive) variance."""
    return [numbers(*shape, low=0.1 if n == 3 else -2, high=2, seed=n, dtype=dtype) for n in range(4)]


def _batch_normalization_samples() -> Iterator[Sample]:
    yield sample(numbers(2, 3, 4, 5), *_channels(3))
    yield sample(numbers(2, 3), *_channels(3), epsilon=0.01, opset=9)
    yield sample(numbers(2, 3, 4), *_channels(3), opset=7)
    yield sample(numbers(2, 3, 4), *_channels(3, 4), opset=7, spatial=0)
    yield sample(numbers(2, 3, 4, dtype="float16"), *_channels(3))


define(
    "BatchNormalization",
    OpKind.BROADCAST,
    _batch_normalization,
    attrs={"epsilon": 1e-5, "momentum": 0.9, "training_mode": 0, "spatial": 1},
    samples=_batch_normalization_samples,
)


# --- InstanceNormalization, GroupNormalization ---


def _instance_normalization(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x, scale, bias = (operand(inputs, position) for position in range(3))
    dims = range(2, len(x.shape))
    mean, variance = _moments(x.shape, dims, lambda *i: widened(x[i]))
    inverse = _inverse_root("rstd", variance, attrs["epsilon"])

    def element(*i: Expr) -> Expr:
        kept = keep_index(i, dims)
        return _affine((widened(x[i]) - mean[kept]) * inverse[kept], scale[i[1]], bias[i[1]]).astype(x.dtype)

    return (compute("instancenormalization", x.shape, element),)


def _instance_normalization_samples() -> Iterator[Sample]:
    yield sample(numbers(2, 3, 4, 5), *_channels(3)[:2])
    yield sample(numbers(2, 3, 7), *_channels(3)[:2], epsilon=0.1)
    yield sample(numbers(1, 3, 7, dtype="float16"), *_channels(3, dtype="float16")[:2])


define(
    "InstanceNormalization",
    OpKind.REDUCTION,
    _instance_normalization,
    attrs={"epsilon": 1e-5},
    samples=_instance_normalization_samples,
)


def _group_normalization(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    """`scale` and `bias` have an element a channel (opset 21), or a group (opset 18)."""
    x, scale, bias = (operand(inputs, position) for position in range(3))
    count = int(attrs["num_groups"])
    n, channels, *spatial = x.shape
    if channels % count:
        raise ModelError(f"GroupNormalization: {channels} channels do not split into {count} groups")
    size, dtype = channels // count, _stash(x, attrs)
    shape = (n, count, size, *spatial)
    dims = range(2, len(shape))

    def load(n: Expr, g: Expr, c: Expr, *rest: Expr) -> Expr:
        return x[(n, g * size + c, *rest)].astype(dtype)

    mean, variance = _moments(shape, dims, load)
    inverse = _inverse_root("rstd", variance, attrs["epsilon"])

    def element(*i: Expr) -> Expr:
        group = i[1] // size
        kept = (i[0], group, *(0 for _ in dims))
        c = i[1] if scale.shape[0] == channels else group
        return _affine((x[i].astype(dtype) - mean[kept]) * inverse[kept], scale[c], bias[c]).astype(x.dtype)

    return (compute("groupnormalization", x.shape, element),)


def _stash(x: Tensor, attrs: Attrs) -> DType:
    """The dtype of the computation: `stash_type`, or that of `x` if it is wider."""
    stash = element_type(attrs["stash_type"])
    return stash if stash.bytes > x.dtype.bytes else computed_in(x.dtype)


def _group_normalization_samples() -> Iterator[Sample]:
    yield sample(numbers(2, 6, 3, 4), *_channels(6)[:2], num_groups=2)
    yield sample(numbers(2, 6, 5), *_channels(6)[:2], num_groups=3, epsilon=0.01)
    yield sample(numbers(2, 6, 3, 4), *_channels(2)[:2], num_groups=2, opset=18)
    yield sample(numbers(2, 4, 3, dtype="float16"), *_channels(4, dtype="float16")[:2], num_groups=2)


define(
    "GroupNormalization",
    OpKind.REDUCTION,
    _group_normalization,
    attrs={"num_groups": REQUIRED, "epsilon": 1e-5, "stash_type": 1},
    samples=_group_normalization_samples,
)


# --- LayerNormalization, RMSNormalization: over the dims from `axis` on ---


def _trailing(x: Tensor, attrs: Attrs) -> range:
    return range(normalize_axis(int(attrs["axis"]), len(x.shape)), len(x.shape))


def _layer_normalization(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x, scale, bias = operand(inputs, 0), operand(inputs, 1), input_at(inputs, 2)
    dims, dtype, stash = _trailing(x, attrs), _stash(x, attrs), element_type(attrs["stash_type"])
    mean, variance = _moments(x.shape, dims, lambda *i: x[i].astype(dtype))
    inverse = _inverse_root("rstd", variance, attrs["epsilon"])

    def element(*i: Expr) -> Expr:
        kept = keep_index(i, dims)
        value = (x[i].astype(dtype) - mean[kept]) * inverse[kept]
        return _affine(value, load_broadcast(scale, i), None if bias is None else load_broadcast(bias, i)).astype(
            x.dtype
        )

    statistics: tuple[Compute, ...] = (mean, inverse)
    if dtype is not stash:
        statistics = tuple(
            mapped(f"{tensor.name}_out", tensor, lambda value: value.astype(stash)) for tensor in statistics
        )
    return (compute("layernormalization", x.shape, element), *statistics)


def _layer_normalization_samples() -> Iterator[Sample]:
    x = numbers(2, 3, 4)
    yield sample(x, numbers(4), numbers(4, seed=1))
    yield sample(x, numbers(4))
    yield sample(x, numbers(3, 4), numbers(3, 4, seed=1), axis=1, epsilon=0.01)
    yield sample(x, numbers(2, 3, 4), axis=-3)
    yield sample(numbers(2, 8, dtype="float16"), numbers(8, dtype="float16"), numbers(8, dtype="float16", seed=1))


define(
    "LayerNormalization",
    OpKind.REDUCTION,
    _layer_normalization,
    attrs={"axis": -1, "epsilon": 1e-5, "stash_type": 1},
    samples=_layer_normalization_samples,
)


def _rms_normalization(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x, scale = operand(inputs, 0), operand(inputs, 1)
    dims, dtype = _trailing(x, attrs), _stash(x, attrs)

    def squared(*i: Expr) -> Expr:
        return x[i].astype(dtype) * x[i].astype(dtype)

    inverse = _inverse_root("rrms", _mean("square", x.shape, dims, squared), attrs["epsilon"])

    def element(*i: Expr) -> Expr:
        value = x[i].astype(dtype) * inverse[keep_index(i, dims)]
        return _affine(value, load_broadcast(scale, i), None).astype(scale.dtype)

    return (compute("rmsnormalization", x.shape, element),)


def _rms_normalization_samples() -> Iterator[Sample]:
    x = numbers(2, 3, 4)
    yield sample(x, numbers(4))
    yield sample(x, numbers(3, 4), axis=1, epsilon=0.01)
    yield sample(numbers(2, 8, dtype="float16"), numbers(8, dtype="float16"))


define(
    "RMSNormalization",
    OpKind.REDUCTION,
    _rms_normalization,
    attrs={"axis": -1, "epsilon": 1e-5, "stash_type": 1},
    samples=_rms_normalization_samples,
)


# --- LpNormalization, MeanVarianceNormalization, LRN ---


def _lp_normalization(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    """A vector of norm 0 stays 0."""
    x, p = operand(inputs, 0), int(attrs["p"])
    if p not in (1, 2):
        raise Unsupported(f"LpNormalization: p must be 1 or 2, got {p}")
    dims = (normalize_axis(int(attrs["axis"]), len(x.shape)),)

    def magnitude(*i: Expr) -> Expr:
        value = widened(x[i])
        return Unary(UnaryOp.ABS, value) if p == 1 else value * value

    def factor_of(total: Expr) -> Expr:
        norm = total if p == 1 else Unary(UnaryOp.SQRT, total)
        return select(norm.eq(0), 0, 1 / norm)

    factor = mapped("factor", reduce_dims("sum", ReduceOp.SUM, x.shape, dims, magnitude), factor_of)

    def element(*i: Expr) -> Expr:
        return (widened(x[i]) * factor[keep_index(i, dims)]).astype(x.dtype)

    return (compute("lpnormalization", x.shape, element),)


def _lp_normalization_samples() -> Iterator[Sample]:
    x = numbers(3, 4, 5)
    for p in (1, 2):
        yield sample(abs(x), p=p)
        yield sample(abs(x), p=p, axis=1)
    yield sample(np.array([[3, 4, 0], [0, 0, 0]], np.float32))
    yield sample(numbers(2, 5, dtype="float16"))


define(
    "LpNormalization",
    OpKind.REDUCTION,
    _lp_normalization,
    attrs={"axis": -1, "p": 2},
    samples=_lp_normalization_samples,
)


def _mean_variance_normalization(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x = operand(inputs, 0)
    dims = normalize_axes(ints(attrs["axes"]), len(x.shape))
    mean, variance = _moments(x.shape, dims, lambda *i: widened(x[i]))
    inverse = mapped("rstd", variance, lambda value: 1 / (Unary(UnaryOp.SQRT, value) + 1e-9))

    def element(*i: Expr) -> Expr:
        kept = keep_index(i, dims)
        return ((widened(x[i]) - mean[kept]) * inverse[kept]).astype(x.dtype)

    return (compute("meanvariancenormalization", x.shape, element),)


define(
    "MeanVarianceNormalization",
    OpKind.REDUCTION,
    _mean_variance_normalization,
    attrs={"axes": (0, 2, 3)},
    samples=lambda: iter([sample(numbers(2, 3, 4, 5)), sample(numbers(2, 3, 4), axes=[1, 2])]),
)


def _lrn(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    """Each element divided by (bias + alpha / size * sum of squares of `size` channels around it) ^ beta."""
    x, size = operand(inputs, 0), int(attrs["size"])
    before, channels = (size - 1) // 2, x.shape[1]
    k = reduce_axis(size, "k")

    def squares(n: Expr, c: Expr, *rest: Expr) -> Expr:
        channel = c + k.var - before
        load = widened(x[(n, channel, *rest)])
        inside = all_of([channel >= 0, channel < channels])
        return reduce_over(ReduceOp.SUM, select(inside, load * load, 0), [k])

    total = compute("squares", x.shape, squares, [k])

    def element(*i: Expr) -> Expr:
        base = total[i] * (attrs["alpha"] / size) + attrs["bias"]
        factor = binary(BinaryOp.POW, base, Const(-attrs["beta"], base.dtype))
        return (widened(x[i]) * factor).astype(x.dtype)

    return (compute("lrn", x.shape, element),)


def _lrn_samples() -> Iterator[Sample]:
    x = numbers(2, 7, 3, 4)
    yield sample(x, size=3)
    yield sample(x, size=4, alpha=0.5, beta=0.6, bias=2.0)
    yield sample(x, size=5, alpha=0.5)


define(
    "LRN",
    OpKind.REDUCTION,
    _lrn,
    attrs={"alpha": 1e-4, "beta": 0.75, "bias": 1.0, "size": REQUIRED},
    samples=_lrn_samples,
)
