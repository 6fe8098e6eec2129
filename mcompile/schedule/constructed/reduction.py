"""Loops for one reduction: a register tile inside the loops of its epilogue, for matmul, convolution, pooling and sums.

for block (parallel): [prologue]  for v.0: for t.0:
    acc[t.1, v.1, v.2] = 0
    for reduce axes: acc += x * w        (t.1 and v.1 unrolled, v.2 a vector)
    y[...] = epilogue(acc)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, prod

from mcompile.ir.expr import Binary, BinaryOp, Const, Expr, Load, Var, walk
from mcompile.ir.tensor import Axis, Compute, Tensor, row_major
from mcompile.schedule import steps
from mcompile.schedule.analysis import (
    TaskAnalysis,
    address,
    axis_names,
    compute_flops,
    is_padding,
    is_plain_copy,
    loads_of,
    stride_along,
)
from mcompile.schedule.constructed.builder import TraceBuilder
from mcompile.schedule.constructed.injective import memory_order, schedule_in_order
from mcompile.schedule.constructed.tiles import Loops, RegisterTile, choose_block, choose_tile, column_cycles
from mcompile.schedule.task import Task

_CACHE_WAYS = 8
_PAGE_BYTES = 4096
_SERIAL_FLOPS = 100_000  # below this a fork costs more than it gains


@dataclass(frozen=True)
class ReductionPlan:
    """A reduction, the stage whose loops it is computed in (itself if it has no epilogue), and what is between.

    `prologue` stages feed it and are materialised; `copies` are operands read through a packed copy.
    """

    reduction: Compute
    epilogue: Compute
    between: tuple[Compute, ...]
    prologue: tuple[Compute, ...]


def plan_reduction(analysis: TaskAnalysis, reduction: Compute, taken: set[str]) -> ReductionPlan:
    """Follow the elementwise chain behind `reduction`, and pick the producers worth storing."""
    chain = [reduction]
    while chain[-1].name not in analysis.outputs:
        consumers = analysis.consumers(chain[-1])
        if len(consumers) != 1 or consumers[0].reduce_axes or consumers[0].name in taken:
            break
        if axis_map(consumers[0], chain[-1]) is None:
            break
        chain.append(consumers[0])
    prologue = tuple(
        source
        for source in reduction.inputs
        if isinstance(source, Compute) and source in analysis.stages and source.name not in taken
        if _is_prologue(analysis, source, reduction)
    )
    return ReductionPlan(reduction, chain[-1], tuple(chain[1:-1]), prologue)


def _is_prologue(analysis: TaskAnalysis, source: Compute, reduction: Compute) -> bool:
    if source.reduce_axes or source.name in analysis.outputs or analysis.consumers(source) != (reduction,):
        return False
    reads = prod(reduction.shape) * prod(axis.extent for axis in reduction.reduce_axes)
    return not is_plain_copy(source) and reads >= 2 * prod(source.shape)


def axis_map(consumer: Compute, producer: Compute) -> dict[int, tuple[Axis, int, bool]] | None:
    """How the consumer's axes give the producer's: dim -> (axis, divisor, is_remainder).

    An index is an axis (divisor 1), axis // divisor or axis % divisor; None if any load has another form, if the loads
    differ, or if some axis of the consumer does not move through the producer.
    """
    loads = [load for load in loads_of(consumer) if load.source.name == producer.name]
    if len({load.indices for load in loads}) != 1:
        return None
    axes = {axis.var: axis for axis in consumer.axes}
    found: dict[int, tuple[Axis, int, bool]] = {}
    for dim, index in enumerate(loads[0].indices):
        match index:
            case Var() if index in axes:
                found[dim] = (axes[index], 1, False)
            case Binary(BinaryOp.FLOORDIV | BinaryOp.FLOORMOD as op, Var() as x, Const(c)) if x in axes:
                found[dim] = (axes[x], int(c), op is BinaryOp.FLOORMOD)
            case _:
                return None
    if prod(consumer.shape) != prod(producer.shape):
        return None
    return found if _is_complete(consumer, found) else None


def _is_complete(consumer: Compute, found: dict[int, tuple[Axis, int, bool]]) -> bool:
    parts: dict[Axis, set[tuple[int, bool]]] = {}
    for axis, divisor, remainder in found.values():
        if (divisor, remainder) in parts.setdefault(axis, set()):
            return False
        parts[axis].add((divisor, remainder))
    for axis in consumer.axes:
        forms = parts.get(axis, set())
        divisors = {divisor for divisor, _ in forms}
        if forms != {(1, False)} and (len(divisors) != 1 or len(forms) != 2 or axis.extent % next(iter(divisors))):
            return False
    return True


@dataclass(frozen=True)
class Operand:
    """A load of the reduction, and how its address moves along each axis (None: irregular)."""

    load: Load
    is_constant: bool
    is_free: bool  # its layout is ours to choose
    steps: dict[Var, int | None] = field(default_factory=dict)

    def moves(self, variable: Var) -> bool:
        return self.steps[variable] != 0


def operands_of(builder: TraceBuilder, plan: ReductionPlan, packed: frozenset[str]) -> list[Operand]:
    compute = plan.reduction
    axes = [axis.var for axis in (*compute.axes, *compute.reduce_axes)]
    found = []
    for load in loads_of(compute):
        constant = load.source.name in builder.analysis.constant
        free = constant or load.source.name in packed
        strides = tuple(range(2, 2 + len(load.indices))) if free else _strides(builder, load.source)
        offset = address(load, strides)
        found.append(Operand(load, constant, free, {axis: stride_along(offset, axis) for axis in axes}))
    return found


def _strides(builder: TraceBuilder, tensor: Tensor) -> tuple[int, ...]:
    """Strides of an operand; a stage's are those of the memory order that its loops will follow."""
    known = builder.task.strides.get(tensor.name)
    if known is not None:
        return known
    if tensor.name not in builder.state.stages:
        return row_major(tensor.shape)
    names = list(builder.stage(tensor.name).spatial_axes)
    strides, step = [0] * len(names), 1
    for axis in reversed(memory_order(builder, tensor.name)):
        strides[names.index(axis)] = step
        step *= tensor.shape[names.index(axis)]
    return tuple(strides)


