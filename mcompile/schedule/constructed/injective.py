"""Loops for a stage without a reduction: in memory order, vectors innermost, the rest in parallel."""

from __future__ import annotations

from math import ceil, prod

from mcompile.ir.tensor import Compute
from mcompile.schedule.analysis import address, is_transcendental, loads_of, stride_along
from mcompile.schedule.constructed.builder import TraceBuilder

PARALLEL_WORK = 16384  # elements (an expensive one counts as eight) from which a fork pays


def memory_order(builder: TraceBuilder, name: str) -> list[str]:
    """Axes from outermost to innermost as the stage's output, else its largest input, lies in memory."""
    stage = builder.stage(name)
    strides = builder.task.strides.get(name)
    axes = list(stage.spatial_axes)
    if strides is None:
        strides = _input_strides(builder, builder.expanded(name))
    return sorted(axes, key=lambda axis: (-strides[axes.index(axis)], axes.index(axis)))


def _input_strides(builder: TraceBuilder, compute: Compute) -> tuple[int, ...]:
    known = [(prod(load.source.shape), load) for load in loads_of(compute) if load.source.name in builder.task.strides]
    if not known:
        return tuple(range(len(compute.shape), 0, -1))
    _, load = max(known, key=lambda pair: pair[0])
    offset = address(load, builder.task.strides[load.source.name])
    return tuple(abs(stride_along(offset, axis.var) or 0) for axis in compute.axes)


def work_of(compute: Compute) -> int:
    return prod(compute.shape) * (8 if is_transcendental(compute) else 1)


def schedule_injective(builder: TraceBuilder, name: str) -> None:
    schedule_in_order(builder, name, memory_order(builder, name))


def schedule_in_order(builder: TraceBuilder, name: str, order: list[str]) -> None:
    """Loops in the given order of axes, the last one vectors."""
    if not order:
        return
    compute = builder.stage(name).compute
    builder.reorder(name, order)
    extent = {axis: compute.axes[list(builder.stage(name).axes).index(axis)].extent for axis in order}
    *outer, inner = order
    is_parallel = work_of(builder.expanded(name)) >= PARALLEL_WORK and builder.task.target.threads > 1
    lanes = builder.lanes
    if extent[inner] <= lanes:
        vector = inner
    else:
        blocks = _inner_blocks(builder, prod(extent[axis] for axis in outer), extent[inner]) if is_parallel else 1
        if blocks > 1:
            per_block = ceil(ceil(extent[inner] / lanes) / blocks)
            block, _, vector = builder.split(name, inner, per_block, lanes)
            outer = [*outer, block]
        else:
            _, vector = builder.split(name, inner, lanes)
    builder.vectorize(name, vector)
    if is_parallel and outer:
        builder.parallel(name, outer)


def _inner_blocks(builder: TraceBuilder, outer: int, inner: int) -> int:
    """Parts to cut the innermost axis in, where the outer ones alone do not occupy the threads evenly."""
    wanted = builder.task.target.threads * 4
    return 1 if outer >= wanted else min(ceil(wanted / outer), max(1, inner // 1024))
