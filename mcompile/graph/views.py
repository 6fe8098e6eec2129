"""Views: outputs that are only other strides and another offset in the memory of an input.

Found by what a Compute loads, never by an op's name: where the address of its single Load is affine in the output's
axes, the output needs no kernel. A concatenation is found likewise: its loads are boxes that tile the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from mcompile.dtypes import DType
from mcompile.errors import InternalError
from mcompile.graph.graph import Array, Graph, Node
from mcompile.ir.affine import as_affine
from mcompile.ir.expr import Const, Expr, Load, Select, Var, transform
from mcompile.ir.simplify import simplify
from mcompile.ir.tensor import Axis, Compute, Placeholder, Tensor
from mcompile.ops.registry import OpKind, lookup

Strides = tuple[int, ...]
_INDEX = DType.INT64


# --- strides ---


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> Strides:
    """Strides of a dense buffer whose dims from outermost to innermost are `order`, in `canonical_strides`' form."""
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return canonical_strides(shape, strides)


def canonical_strides(shape: Sequence[int], strides: Sequence[int]) -> Strides:
    """The strides with those of size-1 dims, which mean nothing, made a function of the others.

    They get the span of the dim to their right, so that a dense row-major tensor keeps its usual strides.
    """
    result = list(strides)
    for dim in reversed(range(len(shape))):
        if shape[dim] <= 1:
            result[dim] = result[dim + 1] * max(1, shape[dim + 1]) if dim + 1 < len(shape) else 1
    return tuple(result)


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Dims from outermost to innermost; None if a dim of several elements has stride 0 (they overlap)."""
    if any(extent > 1 and stride == 0 for extent, stride in zip(shape, strides, strict=True)):
        return None
    return tuple(sorted(range(len(shape)), key=lambda dim: -strides[dim]))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill a contiguous block, in whatever order of dims."""
    order = memory_order(shape, strides)
    return order is not None and dense_strides(shape, order) == canonical_strides(shape, strides)


# --- what a node computes ---


def computes_of(graph: Graph, node: Node, inputs: Sequence[Tensor | None]) -> tuple[Compute, ...]:
    """The node's output tensors on `inputs`.

    Where it computes element by element or moves elements, constants of one element stand as numbers in the bodies.
    """
    op = lookup(node.op, node.domain)
    if op is None:
        raise InternalError(f"{node.name}: {node.op} has no definition")
    outputs = op.compute(inputs, node.attrs)[: len(node.outputs)]
    if op.kind not in (OpKind.ELEMENTWISE, OpKind.BROADCAST, OpKind.INJECTIVE):
        return outputs
    scalars: dict[Tensor, Array] = {
        tensor: graph.constants[value].reshape(-1)[0]
        for value, tensor in zip(node.inputs, inputs, strict=True)
        if isinstance(tensor, Placeholder) and value in graph.constants and graph.types[value].size == 1
    }
    return rebuild(outputs, {}, scalars) if scalars else outputs


def placeholders_of(graph: Graph, node: Node) -> tuple[Placeholder | None, ...]:
    """One placeholder for each input position (a value used twice has two), None where the input is absent."""
    types = [graph.types[value] if value else None for value in node.inputs]
    return tuple(None if t is None else Placeholder(f"x{i}", t.dims, t.dtype) for i, t in enumerate(types))


