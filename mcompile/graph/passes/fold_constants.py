"""Evaluate nodes whose inputs are all known.

c = Transpose(W, perm=[1, 0])      ->   c: constant
y = MatMul(x, c)                        y = MatMul(x, c)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mcompile.dtypes import DType, TensorType
from mcompile.graph.graph import Array, Graph, Node
from mcompile.graph.infer import derive, is_host
from mcompile.ir.evaluate import evaluate
from mcompile.ir.tensor import Placeholder, build_dag
from mcompile.ops.registry import Attrs, OpDef, lookup

ALWAYS_FOLDED_BYTES = 1 << 24
_GROWTH = 2  # larger results must not be more than so many times their inputs


def fold_constants(graph: Graph) -> Graph:
    """The graph with every node of known inputs replaced by its value, where that does not blow up its size."""
    new = None
    for node in graph.topological():
        source = new or graph
        op = lookup(node.op, node.domain)
        used = [value for value in node.inputs if value]
        if op is None or is_host(node) or not all(value in source.constants for value in used):
            continue
        if any(output in source.outputs for output in node.outputs):
            continue  # an output needs a kernel that writes it
        types = [source.types[output] for output in node.outputs]
        if not is_worth_folding(types, [source.constants[value] for value in used]):
            continue
        results = evaluate_op(op, [source.constants[value] if value else None for value in node.inputs], node.attrs)
        new = new or graph.copy()
        _replace(new, node, types, results)
    return new or graph


def _replace(graph: Graph, node: Node, types: Sequence[TensorType], results: Sequence[Array]) -> None:
    users = {output: graph.users.pop(output, []) for output in node.outputs}
    graph.remove(node.name)
    for output, type_, result in zip(node.outputs, types, results, strict=False):
        graph.add_constant(output, result, type_)
        if users[output]:
            graph.users[output] = users[output]


def is_worth_folding(results: Sequence[TensorType], operands: Sequence[Array]) -> bool:
    """Whether the results are small, or not much larger than what they are made of."""
    size = sum(type_.size_bytes for type_ in results)
    return size <= max(ALWAYS_FOLDED_BYTES, _GROWTH * sum(operand.nbytes for operand in operands))


def evaluate_op(op: OpDef, inputs: Sequence[Array | None], attrs: Attrs) -> tuple[Array, ...]:
    """The op's outputs for known inputs: by its numpy reference, else by evaluating its compute."""
    types = tuple(None if x is None else TensorType(x.shape, _dtype(x)) for x in inputs)
    facts = derive(op, types, attrs)
    if facts.copied_input is not None and len(facts.types) == 1:
        return (np.asarray(inputs[facts.copied_input]),)
    if facts.permutation is not None and len(facts.types) == 1:
        return (np.transpose(np.asarray(inputs[0]), facts.permutation),)
    reference = op.reference
    results = _evaluate_compute(op, inputs, types, attrs) if reference is None else reference(inputs, attrs)
    pairs = zip(results, facts.types, strict=False)
    return tuple(np.asarray(result).astype(t.dtype.numpy, copy=False).reshape(t.dims) for result, t in pairs)


def _evaluate_compute(
    op: OpDef, inputs: Sequence[Array | None], types: Sequence[TensorType | None], attrs: Attrs
) -> tuple[Array, ...]:
    tensors = [None if t is None else Placeholder(f"x{i}", t.dims, t.dtype) for i, t in enumerate(types)]
    outputs = op.compute(tensors, attrs)
    arrays = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    results = evaluate(build_dag(outputs), arrays)
    return tuple(results[output.name] for output in outputs)


def _dtype(array: Array) -> DType:
    return DType.from_numpy(array.dtype)