def epilogue_axes(plan: ReductionPlan) -> dict[int, tuple[Axis, int, bool]]:
    """Dims of the reduction -> axes of the epilogue, through the stages between, as `axis_map` gives them."""
    result: dict[int, tuple[Axis, int, bool]] | None = None
    for producer, consumer in pairwise([plan.reduction, *plan.between, plan.epilogue]):
        step = axis_map(consumer, producer)
        assert step is not None
        if result is None:
            result = step
        else:
            result = {dim: _compose(step, producer, form) for dim, form in result.items()}
    assert result is not None
    return result


def epilogue_loops(builder: TraceBuilder, plan: ReductionPlan) -> dict[Axis, str]:
    """The epilogue's loop for each axis of the reduction, splitting where the epilogue interleaves."""
    out = plan.epilogue.name
    names = axis_names(plan.epilogue)
    done: dict[str, list[str]] = {}
    loop_of: dict[Axis, str] = {}
    for dim, (axis, divisor, remainder) in epilogue_axes(plan).items():
        loop = names[axis.var]
        if divisor > 1:
            if loop not in done:
                done[loop] = builder.split(out, loop, divisor)
            loop = done[loop][1 if remainder else 0]
        loop_of[plan.reduction.axes[dim]] = loop
    return loop_of


def output_stride(task: Task, plan: ReductionPlan, axis: Axis) -> int:
    """How far the epilogue's store moves along an axis of the reduction; 0 if unknown."""
    strides = task.strides.get(plan.epilogue.name)
    if strides is None:
        return 0
    dim = plan.reduction.axes.index(axis)
    if plan.epilogue is plan.reduction:
        return strides[dim]
    found, divisor, remainder = epilogue_axes(plan)[dim]
    return strides[plan.epilogue.axes.index(found)] * (1 if remainder else divisor)


