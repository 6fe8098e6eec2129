"""Constructed schedules for a GPU: a tiled contraction through shared memory, and rows for everything else.

for m.0, n.0 (blocks): for m.1, n.1 (threads):
    acc[m.2, n.2] = 0
    for k.0:  a_cache, b_cache (shared; barrier);  for k.1: acc[m.2, n.2] += a_cache * b_cache
    y[...] = epilogue(acc)
"""

from __future__ import annotations

from mcompile.errors import ScheduleError
from mcompile.ir.tensor import Axis, Compute
from mcompile.schedule import steps
from mcompile.schedule.analysis import address, axis_names, loads_of, stride_along
from mcompile.schedule.constructed.builder import TraceBuilder
from mcompile.schedule.constructed.reduction import ReductionPlan, epilogue_loops, plan_reduction
from mcompile.schedule.steps import Trace
from mcompile.schedule.task import Task

_BLOCK, _TILE, _DEPTH, _THREADS = 16, 4, 8, 256


def construct_gpu(task: Task) -> Trace:
    """The trace of a task for a CUDA target."""
    builder = TraceBuilder(task)
    analysis = builder.analysis
    reductions = analysis.reductions
    if len(reductions) == 1 and (axes := _matmul_axes(builder, reductions[0])) is not None:
        _schedule_matmul(builder, plan_reduction(analysis, reductions[0], set()), *axes)
        return builder.trace
    for stage in analysis.stages:
        if not stage.reduce_axes and stage.name not in analysis.outputs:
            builder.inline(stage)
    for stage in analysis.stages:
        if not builder.stage(stage.name).inlined:
            _bind_flat(builder, stage.name)
    return builder.trace


def _matmul_axes(builder: TraceBuilder, stage: Compute) -> tuple[Axis, Axis] | None:
    """(row, column): the last two spatial axes, each moving one of the two operands only; one reduce axis."""
    loads = loads_of(stage)
    if len(loads) != 2 or len(stage.reduce_axes) != 1 or len(stage.axes) < 2:
        return None
    moves = []
    for axis in stage.axes[-2:]:
        offsets = [address(load, tuple(range(2, 2 + len(load.indices)))) for load in loads]
        moves.append([stride_along(offset, axis.var) != 0 for offset in offsets])
    if sorted(moves) != [[False, True], [True, False]] or any(load.source in builder.analysis.stages for load in loads):
        return None
    return stage.axes[-2], stage.axes[-1]


def _bind(builder: TraceBuilder, stage: str, loop: str, thread: str) -> None:
    builder.add(steps.Bind(stage, loop, thread))


def _bind_flat(builder: TraceBuilder, name: str) -> None:
    """All spatial points of a stage over blocks of threads, one point a thread."""
    stage = builder.stage(name)
    spatial = list(stage.spatial_axes)
    if not spatial:
        raise ScheduleError(f"{name}: a result without dims has no GPU schedule")
    flat = builder.fuse(name, spatial)
    block, thread = builder.split(name, flat, _THREADS)
    _bind(builder, name, block, "blockIdx.x")
    _bind(builder, name, thread, "threadIdx.x")


def _schedule_matmul(builder: TraceBuilder, plan: ReductionPlan, row: Axis, column: Axis) -> None:
    name = plan.reduction.name
    for stage in plan.between:
        builder.inline(stage)
    names = axis_names(plan.reduction)
    if plan.epilogue is plan.reduction:
        builder.add(steps.CacheWrite(name))
        acc, out = f"{name}_acc", name
        loops = [names[axis.var] for axis in plan.reduction.axes]
    else:
        acc, out = name, plan.epilogue.name
        loop_of = epilogue_loops(builder, plan)
        loops = [loop_of[axis] for axis in plan.reduction.axes]
    m = builder.split(out, loops[-2], _BLOCK, _TILE)
    n = builder.split(out, loops[-1], _BLOCK, _TILE)
    batch = loops[:-2]
    builder.reorder(out, [*batch, m[0], n[0], m[1], n[1], m[2], n[2]])
    if batch:
        _bind(builder, out, builder.fuse(out, batch), "blockIdx.z")
    for loop, thread in ((m[0], "blockIdx.y"), (n[0], "blockIdx.x"), (m[1], "threadIdx.y"), (n[1], "threadIdx.x")):
        _bind(builder, out, loop, thread)
    builder.unroll(out, m[2], n[2])
    k = builder.split(acc, names[plan.reduction.reduce_axes[0].var], _DEPTH)
    tile = [names[row.var], names[column.var]]
    others = [names[axis.var] for axis in plan.reduction.axes[:-2]]
    builder.reorder(acc, [*others, *k, *tile])
    builder.unroll(acc, k[1], *tile)
    builder.compute_at(acc, out, n[1])
    for tensor in plan.reduction.inputs:
        _share(builder, tensor.name, acc, k[0])


def _share(builder: TraceBuilder, tensor: str, reader: str, loop: str) -> None:
    """Read `tensor` through shared memory that all threads of the block fill together."""
    builder.add(steps.CacheRead(tensor, reader))
    cache = f"{tensor}_cache"
    flat = builder.fuse(cache, list(builder.loops(cache)))
    _, rows, columns = builder.split(cache, flat, _BLOCK, _BLOCK)
    _bind(builder, cache, rows, "threadIdx.y")
    _bind(builder, cache, columns, "threadIdx.x")
    builder.add(steps.ComputeAt(cache, reader, loop, "shared"))
