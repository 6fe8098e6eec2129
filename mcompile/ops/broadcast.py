"""Loads under numpy's broadcasting, and pointwise stages built from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mcompile.errors import ModelError
from mcompile.ir.expr import Expr
from mcompile.ir.tensor import Compute, Tensor, compute
from mcompile.ops.precision import narrowed, widened
from mcompile.ops.registry import Array, Attrs


def broadcast_shape(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """numpy's multidirectional broadcasting. Raises ModelError if the shapes do not fit."""
    rank = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    result = []
    for dims in zip(*padded, strict=True):
        sizes = {dim for dim in dims if dim != 1}
        if len(sizes) > 1:
            raise ModelError(f"shapes do not broadcast: {', '.join(str(tuple(shape)) for shape in shapes)}")
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def load_broadcast(tensor: Tensor, indices: Sequence[Expr]) -> Expr:
    """The element of `tensor` that broadcasting puts at `indices` of a result of the same or higher rank."""
    aligned = indices[len(indices) - len(tensor.shape) :]
    return tensor[tuple(0 if extent == 1 else index for index, extent in zip(aligned, tensor.shape, strict=True))]


def quiet_reference(function: Callable[..., Any] | None) -> Callable[..., tuple[Array, ...]] | None:
    """An OpDef's reference of a numpy function of the inputs, without numpy's warnings about overflow and the like."""
    if function is None:
        return None

    def reference(arrays: Sequence[Array | None], _: Attrs) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            return (np.asarray(function(*arrays)),)

    return reference


def pointwise(name: str, tensors: Sequence[Tensor], function: Callable[..., Expr]) -> Compute:
    """`function` of the broadcast elements; 16-bit floats are computed in FLOAT32 and rounded to that of input 0."""

    def element(*indices: Expr) -> Expr:
        loads = [widened(load_broadcast(tensor, indices)) for tensor in tensors]
        return narrowed(function(*loads), tensors[0].dtype)

    return compute(name, broadcast_shape([tensor.shape for tensor in tensors]), element)
