"""Constructed schedules give the dag's values, for shapes that divide nothing."""

from __future__ import annotations

import pytest

from mcompile.schedule.constructed import construct
from mcompile.schedule.task import Task
from tests.schedule import programs
from tests.schedule.programs import check, conv_task, make_task, matmul, softmax

CONVOLUTIONS = {
    "3x3": (1, 5, 6, 7, 20, 3, 1, 1),
    "3x3 strided": (1, 4, 9, 9, 17, 3, 2, 1),
    "1x1": (1, 8, 5, 5, 40, 1),
    "batch": (2, 3, 5, 5, 16, 3, 1, 1),
    "first layer": (1, 3, 12, 12, 8, 7, 2, 3),
    "one pixel": (1, 16, 1, 1, 33, 1),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name: str) -> None:
    task = conv_task(*CONVOLUTIONS[name])
    check(task, construct(task))


@pytest.mark.parametrize("groups", [2, 8])
def test_grouped_convolution(groups: int) -> None:
    task = conv_task(1, 8, 6, 6, 16, 3, 1, 1, groups=groups)
    check(task, construct(task))


def test_depthwise_convolution() -> None:
    task = conv_task(1, 20, 6, 7, 20, 3, 1, 1, groups=20)
    check(task, construct(task))


def test_row_major_output() -> None:
    task = make_task([programs.conv2d(1, 4, 5, 5, 6, 3)], {}, ("w", "b"))
    check(task, construct(task))


MATMULS = {"plain": (7, 20, 9), "tall": (50, 3, 8), "vector": (1, 40, 30), "batched": (5, 18, 6, 3), "dot": (1, 1, 50)}


@pytest.mark.parametrize("name", MATMULS)
@pytest.mark.parametrize("constant", [(), ("b",), ("a",)], ids=["free", "weights", "constant a"])
def test_matmul(name: str, constant: tuple[str, ...]) -> None:
    task = make_task([matmul(*MATMULS[name])], {}, constant)
    check(task, construct(task))


def test_matmul_transposed() -> None:
    task = make_task([matmul(9, 18, 12, 2)], {"b": (0, 2, 1)})
    check(task, construct(task))


@pytest.mark.parametrize("columns", [5, 16, 37, 300])
def test_softmax(columns: int) -> None:
    task = make_task([softmax(6, columns)])
    check(task, construct(task))


def test_softmax_over_columns() -> None:
    task: Task = make_task([softmax(6, 10)], {"x": (1, 0), "y": (1, 0)})
    check(task, construct(task))
