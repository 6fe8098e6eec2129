"""Facts about a node that follow from its op, input types and attributes alone: memoised, as networks repeat layers.

Also `append`, the one way for passes and the frontend to add a node: its output types are derived, never told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from mcompile.dtypes import TensorType
from mcompile.errors import InternalError, ModelError
from mcompile.graph.graph import Graph, Node
from mcompile.ir.expr import Load, Select, Var
from mcompile.ir.simplify import simplify
from mcompile.ir.tensor import Compute, Placeholder, build_dag
from mcompile.ops.registry import OpDef, OpKind, lookup

Types = tuple[TensorType | None, ...]
HOST_DOMAIN = "host"  # domain of nodes that Python runs; no OpDef has it
HOST_MODEL = "onnx_model"  # attribute of a host op: its one-node ONNX model, serialised
_MEMO_BYTES = 1 << 12  # attributes with larger arrays are not memoised


@dataclass(frozen=True)
class Facts:
    """What an application of an op gives.

    types: of the outputs. copied_input: the input that the first output copies element by element, if there is one.
    permutation: of the dims of input 0, if the first output is that and nothing more. reads_nothing: no input's
    elements matter.
    """

    types: tuple[TensorType, ...]
    copied_input: int | None
    permutation: tuple[int, ...] | None
    reads_nothing: bool


class _Key:
    """Hashable stand-in for attributes: equal when names, types and contents are equal."""

    __slots__ = ("attrs", "hash", "key")

    def __init__(self, attrs: Mapping[str, Any]) -> None:
        self.attrs = attrs
        self.key = tuple((name, freeze(attrs[name])) for name in sorted(attrs))
        self.hash = hash(self.key)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.key == other.key


def freeze(value: Any) -> Any:
    """A hashable value, equal for equal attribute values. Raises TypeError for a Graph (compared by nothing)."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (list, tuple)):
        return tuple(freeze(item) for item in value)
    if isinstance(value, Graph):
        raise TypeError("a Graph has no frozen form")
    return type(value).__name__, repr(value) if isinstance(value, float) else value


def _is_small(attrs: Mapping[str, Any]) -> bool:
    arrays = [value for value in attrs.values() if isinstance(value, np.ndarray)]
    graphs = any(isinstance(value, Graph) for value in attrs.values())
    return not graphs and sum(array.nbytes for array in arrays) <= _MEMO_BYTES


def derive(op: OpDef, types: Types, attrs: Mapping[str, Any]) -> Facts:
    """The facts of an application of `op`. Raises what `op.compute` raises: ModelError, Unsupported."""
    return _derive(op.domain, op.name, types, _Key(attrs)) if _is_small(attrs) else _compute_facts(op, types, attrs)


@lru_cache(maxsize=4096)
def _derive(domain: str, name: str, types: Types, key: _Key) -> Facts:
    op = lookup(name, domain)
    if op is None:
        raise InternalError(f"no op {name} in domain {domain!r}")
    return _compute_facts(op, types, key.attrs)


def _compute_facts(op: OpDef, types: Types, attrs: Mapping[str, Any]) -> Facts:
    inputs = [None if t is None else Placeholder(f"x{i}", t.dims, t.dtype) for i, t in enumerate(types)]
    outputs = op.compute(inputs, attrs)
    _check_reads(outputs)
    copied = None
    if op.kind in (OpKind.ELEMENTWISE, OpKind.BROADCAST, OpKind.INJECTIVE) and outputs:
        copied = next((i for i, x in enumerate(inputs) if x is not None and _copies(outputs[0], x)), None)
    permutation = _permutation(outputs[0], inputs[0]) if op.kind is OpKind.INJECTIVE and inputs else None
    reads_nothing = not any(output.inputs for output in outputs)
    return Facts(tuple(output.type for output in outputs), copied, permutation, reads_nothing)


