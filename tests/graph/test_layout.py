"""Layouts: orders, views, copies; and that a laid-out graph still gives the same values."""

from __future__ import annotations

import numpy as np

from mcompile.graph.graph import Graph
from mcompile.graph.layout import Layouts, Storage, assign_layouts
from mcompile.graph.views import canonical_strides, dense_strides, is_dense
from tests.graph.execution import TARGET, Builder, check


def lay_out(graph: Graph) -> Layouts:
    return assign_layouts(graph, TARGET)


def conv(b: Builder, x: str, channels: int, kernel: int = 3, pad: int = 1) -> str:
    depth = b.graph.types[x].dims[1]
    weight = b.weight(channels, depth, kernel, kernel)
    return b("Conv", x, weight, b.weight(channels), pads=(pad,) * 4, kernel_shape=(kernel, kernel))


def test_strides_of_unit_dims_are_canonical():
    assert dense_strides((1, 8, 1, 1), (0, 1, 2, 3)) == dense_strides((1, 8, 1, 1), (0, 2, 3, 1)) == (8, 1, 1, 1)
    assert dense_strides((2, 3, 4), range(3)) == (12, 4, 1)
    assert dense_strides((2, 3, 4, 5), (0, 2, 3, 1)) == (60, 1, 15, 3)
    assert canonical_strides((1, 4, 5), (99, 5, 1)) == (20, 5, 1)
    assert is_dense((2, 3), (1, 2))
    assert not is_dense((2, 3), (4, 1))


def test_convolution_chain_is_channels_last_and_output_row_major():
    b = Builder()
    x = b.input(1, 3, 8, 8)
    first = b("Relu", conv(b, x, 6))
    second = conv(b, first, 4)
    planned = check(b.outputs(second))
    storage = planned.layouts.storage
    assert storage[first].strides == dense_strides((1, 6, 8, 8), (0, 2, 3, 1))
    assert storage[second].strides == dense_strides((1, 4, 8, 8), (0, 2, 3, 1))
    assert planned.copies == 1
    assert storage[planned.layouts.graph.outputs[0]].strides == (256, 64, 8, 1)


def test_output_of_one_pixel_needs_no_copy():
    b = Builder()
    pooled = b("GlobalAveragePool", conv(b, b.input(1, 3, 8, 8), 6))
    flat = b("Flatten", pooled)
    planned = check(b.outputs(b("Gemm", flat, b.weight(6, 5)), pooled))
    assert planned.copies == 0
    assert len(planned.groups) == 3


def test_heads_are_split_and_joined_without_copies():
    b = Builder()
    x = b.input(2, 5, 12)

    def heads(perm: tuple[int, ...]) -> str:
        y = b("Add", b("MatMul", x, b.weight(12, 12)), b.weight(12))
        return b("Transpose", b("Reshape", y, shape=np.array([2, 5, 3, 4])), perm=perm)

    scores = b("Softmax", b("MatMul", heads((0, 2, 1, 3)), heads((0, 2, 3, 1))), axis=-1)
    mixed = b("MatMul", scores, heads((0, 2, 1, 3)))
    joined = b("Reshape", b("Transpose", mixed, perm=(0, 2, 1, 3)), shape=np.array([2, 5, 12]))
    planned = check(b.outputs(b("MatMul", joined, b.weight(12, 12))))
    assert planned.copies == 0
    assert len(planned.groups) == 7
    assert planned.layouts.storage[mixed].strides == (60, 4, 12, 1)
    assert planned.layouts.storage[joined] == Storage(mixed, (60, 12, 1))


def test_patches_become_tokens_without_a_copy():
    b = Builder()
    patches = conv(b, b.input(1, 3, 8, 8), 6)
    tokens = b("Transpose", b("Reshape", patches, shape=np.array([1, 6, 64])), perm=(0, 2, 1))
    planned = check(b.outputs(b("Add", tokens, b.weight(1, 64, 6))))
    assert planned.layouts.storage[tokens] == Storage(patches, (384, 6, 1))
    assert planned.copies == 0


def test_output_that_is_a_view_is_written_by_its_producer():
    b = Builder()
    x = b.input(4, 6)
    y = b("Relu", x)
    flat = b("Reshape", y, shape=np.array([2, 12]))
    planned = check(b.outputs(flat))
    assert planned.layouts.storage[y] == Storage(flat, (6, 1))
    assert planned.calls() == 1


def test_outputs_that_no_kernel_can_write_are_copied():
    b = Builder()
    x = b.input(4, 6)
    y = b("Relu", x)
    part = b("Slice", y, starts=np.array([1]), ends=np.array([5]), axes=np.array([1]))
    turned = b("Transpose", y)
    weight = b.weight(3)
    planned = check(b.outputs(x, y, y, part, turned, weight))
    assert planned.copies == 5


def test_negative_steps_and_broadcasts():
    b = Builder()
    x = b.input(4, 6)
    back = b("Slice", x, starts=np.array([-1]), ends=np.array([-10]), axes=np.array([1]), steps=np.array([-1]))
    wide = b("Expand", b("Unsqueeze", x, axes=np.array([0])), shape=np.array([3, 4, 6]))
    planned = check(b.outputs(b("Add", wide, b("Relu", back))))
    assert planned.layouts.storage[wide] == Storage(x, (0, 6, 1))


def test_scalar_gather_is_a_view():
    b = Builder()
    x = b("Relu", b.input(2, 5, 8))
    first = b("Gather", x, b.constant(np.array(-5, np.int64)), axis=1)
    planned = check(b.outputs(b("Gemm", first, b.weight(8, 3))))
    assert planned.layouts.storage[first] == Storage(x, (40, 1))


