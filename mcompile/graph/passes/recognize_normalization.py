"""Normalisations written out in small ops -> LayerNormalization, RMSNormalization.

    d = x - ReduceMean(x)
    d / Sqrt(ReduceMean(d * d) + epsilon)         ->   LayerNormalization(x, 1)
    x / Sqrt(ReduceMean(x * x) + epsilon)         ->   RMSNormalization(x, 1)
    Mul(LayerNormalization(x, 1), g)              ->   LayerNormalization(x, g)
    Add(LayerNormalization(x, g), b)              ->   LayerNormalization(x, g, b)

The means must be over the trailing dims, which is what these ops normalise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from mcompile.graph.graph import Graph, Node
from mcompile.graph.infer import become
from mcompile.graph.passes.canonicalize import add_constant
from mcompile.graph.passes.pattern import (
    Any,
    Binding,
    Known,
    Number,
    Op,
    Pattern,
    Rule,
    apply_rules,
    op,
    scalar,
)
from mcompile.graph.passes.recognize_activations import has

X, D = Any("x"), Any("d")


def recognize_normalization(graph: Graph) -> Graph:
    """The graph with written-out normalisations as single ops."""
    return apply_rules(graph, RULES)


def _first_trailing_axis(graph: Graph, mean: Node | None, value: str) -> int | None:
    """The first axis of a mean over the trailing dims of `value`, which keeps them."""
    if mean is None or not mean.attrs["keepdims"] or mean.attrs["axes"] is None:
        return None
    rank = len(graph.types[value].shape)
    axes = sorted(int(axis) % rank for axis in mean.attrs["axes"])
    return axes[0] if axes and axes == list(range(axes[0], rank)) else None


def _normalized(name: str, means: tuple[str, ...]) -> Callable[[Graph, Node, Binding], bool]:
    def build(graph: Graph, node: Node, bound: Binding) -> bool:
        x, epsilon = bound["x"], scalar(graph, bound["epsilon"])
        axes = {_first_trailing_axis(graph, graph.producer(bound[mean]), x) for mean in means}
        axis = axes.pop()
        if axes or axis is None or not graph.types[x].dtype.is_float:
            return False
        type_ = graph.types[x]
        ones = add_constant(graph, f"{node.name}.scale", np.ones(type_.dims[axis:], type_.dtype.numpy))
        become(graph, node, name, (x, ones), {"axis": axis, "epsilon": epsilon})
        return True

    return build


def _scale(graph: Graph, node: Node, bound: Binding) -> bool:
    inner = graph.producer(bound["y"])
    assert inner is not None
    shape = _normalized_shape(graph, inner)
    if not np.all(graph.constants[bound["ones"]] == 1) or not _fits(graph, bound["c"], shape):
        return False
    scale = np.broadcast_to(graph.constants[bound["c"]], shape)
    become(graph, node, inner.op, (bound["x"], add_constant(graph, f"{node.name}.scale", scale.copy())), inner.attrs)
    return True


def _shift(graph: Graph, node: Node, bound: Binding) -> bool:
    inner = graph.producer(bound["y"])
    assert inner is not None
    shape = _normalized_shape(graph, inner)
    if not _fits(graph, bound["c"], shape):
        return False
    shift = np.broadcast_to(graph.constants[bound["c"]], shape)
    inputs = (bound["x"], bound["g"], add_constant(graph, f"{node.name}.shift", shift.copy()))
    become(graph, node, inner.op, inputs, inner.attrs)
    return True


def _normalized_shape(graph: Graph, node: Node) -> tuple[int, ...]:
    shape = graph.types[node.inputs[0]].dims
    return shape[int(node.attrs["axis"]) % len(shape) :]


def _fits(graph: Graph, value: str, shape: tuple[int, ...]) -> bool:
    """Whether a constant broadcasts to `shape`."""
    array = graph.constants[value]
    pairs = zip(reversed(array.shape), reversed(shape), strict=False)
    return array.ndim <= len(shape) and all(dim in (1, target) for dim, target in pairs)


def _squares(x: Pattern) -> tuple[Pattern, ...]:
    return op("Mul", x, x), op("Pow", x, where=has(exponent=2)), op("Pow", x, Number(2))


def _divided(x: Pattern, numerator: Pattern) -> Iterator[Op]:
    """numerator / sqrt(mean(x^2) + epsilon) in its forms; the numerator binds what `x` means first."""
    for square in _squares(x):
        variance = op("Add", op("ReduceMean", square, bind="square_mean"), Number(name="epsilon"))
        root = op("Sqrt", variance)
        yield op("Div", numerator, root)
        power = op("Pow", variance, where=has(exponent=-0.5))
        for inverse in (op("Reciprocal", root), op("Div", Number(1), root), power):
            yield op("Mul", numerator, inverse)


_CENTERED = op("Sub", X, op("ReduceMean", X, bind="mean"), bind="d")
_LAYER_NORM = _normalized("LayerNormalization", ("mean", "square_mean"))
_RMS_NORM = _normalized("RMSNormalization", ("square_mean",))
_SCALED = {name: op(name, X, Known("ones"), bind="y", sole=True) for name in ("LayerNormalization", "RMSNormalization")}
_SHIFTED = op("LayerNormalization", X, Any("g"), bind="y", sole=True)

RULES: tuple[Rule, ...] = (
    *(Rule("layer_norm", form, _LAYER_NORM, ("LayerNormalization",)) for form in _divided(D, _CENTERED)),
    *(Rule("rms_norm", form, _RMS_NORM, ("RMSNormalization",)) for form in _divided(X, X)),
    *(Rule("scale", op("Mul", form, Known("c")), _scale) for form in _SCALED.values()),
    Rule("shift", op("Add", _SHIFTED, Known("c")), _shift),
)
