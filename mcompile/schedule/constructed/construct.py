"""Chooses the rule that writes a task's trace. Rules are tried in order; the last one fits every task."""

from __future__ import annotations

from mcompile.schedule.constructed.builder import TraceBuilder
from mcompile.schedule.constructed.gpu import construct_gpu
from mcompile.schedule.constructed.rows import can_schedule_rows, schedule_rows
from mcompile.schedule.constructed.stagewise import schedule_stagewise
from mcompile.schedule.steps import Trace
from mcompile.schedule.task import Task


def construct(task: Task) -> Trace:
    """The constructed trace of `task`."""
    if task.target.kind == "cuda":
        return construct_gpu(task)
    builder = TraceBuilder(task)
    if can_schedule_rows(builder.analysis):
        schedule_rows(builder)
    else:
        schedule_stagewise(builder)
    return builder.trace
