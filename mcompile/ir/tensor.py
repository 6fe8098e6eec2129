"""Tensor computes: what a Task computes, with no order of evaluation and no memory layout.

A Compute gives its element at `axes` as one scalar expression over loads of other tensors; a ComputeDag is a
dag of them in topological order. Indices are logical: where an element lies in memory is a Buffer's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mcompile.dtypes import DType, TensorType
from mcompile.errors import InternalError
from mcompile.ir.expr import Expr, Load, Reduce, ReduceOp, Var, as_expr, var, walk


@dataclass(frozen=True, eq=False)
class Axis:
    """A variable that runs over [0, extent)."""

    var: Var
    extent: int


@dataclass(frozen=True, eq=False)
class Tensor:
    """Base of Placeholder and Compute; compared by identity. Index it to load an element."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    def __getitem__(self, indices: Any) -> Expr:
        indices = indices if isinstance(indices, tuple) else (indices,)
        if len(indices) != len(self.shape):
            raise InternalError(f"{self.name}: expected {len(self.shape)} indices, got {len(indices)}")
        return Load(self, tuple(as_expr(index) for index in indices))

    @property
    def type(self) -> TensorType:
        return TensorType(self.shape, self.dtype)


@dataclass(frozen=True, eq=False)
class Placeholder(Tensor):
    """An input of a ComputeDag."""


@dataclass(frozen=True, eq=False)
class Compute(Tensor):
    """`self[axes] = body`; `reduce_axes` are those of the Reduce that may stand at the top of `body`."""

    axes: tuple[Axis, ...]
    reduce_axes: tuple[Axis, ...]
    body: Expr

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors it loads, each once, in order of first use."""
        return tuple(dict.fromkeys(node.source for node in walk(self.body) if isinstance(node, Load)))


def placeholder(name: str, shape: Sequence[int], dtype: DType) -> Placeholder:
    return Placeholder(name, tuple(shape), dtype)


def reduce_axis(extent: int, name: str = "k") -> Axis:
    return Axis(var(name), extent)


def reduce_over(op: ReduceOp, value: Expr, axes: Sequence[Axis]) -> Expr:
    """`value` reduced over `axes`; the extents travel in `compute(..., reduce_axes=axes)`."""
    return Reduce(op, value, tuple(axis.var for axis in axes))


def compute(
    name: str,
    shape: Sequence[int],
    function: Callable[..., Any],
    reduce_axes: Sequence[Axis] = (),
    axis_names: Sequence[str] = (),
) -> Compute:
    """The tensor whose element at (i0, i1, ...) is `function(i0, i1, ...)`.

    With `reduce_axes`, `function` must return `reduce_over(op, value, reduce_axes)`.
    """
    names = axis_names or tuple(f"i{position}" for position in range(len(shape)))
    axes = tuple(Axis(var(axis_name), extent) for axis_name, extent in zip(names, shape, strict=True))
    body = function(*(axis.var for axis in axes))
    for node in walk(body):
        if isinstance(node, Reduce) and node is not body:
            raise InternalError(f"{name}: a Reduce may only stand at the top of a body")
    if isinstance(body, Reduce) != bool(reduce_axes):
        raise InternalError(f"{name}: reduce_axes and a Reduce at the top of the body go together")
    return Compute(name, tuple(shape), body.dtype, axes, tuple(reduce_axes), body)


@dataclass(frozen=True, eq=False)
class ComputeDag:
    """Tensors in topological order (placeholders first met first), and those that are the results.

    Names are unique within a dag.
    """

    tensors: tuple[Tensor, ...]
    outputs: tuple[Compute, ...]

    @property
    def placeholders(self) -> tuple[Placeholder, ...]:
        return tuple(tensor for tensor in self.tensors if isinstance(tensor, Placeholder))

    @property
    def computes(self) -> tuple[Compute, ...]:
        return tuple(tensor for tensor in self.tensors if isinstance(tensor, Compute))

    def consumers(self, tensor: Tensor) -> tuple[Compute, ...]:
        return tuple(compute for compute in self.computes if tensor in compute.inputs)


def build_dag(outputs: Sequence[Compute]) -> ComputeDag:
    """The dag of everything `outputs` need. Raises InternalError if two tensors share a name."""
    order: dict[Tensor, None] = {}

    def visit(tensor: Tensor) -> None:
        if tensor in order:
            return
        if isinstance(tensor, Compute):
            for source in tensor.inputs:
                visit(source)
        order[tensor] = None

    for output in outputs:
        visit(output)
    names = [tensor.name for tensor in order]
    if len(set(names)) != len(names):
        raise InternalError(f"a dag's tensors need distinct names, got {sorted(names)}")
    return ComputeDag(tuple(order), tuple(outputs))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a dense array whose last dim is contiguous."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)