def packed_order(compute: Compute, indices: tuple[Expr, ...], vector: Axis) -> tuple[tuple[int, int], ...] | None:
    """How a constant's dims are stored: outer dims, tiles of the vector axis, reduced dims, the place in the tile."""
    if sum(index is vector.var for index in indices) != 1:
        return None
    spatial = [axis.var for axis in compute.axes]
    reduces = [axis.var for axis in compute.reduce_axes]
    place = indices.index(vector.var)
    outer = [d for d, i in enumerate(indices) if isinstance(i, Var) and i in spatial and d != place]
    inner = [d for d in range(len(indices)) if d not in outer and d != place]
    inner.sort(key=lambda d: _reduce_position(indices[d], reduces))
    return (*((d, 0) for d in outer), (place, 0), *((d, 0) for d in inner), (place, 1))


def schedule_reduction(builder: TraceBuilder, plan: ReductionPlan) -> None:
    """Write the steps for one reduction and its neighbours."""
    _Rule(builder, plan).write()


class _Rule:
    def __init__(self, builder: TraceBuilder, plan: ReductionPlan) -> None:
        self.builder = builder
        self.plan = plan
        self.compute = plan.reduction
        self.target = builder.task.target
        self.lanes = builder.lanes
        self.packed: dict[str, tuple[int, ...]] = {}  # copies that reorder: their dims, outermost first
        self.operands = operands_of(builder, plan, frozenset())
        self.steps = prod(axis.extent for axis in self.compute.reduce_axes)

    # --- choices ---

    def _vector_cost(self, axis: Axis) -> float:
        """Estimated work of a vector along `axis`: loads (a gather costs a lane each), the store, unused lanes."""
        cost = 0.5
        for operand in self.operands:
            step = operand.steps[axis.var]
            if step == 0:
                continue
            cost += 1.0 if operand.is_free or step == 1 else float(self.lanes)
        if output_stride(self.builder.task, self.plan, axis) not in (0, 1):
            cost += self.lanes / self.steps
        used = axis.extent / (ceil(axis.extent / self.lanes) * self.lanes)
        return cost / used

    def _reads_apart(self, tile: Axis, vector: Axis) -> bool:
        """Whether no operand moves along both axes: then one is a scalar for a row, the other a vector for a column."""
        return not any(operand.moves(tile.var) and operand.moves(vector.var) for operand in self.operands)

    def _tile_axis(self, vector: Axis) -> Axis | None:
        """The axis of the register tile's rows: one that reuses the vector operand if there is, the innermost first."""
        others = [axis for axis in self.compute.axes if axis is not vector and axis.extent > 1]
        apart = [axis for axis in others if self._reads_apart(axis, vector)]
        moving = [axis for axis in others if any(operand.moves(axis.var) for operand in self.operands)]
        choices = apart or moving
        if not choices:
            return None
        last = choices[-1]
        return last if last.extent >= 4 else max(choices, key=lambda axis: axis.extent)

    # --- steps ---

    def write(self) -> None:
        builder = self.builder
        for stage in self.plan.between:
            builder.inline(stage)
        axes = [axis for axis in self.compute.axes if axis.extent > 1]
        vector = min(axes, key=self._vector_cost, default=None)
        if vector is None or self._vector_cost(vector) > self.lanes / 2:
            packed = self._pack_operand()
            if packed is not None:
                vector = packed
            elif self._lane_axis() is not None:
                self._write_lanes()
                return
        if vector is None:
            vector = Axis(Var("none", self.compute.axes[0].var.dtype, -1), 1) if self.compute.axes else None
        self._write_tile(vector)

    def _pack_operand(self) -> Axis | None:
        """Read one operand of a large contraction through a packed copy; gives the axis that becomes the vector."""
        candidates = [axis for axis in self.compute.axes if axis.extent >= self.lanes]
        for axis in reversed(candidates):
            strided = [operand for operand in self.operands if operand.moves(axis.var)]
            others = [a for a in self.compute.axes if a is not axis and not strided[0].moves(a.var)] if strided else []
            reuse = prod(a.extent for a in others)
            if len(strided) == 1 and strided[0].steps[axis.var] is not None and reuse >= 8:
                self._copy_operand(strided[0], axis)
                return axis
        return None

    def _crowded_operand(self, vector: Axis | None, tile_axis: Axis | None, tile: RegisterTile) -> Operand | None:
        """An operand whose rows fall into one set of the first-level cache, read often enough to pay for a copy."""
        if vector is None or tile_axis is None or tile.rows <= _CACHE_WAYS or vector.extent < 8 * self.lanes:
            return None
        for operand in self.operands:
            step = operand.steps[tile_axis.var]
            crowds = step and step * operand.load.source.dtype.bytes % _PAGE_BYTES == 0
            if crowds and not operand.is_free and not operand.moves(vector.var):
                return operand
        return None

    def _copy_operand(self, operand: Operand, vector: Axis | None = None) -> None:
        """Read an operand through a copy; with `vector`, one that lies contiguous along that axis."""
        source = operand.load.source
        if vector is not None:
            last = [vector.var in walk(index) for index in operand.load.indices]
            dims = sorted(range(len(last)), key=lambda dim: last[dim])
            self.packed[f"{source.name}_cache"] = tuple(dims)
        self.builder.add(steps.CacheRead(source.name, self.compute.name))
        copy = self.builder.stage(f"{source.name}_cache").compute
        self.compute = self.builder.stage(self.compute.name).compute
        self.plan = ReductionPlan(
            self.compute,
            self.compute if self.plan.epilogue.name == self.compute.name else self.plan.epilogue,
            self.plan.between,
            (*self.plan.prologue, copy),
        )
        self.operands = operands_of(self.builder, self.plan, frozenset(self.packed))

    def _lane_axis(self) -> Axis | None:
        """A reduce axis along which every operand is contiguous or constant."""
        for axis in reversed(self.compute.reduce_axes):
            if axis.extent >= 4 and all(o.is_free or o.steps[axis.var] in (0, 1) for o in self.operands):
                return axis
        return None

    def _write_lanes(self) -> None:
        """Vectors along a reduce axis: partial sums by lane, combined at the end."""
        builder, name = self.builder, self.compute.name
        axis = self._lane_axis()
        assert axis is not None
        self._inline_prologue()
        write_lane_reduction(builder, name, axis_names(self.compute)[axis.var], axis.extent)
        if self.plan.epilogue is self.compute:
            builder.add(steps.CacheWrite(name))
            inner, outer = f"{name}_acc", name
        else:
            inner, outer = name, self.plan.epilogue.name
        loops = list(builder.loops(outer))
        if not loops:
            builder.stage(outer)
            return
        place = loops[-1]
        if compute_flops(self.compute) >= _SERIAL_FLOPS and self.target.threads > 1:
            place = builder.parallel(outer, loops)
        vectorize_lanes(builder, inner, self.lanes)
        for stage in (f"{name}_rf", inner):
            builder.compute_at(stage, outer, place)

    def _inline_prologue(self) -> None:
        for stage in self.plan.prologue:
            self.builder.inline(stage)

    def _inline_padding(self) -> None:
        """Where each point loads vectors of its own, choosing zeros for what is outside beats a padded copy."""
        for stage in self.plan.prologue:
            if is_padding(stage):
                self.builder.inline(stage)
        kept = tuple(stage for stage in self.plan.prologue if not is_padding(stage))
        self.plan = replace(self.plan, prologue=kept)

    def _write_tile(self, vector: Axis | None) -> None:
        builder, name = self.builder, self.compute.name
        tile_axis = None if vector is None else self._tile_axis(vector)
        tile = self._register_tile(vector, tile_axis)
        if vector is not None and tile_axis is not None and not self._reads_apart(tile_axis, vector):
            self._inline_padding()
        crowded = self._crowded_operand(vector, tile_axis, tile)
        if crowded is not None:
            self._copy_operand(crowded)
        names = axis_names(self.compute)
        if self.plan.epilogue.name == name:
            builder.add(steps.CacheWrite(name))
            acc, out = f"{name}_acc", name
            loop_of = {axis: names[axis.var] for axis in self.compute.axes}
        else:
            acc, out = name, self.plan.epilogue.name
            loop_of = epilogue_loops(builder, self.plan)
        grid = _Grid(self, out, loop_of, vector, tile_axis, tile)
        parallel_loop, place = grid.write()
        self._write_accumulator(acc, names, vector, tile_axis, tile)
        if place is not None:
            builder.compute_at(acc, out, place)
        self._write_prologue(out, parallel_loop)
        packed = self._pack_constants(vector, tile)
        if place is not None and grid.column_loop is not None and grid.tiles_per_column > 1:
            self._prefetch(packed, acc, out, grid.column_loop)

    def _register_tile(self, vector: Axis | None, tile_axis: Axis | None) -> RegisterTile:
        if vector is None:
            return RegisterTile(1, 1)
        rows = 1 if tile_axis is None else tile_axis.extent
        apart = tile_axis is None or self._reads_apart(tile_axis, vector)
        return choose_tile(rows, vector.extent, self.steps, self.lanes, apart, self.target)

    def _write_accumulator(
        self, acc: str, names: dict[Var, str], vector: Axis | None, tile_axis: Axis | None, tile: RegisterTile
    ) -> None:
        builder = self.builder
        reduces = [names[axis.var] for axis in self.compute.reduce_axes]
        tail: list[str] = []
        if tile_axis is not None:
            tail.append(names[tile_axis.var])
        vectors: list[str] = []
        if vector is not None and vector.extent > 1:
            vectors = builder.split(acc, names[vector.var], self.lanes)
        chosen = {names[axis.var] for axis in (vector, tile_axis) if axis is not None and axis.var in names}
        spatial = [names[axis.var] for axis in self.compute.axes if names[axis.var] not in chosen]
        unrolled = self._unroll_reduction(acc, reduces, tile)
        loops = [*spatial, *reduces, *tail, *vectors]
        position = loops.index(reduces[-1])
        if unrolled and unrolled[0] not in loops:
            loops[position : position + 1] = unrolled
        builder.reorder(acc, loops)
        builder.unroll(acc, *tail, *vectors[:-1])
        if vectors:
            builder.vectorize(acc, vectors[-1])

    def _unroll_reduction(self, acc: str, reduces: list[str], tile: RegisterTile) -> list[str]:
        """Unroll short inner reduce loops whole, and a long innermost one by a few steps if the tile is small."""
        size = tile.rows * tile.vectors
        extents = [axis.extent for axis in self.compute.reduce_axes]
        budget = 96
        if extents[-1] * size > budget:
            if size > 8 or extents[-1] < 8:
                return []
            loops = self.builder.split(acc, reduces[-1], 4)
            self.builder.unroll(acc, loops[1])
            return loops
        for name, extent in zip(reversed(reduces), reversed(extents), strict=True):
            size *= extent
            if size > budget:
                break
            self.builder.unroll(acc, name)
        return []

    def _write_prologue(self, out: str, parallel_loop: str | None) -> None:
        for stage in self.plan.prologue:
            names = list(self.builder.stage(stage.name).spatial_axes)
            dims = self.packed.get(stage.name)
            order = memory_order(self.builder, stage.name) if dims is None else [names[dim] for dim in dims]
            if parallel_loop is None:
                schedule_in_order(self.builder, stage.name, order)
                continue
            self.builder.reorder(stage.name, order)
            inner = order[-1]
            if stage.shape[names.index(inner)] > self.lanes:
                inner = self.builder.split(stage.name, inner, self.lanes)[1]
            self.builder.vectorize(stage.name, inner)
            self.builder.compute_at(stage.name, out, parallel_loop)

    def _prefetch(self, packed: list[Tensor], acc: str, out: str, loop: str) -> None:
        """Weights that come from memory arrive while the tile before theirs is computed, not all at its start."""
        for tensor in packed:
            if prod(tensor.shape) * tensor.dtype.bytes > self.target.l2_bytes // 2:
                self.builder.add(steps.Prefetch(acc, tensor.name, out, loop))
                return

    def _pack_constants(self, vector: Axis | None, tile: RegisterTile) -> list[Tensor]:
        """Store constants that vectors are loaded from in the order in which the tiles read them; gives those."""
        packed: list[Tensor] = []
        if vector is None:
            return packed
        width = min(tile.vectors * self.lanes, ceil(vector.extent / self.lanes) * self.lanes)
        for operand in self.operands:
            source = operand.load.source
            reads = sum(load.source is source for c in self.builder.task.dag.computes for load in loads_of(c))
            if not operand.is_constant or not operand.moves(vector.var) or reads != 1:
                continue
            order = packed_order(self.compute, operand.load.indices, vector)
            if order is not None:
                tiles = tuple(width if index is vector.var else 0 for index in operand.load.indices)
                self.builder.add(steps.LayoutRewrite(source.name, tiles, order))
                packed.append(source)
        return packed


