"""Index arithmetic that movement and indexing ops share: axes, flat indices, clamps, attribute values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import numpy as np

from mcompile.dtypes import DType
from mcompile.errors import ModelError
from mcompile.ir.expr import Const, Expr, maximum, minimum, select
from mcompile.ir.tensor import Tensor, row_major
from mcompile.ops.registry import Inputs

ZERO = Const(0, DType.INT64)


def operand(inputs: Inputs, position: int) -> Tensor:
    """The input at `position`. Raises ModelError where it is absent."""
    tensor = inputs[position] if position < len(inputs) else None
    if tensor is None:
        raise ModelError(f"required input {position} is missing")
    return tensor


def ints(value: Any) -> tuple[int, ...]:
    """An integer attribute (array, sequence or number) as a tuple."""
    return tuple(int(item) for item in np.asarray(value).reshape(-1))


def is_given(value: Any) -> bool:
    """False for an optional operand that is absent or an empty tensor."""
    return value is not None and np.asarray(value).size > 0


def normalize_axis(axis: int, rank: int) -> int:
    """`axis` as a number in [0, rank). Raises ModelError outside of [-rank, rank)."""
    if not -rank <= axis < rank:
        raise ModelError(f"axis {axis} is out of range for rank {rank}")
    return axis % rank


def normalize_axes(axes: Any, rank: int) -> tuple[int, ...]:
    """As `normalize_axis` for each; all of them where `axes` is None. Raises ModelError on a repeat."""
    if axes is None:
        return tuple(range(rank))
    result = tuple(normalize_axis(axis, rank) for axis in ints(axes))
    if len(set(result)) != len(result):
        raise ModelError(f"axes {ints(axes)} repeat a dimension")
    return result


def clamp(index: Expr, extent: int) -> Expr:
    """`index` forced into [0, extent)."""
    return minimum(maximum(index, 0), max(extent - 1, 0))


def wrap_index(index: Expr, extent: int) -> Expr:
    """A loaded index as a safe position: negative counts from the end, out of range goes to the nearest end."""
    index = index.astype(DType.INT64)
    return clamp(select(index < 0, index + extent, index), extent)


def ravel(indices: Sequence[Expr], shape: Sequence[int]) -> Expr:
    """The row-major flat index."""
    flat: Expr = ZERO
    for index, extent, stride in zip(indices, shape, row_major(shape), strict=True):
        if extent != 1:
            flat = flat + index * stride
    return flat


def reshape_indices(indices: Sequence[Expr], source: Sequence[int], target: Sequence[int]) -> tuple[Expr, ...]:
    """Where element `indices` of a `target`-shaped array lies in the `source`-shaped one of the same elements.

    The shapes are cut into minimal groups of dims that merge or split, so that (n, c, h, w) -> (n, c, h * w)
    touches h and w only and stays affine where it can.
    """
    if 0 in source:
        return (ZERO,) * len(source)
    result: list[Expr] = [ZERO] * len(source)
    for source_dims, target_dims in _groups(source, target):
        terms = _terms([indices[dim] for dim in target_dims], [target[dim] for dim in target_dims])
        extents = [source[dim] for dim in source_dims]
        for dim, extent, stride in zip(source_dims, extents, row_major(extents), strict=True):
            result[dim] = ZERO if extent == 1 else _digit(terms, stride, extent)
    return tuple(result)


@dataclass(frozen=True)
class _Term:
    """index * stride with 0 <= index < extent; the terms of a flat index have falling strides."""

    index: Expr
    extent: int
    stride: int


def _groups(source: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Pairs of (source dims, target dims) of equal products, as small as possible; dims of 1 are left out."""
    left = [dim for dim, extent in enumerate(source) if extent != 1]
    right = [dim for dim, extent in enumerate(target) if extent != 1]
    groups = []
    while left:
        a, b = [left.pop(0)], [right.pop(0)]
        while (size_a := prod(source[dim] for dim in a)) != (size_b := prod(target[dim] for dim in b)):
            if size_a < size_b:
                a.append(left.pop(0))
            else:
                b.append(right.pop(0))
        groups.append((a, b))
    return groups


def _terms(indices: Sequence[Expr], shape: Sequence[int]) -> list[_Term]:
    return [_Term(*term) for term in zip(indices, shape, row_major(shape), strict=True)]


def _digit(terms: Sequence[_Term], stride: int, extent: int) -> Expr:
    """(flat // stride) % extent, simplified by the terms' strides and extents."""
    high = [term for term in terms if term.stride >= stride]
    low = [term for term in terms if term.stride < stride]
    if any(term.stride % stride for term in high):
        return (_sum([(term.index, term.stride) for term in terms]) // stride) % extent
    quotient = [(term.index, term.stride // stride, term.extent - 1) for term in high]
    quotient = [(index, factor, bound) for index, factor, bound in quotient if factor % extent]
    bound = sum(factor * limit for _, factor, limit in quotient)
    total = _sum([(index, factor) for index, factor, _ in quotient])
    if sum((term.extent - 1) * term.stride for term in low) >= stride:
        common = gcd(stride, *(term.stride for term in low))
        total = total + _sum([(term.index, term.stride // common) for term in low]) // (stride // common)
        bound += sum((term.extent - 1) * term.stride for term in low) // stride
    return total if bound < extent else total % extent


def _sum(products: Sequence[tuple[Expr, int]]) -> Expr:
    total: Expr = ZERO
    for index, factor in products:
        total = total + index * factor
    return total
