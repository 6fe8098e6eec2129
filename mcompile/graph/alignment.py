"""Alignment: an epilogue is written in the axes of the anchor whose values it takes.

    matmul[n, h, w, c] = ...                       matmul[n, h, w, c] = ...
    t[n, c, h, w] = matmul[n, h, w, c]        ->   add[n, h, w, c] = matmul[n, h, w, c] + x[n, c, h, w]
    add[n, c, h, w] = t[n, c, h, w] + x[n, c, h, w]

A logical order of axes means nothing in memory: the output's strides are permuted with its axes. So a Transpose, or a
Reshape that only adds or drops dims of 1, may stand between an anchor and its epilogue at no cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcompile.dtypes import DType
from mcompile.graph.views import Strides, canonical_strides, tensors_of
from mcompile.ir.expr import Const, Expr, Load, Var, substitute, transform, var, walk
from mcompile.ir.tensor import Axis, Compute, Tensor

_ZERO = Const(0, DType.INT64)
Frame = tuple[int | None, ...]  # for each axis of the anchor, the tensor's axis that runs with it; None: both have 1


@dataclass(frozen=True)
class Aligned:
    """The outputs in the anchor's axes, and how the axes of each stood before."""

    outputs: tuple[Compute, ...]
    frames: tuple[Frame, ...]

    def strides(self, position: int, strides: Strides) -> Strides:
        """Strides of output `position` in the new order of axes."""
        frame = self.frames[position]
        moved = [0 if axis is None else strides[axis] for axis in frame]
        return canonical_strides(self.outputs[position].shape, moved)


def align(outputs: Sequence[Compute], anchor: Compute) -> Aligned:
    """`outputs` with every compute that takes values of `anchor`, directly or not, in its axes.

    Where one of them does not run element by element with the anchor, all stay as they are.
    """
    tensors = tensors_of(outputs)
    same = Aligned(tuple(outputs), tuple(tuple(range(len(output.shape))) for output in outputs))
    frames: dict[Tensor, Frame] = {anchor: tuple(range(len(anchor.shape)))}
    for tensor in tensors:
        if isinstance(tensor, Compute) and tensor is not anchor and any(s in frames for s in tensor.inputs):
            frame = _frame(tensor, anchor, frames)
            if frame is None:
                return same
            frames[tensor] = frame
    if all(frame == tuple(range(len(tensor.shape))) for tensor, frame in frames.items()):
        return same
    done: dict[Tensor, Tensor] = {}
    for tensor in tensors:
        framed = isinstance(tensor, Compute) and tensor is not anchor and tensor in frames
        done[tensor] = _rewrite(tensor, anchor, frames, done) if framed else tensor  # type: ignore[arg-type]
    results = [done[output] for output in outputs]
    identity = tuple(range(len(anchor.shape)))
    return Aligned(
        tuple(result for result in results if isinstance(result, Compute)),
        tuple(
            frames.get(output, tuple(range(len(output.shape)))) if output is not anchor else identity
            for output in outputs
        ),
    )


def _frame(tensor: Compute, anchor: Compute, frames: Mapping[Tensor, Frame]) -> Frame | None:
    """The axes of `tensor` that run with the anchor's, judged by how it loads a tensor that runs with it."""
    if tensor.reduce_axes:
        return None
    load = next(node for node in walk(tensor.body) if isinstance(node, Load) and node.source in frames)
    positions = {axis.var: position for position, axis in enumerate(tensor.axes) if axis.extent != 1}
    frame: list[int | None] = []
    for extent, source_axis in zip(anchor.shape, frames[load.source], strict=True):
        index = None if source_axis is None else load.indices[source_axis]
        position = positions.get(index) if isinstance(index, Var) else None
        if extent != 1 and (position is None or tensor.axes[position].extent != extent):
            return None
        frame.append(position)
    used = [position for position in frame if position is not None]
    return tuple(frame) if sorted(used) == sorted(positions.values()) else None


def _rewrite(tensor: Compute, anchor: Compute, frames: Mapping[Tensor, Frame], done: Mapping[Tensor, Tensor]) -> Tensor:
    """`tensor` in the anchor's axes; one that only rearranged another one's elements becomes that one."""
    frame = frames[tensor]
    axes = tuple(
        Axis(var(own.var.name), 1) if position is None else tensor.axes[position]
        for own, position in zip(anchor.axes, frame, strict=True)
    )
    unit: dict[Var, Expr] = {axis.var: _ZERO for i, axis in enumerate(tensor.axes) if i not in frame}

    def load(node: Expr) -> Expr | None:
        if not isinstance(node, Load) or node.source not in frames or node.source is anchor:
            return None
        indices = [_ZERO if position is None else node.indices[position] for position in frames[node.source]]
        return Load(done[node.source], tuple(indices))

    body = transform(substitute(tensor.body, unit), load)
    if isinstance(body, Load) and _is_identity(body, axes):
        return body.source  # type: ignore[no-any-return]
    return Compute(tensor.name, anchor.shape, tensor.dtype, axes, (), body)


def _is_identity(load: Load, axes: Sequence[Axis]) -> bool:
    return load.source.shape == tuple(axis.extent for axis in axes) and all(
        index is axis.var or axis.extent == 1 for index, axis in zip(load.indices, axes, strict=True)
    )
