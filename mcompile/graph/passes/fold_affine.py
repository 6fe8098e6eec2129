"""Fold per-channel scales and shifts into the weights before them; BatchNormalization is one of each.

    BatchNormalization(x, s, b, m, v)         ->   Add(Mul(x, a), b - m * a)      with a = s / sqrt(v + epsilon)
    Mul(Conv(x, W, b), a)                     ->   Conv(x, W * a, b * a)          likewise ConvTranspose, MatMul
    Add(Conv(x, W, b), c)                     ->   Conv(x, W, b + c)
    Mul(Add(MatMul(x, W), b), a)              ->   Add(MatMul(x, W * a), b * a)

Only where the convolution's result has no other user, and the scale is one value for each output channel.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mcompile.graph.graph import Array, Graph, Node
from mcompile.graph.infer import apply, become
from mcompile.graph.passes.canonicalize import add_constant
from mcompile.graph.passes.pattern import Any, Binding, Known, Op, Pattern, Rule, apply_rules, op

Convolved = Callable[[Array, Array, Node], Array]


def fold_affine(graph: Graph) -> Graph:
    """The graph with constant scales and shifts folded into constant weights."""
    return apply_rules(graph, RULES)


# --- BatchNormalization ---


def _split_batch_norm(graph: Graph, node: Node, bound: Binding) -> bool:
    if node.attrs["training_mode"] or len(graph.types[bound["s"]].shape) != 1:
        return False
    scale, bias, mean, variance = (graph.constants[bound[name]].astype(np.float64) for name in "sbmv")
    type_ = graph.types[bound["x"]]
    factor = scale / np.sqrt(variance + node.attrs["epsilon"])
    shape = (-1, *[1] * (len(type_.shape) - 2))
    factors, shifts = (array.reshape(shape).astype(type_.dtype.numpy) for array in (factor, bias - mean * factor))
    scaled = apply(
        graph, "Mul", (bound["x"], add_constant(graph, f"{node.name}.factor", factors)), stem=f"{node.name}.scaled"
    )
    become(graph, node, "Add", (scaled, add_constant(graph, f"{node.name}.shift", shifts)))
    return True


# --- scales and shifts after convolutions ---


def _per_channel(graph: Graph, value: str, channels: int, rank: int, axis: int) -> Array | None:
    """The constant as one value a channel, where it varies along dim `axis` of a result of `rank` dims only."""
    array = graph.constants[value]
    if array.ndim > rank:
        return None
    shape = (1,) * (rank - array.ndim) + array.shape
    if any(dim != 1 for position, dim in enumerate(shape) if position != axis):
        return None
    return np.broadcast_to(array.reshape(-1), (channels,)) if shape[axis] in (1, channels) else None


def _scale_conv(weights: Array, factors: Array, node: Node) -> Array:
    return weights * factors.reshape(-1, *[1] * (weights.ndim - 1))


def _scale_conv_transpose(weights: Array, factors: Array, node: Node) -> Array:
    """Weights are (inputs, outputs of a group, kernel...); group g makes the outputs g * outputs..."""
    groups = int(node.attrs["group"])
    inputs, outputs, *kernel = weights.shape
    by_group = weights.reshape(groups, inputs // groups, outputs, *kernel)
    scaled = by_group * factors.reshape(groups, 1, outputs, *[1] * len(kernel))
    return scaled.reshape(weights.shape)


_SCALES: dict[str, Convolved] = {"Conv": _scale_conv, "ConvTranspose": _scale_conv_transpose}


def _fold_into_conv(graph: Graph, node: Node, bound: Binding) -> bool:
    """Scale (for a Mul) or shift (for an Add) the weights and bias of the convolution bound to `y`."""
    conv = graph.producer(bound["y"])
    assert conv is not None
    type_ = graph.types[bound["y"]]
    channels = type_.dims[1]
    values = _per_channel(graph, bound["c"], channels, len(type_.shape), axis=1)
    if values is None or graph.types[node.outputs[0]] != type_:
        return False
    weights = graph.constants[conv.inputs[1]]
    bias = graph.constants[conv.inputs[2]] if "bias" in bound else np.zeros(channels, weights.dtype)
    new_weights = conv.inputs[1]
    if node.op == "Mul":
        new_weights = add_constant(graph, f"{conv.name}.weights", _SCALES[conv.op](weights, values, conv))
        new_bias = bias * values
    else:
        new_bias = bias + values
    has_bias = "bias" in bound or node.op == "Add"
    inputs = (conv.inputs[0], new_weights, *([add_constant(graph, f"{conv.name}.bias", new_bias)] if has_bias else []))
    become(graph, node, conv.op, inputs, conv.attrs)
    return True


def _fold_into_matmul(graph: Graph, node: Node, bound: Binding) -> bool:
    """Mul(MatMul(x, W), c) and Mul(Add(MatMul(x, W), b), c), c one value a column."""
    product = graph.producer(bound["product"])
    assert product is not None
    weights = graph.constants[bound["w"]]
    type_ = graph.types[node.outputs[0]]
    if weights.ndim != 2 or type_ != graph.types[bound["product"]]:
        return False
    rank, columns = len(type_.shape), weights.shape[1]
    values = _per_channel(graph, bound["c"], columns, rank, axis=rank - 1)
    bias = _per_channel(graph, bound["b"], columns, rank, axis=rank - 1) if "b" in bound else None
    if values is None or ("b" in bound and bias is None):
        return False
    inputs = (bound["x"], add_constant(graph, f"{product.name}.weights", weights * values))
    if bias is None:
        become(graph, node, "MatMul", inputs)
        return True
    scaled = apply(graph, "MatMul", inputs, stem=f"{product.name}.scaled")
    become(graph, node, "Add", (scaled, add_constant(graph, f"{node.name}.bias", bias * values)))
    return True


X, C, W = Any("x"), Known("c"), Known("w")
_BATCH_NORM = op("BatchNormalization", X, Known("s"), Known("b"), Known("m"), Known("v"))


def _convolutions() -> list[Op]:
    operands: list[tuple[Pattern, ...]] = [(X, W), (X, W, Known("bias"))]
    return [Op(name, inputs, "y", sole=True) for name in _SCALES for inputs in operands]


_PRODUCT = op("MatMul", X, W, bind="product", sole=True)

RULES: tuple[Rule, ...] = (
    Rule("split_batch_norm", _BATCH_NORM, _split_batch_norm),
    *(Rule(f"{name}_conv", op(name, conv, C), _fold_into_conv) for name in ("Mul", "Add") for conv in _convolutions()),
    Rule("scale_matmul", op("Mul", _PRODUCT, C), _fold_into_matmul),
    Rule("scale_biased_matmul", op("Mul", op("Add", _PRODUCT, Known("b"), sole=True), C), _fold_into_matmul),
)
