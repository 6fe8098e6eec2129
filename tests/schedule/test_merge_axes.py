"""Canonical tasks: which axes are dropped and merged, and that memory and values stay as they are."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcompile.ir.evaluate import evaluate
from mcompile.ir.expr import ReduceOp, select
from mcompile.ir.tensor import Compute, compute, placeholder, reduce_axis, reduce_over
from mcompile.schedule.merge_axes import merge_axes
from mcompile.schedule.task import Task
from tests.schedule.programs import CHANNELS_LAST, F32, Array, conv2d, plain_task, random_inputs
from tests.schedule.random_traces import random_plain_task


def shapes(task: Task) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in task.dag.tensors}


def reduce_extents(task: Task, name: str) -> tuple[int, ...]:
    stage = next(stage for stage in task.dag.computes if stage.name == name)
    return tuple(axis.extent for axis in stage.reduce_axes)


def addresses(shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """Where each element lies, in the logical order of the elements."""
    total = np.zeros(shape, np.int64)
    for dim, (extent, stride) in enumerate(zip(shape, strides, strict=True)):
        total += (np.arange(extent) * stride).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return total.reshape(-1)


def merged(task: Task) -> Task:
    """The canonical form, after a check of memory and values."""
    result = merge_axes(task)
    names = [tensor.name for tensor in task.dag.tensors]
    assert [tensor.name for tensor in result.dag.tensors] == names
    assert result.strides.keys() == task.strides.keys()
    before, after = shapes(task), shapes(result)
    for name in task.strides:
        old, new = addresses(before[name], task.strides[name]), addresses(after[name], result.strides[name])
        np.testing.assert_array_equal(new, old, err_msg=name)
    inputs = random_inputs(task)
    expected = evaluate(task.dag, inputs)
    actual = evaluate(result.dag, {name: array.reshape(after[name]) for name, array in inputs.items()})
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name].reshape(-1), values.reshape(-1), rtol=1e-5, atol=1e-5, err_msg=name)
    return result


def bias(shape: tuple[int, ...], *, reads: tuple[int, ...], dims: tuple[int, ...]) -> Compute:
    """y = x + b, where b has the shape `reads` and runs along `dims` of x."""
    x, b = placeholder("x", shape, F32), placeholder("b", reads, F32)
    return compute("y", shape, lambda *i: x[i] + b[tuple(i[d] for d in dims)])


def test_all_dims_of_an_elementwise_op() -> None:
    x = placeholder("x", (2, 3, 4, 5), F32)
    task = merged(plain_task([compute("y", x.shape, lambda *i: x[i] * 2.0)]))
    assert shapes(task) == {"x": (120,), "y": (120,)}
    assert task.strides == {"x": (1,), "y": (1,)}


def test_unit_dims() -> None:
    task = merged(plain_task([bias((1, 3, 1, 4), reads=(3, 1), dims=(1, 2))]))
    assert shapes(task) == {"x": (3, 4), "b": (3,), "y": (3, 4)}


def test_a_single_element() -> None:
    assert shapes(merged(plain_task([bias((1, 1), reads=(1,), dims=(0,))]))) == {"x": (), "b": (), "y": ()}


def test_dims_that_a_broadcast_splits() -> None:
    """b[c] keeps c apart from n before it and from h, w after it, which merge."""
    task = merged(plain_task([bias((2, 3, 4, 5), reads=(3,), dims=(1,))]))
    assert shapes(task) == {"x": (2, 3, 20), "b": (3,), "y": (2, 3, 20)}


def test_dims_that_a_broadcast_joins() -> None:
    task = merged(plain_task([bias((2, 3, 4, 5), reads=(3, 4), dims=(1, 2))]))
    assert shapes(task) == {"x": (2, 12, 5), "b": (12,), "y": (2, 12, 5)}


def test_dims_that_memory_splits() -> None:
    """Channels-last: h and w are next to each other in memory, c lies inside them."""
    x = placeholder("x", (2, 3, 4, 5), F32)
    task = merged(plain_task([compute("y", x.shape, lambda *i: x[i] * 2.0)], {"x": CHANNELS_LAST}))
    assert shapes(task)["y"] == (2, 3, 20)
    assert task.strides == {"x": (60, 1, 3), "y": (60, 20, 1)}


def test_a_slice_of_a_larger_buffer() -> None:
    """Rows of 8 elements, 5 of them ours: they cannot merge with what is outside."""
    x = placeholder("x", (2, 4, 5), F32)
    task = plain_task([compute("y", x.shape, lambda *i: x[i] * 2.0)])
    task = merged(Task(task.dag, {**task.strides, "x": (32, 8, 1)}, task.constants, task.target))
    assert shapes(task) == {"x": (8, 5), "y": (8, 5)}
    assert task.strides["x"] == (8, 1)


def test_indices_other_than_the_axis() -> None:
    """A mirrored dim stays by itself; so does one that a condition looks at."""
    x = placeholder("x", (2, 3, 4, 5), F32)
    mirrored = compute("y", x.shape, lambda a, b, c, d: x[a, b, 3 - c, d])
    assert shapes(merged(plain_task([mirrored])))["y"] == (6, 4, 5)
    guarded = compute("y", x.shape, lambda a, b, c, d: select(b < 2, x[a, b, c, d], 0.0))
    assert shapes(merged(plain_task([guarded])))["y"] == (2, 3, 20)


def test_a_transposed_read() -> None:
    x = placeholder("x", (4, 2, 3), F32)
    y = compute("y", (2, 3, 4), lambda i, j, k: x[k, i, j])
    assert shapes(merged(plain_task([y]))) == {"x": (4, 6), "y": (6, 4)}


def test_reduce_axes() -> None:
    """Of windows that are whole rows, (c, h, w) is one axis; of w alone, it is not merged with the spatial ones."""
    x = placeholder("x", (2, 3, 4, 5), F32)
    c, h, w = (reduce_axis(extent, name) for extent, name in ((3, "c"), (4, "h"), (5, "w")))
    whole = compute("y", (2,), lambda n: reduce_over(ReduceOp.SUM, x[n, c.var, h.var, w.var], [c, h, w]), [c, h, w])
    task = merged(plain_task([whole]))
    assert (shapes(task), reduce_extents(task, "y")) == ({"x": (2, 60), "y": (2,)}, (60,))
    rows = compute("y", (2, 3, 4), lambda n, i, j: reduce_over(ReduceOp.SUM, x[n, i, j, w.var], [w]), [w])
    task = merged(plain_task([rows]))
    assert (shapes(task), reduce_extents(task, "y")) == ({"x": (24, 5), "y": (24,)}, (5,))


def test_unit_reduce_axes() -> None:
    """A reduction over single elements is none."""
    x, k = placeholder("x", (6, 1), F32), reduce_axis(1)
    y = compute("y", (6,), lambda i: reduce_over(ReduceOp.SUM, x[i, k.var], [k]), [k])
    task = merged(plain_task([y]))
    assert reduce_extents(task, "y") == ()
    assert shapes(task) == {"x": (6,), "y": (6,)}


def test_pointwise_convolution_is_a_matrix_product() -> None:
    task = merged(plain_task([conv2d(1, 8, 5, 6, 4, 1)], {"x": CHANNELS_LAST, "relu": CHANNELS_LAST}, ("w", "b")))
    assert shapes(task) == dict.fromkeys(("conv", "bias", "relu"), (4, 30)) | {"x": (8, 30), "w": (4, 8), "b": (4,)}
    assert reduce_extents(task, "conv") == (8,)


def test_convolution_keeps_rows_and_columns() -> None:
    task = merged(plain_task([conv2d(1, 2, 5, 6, 4, 3)], {"x": CHANNELS_LAST, "relu": CHANNELS_LAST}, ("w", "b")))
    assert shapes(task)["conv"] == (4, 3, 4)
    assert shapes(task)["relu"] == (4, 3, 4)  # in step with conv


def test_equal_work_has_one_key() -> None:
    """x + 1 on 2 x 12 and on 4 x 6 is the same task."""

    def key(*shape: int) -> str:
        x = placeholder("x", shape, F32)
        return merge_axes(plain_task([compute("y", shape, lambda *i: x[i] + 1.0)])).workload_key

    assert key(2, 12) == key(4, 6) == key(24) == key(24, 1)
    assert key(24) != key(25)


def test_a_canonical_task_stays_as_it_is() -> None:
    task = merge_axes(plain_task([conv2d(1, 2, 5, 6, 4, 3, 1, 1)], {"x": CHANNELS_LAST}, ("w", "b")))
    assert merge_axes(task).workload_key == task.workload_key


@pytest.mark.parametrize("constant", [(), ("w",)])
def test_constants_and_target_are_kept(constant: tuple[str, ...]) -> None:
    task = plain_task([conv2d(1, 2, 5, 6, 4, 3)], {}, constant)
    assert (merge_axes(task).constants, merge_axes(task).target) == (task.constants, task.target)


@st.composite
def plain_tasks(draw: st.DrawFn) -> Task:
    return random_plain_task(lambda options: draw(st.sampled_from(options)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(plain_tasks())
def test_random_tasks_keep_memory_and_values(task: Task) -> None:
    result = merged(task)
    assert all(prod(shapes(result)[name]) == prod(shape) for name, shape in shapes(task).items())
    assert not any(1 in tensor.shape for tensor in result.dag.tensors)
