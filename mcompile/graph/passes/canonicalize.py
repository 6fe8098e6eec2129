"""Write equivalent forms in one way, so that later passes, fusion and schedules see few of them.

Flatten, Squeeze, Unsqueeze, Reshape      ->   Reshape(x, shape=[the output's dims])
Gemm(a, b, c, alpha, beta, transA/B)      ->   MatMul, then Add (constants scaled and transposed)
Div(x, 4)                                 ->   Mul(x, 0.25): only where the reciprocal is exact
Sub(x, constant)                          ->   Add(x, -constant)
Expand(x) that its user would broadcast   ->   x
Sum(a, b)                                 ->   Add(a, b)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import frexp

import numpy as np

from mcompile.dtypes import DType, TensorType
from mcompile.errors import McompileError
from mcompile.graph.graph import Array, Graph, Node
from mcompile.graph.infer import apply, become, derive, input_types, node_facts
from mcompile.graph.passes.pattern import Any, Binding, Known, Number, Op, Rule, apply_rules, op, scalar
from mcompile.ops.registry import OpKind, lookup

X = Any("x")


def canonicalize(graph: Graph) -> Graph:
    """The graph in canonical forms."""
    return _drop_expands(apply_rules(graph, RULES))


def add_constant(graph: Graph, stem: str, array: Array) -> str:
    """A new constant; edits `graph`."""
    name = graph.fresh(stem)
    return graph.add_constant(name, array, TensorType(array.shape, DType.from_numpy(array.dtype)))


def reshape_attrs(shape: Sequence[int]) -> dict[str, object]:
    """Attributes of the Reshape to exactly `shape`."""
    return {"shape": np.array(shape, np.int64), "allowzero": int(0 in shape)}


def _reshape(graph: Graph, node: Node, bound: Binding) -> bool:
    shape = graph.types[node.outputs[0]].dims
    if node.op == "Reshape" and tuple(node.attrs["shape"]) == shape:
        return False
    become(graph, node, "Reshape", (bound["x"],), reshape_attrs(shape))
    return True


def _gemm(graph: Graph, node: Node, bound: Binding) -> bool:
    attrs = node.attrs
    if not graph.types[node.outputs[0]].dtype.is_float:
        return False
    alpha, beta = float(attrs["alpha"]), float(attrs["beta"])
    a = _transposed(graph, node.inputs[0], bool(attrs["transA"]), f"{node.name}.a")
    b = _transposed(graph, node.inputs[1], bool(attrs["transB"]), f"{node.name}.b")
    if alpha != 1 and b in graph.constants:
        b, alpha = _scaled(graph, b, alpha, f"{node.name}.b"), 1.0
    added = node.inputs[2] if len(node.inputs) > 2 and node.inputs[2] and beta != 0 else ""
    if not added and alpha == 1:
        become(graph, node, "MatMul", (a, b))
        return True
    product = apply(graph, "MatMul", (a, b), stem=f"{node.name}.product")
    if not added:
        become(graph, node, "Mul", (product, _number(graph, product, alpha, f"{node.name}.alpha")))
        return True
    product = _scaled(graph, product, alpha, f"{node.name}.alpha")
    become(graph, node, "Add", (product, _scaled(graph, added, beta, f"{node.name}.beta")))
    return True


def _transposed(graph: Graph, value: str, wanted: bool, stem: str) -> str:
    """The transpose of a matrix; of a constant at once."""
    if not wanted:
        return value
    if value in graph.constants:
        return add_constant(graph, stem, graph.constants[value].T)
    return apply(graph, "Transpose", (value,), {"perm": (1, 0)}, stem=stem)


def _scaled(graph: Graph, value: str, factor: float, stem: str) -> str:
    """factor * value; of a constant at once."""
    if factor == 1:
        return value
    if value in graph.constants:
        array = graph.constants[value]
        return add_constant(graph, stem, (array * array.dtype.type(factor)).astype(array.dtype, copy=False))
    return apply(graph, "Mul", (value, _number(graph, value, factor, stem)), stem=stem)


def _number(graph: Graph, like: str, number: float, stem: str) -> str:
    """A scalar constant of the dtype of the value `like`."""
    return add_constant(graph, stem, np.array(number, graph.types[like].dtype.numpy))


def _exact_division(graph: Graph, node: Node, bound: Binding) -> bool:
    divisor = scalar(graph, bound["c"])
    if divisor is None or not np.isfinite(divisor) or abs(frexp(divisor)[0]) != 0.5 or abs(frexp(divisor)[1]) > 60:
        return False
    array = graph.constants[bound["c"]]
    if not graph.types[bound["c"]].dtype.is_float:
        return False
    become(graph, node, "Mul", (bound["x"], add_constant(graph, f"{node.name}.factor", 1 / array)))
    return True


def _negated_sub(graph: Graph, node: Node, bound: Binding) -> bool:
    array = graph.constants[bound["c"]]
    if not graph.types[bound["c"]].dtype.is_float:
        return False
    become(graph, node, "Add", (bound["x"], add_constant(graph, f"{node.name}.negated", -array)))
    return True


def _explicit_perm(graph: Graph, node: Node, bound: Binding) -> bool:
    if node.attrs["perm"] is not None:
        return False
    rank = len(graph.types[bound["x"]].shape)
    become(graph, node, "Transpose", (bound["x"],), {"perm": tuple(reversed(range(rank)))})
    return True


def _sum(graph: Graph, node: Node, bound: Binding) -> bool:
    become(graph, node, "Add", node.inputs)
    return True


RULES = (
    *(Rule("reshape", op(name, X), _reshape) for name in ("Flatten", "Squeeze", "Unsqueeze", "Reshape")),
    Rule("gemm", op("Gemm", X, Any("w")), _gemm),
    Rule("gemm_add", op("Gemm", X, Any("w"), Any("c")), _gemm),
    Rule("exact_division", op("Div", X, Number(name="c")), _exact_division),
    Rule("negated_sub", op("Sub", X, Known("c")), _negated_sub),
    Rule("explicit_perm", op("Transpose", X), _explicit_perm),
    Rule("sum_of_two", Op("Sum", (X, Any("y"))), _sum),
)


def _drop_expands(graph: Graph) -> Graph:
    """Let elementwise users broadcast by themselves, where their output stays the same."""
    new: Graph | None = None
    for node in graph.topological():
        current = new or graph
        node = current.nodes[node.name]
        definition = lookup(node.op, node.domain)
        if definition is None or definition.kind is not OpKind.BROADCAST:
            continue
        for position, value in enumerate(node.inputs):
            source = _expanded(current, value)
            if source is None or not _same_output(current, node, position, source):
                continue
            new = new or graph.copy()
            inputs = (*node.inputs[:position], source, *node.inputs[position + 1 :])
            become(new, node, node.op, inputs, node.attrs)
            current, node = new, new.nodes[node.name]
    return new or graph


def _expanded(graph: Graph, value: str) -> str | None:
    """What `value` is an Expand of."""
    node = graph.producer(value) if value else None
    return node.inputs[0] if node is not None and node.op == "Expand" and not node.domain else None


def _same_output(graph: Graph, node: Node, position: int, source: str) -> bool:
    definition, facts = lookup(node.op, node.domain), node_facts(graph, node)
    types = list(input_types(graph, node))
    types[position] = graph.types[source]
    try:
        return definition is not None and facts == derive(definition, tuple(types), node.attrs)
    except McompileError:
        return False
