"""Partition: tasks, their names, strides and constants, and merging."""

from __future__ import annotations

import numpy as np

from mcompile.graph.partition import TaskUse, compute_flops, same_index_inputs
from mcompile.ir.printer import print_dag
from tests.graph.execution import Builder, Planned, check
from tests.graph.test_layout import conv


def uses(planned: Planned) -> list[TaskUse]:
    return [use for use in planned.partition.uses if isinstance(use, TaskUse)]


def test_equal_layers_are_one_task():
    b = Builder()
    x = conv(b, b.input(1, 4, 6, 6), 4)
    for _ in range(3):
        x = b("Relu", conv(b, x, 4))
    planned = check(b.outputs(b("GlobalAveragePool", x)))
    weights = [item.weight for item in planned.partition.tasks()]
    assert weights == [1, 3, 1]
    first, second = uses(planned)[1:3]
    assert first.task is second.task
    assert first.constant("x1").shape == (4, 4, 3, 3)
    assert not np.array_equal(first.constant("x1"), second.constant("x1"))


def test_views_differ_only_in_strides():
    b = Builder()
    x, y = b.input(4, 6), b.input(6, 4)
    turned = b("Transpose", y)
    planned = check(b.outputs(b("Add", b("MatMul", x, b.weight(6, 6)), turned)))
    (use,) = uses(planned)
    assert use.task.strides["x2"] == (1, 4)
    assert use.task.constants == {"x1"}


def test_names_repeat_with_numbers():
    b = Builder()
    x = b.input(4)
    planned = check(b.outputs(b("Exp", b("Exp", b("Exp", x)))))
    (use,) = uses(planned)
    names = [tensor.name for tensor in use.task.dag.tensors]
    assert names[0] == "x0"
    assert names[2:] == [f"{names[1]}_1", f"{names[1]}_2"]


def test_keys_do_not_depend_on_when_a_task_was_made():
    def text() -> tuple[str, str]:
        b = Builder()
        y = conv(b, b.input(1, 4, 6, 6), 4)
        planned = check(b.outputs(b("GlobalAveragePool", b("Mul", y, b("Sigmoid", y)))))
        task = uses(planned)[0].task
        return task.workload_key, print_dag(task.dag)

    assert text() == text()


def test_scalar_constants_stand_in_the_bodies():
    b = Builder()
    planned = check(b.outputs(b("Mul", b.input(4, 6), b.constant(np.array([0.5], np.float32)))))
    (use,) = uses(planned)
    assert [tensor.name for tensor in use.task.dag.placeholders] == ["x0"]
    assert "0.5" in print_dag(use.task.dag)


def test_copy_of_a_constant_has_no_constants():
    b = Builder()
    planned = check(b.outputs(b.weight(3)))
    (use,) = uses(planned)
    assert not use.task.constants


def test_views_of_constants_are_constants():
    b = Builder()
    weight = b("Transpose", b.weight(5, 6))
    planned = check(b.outputs(b("MatMul", b.input(4, 6), weight)))
    (use,) = uses(planned)
    assert use.task.constants == {"x1"}
    assert use.constant("x1").shape == (6, 5)
    np.testing.assert_array_equal(use.constant("x1"), b.graph.constants["const0"].T)


def test_absent_inputs_and_repeated_inputs():
    b = Builder()
    x = b.input(4, 6)
    clipped = b("Clip", x, "", b.constant(np.float32(0.5)))
    planned = check(b.outputs(b("Mul", clipped, clipped), b("Mul", x, x)))
    assert all(len(use.task.dag.placeholders) == 1 for use in uses(planned))


def test_empty_tensors_need_no_kernel():
    b = Builder()
    past = b.input(1, 0, 4)
    joined = b("Concat", past, b("Relu", b.input(1, 2, 4)), axis=1)
    planned = check(b.outputs(b("Neg", past), b("Neg", joined)))
    assert planned.calls() == 1


def test_work_estimates():
    b = Builder()
    planned = check(b.outputs(b("Relu", b("MatMul", b.input(4, 6), b.input(6, 5)))))
    (use,) = uses(planned)
    assert 2 * 4 * 5 * 6 <= sum(map(compute_flops, use.task.dag.computes)) <= 2 * 4 * 5 * 6 + 4 * 5


def test_what_may_work_in_place():
    b = Builder()
    x, y = b.input(4, 4), b.input(4)
    planned = check(b.outputs(b("Add", b("Exp", x), y)))
    assert [pair[0] for pair in same_index_inputs(uses(planned)[0].task)] == ["x0"]
    other = Builder()
    x = other.input(4, 4)
    planned = check(other.outputs(other("Softmax", x)))
    assert same_index_inputs(uses(planned)[0].task) == ()
