"""One product for several of the same left operand (query, key and value of attention).

    q = MatMul(x, Wq) + bq                  y = MatMul(x, [Wq Wk Wv]) + [bq bk bv]
    k = MatMul(x, Wk) + bk           ->     q, k, v = Split(y)
    v = MatMul(x, Wv) + bv

Split's parts are views, so x is read once and the product has more columns to share among threads. Profitable while
the single products are small: wide ones fill the machine by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mcompile.graph.graph import Graph, Node
from mcompile.graph.infer import apply
from mcompile.graph.passes.canonicalize import add_constant

MAX_COLUMNS = 1024


@dataclass(frozen=True)
class _Product:
    """MatMul(x, weights), with `bias` added by the node `last` where there is one."""

    matmul: Node
    last: Node
    bias: str


def merge_matmuls(graph: Graph) -> Graph:
    """The graph with the small products of one operand by constant matrices merged."""
    new = graph
    for value in [*graph.inputs, *(output for node in graph.topological() for output in node.outputs)]:
        users = new.consumers(value)
        found = [product for node in users if (product := _product(new, node, value)) is not None]
        for group in (
            [product for product in found if product.bias],
            [product for product in found if not product.bias],
        ):
            if len(group) > 1 and len({_rows(new, product) for product in group}) == 1:
                new = new.copy() if new is graph else new
                _merge(new, value, group)
    return new


def _rows(graph: Graph, product: _Product) -> tuple[int, str]:
    weights = graph.constants[product.matmul.inputs[1]]
    return weights.shape[0], weights.dtype.name


def _product(graph: Graph, node: Node, value: str) -> _Product | None:
    """The product that `node` begins, if it is one that may be merged."""
    if node.op != "MatMul" or node.domain or node.inputs[0] != value or node.inputs[1] == value:
        return None
    weights = graph.constants.get(node.inputs[1])
    output = node.outputs[0]
    if weights is None or weights.ndim != 2 or weights.shape[1] > MAX_COLUMNS or output in graph.outputs:
        return None
    consumers = graph.consumers(output)
    if len(consumers) == 1 and consumers[0].op == "Add" and not consumers[0].domain:
        add = consumers[0]
        bias = next((name for name in add.inputs if name != output), "")
        array = graph.constants.get(bias)
        is_row = array is not None and array.shape == (weights.shape[1],)
        if is_row and add.outputs[0] not in graph.outputs:
            return _Product(node, add, bias)
    return _Product(node, node, "")


def _merge(graph: Graph, value: str, group: Sequence[_Product]) -> None:
    first = group[0]
    arrays = [graph.constants[product.matmul.inputs[1]] for product in group]
    weights = add_constant(graph, f"{first.matmul.name}.merged", np.concatenate(arrays, axis=1))
    merged = apply(graph, "MatMul", (value, weights), stem=f"{first.matmul.name}.product")
    if first.bias:
        biases = np.concatenate([graph.constants[product.bias] for product in group])
        bias = add_constant(graph, f"{first.last.name}.merged", biases)
        merged = apply(graph, "Add", (merged, bias), stem=f"{first.last.name}.sum")
    sizes = np.array([array.shape[1] for array in arrays], np.int64)
    split = apply(graph, "Split", (merged,), {"axis": -1, "split": sizes, "num_outputs": None}, stem="split")
    parts = graph.nodes[graph.producers[split]].outputs
    for product, part in zip(group, parts, strict=True):
        graph.replace_uses(product.last.outputs[0], part)
        graph.remove(product.last.name)
        if product.last is not product.matmul:
            graph.remove(product.matmul.name)