def tensors_of(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """All that `outputs` need, themselves included, in topological order; names may repeat."""
    order: dict[Tensor, None] = {}

    def visit(tensor: Tensor) -> None:
        if tensor in order:
            return
        for source in tensor.inputs if isinstance(tensor, Compute) else ():
            visit(source)
        order[tensor] = None

    for output in outputs:
        visit(output)
    return tuple(order)


def rebuild(
    outputs: Sequence[Compute],
    names: Mapping[Tensor, str],
    scalars: Mapping[Tensor, Array] | None = None,
) -> tuple[Compute, ...]:
    """The computes and all they need, tensors renamed by `names`, loads of `scalars` replaced by their value."""
    done: dict[Tensor, Tensor] = {}

    def load(node: Expr) -> Expr | None:
        if not isinstance(node, Load):
            return None
        if scalars and node.source in scalars:
            return Const(scalars[node.source].item(), node.dtype)
        new = done[node.source]
        return None if new is node.source else Load(new, node.indices)

    for tensor in tensors_of(outputs):
        name = names.get(tensor, tensor.name)
        if isinstance(tensor, Compute):
            body = transform(tensor.body, load)
            same = name == tensor.name and body is tensor.body
            new = Compute(name, tensor.shape, tensor.dtype, tensor.axes, tensor.reduce_axes, body)
            done[tensor] = tensor if same else new
        else:
            done[tensor] = tensor if name == tensor.name else Placeholder(name, tensor.shape, tensor.dtype)
    results = [done[output] for output in outputs]
    return tuple(result for result in results if isinstance(result, Compute))


# --- views ---


@dataclass(frozen=True)
class ViewMap:
    """Output element i lies where the input at position `source` has its element `indices`(i)."""

    source: int
    source_shape: tuple[int, ...]
    indices: tuple[Expr, ...]
    axes: tuple[Axis, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.extent for axis in self.axes)

    @property
    def is_rearrangement(self) -> bool:
        """Whether it only permutes dims and adds or drops dims of size 1."""
        used = {index for index in self.indices if isinstance(index, Var)}
        rest = [index for index in self.indices if not isinstance(index, Var)]
        large = {axis.var for axis in self.axes if axis.extent != 1}
        once = len(used) + len(rest) == len(self.indices) and prod(self.shape) == prod(self.source_shape)
        return once and used == large and all(isinstance(index, Const) and index.value == 0 for index in rest)

    def strides(self, source: Strides) -> tuple[Strides, int] | None:
        """(strides, offset) of the output in the memory of a source of strides `source`; None if not affine.

        Negative strides count as not affine: kernels read forward.
        """
        address: Expr = Const(0, _INDEX)
        for index, stride in zip(self.indices, source, strict=True):
            address = address + index * stride
        affine = as_affine(simplify(address, _ranges(self.axes)))
        variables = {axis.var for axis in self.axes}
        if any(atom not in variables or stride < 0 for atom, stride in affine.terms.items()):
            return None
        strides = [affine.coefficient(axis.var) for axis in self.axes]
        return canonical_strides(self.shape, strides), affine.const


def view_map(compute: Compute, inputs: Sequence[Tensor | None]) -> ViewMap | None:
    """How `compute` moves the elements of one of `inputs`; None if it does anything else."""
    body = compute.body
    if not isinstance(body, Load) or body.source not in inputs or compute.reduce_axes or 0 in compute.shape:
        return None
    ranges = _ranges(compute.axes)
    indices = tuple(simplify(index, ranges) for index in body.indices)
    return ViewMap(list(inputs).index(body.source), body.source.shape, indices, compute.axes)


def _ranges(axes: Sequence[Axis]) -> dict[Var, tuple[int, int]]:
    return {axis.var: (0, axis.extent - 1) for axis in axes}


# --- concatenation ---


def concat_boxes(compute: Compute, inputs: Sequence[Tensor | None]) -> tuple[tuple[int, ...] | None, ...] | None:
    """Where each input's first element lies in the output, if the inputs tile it; None if they do not.

    The body must choose by Selects among loads whose indices are `axis - offset`. Where such boxes do not overlap
    and fill the output, an element is in bounds for one load only, so the conditions need not be looked at. An
    input that is not loaded (it is empty) has None.
    """
    offsets: dict[Tensor, tuple[int, ...]] = {}
    for leaf in _choices(compute.body):
        offset = _box(leaf, compute) if isinstance(leaf, Load) else None
        if offset is None or leaf.source in offsets or leaf.source not in inputs:  # type: ignore[attr-defined]
            return None
        offsets[leaf.source] = offset  # type: ignore[attr-defined]
    boxes = [(offset, tensor.shape) for tensor, offset in offsets.items()]
    if len(boxes) < 2 or sum(prod(shape) for _, shape in boxes) != prod(compute.shape):
        return None
    if any(_overlap(a, b) for i, a in enumerate(boxes) for b in boxes[:i]):
        return None
    return tuple(None if tensor is None else offsets.get(tensor) for tensor in inputs)


def _choices(body: Expr) -> list[Expr]:
    leaves: list[Expr] = []
    stack = [body]
    while stack:
        node = stack.pop()
        if isinstance(node, Select):
            stack += [node.b, node.a]
        else:
            leaves.append(node)
    return leaves


def _box(load: Load, compute: Compute) -> tuple[int, ...] | None:
    """The offset at which the loaded tensor lies in the output; None if it is not all there, dim for dim."""
    shape: tuple[int, ...] = load.source.shape
    if len(shape) != len(compute.shape):
        return None
    offset = []
    for index, axis, extent in zip(load.indices, compute.axes, shape, strict=True):
        affine = as_affine(index)
        start = -affine.const
        whole = axis.extent == extent == 1 and not affine.terms
        if not (whole or affine.terms == {axis.var: 1}) or start < 0 or start + extent > axis.extent:
            return None
        offset.append(start)
    return tuple(offset)


_Box = tuple[tuple[int, ...], tuple[int, ...]]


def _overlap(a: _Box, b: _Box) -> bool:
    return all(x < y + height and y < x + width for x, width, y, height in zip(a[0], a[1], b[0], b[1], strict=True))
