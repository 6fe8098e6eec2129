"""Activations written out in small ops -> one op of one operand, so that fusion sees a chain and not a diamond.

0.5 * x * (1 + Erf(x / sqrt(2)))                             ->   Gelu(x)
0.5 * x * (1 + Tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))    ->   Gelu(x, approximate=tanh)
x * Sigmoid(x), x * Sigmoid(a * x)                           ->   Swish(x, alpha)
Clip(x + 3, 0, 6) / 6                                        ->   HardSigmoid(x, 1/6, 0.5)
x * HardSigmoid(x, 1/6, 0.5)                                 ->   HardSwish(x)
Log(Exp(x) + 1), x * Tanh(Softplus(x))                       ->   Softplus(x), Mish(x)
Max(x, 0), Clip(x, 0, none)                                  ->   Relu(x)
Exp(x - ReduceMax(x)) / ReduceSum(...)                       ->   Softmax(x)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import isclose, pi, sqrt

from mcompile.graph.graph import Graph, Node
from mcompile.graph.infer import become
from mcompile.graph.passes.pattern import Any, Binding, Number, Op, Pattern, Rule, apply_rules, op, scalar

X = Any("x")


def recognize_activations(graph: Graph) -> Graph:
    """The graph with written-out activations as single ops."""
    return apply_rules(graph, RULES)


def _becomes(name: str, **attrs: object) -> Callable[[Graph, Node, Binding], bool]:
    def build(graph: Graph, node: Node, bound: Binding) -> bool:
        if graph.types[bound["x"]] != graph.types[node.outputs[0]]:
            return False  # a constant broadcast it
        become(graph, node, name, (bound["x"],), attrs)
        return True

    return build


def has(**values: float | None) -> Callable[[Mapping[str, object]], bool]:
    """Attributes (nearly) equal to numbers, or None."""

    def where(attrs: Mapping[str, object]) -> bool:
        for name, value in values.items():
            got = attrs.get(name)
            if value is None or not isinstance(got, (int, float)):
                if value is not got:
                    return False
            elif not isclose(got, value, rel_tol=1e-4):
                return False
        return True

    return where


def _product(*factors: Pattern) -> Iterator[Op]:
    """Every way to associate a product (Mul matches its operands in either order)."""
    first, second, *rest = factors
    if not rest:
        yield op("Mul", first, second)
        return
    for position, last in enumerate(factors):
        others = (*factors[:position], *factors[position + 1 :])
        for product in _product(*others):
            yield op("Mul", product, last)


def _halved(*gates: Pattern) -> Iterator[Op]:
    """0.5 * x * gate."""
    for gate in gates:
        yield from _product(X, gate, Number(0.5))


def _powers(exponent: int) -> Iterator[Pattern]:
    """x^2 or x^3 as a Pow or as products."""
    yield op("Pow", X, where=has(exponent=exponent))
    yield op("Pow", X, Number(exponent))
    square = op("Mul", X, X)
    yield square if exponent == 2 else op("Mul", square, X)


def _erf_gates() -> Iterator[Pattern]:
    for scaled in (op("Div", X, Number(sqrt(2))), op("Mul", X, Number(sqrt(0.5)))):
        yield op("Add", op("Erf", scaled), Number(1))


def _tanh_gates() -> Iterator[Pattern]:
    root = Number(sqrt(2 / pi))
    for cube in _powers(3):
        yield op("Add", op("Tanh", op("Mul", op("Add", X, op("Mul", cube, Number(0.044715))), root)), Number(1))
    for square in _powers(2):
        polynomial = op("Add", op("Mul", square, Number(0.044715)), Number(1))
        for inner in _product(X, polynomial, root):
            yield op("Add", op("Tanh", inner), Number(1))


def _swish(graph: Graph, node: Node, bound: Binding) -> bool:
    return _becomes("Swish", alpha=scalar(graph, bound["alpha"]))(graph, node, bound)


def _softmax(graph: Graph, node: Node, bound: Binding) -> bool:
    rank = len(graph.types[bound["x"]].shape)
    total, highest = graph.producer(bound["total"]), graph.producer(bound["highest"])
    axes = {_single_axis(reduction, rank) for reduction in (total, highest)}
    if len(axes) != 1 or None in axes:
        return False
    become(graph, node, "Softmax", (bound["x"],), {"axis": axes.pop()})
    return True


def _single_axis(reduction: Node | None, rank: int) -> int | None:
    """The one axis that a ReduceX keeps as a dim of 1."""
    if reduction is None or not reduction.attrs["keepdims"] or reduction.attrs["axes"] is None:
        return None
    axes = [int(axis) % rank for axis in reduction.attrs["axes"]]
    return axes[0] if len(axes) == 1 else None


_SIXTH = has(alpha=1 / 6, beta=0.5)
_RELU6_OF_X_PLUS_3 = op("Clip", op("Add", X, Number(3)), where=has(min=0, max=6))
_EXP = op("Exp", op("Sub", X, op("ReduceMax", X, bind="highest")), bind="exp")

RULES: tuple[Rule, ...] = (
    *(Rule("gelu", form, _becomes("Gelu"), ("Gelu",)) for form in _halved(*_erf_gates())),
    *(Rule("gelu_tanh", form, _becomes("Gelu", approximate="tanh"), ("Gelu",)) for form in _halved(*_tanh_gates())),
    Rule("swish", op("Mul", X, op("Sigmoid", X)), _becomes("Swish"), ("Swish",)),
    Rule("swish_alpha", op("Mul", X, op("Sigmoid", op("Mul", X, Number(name="alpha")))), _swish, ("Swish",)),
    Rule("softplus", op("Log", op("Add", op("Exp", X), Number(1))), _becomes("Softplus"), ("Softplus",)),
    Rule("mish", op("Mul", X, op("Tanh", op("Softplus", X))), _becomes("Mish"), ("Mish",)),
    Rule("hard_swish", op("Mul", X, op("HardSigmoid", X, where=_SIXTH)), _becomes("HardSwish"), ("HardSwish",)),
    *(
        Rule("hard_swish", form, _becomes("HardSwish"), ("HardSwish",))
        for form in (
            op("Div", op("Mul", X, _RELU6_OF_X_PLUS_3), Number(6)),
            *_product(X, _RELU6_OF_X_PLUS_3, Number(1 / 6)),
        )
    ),
    *(
        Rule("hard_sigmoid", form, _becomes("HardSigmoid", alpha=1 / 6, beta=0.5), ("HardSigmoid",))
        for form in (op("Div", _RELU6_OF_X_PLUS_3, Number(6)), op("Mul", _RELU6_OF_X_PLUS_3, Number(1 / 6)))
    ),
    Rule("relu", op("Max", X, Number(0)), _becomes("Relu")),
    Rule("relu", op("Clip", X, where=has(min=0, max=None)), _becomes("Relu")),
    Rule("softmax", op("Div", _EXP, op("ReduceSum", Any("exp"), bind="total")), _softmax),
)
