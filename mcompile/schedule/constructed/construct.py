"""Chooses the rule that writes a task's trace. Rules are tried in order; the last one fits every task."""

from __future__ import annotations

from dataclasses import replace

from mcompile.schedule.constructed.builder import TraceBuilder
from mcompile.schedule.constructed.gpu import construct_gpu
from mcompile.schedule.constructed.rows import can_schedule_rows, schedule_rows
from mcompile.schedule.constructed.stagewise import schedule_stagewise
from mcompile.schedule.constructed.winograd import VARIANT, WinogradPlan, pays, plan_winograd, schedule_winograd
from mcompile.schedule.steps import Trace, Variant
from mcompile.schedule.task import Task
from mcompile.schedule.variants import make_variant


def construct_winograd(task: Task, plan: WinogradPlan) -> Trace:
    """The trace that computes the task's convolution by F(4x4, 3x3)."""
    builder = TraceBuilder(replace(task, dag=make_variant(task.dag, VARIANT)))
    schedule_winograd(builder, plan)
    return (Variant(VARIANT), *builder.trace)


def construct(task: Task) -> Trace:
    """The constructed trace of `task`."""
    if task.target.kind == "cuda":
        return construct_gpu(task)
    plan = plan_winograd(task)
    if plan is not None and not task.target.exact and pays(task, plan):
        return construct_winograd(task, plan)
    builder = TraceBuilder(task)
    if can_schedule_rows(builder.analysis):
        schedule_rows(builder)
    else:
        schedule_stagewise(builder)
    return builder.trace
