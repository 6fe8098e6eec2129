"""Winograd's F(4x4, 3x3): the direct convolution's values, chosen where it pays, never where exactness is asked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mcompile.errors import ScheduleError
from mcompile.ir.evaluate import evaluate
from mcompile.ir.expr import ReduceOp
from mcompile.ir.tensor import Compute, compute, placeholder, reduce_axis, reduce_over
from mcompile.schedule.constructed import construct
from mcompile.schedule.constructed.construct import construct_winograd
from mcompile.schedule.constructed.winograd import pays, plan_winograd
from mcompile.schedule.lower import lower
from mcompile.schedule.steps import Variant
from mcompile.schedule.task import Task
from mcompile.schedule.variants import make_variant, variant_names
from tests.schedule.programs import (
    F32,
    check,
    conv2d,
    conv_task,
    make_task,
    matmul,
    outputs_of,
    random_inputs,
    run_interpreted,
)

SHAPES = {
    "whole tiles": (1, 16, 8, 8, 32, 3, 1, 1),
    "partial tiles": (1, 20, 9, 10, 36, 3, 1, 1),
    "batch": (2, 16, 8, 8, 16, 3, 1, 1),
    "no padding": (1, 16, 10, 7, 16, 3, 1, 0),
    "one tile": (1, 16, 4, 3, 16, 3, 1, 1),
}


def with_threads(task: Task, threads: int) -> Task:
    return replace(task, target=replace(task.target, threads=threads))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_values(name: str, threads: int) -> None:
    task = with_threads(conv_task(*SHAPES[name]), threads)
    plan = plan_winograd(task)
    assert plan is not None
    check(task, construct_winograd(task, plan), scaled_error=1e-5)


def test_without_epilogue() -> None:
    chain = conv2d(1, 16, 8, 8, 16, 3, 1, 1)
    bias = next(tensor for tensor in chain.inputs if isinstance(tensor, Compute))
    conv = next(tensor for tensor in bias.inputs if isinstance(tensor, Compute))
    order = {"x": (0, 2, 3, 1), "conv": (0, 2, 3, 1)}
    task = make_task([conv], order, ("w",))
    plan = plan_winograd(task)
    assert plan is not None
    check(task, construct_winograd(task, plan), scaled_error=1e-5)


def conv3d() -> Compute:
    x, w = placeholder("x", (1, 16, 4, 6, 6), F32), placeholder("w", (16, 16, 3, 3, 3), F32)
    kd, kh, kw, ic = (reduce_axis(extent, name) for extent, name in ((3, "kd"), (3, "kh"), (3, "kw"), (16, "ic")))

    def body(n, oc, d, h, v):  # type: ignore[no-untyped-def]
        window = (ic.var, d + kd.var, h + kh.var, v + kw.var)
        return reduce_over(ReduceOp.SUM, x[(n, *window)] * w[oc, ic.var, kd.var, kh.var, kw.var], [kd, kh, kw, ic])

    return compute("conv", (1, 16, 2, 4, 4), body, [kd, kh, kw, ic], ("n", "oc", "od", "oh", "ow"))


@pytest.mark.parametrize("threads", [1, 2])
def test_three_dims(threads: int) -> None:
    last = (0, 2, 3, 4, 1)
    task = with_threads(make_task([conv3d()], {"x": last, "conv": last}, ("w",)), threads)
    plan = plan_winograd(task)
    assert plan is not None
    check(task, construct_winograd(task, plan), scaled_error=1e-5)


def test_chosen_where_it_pays_and_never_when_exact() -> None:
    task = conv_task(1, 64, 56, 56, 64, 3, 1, 1)
    plan = plan_winograd(task)
    assert plan is not None
    assert pays(task, plan)
    assert isinstance(construct(task)[0], Variant)
    exact = replace(task, target=replace(task.target, exact=True))
    assert not any(isinstance(step, Variant) for step in construct(exact))


REFUSED = {
    "strided": (1, 16, 9, 9, 16, 3, 2, 1),
    "5x5": (1, 16, 9, 9, 16, 5, 1, 2),
    "1x1": (1, 16, 9, 9, 16, 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_not_applicable(name: str) -> None:
    task = conv_task(*REFUSED[name])
    assert plan_winograd(task) is None
    with pytest.raises(ScheduleError, match="variant winograd4 does not apply"):
        make_variant(task.dag, "winograd4")


def test_other_tasks() -> None:
    assert plan_winograd(make_task([matmul(8, 16, 9)])) is None
    assert plan_winograd(conv_task(1, 16, 6, 6, 16, 3, 1, 1, groups=16)) is None
    assert plan_winograd(make_task([conv2d(1, 16, 6, 6, 16, 3, 1, 1)])) is None  # weights only known at run time


def test_unknown_variant() -> None:
    task = conv_task(1, 16, 8, 8, 16, 3, 1, 1)
    with pytest.raises(ScheduleError, match="no variant strassen; variants: winograd4"):
        lower(task, (Variant("strassen"),))
    assert variant_names() == ("winograd4",)


def test_error_on_weights_of_trained_statistics() -> None:
    """Against float64: small weights around zero, activations after a relu, 64 channels."""
    task = conv_task(1, 64, 8, 8, 32, 3, 1, 1)
    plan = plan_winograd(task)
    assert plan is not None
    inputs = random_inputs(task)
    inputs["x"] = np.maximum(inputs["x"], 0)
    inputs["w"] = (inputs["w"] * 0.05).astype(np.float32)
    exact = evaluate(task.dag, inputs)["relu"]
    found = outputs_of(task, lower(task, construct_winograd(task, plan)), inputs, run_interpreted)["relu"]
    assert np.abs(found - exact).max() <= 5e-6 * np.abs(exact).max()