def _reduce_position(index: Expr, reduces: list[Var]) -> int:
    return reduces.index(index) if isinstance(index, Var) and index in reduces else -1


def _compose(
    step: dict[int, tuple[Axis, int, bool]], producer: Compute, form: tuple[Axis, int, bool]
) -> tuple[Axis, int, bool]:
    axis, divisor, remainder = form
    outer, outer_divisor, outer_remainder = step[producer.axes.index(axis)]
    if outer_divisor == 1:
        return outer, divisor, remainder
    return outer, outer_divisor, outer_remainder


def write_lane_reduction(builder: TraceBuilder, name: str, axis: str, extent: int) -> None:
    """rfactor `axis` into vectors of partial results (several, to hide latency), and schedule the partial stage."""
    lanes = builder.lanes
    vectors = 4 if extent >= 16 * lanes else 2 if extent >= 8 * lanes else 1
    builder.add(steps.Rfactor(name, axis, lanes * vectors))
    partial = f"{name}_rf"
    stage = builder.stage(partial)
    count = -(-extent // (lanes * vectors))
    if extent % (lanes * vectors) and count > 1:  # the guarded last step runs on its own
        builder.split(partial, axis, count - 1)
    lane = stage.spatial_axes[-1]
    loops = [loop for loop in builder.loops(partial) if loop != lane]
    builder.reorder(partial, [*loops, lane])
    vectorize_lanes(builder, partial, lanes, lane)


def vectorize_lanes(builder: TraceBuilder, stage: str, lanes: int, loop: str | None = None) -> None:
    """Make the innermost loop vectors of `lanes`, the vectors unrolled."""
    loop = builder.loops(stage)[-1] if loop is None else loop
    extent = builder.stage(stage).axes[loop].extent
    if extent > lanes:
        outer, loop = builder.split(stage, loop, lanes)
        builder.unroll(stage, outer)
    builder.vectorize(stage, loop)


class _Grid:
    """The loops around the register tile: which run in parallel, in what blocks and order."""

    def __init__(
        self,
        rule: _Rule,
        out: str,
        loop_of: dict[Axis, str],
        vector: Axis | None,
        tile_axis: Axis | None,
        tile: RegisterTile,
    ) -> None:
        self.rule, self.builder, self.out = rule, rule.builder, out
        self.loop_of, self.vector, self.tile_axis, self.tile = loop_of, vector, tile_axis, tile
        self.others = [a for a in rule.compute.axes if a is not vector and a is not tile_axis]
        strides = {axis: output_stride(rule.builder.task, rule.plan, axis) for axis in self.others}
        self.others.sort(key=lambda axis: -strides[axis])
        self.row = self._row_axis()
        self.threads = rule.target.threads
        self.block = 1
        self.column_loop: str | None = None
        self.tiles_per_column = 1

    def _row_axis(self) -> Axis | None:
        """The innermost other axis that moves the same operands as the tile axis does: the rows of an image."""
        if self.vector is None or self.tile_axis is None:
            return None
        moved = self._moved(self.tile_axis)
        candidates = [axis for axis in self.others if axis.extent > 1 and self._moved(axis) == moved]
        return candidates[-1] if candidates else None

    def _moved(self, axis: Axis) -> list[bool]:
        return [operand.moves(axis.var) for operand in self.rule.operands]

    def _bytes(self, constant_like: bool) -> int:
        """Bytes of the operands that move (`constant_like`) or do not move along the vector axis."""
        total = 0
        for operand in self.rule.operands:
            moves = self.vector is not None and operand.moves(self.vector.var)
            if moves == constant_like:
                total += prod(operand.load.source.shape) * operand.load.source.dtype.bytes
        return total

    def write(self) -> tuple[str | None, str | None]:
        """Write the loops; gives the loop that prologues are computed in (None: at root) and the accumulator's."""
        builder, out = self.builder, self.out
        vectors = self._split_vector()
        is_parallel = self.threads > 1 and compute_flops(self.rule.compute) >= _SERIAL_FLOPS
        loops = self._loops()
        self.column_loop = vectors[0] if vectors else None
        self.tiles_per_column = ceil(loops.points / self.tile.rows)
        self.block, cycles = choose_block(loops, self.rule.target)
        by_vector = bool(vectors) and (self.tile_axis is None or column_cycles(loops, self.rule.target) < cycles)
        batch = [self.loop_of[axis] for axis in self.others if axis is not self.row]
        row = self._split_row(by_vector)
        tiles = self._split_tile(by_vector)
        inner = [*tiles[-1:], *vectors[1:]]
        if by_vector:
            grid, rest = [*batch, *vectors[:1]], [*row, *tiles[:-1]]
        elif row:
            grid, rest = [*batch, row[0]], [*vectors[:1], *row[1:], *tiles[:-1]]
        else:
            grid, rest = [*batch, *tiles[:-2]], [*vectors[:1], *tiles[-2:-1]]
        builder.reorder(out, [*grid, *rest, *inner])
        if tiles:
            builder.unroll(out, tiles[-1])
        if vectors:
            builder.unroll(out, *vectors[1:-1])
            builder.vectorize(out, vectors[-1])
        block = None
        if is_parallel and grid:
            block = builder.parallel(out, grid)
        elif grid:
            block = grid[-1]
        place = rest[-1] if rest else block
        return (None if by_vector else block), place

    def _split_vector(self) -> list[str]:
        if self.vector is None or self.vector.extent == 1 or self.vector not in self.loop_of:
            return []
        return self.builder.split(self.out, self.loop_of[self.vector], self.tile.vectors, self.rule.lanes)

    def _loops(self) -> Loops:
        """Sizes for the choice of blocks; a unit is a row, or a register tile's points where there are no rows."""
        row = 1 if self.row is None else self.row.extent
        tile = 1 if self.tile_axis is None else self.tile_axis.extent
        vector = 1 if self.vector is None else self.vector.extent
        unit = tile if self.row is not None else self.tile.rows
        return Loops(
            points=row * tile,
            columns=ceil(vector / (self.tile.vectors * self.rule.lanes)),
            batch=prod(axis.extent for axis in self.others if axis is not self.row),
            unit=min(unit, row * tile),
            halo=self._halo() * unit,
            cycles=compute_flops(self.rule.compute) / (4 * self.rule.lanes),
            shared_bytes=self._bytes(True),
            point_bytes=self._bytes(False),
            stored_bytes=sum(prod(stage.shape) * stage.dtype.bytes for stage in self.rule.plan.prologue),
        )

    def _halo(self) -> float:
        """What a block's prologue costs over what it stores, in rows of the reduction's own work."""
        if not self.rule.plan.prologue or self.row is None:
            return 0.0
        work = self.rule.steps * (1 if self.vector is None else self.vector.extent)
        return 2.0 * min(1.0, 64.0 / max(1.0, work / self.rule.compute.reduce_axes[-1].extent))

    def _split_row(self, by_vector: bool) -> list[str]:
        if self.row is None:
            return []
        loop = self.loop_of[self.row]
        return [loop] if by_vector else self.builder.split(self.out, loop, self.block)

    def _split_tile(self, by_vector: bool) -> list[str]:
        if self.tile_axis is None:
            return []
        loop, rows = self.loop_of[self.tile_axis], self.tile.rows
        if self.row is not None or by_vector:
            return self.builder.split(self.out, loop, rows)
        return self.builder.split(self.out, loop, self.block, rows)
