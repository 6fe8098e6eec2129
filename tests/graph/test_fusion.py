"""Fusion: which nodes share a kernel."""

from __future__ import annotations

import numpy as np

from mcompile.graph.fusion import GroupKind
from tests.graph.execution import Builder, check
from tests.graph.test_layout import conv


def test_bias_activation_and_residual_join_the_anchor():
    b = Builder()
    x = conv(b, b.input(1, 3, 6, 6), 4)
    y = conv(b, x, 4)
    total = b("Add", y, x)
    result = b("Relu", total)
    planned = check(b.outputs(b("GlobalAveragePool", result)))
    assert planned.kernel_nodes() == [{x}, {y, total, result}, {b.graph.outputs[0]}]
    group = planned.groups[1]
    assert (group.kind, group.anchor, group.outputs) == (GroupKind.TASK, y, (result,))
    assert group.inputs[0] == x


def test_diamond_joins_the_anchor():
    """x * sigmoid(x): two uses, both inside."""
    b = Builder()
    y = conv(b, b.input(1, 3, 6, 6), 4)
    gate = b("Sigmoid", y)
    swish = b("Mul", y, gate)
    planned = check(b.outputs(conv(b, swish, 2)))
    assert planned.kernel_nodes()[0] == {y, gate, swish}


def test_value_used_outside_is_written_out():
    b = Builder()
    y = conv(b, b.input(1, 3, 6, 6), 4)
    active, other = b("Relu", y), conv(b, y, 4)
    total = b("Add", active, other)
    planned = check(b.outputs(b("GlobalAveragePool", total)))
    assert planned.kernel_nodes()[:2] == [{y}, {active, other, total}]


def test_graph_output_is_written_out():
    b = Builder()
    x = b.input(4, 6)
    y = b("MatMul", x, b.weight(6, 5))
    planned = check(b.outputs(y, b("Relu", y)))
    assert len(planned.groups) == 2


def test_two_anchors_never_share_a_kernel():
    b = Builder()
    x = b.input(4, 6)
    y, z = b("MatMul", x, b.weight(6, 5)), b("MatMul", x, b.weight(6, 5))
    total = b("Add", y, z)
    planned = check(b.outputs(total))
    assert planned.kernel_nodes() == [{z}, {y, total}]


def test_softmax_stays_apart_and_takes_no_anchor():
    b = Builder()
    scores = b("MatMul", b.input(2, 3, 4, 5), b.input(2, 3, 5, 4))
    scaled = b("Div", scores, b.constant(np.float32(8)))
    masked = b("Add", scaled, b.input(2, 1, 1, 4))
    soft = b("Softmax", masked, axis=-1)
    planned = check(b.outputs(b("MatMul", soft, b.input(2, 3, 4, 5))))
    assert planned.kernel_nodes()[:2] == [{scores, scaled, masked}, {soft}]


def test_pointwise_chains_fuse():
    b = Builder()
    x = b.input(4, 6)
    a = b("Exp", x)
    c = b("Add", a, b("Sqrt", b("Abs", b.input(6))))
    planned = check(b.outputs(b("Mul", c, b("Neg", a))))
    assert len(planned.groups) == 2  # the small operand is not computed anew for each row


def test_pointwise_prologue_of_a_reduction():
    b = Builder()
    x, y = b.input(4, 6), b.input(4, 6)
    total = b("Add", x, y)
    norm = b("LayerNormalization", total, b.weight(6))
    planned = check(b.outputs(b("Relu", norm)))
    assert len(planned.groups) == 1


def test_sum_used_twice_is_a_second_output():
    b = Builder()
    x, y = b.input(4, 6), b.input(4, 6)
    total = b("Add", x, y)
    norm = b("LayerNormalization", total, b.weight(6))
    graph = b.outputs(b("Add", b("MatMul", norm, b.weight(6, 6)), total))
    planned = check(graph)
    assert planned.groups[0].outputs == (total, norm)
    assert len(planned.groups) == 2
    assert len(check(graph, multiple_outputs=False).groups) == 3