def test_concat_is_written_in_place():
    b = Builder()
    x = conv(b, b.input(1, 3, 6, 6), 4)
    left, right = b("Relu", conv(b, x, 5)), b("Relu", conv(b, x, 3))
    joined = b("Concat", left, right, axis=1)
    planned = check(b.outputs(conv(b, joined, 2)))
    storage = planned.layouts.storage
    assert storage[joined].strides == (8, 1, 48, 8)
    assert storage[left] == Storage(joined, (5, 1, 48, 8))
    assert storage[right] == Storage(joined, (3, 1, 48, 8), 5)
    assert planned.copies == 1


def test_dense_block_shares_one_buffer():
    """Concats of growing lists of the same values: the last one holds them all."""
    b = Builder()
    features = [conv(b, b.input(1, 3, 4, 4), 4)]
    joined = features[0]
    for _ in range(3):
        features.append(b("Relu", conv(b, joined, 2)))
        joined = b("Concat", *features, axis=1)
    planned = check(b.outputs(conv(b, joined, 2)))
    assert planned.copies == 1
    assert {planned.layouts.storage[value].base for value in features} == {joined}


def test_nested_concats_share_one_buffer():
    b = Builder()
    joined = b("Relu", b.input(1, 4, 4, 4))
    for _ in range(3):
        joined = b("Concat", joined, b("Relu", conv(b, joined, 2)), axis=1)
    planned = check(b.outputs(conv(b, joined, 2)))
    assert planned.copies == 1


def test_concat_follows_the_input_that_is_channels_last():
    b = Builder()
    x = b.input(1, 3, 4, 4)
    joined = b("Concat", b("Relu", conv(b, x, 2)), b("Exp", x), axis=1)
    planned = check(b.outputs(conv(b, joined, 2)))
    assert planned.copies == 1
    assert planned.layouts.storage[joined].strides == (5, 1, 20, 5)


def test_concat_copies_what_it_must():
    b = Builder()
    x = b.input(2, 3)
    y, z = b("Relu", x), b("Exp", x)
    first = b("Concat", x, y, y, b.weight(2, 2), axis=1)
    second = b("Concat", z, y, axis=0)
    planned = check(b.outputs(b("Neg", first), b("Neg", second)))
    assert planned.copies == 4


def test_concat_through_views():
    b = Builder()
    cls = b.weight(1, 1, 6)
    patches = conv(b, b.input(1, 3, 4, 4), 6)
    tokens = b("Transpose", b("Reshape", patches, shape=np.array([1, 6, 16])), perm=(0, 2, 1))
    joined = b("Concat", cls, tokens, axis=1)
    planned = check(b.outputs(b("Add", joined, b.weight(1, 17, 6))))
    assert planned.copies == 1
    assert planned.layouts.storage[patches] == Storage(joined, (6, 1, 24, 6), 6)


def test_concat_does_not_break_views_of_its_inputs():
    b = Builder()
    x = b.input(3, 4)
    y = b("Relu", x)
    flat = b("Reshape", y, shape=np.array([12]))
    joined = b("Concat", y, b("Exp", x), axis=1)
    planned = check(b.outputs(b("Neg", flat), b("Neg", joined)))
    assert planned.copies == 1


def test_concat_as_graph_output():
    b = Builder()
    x = b.input(2, 3)
    past = b.input(2, 4)
    joined = b("Concat", past, b("Relu", x), axis=1)
    planned = check(b.outputs(joined, b("Neg", joined)))
    assert planned.copies == 1
    channels = Builder()
    left = conv(channels, channels.input(1, 3, 4, 4), 4)
    channels_joined = channels("Concat", left, channels("Relu", left), axis=1)
    assert check(channels.outputs(channels_joined)).copies == 1


def test_slices_that_are_joined_again_stay_where_they_are():
    b = Builder()
    whole = b("Relu", conv(b, b.input(1, 3, 4, 4), 6))
    left, right = b.many("Split", whole, axis=1, num_outputs=2)
    joined = b("Concat", left, right, b("Relu", conv(b, right, 2)), axis=1)
    planned = check(b.outputs(b("GlobalAveragePool", joined)))
    assert planned.copies == 0
    swapped = Builder()
    left, right = swapped.many("Split", swapped("Relu", swapped.input(2, 6)), axis=1, num_outputs=2)
    planned = check(swapped.outputs(swapped("Neg", swapped("Concat", right, left, axis=1))))
    assert planned.copies == 2


def test_split_is_a_view():
    b = Builder()
    parts = b.many("Split", b("Relu", b.input(2, 6)), axis=1, num_outputs=3)
    planned = check(b.outputs(b("Add", b("Mul", parts[0], parts[1]), parts[2])))
    assert len(planned.groups) == 2


def test_host_ops_see_row_major_tensors():
    b = Builder()
    y = conv(b, b.input(1, 3, 4, 4), 6)
    hosted = b.host("Weird", b("Transpose", y, perm=(0, 3, 1, 2)))
    planned = check(b.outputs(b("Relu", b("Transpose", hosted))))
    assert planned.copies == 1


def test_layout_leaves_its_input_alone():
    b = Builder()
    graph = b.outputs(conv(b, b.input(1, 3, 4, 4), 6))
    before = list(graph.nodes)
    laid_out = lay_out(graph)
    assert list(graph.nodes) == before
    assert len(laid_out.graph.nodes) == len(before) + 1
