"""Views: strides and offsets against numpy's, and how concatenations are recognised."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mcompile.dtypes import DType
from mcompile.graph.views import Strides, concat_boxes, is_dense, view_map
from mcompile.ir.expr import select
from mcompile.ir.tensor import Compute, compute, placeholder, row_major
from mcompile.ops.registry import lookup

X = placeholder("x", (2, 3, 4), DType.FLOAT32)


def one(op: str, **attrs: object) -> Compute:
    definition = lookup(op)
    assert definition is not None
    return definition.compute([X], {**definition.attrs, **attrs})[0]


def view_of(compute: Compute, source: Strides) -> tuple[Strides, int] | None:
    """(strides, offset) of the output in the memory of the input; None if it is no view."""
    moved = view_map(compute, compute.inputs)
    return None if moved is None else moved.strides(source)


@given(st.permutations(range(3)), st.permutations(range(3)))
def test_transpose_of_any_order(order, perm):
    array = np.zeros(24, np.int8).reshape([X.shape[dim] for dim in order]).transpose(np.argsort(order))
    assert view_of(one("Transpose", perm=tuple(perm)), array.strides) == (array.transpose(perm).strides, 0)


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 3))
def test_slice(start, stop, step):
    array = np.zeros(X.shape, np.int8)
    part = array[:, :, start:stop:step]
    found = view_of(
        one("Slice", starts=np.array([start]), ends=np.array([stop]), axes=np.array([2]), steps=np.array([step])),
        row_major(X.shape),
    )
    if part.size == 0:
        assert found is None
    elif part.shape[2] > 1:
        assert found == (part.strides, start)


def test_reshape_depends_on_the_order():
    merged = one("Reshape", shape=np.array([2, 12]))
    assert view_of(merged, (12, 4, 1)) == ((12, 1), 0)
    assert view_of(merged, (12, 1, 3)) is None
    assert view_of(one("Reshape", shape=np.array([2, 3, 2, 2])), (12, 1, 3)) == ((12, 1, 6, 3), 0)


def test_what_is_no_view():
    assert view_map(compute("twice", X.shape, lambda *i: X[i] + X[i]), [X]) is None
    flipped = compute("flip", X.shape, lambda i, j, k: X[i, j, 3 - k])
    assert view_of(flipped, row_major(X.shape)) is None


def test_rearrangements():
    def rearranges(op: str, **attrs: object) -> bool:
        found = view_map(one(op, **attrs), [X])
        return found is not None and found.is_rearrangement

    assert rearranges("Transpose", perm=(2, 0, 1))
    assert rearranges("Unsqueeze", axes=np.array([0, 2]))
    assert not rearranges("Reshape", shape=np.array([6, 4]))
    assert not rearranges("Slice", starts=np.array([0]), ends=np.array([1]))


def test_concatenations_are_recognised_by_their_boxes():
    y = placeholder("y", (2, 2, 4), DType.FLOAT32)
    joined = compute("c", (2, 5, 4), lambda i, j, k: select(j < 3, X[i, j, k], y[i, j - 3, k]))
    assert concat_boxes(joined, [X, y]) == ((0, 0, 0), (0, 3, 0))
    overlapping = compute("c", (2, 5, 4), lambda i, j, k: select(j < 3, X[i, j, k], y[i, j - 2, k]))
    assert concat_boxes(overlapping, [X, y]) is None
    chosen = compute("c", X.shape, lambda i, j, k: select(j < 3, X[i, j, k], X[i, j, k]))
    assert concat_boxes(chosen, [X]) is None


def test_dense_in_some_order():
    assert is_dense((2, 3, 4), (1, 2, 6))
    assert not is_dense((2, 3, 4), (12, 4, 0))
    assert is_dense((1, 1), (7, 9))
