"""Scatters, turned inside out: each output element looks for the updates that hit it.

O(elements * updates) comparisons, deterministic and parallel; where several updates hit one element the last one wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mcompile.dtypes import DType
from mcompile.errors import ModelError
from mcompile.ir.expr import Const, Expr, ReduceOp, Var, all_of, binary, select
from mcompile.ir.tensor import Axis, Compute, Tensor, compute, reduce_axis, reduce_over, row_major
from mcompile.ops.index_math import clamp, normalize_axis, operand, ravel, reshape_indices
from mcompile.ops.registry import REQUIRED, Array, Attrs, Inputs, OpKind, Sample, define
from mcompile.ops.sampling import numbers

_REDUCTIONS = {"add": ReduceOp.SUM, "mul": ReduceOp.PROD, "max": ReduceOp.MAX, "min": ReduceOp.MIN}


def _reduction(attrs: Attrs) -> ReduceOp | None:
    """The combining op, or None for plain overwriting."""
    name = str(attrs["reduction"])
    if name != "none" and name not in _REDUCTIONS:
        raise ModelError(f"scatter has no reduction {name!r}; expected none or one of {sorted(_REDUCTIONS)}")
    return _REDUCTIONS.get(name)


def _wrapped(index: Expr, extent: int) -> Expr:
    """A loaded index with negatives counted from the end; out of range matches nothing."""
    index = index.astype(DType.INT64)
    return select(index < 0, index + extent, index)


def _combine(op: ReduceOp, data: Tensor, combined: Compute) -> Compute:
    return compute("scatter", data.shape, lambda *index: binary(op.combiner, data[index], combined[index]))


# --- ScatterND ---


def _scatter_nd(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    data, indices, updates = (operand(inputs, position) for position in range(3))
    depth = indices.shape[-1]
    if updates.shape != (*indices.shape[:-1], *data.shape[depth:]):
        raise ModelError(f"ScatterND updates {list(updates.shape)} do not fit indices {list(indices.shape)}")
    op = _reduction(attrs)
    if op is not None:
        return (_combine(op, data, _combined_nd(op, data, indices, updates)),)
    return (_overwritten_nd(data, updates, _last_match(data, indices), indices.shape[:-1]),)


def _matches(data: Tensor, indices: Tensor, axes: Sequence[Axis], index: Sequence[Expr]) -> Expr:
    """Whether the update at `axes` goes to the element (or slice) of `data` at `index`."""
    position = [axis.var for axis in axes]
    targets = [_wrapped(indices[(*position, k)], data.shape[k]) for k in range(indices.shape[-1])]
    return all_of([target.eq(i) for target, i in zip(targets, index, strict=False)])


def _last_match(data: Tensor, indices: Tensor) -> Compute:
    """The flat number of the last update of each slice of `data`, -1 for none."""
    axes = [reduce_axis(extent, f"u{dim}") for dim, extent in enumerate(indices.shape[:-1])] or [reduce_axis(1, "u")]
    outer = axes if len(indices.shape) > 1 else []
    number = ravel([axis.var for axis in outer], indices.shape[:-1])

    def element(*index: Var) -> Expr:
        return reduce_over(ReduceOp.MAX, select(_matches(data, indices, outer, index), number, -1), axes)

    return compute("last", data.shape[: indices.shape[-1]], element, reduce_axes=axes)


def _overwritten_nd(data: Tensor, updates: Tensor, last: Compute, outer: Sequence[int]) -> Compute:
    depth = len(last.shape)
    count = int(np.prod(outer, dtype=np.int64))

    def element(*index: Var) -> Expr:
        found = last[tuple(index[:depth])]
        update = reshape_indices([clamp(found, count)], outer, [count])
        return select(found >= 0, updates[(*update, *index[depth:])], data[index])

    return compute("scatter", data.shape, element)


def _combined_nd(op: ReduceOp, data: Tensor, indices: Tensor, updates: Tensor) -> Compute:
    axes = [reduce_axis(extent, f"u{dim}") for dim, extent in enumerate(indices.shape[:-1])] or [reduce_axis(1, "u")]
    outer = axes if len(indices.shape) > 1 else []
    depth = indices.shape[-1]

    def element(*index: Var) -> Expr:
        update = updates[(*(axis.var for axis in outer), *index[depth:])]
        hit = _matches(data, indices, outer, index[:depth])
        return reduce_over(op, select(hit, update, op.identity(data.dtype)), axes)

    return compute("combined", data.shape, element, reduce_axes=axes)


def _scatter_nd_samples() -> Iterator[Sample]:
    data, updates = numbers(4, 3, 2), numbers(3, 2)
    yield Sample((data, np.array([[0, 1], [3, -1], [2, 0]], np.int64), updates), {})
    yield Sample((np.arange(8, dtype=np.float32), np.array([[4], [3], [1], [4]], np.int64), np.ones(4, np.float32)), {})
    for reduction in _REDUCTIONS:
        indices = np.array([[0, 1], [0, 1], [2, 0]], np.int64)
        yield Sample((data, indices, updates), {"reduction": reduction})


define(
    "ScatterND",
    OpKind.REDUCTION,
    _scatter_nd,
    attrs={"reduction": "none"},
    samples=_scatter_nd_samples,
)


# --- ScatterElements ---


def _scatter_elements(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    data, indices, updates = (operand(inputs, position) for position in range(3))
    if updates.shape != indices.shape or len(indices.shape) != len(data.shape):
        raise ModelError(f"ScatterElements updates {list(updates.shape)} do not fit indices {list(indices.shape)}")
    axis = normalize_axis(int(attrs["axis"]), len(data.shape))
    op = _reduction(attrs)

    def at(index: Sequence[Expr], position: Expr) -> tuple[Expr, ...]:
        """The update numbered `position` of the line that `index` lies on."""
        return (*index[:axis], position, *index[axis + 1 :])

    def is_covered(index: Sequence[Expr]) -> Expr:
        pairs = enumerate(zip(index, indices.shape, data.shape, strict=True))
        return all_of([i < ours for dim, (i, ours, all_) in pairs if dim != axis and ours < all_])

    def search(name: str, op: ReduceOp, value: Callable[[Sequence[Expr], Expr], Expr], missing: Expr) -> Compute:
        """`op` over the values of the updates that hit an element."""
        axes = [reduce_axis(indices.shape[axis], "u")]

        def element(*index: Var) -> Expr:
            position = axes[0].var
            hit = _wrapped(indices[at(index, position)], data.shape[axis]).eq(index[axis])
            found = select(is_covered(index), select(hit, value(index, position), missing), missing)
            return reduce_over(op, found, axes)

        return compute(name, data.shape, element, reduce_axes=axes)

    if op is not None:
        identity = op.identity(data.dtype)
        return (_combine(op, data, search("combined", op, lambda index, u: updates[at(index, u)], identity)),)
    last = search("last", ReduceOp.MAX, lambda index, u: u, Const(-1, DType.INT64))

    def element(*index: Var) -> Expr:
        found = last[index]
        return select(found >= 0, updates[at(index, clamp(found, indices.shape[axis]))], data[index])

    return (compute("scatter", data.shape, element),)


def _scatter_elements_samples() -> Iterator[Sample]:
    data = np.arange(12, dtype=np.float32).reshape(3, 4)
    indices = np.array([[1, 3, 1], [0, -1, 2]], np.int64)
    updates = np.array([[1.5, 2.5, 3.5], [4.5, 5.5, 6.5]], np.float32)
    yield Sample((data, np.array([[1, 0, 2], [0, 2, 1]], np.int64), updates), {})
    yield Sample((data, np.array([[1, 3, 0], [0, -1, 2]], np.int64), updates), {"axis": 1})
    for reduction in _REDUCTIONS:
        yield Sample((data, indices, updates), {"axis": 1, "reduction": reduction})


def _scatter_samples() -> Iterator[Sample]:
    indices, updates = np.array([[1, 0, 2], [0, 2, 1]], np.int64), numbers(2, 3)
    yield Sample((np.zeros((3, 3), np.float32), indices, updates), {"axis": 0}, opset=10)


define(
    "ScatterElements",
    OpKind.REDUCTION,
    _scatter_elements,
    attrs={"axis": 0, "reduction": "none"},
    samples=_scatter_elements_samples,
)
define(
    "Scatter",
    OpKind.REDUCTION,
    _scatter_elements,
    attrs={"axis": 0, "reduction": "none"},
    samples=_scatter_samples,
)


# --- Col2Im ---


def _col2im(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    """Sums the columns' elements that land on each pixel: for each kernel position, at most one column."""
    x = operand(inputs, 0)
    image, block = _ints(attrs["image_shape"]), _ints(attrs["block_shape"])
    rank = len(image)
    strides, dilations = (_ints(attrs[name] or (1,) * rank) for name in ("strides", "dilations"))
    pads = _ints(attrs["pads"] or (0,) * (2 * rank))
    counts = [
        (image[d] + pads[d] + pads[d + rank] - dilations[d] * (block[d] - 1) - 1) // strides[d] + 1 for d in range(rank)
    ]
    channels = x.shape[1] // int(np.prod(block))
    if x.shape[1] % int(np.prod(block)) or x.shape[2] != int(np.prod(counts)):
        raise ModelError(f"Col2Im input {list(x.shape)} does not fit image {list(image)} and block {list(block)}")
    axes = [reduce_axis(extent, f"k{dim}") for dim, extent in enumerate(block)]
    kernel_strides, column_strides = row_major(block), row_major(counts)

    def element(n: Var, c: Var, *index: Var) -> Expr:
        row: Expr = c * int(np.prod(block))
        column: Expr = Const(0, DType.INT64)
        guards = []
        for d in range(rank):
            offset = index[d] + pads[d] - axes[d].var * dilations[d]
            place = offset // strides[d]
            guards += [(offset % strides[d]).eq(0)] if strides[d] > 1 else []
            guards += [place >= 0, place < counts[d]]
            row = row + axes[d].var * kernel_strides[d]
            column = column + place * column_strides[d]
        return reduce_over(ReduceOp.SUM, select(all_of(guards), x[n, row, column], Const(0, x.dtype)), axes)

    return (compute("col2im", (x.shape[0], channels, *image), element, reduce_axes=axes),)


def _ints(value: Any) -> tuple[int, ...]:
    return tuple(int(item) for item in value)


def _col2im_samples() -> Iterator[Sample]:
    def sizes(*values: int) -> Array:
        return np.array(values, np.int64)

    x = numbers(1, 10, 9)
    yield Sample(
        (x,), {"image_shape": sizes(5, 5), "block_shape": sizes(1, 5), "strides": (2, 1), "pads": (0, 1, 0, 1)}
    )
    x = numbers(1, 8, 9)
    yield Sample((x,), {"image_shape": sizes(5, 5), "block_shape": sizes(2, 2), "dilations": (2, 2)})


define(
    "Col2Im",
    OpKind.REDUCTION,
    _col2im,
    attrs={"image_shape": REQUIRED, "block_shape": REQUIRED, "dilations": None, "pads": None, "strides": None},
    operands={1: "image_shape", 2: "block_shape"},
    samples=_col2im_samples,
)