def test_second_output_must_not_come_back():
    """The reduction needs what another user of the sum computes: no group may depend on itself."""
    b = Builder()
    total = b("Add", b.input(4, 6), b.input(4, 6))
    scale = b("ReduceMean", b("MatMul", total, b.weight(6, 6)), axes=np.array([0]), keepdims=0)
    planned = check(b.outputs(b("LayerNormalization", total, scale)))
    assert {total} in planned.kernel_nodes()


def test_normalisation_joins_the_convolution_after_it():
    b = Builder()
    x = conv(b, b.input(1, 3, 6, 6), 4)
    scaled = b("Mul", x, b.weight(4, 1, 1))
    active = b("Relu", b("Add", scaled, b.weight(4, 1, 1)))
    planned = check(b.outputs(b("Add", conv(b, active, 4), x)))
    assert len(planned.groups) == 3  # the copy to row-major is the third
    assert active in planned.groups[1].nodes
    assert len(check(b.graph, prologues=False).groups) == 4


def test_wide_windows_do_not_compute_their_input_anew():
    b = Builder()
    x = b("Exp", b.input(1, 4, 8, 8))
    planned = check(b.outputs(b("MaxPool", x, kernel_shape=(3, 3), strides=(1, 1), pads=(1, 1, 1, 1))))
    assert {x} in planned.kernel_nodes()


def test_gather_joins_what_follows():
    b = Builder()
    rows = b("Gather", b.weight(10, 6), b.constant(np.array([[1, 2], [3, -4]], np.int64)))
    total = b("Add", rows, b.weight(1, 2, 6))
    planned = check(b.outputs(b("LayerNormalization", total, b.weight(6))))
    assert len(planned.groups) == 1


def test_pad_is_no_prologue_of_an_anchor():
    b = Builder()
    padded = b("Pad", b.input(1, 3, 6, 6), pads=np.array([0, 0, 1, 1, 0, 0, 1, 1]))
    planned = check(b.outputs(conv(b, padded, 4, pad=0)))
    assert {padded} in planned.kernel_nodes()


def test_view_between_fused_nodes():
    b = Builder()
    y = b("Gemm", b.input(6, 8), b.weight(8, 4))
    wide = b("Reshape", y, shape=np.array([1, 6, 4]))
    total = b("Add", wide, b.input(1, 6, 4))
    planned = check(b.outputs(total))
    assert planned.kernel_nodes() == [{y, wide, total}]
    (use,) = planned.partition.uses
    assert [tensor.shape for tensor in use.task.dag.outputs] == [(6, 4)]


def test_transpose_between_fused_nodes_where_the_order_in_memory_stays():
    b = Builder()
    x = conv(b, b.input(1, 3, 4, 5), 6)
    rows = b("Transpose", x, perm=(0, 2, 3, 1))
    y = b("MatMul", rows, b.weight(6, 6))
    back = b("Transpose", y, perm=(0, 3, 1, 2))
    total = b("Add", x, back)
    planned = check(b.outputs(b("GlobalAveragePool", b("Relu", total))))
    assert planned.kernel_nodes()[1] == {y, back, total, "relu5"}
    task = planned.partition.uses[1].task
    assert [tensor.shape for tensor in task.dag.computes] == [(20, 6)] * 3
    assert task.strides[task.dag.outputs[0].name] == (6, 1)
    other = Builder()
    turned = other("Transpose", other("Gemm", other.input(6, 8), other.weight(8, 4)))
    assert len(check(other.outputs(other("Add", other.input(4, 6), turned))).groups) == 2


def test_groups_are_bounded():
    b = Builder()
    x = b.input(3)
    for _ in range(80):
        x = b("Neg", x)
    planned = check(b.outputs(x))
    assert [len(group.nodes) for group in planned.groups] == [32, 32, 16]


def test_host_op_is_a_group_of_its_own():
    b = Builder()
    x = b("Neg", b.input(3))
    planned = check(b.outputs(b("Neg", b.host("Weird", x))))
    assert [group.kind for group in planned.groups] == [GroupKind.TASK, GroupKind.HOST, GroupKind.TASK]