def _check_reads(outputs: Sequence[Compute]) -> None:
    """Raises ModelError where an axis runs beyond the end of an input that it indexes (guarded loads are not seen)."""
    for tensor in build_dag(outputs).computes:
        extents = {axis.var: axis.extent for axis in (*tensor.axes, *tensor.reduce_axes)}
        pending = [tensor.body]
        while pending:
            expr = pending.pop()
            if isinstance(expr, Select):
                continue
            pending.extend(expr.children)
            if not isinstance(expr, Load) or not isinstance(expr.source, Placeholder):
                continue
            for index, size in zip(expr.indices, expr.source.shape, strict=True):
                if isinstance(index, Var) and extents.get(index, 0) > size:
                    name, shape = expr.source.name.removeprefix("x"), list(expr.source.shape)
                    raise ModelError(f"input {name} of shape {shape} is too small: {extents[index]} elements are read")


def _copies(output: Compute, source: Placeholder) -> bool:
    """Whether output[i] = source[i] for every i."""
    if output.type != source.type or len(output.inputs) > 1:
        return False
    ranges = {axis.var: (0, axis.extent - 1) for axis in output.axes}
    body = simplify(output.body, ranges) if output.type.size else output.body
    if not isinstance(body, Load) or body.source is not source:
        return False
    pairs = zip(body.indices, output.axes, strict=True)
    return all(index is axis.var or axis.extent == 1 for index, axis in pairs)


def _permutation(output: Compute, source: Placeholder | None) -> tuple[int, ...] | None:
    """The dims p for which output = source.transpose(p)."""
    body = output.body
    if not isinstance(body, Load) or body.source is not source or len(body.indices) != len(output.axes):
        return None
    dims = {index: dim for dim, index in enumerate(body.indices)}
    perm = tuple(dims.get(axis.var, -1) for axis in output.axes)
    if -1 in perm or source is None or tuple(source.shape[dim] for dim in perm) != output.shape:
        return None
    return perm


def input_types(graph: Graph, node: Node) -> Types:
    """Types of a node's inputs, None where an optional one is absent."""
    return tuple(graph.types[value] if value else None for value in node.inputs)


def node_facts(graph: Graph, node: Node) -> Facts | None:
    """The facts of a node, or None for one without an OpDef (a host op)."""
    op = None if is_host(node) else lookup(node.op, node.domain)
    return None if op is None else derive(op, input_types(graph, node), node.attrs)


def is_host(node: Node) -> bool:
    """Whether Python runs the node: the frontend gave it its own ONNX model."""
    return HOST_MODEL in node.attrs


def apply(
    graph: Graph,
    op: str,
    inputs: Sequence[str],
    attrs: Mapping[str, Any] | None = None,
    *,
    stem: str,
) -> str:
    """Add a node of `op` (missing attributes take their defaults) and return its first output; edits `graph`."""
    node, types = _build(graph, op, inputs, attrs or {}, graph.fresh(stem))
    graph.add(node, types)
    return node.outputs[0]


def become(graph: Graph, node: Node, op: str, inputs: Sequence[str], attrs: Mapping[str, Any] | None = None) -> None:
    """Put an application of `op` in the place of `node`, under the same name and outputs; edits `graph`.

    Raises InternalError if that changed an output's type.
    """
    new, types = _build(graph, op, inputs, attrs or {}, node.name)
    old = [graph.types[output] for output in node.outputs]
    if list(types[: len(old)]) != old:
        raise InternalError(f"{node.name}: {op} gives {types[0]}, but {node.op} gave {old[0]}")
    graph.replace(replace(new, outputs=(*node.outputs, *new.outputs[len(old) :])), types)


def _build(
    graph: Graph, op: str, inputs: Sequence[str], attrs: Mapping[str, Any], name: str
) -> tuple[Node, tuple[TensorType, ...]]:
    definition = lookup(op)
    if definition is None:
        raise InternalError(f"no op {op}")
    full = {**definition.attrs, **attrs}
    types = derive(definition, tuple(graph.types[value] if value else None for value in inputs), full).types
    outputs = tuple(name if i == 0 else graph.fresh(f"{name}.{i}") for i in range(len(types)))
    return Node(name, op, tuple(inputs), outputs, full), types
