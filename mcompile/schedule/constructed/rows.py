"""Loops for chains of row reductions (softmax, normalisation): one pass over the rows, all stages of a row together.

for row (parallel):
    max = ...; e[j] = exp(x[row, j] - max); sum = ...; y[row, j] = e[j] / sum
"""

from __future__ import annotations

from mcompile.ir.tensor import Compute
from mcompile.schedule.analysis import (
    TaskAnalysis,
    address,
    axis_names,
    is_transcendental,
    loads_of,
    operations,
    stride_along,
)
from mcompile.schedule.constructed.builder import TraceBuilder
from mcompile.schedule.constructed.injective import PARALLEL_WORK, work_of
from mcompile.schedule.constructed.reduction import vectorize_lanes, write_lane_reduction


def can_schedule_rows(analysis: TaskAnalysis) -> bool:
    """One output whose leading axes index every reduction, each of which runs over contiguous memory."""
    if len(analysis.outputs) != 1 or not analysis.reductions:
        return False
    output = analysis.task.dag.outputs[0]
    if output.reduce_axes or len(output.shape) < 2 or analysis.task.strides[output.name][-1] != 1:
        return False
    rows = output.shape[:-1]
    if not all(reduction.shape == rows for reduction in analysis.reductions):
        return False
    if not all(stage.shape in (rows, output.shape) for stage in analysis.stages):
        return False
    return all(_reads_rows(analysis, stage) for stage in analysis.stages)


def _reads_rows(analysis: TaskAnalysis, stage: Compute) -> bool:
    """Stages are read at their own row; inputs of reductions are contiguous along the reduce axis."""
    leading = [axis.var for axis in stage.axes][: len(analysis.task.dag.outputs[0].shape) - 1]
    if len(stage.reduce_axes) > 1:
        return False
    for load in loads_of(stage):
        if load.source in analysis.stages and list(load.indices[: len(leading)]) != leading:
            return False
        strides = analysis.strides_of(load.source)
        if not stage.reduce_axes or strides is None or load.source.name in analysis.constant:
            continue
        if stride_along(address(load, strides), stage.reduce_axes[0].var) not in (0, 1):
            return False
    return True


def schedule_rows(builder: TraceBuilder) -> None:
    analysis = builder.analysis
    output = analysis.task.dag.outputs[0]
    name = output.name
    kept: list[Compute] = []
    for stage in analysis.stages:
        if stage.reduce_axes or (stage is not output and _is_worth_keeping(analysis, stage)):
            kept.append(stage)
        elif stage is not output:
            builder.inline(stage)
    *rows, column = list(builder.stage(name).axes)
    _vectorize_row(builder, name, column, output.shape[-1])
    work = sum(work_of(stage) for stage in analysis.stages if stage.shape == output.shape)
    place = rows[-1]
    if work >= PARALLEL_WORK and builder.task.target.threads > 1:
        place = builder.parallel(name, rows)
    for stage in kept:
        if stage.reduce_axes:
            _schedule_reduction(builder, stage, place)
        else:
            if stage.shape == output.shape:
                _vectorize_row(builder, stage.name, list(builder.stage(stage.name).axes)[-1], stage.shape[-1])
            builder.compute_at(stage.name, name, place)


def _is_worth_keeping(analysis: TaskAnalysis, stage: Compute) -> bool:
    uses = sum(load.source is stage for consumer in analysis.consumers(stage) for load in loads_of(consumer))
    if stage.shape != analysis.task.dag.outputs[0].shape:  # one value a row, read by every element of it
        return operations(stage.body) > 0
    return uses > 1 and (is_transcendental(stage) or operations(stage.body) > 3)


def _vectorize_row(builder: TraceBuilder, stage: str, column: str, extent: int) -> None:
    if extent > builder.lanes:
        column = builder.split(stage, column, builder.lanes)[1]
    builder.vectorize(stage, column)


def _schedule_reduction(builder: TraceBuilder, stage: Compute, place: str) -> None:
    output = builder.analysis.outputs[0]
    axis = stage.reduce_axes[0]
    write_lane_reduction(builder, stage.name, axis_names(stage)[axis.var], axis.extent)
    vectorize_lanes(builder, stage.name, builder.lanes)
    builder.compute_at(f"{stage.name}_rf", output, place)
    builder.compute_at(stage.name, output, place)
