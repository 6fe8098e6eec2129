"""Sketch rules: how the loops of a stage may be written, applied to a task's stages from output to input.

A rule looks at one stage and gives alternatives, each a partial sketch with one more part; the sketches of a task are
all combinations. A user's own rules stand before these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from typing import Any, Protocol

from mcompile.ir.tensor import Axis, Compute
from mcompile.schedule import steps
from mcompile.schedule.analysis import (
    TaskAnalysis,
    address,
    axis_names,
    compute_flops,
    is_plain_copy,
    is_transcendental,
    loads_of,
    operations,
    stride_along,
)
from mcompile.schedule.constructed.builder import TraceBuilder
from mcompile.schedule.constructed.injective import PARALLEL_WORK, memory_order, work_of
from mcompile.schedule.constructed.reduction import (
    Operand,
    ReductionPlan,
    epilogue_loops,
    operands_of,
    output_stride,
    packed_order,
    plan_reduction,
)
from mcompile.schedule.constructed.rows import can_schedule_rows
from mcompile.schedule.task import Task
from mcompile.tuning.sketch import Choice, Decision, Part, TileSizes, Values

_SURELY_PARALLEL = 4_000_000  # flops from which a fork always pays
_PAGE_BYTES = 4096
_MOST_COPIES = 3  # of an expensive stage, inlined in its readers
_PARTIAL_VECTORS = (1, 2, 4, 8)  # of a reduction's partial results


@dataclass(frozen=True)
class Partial:
    """A sketch being derived: its parts so far, and the stages they write."""

    task: Task
    parts: tuple[Part, ...] = ()
    done: frozenset[str] = frozenset()
    labels: tuple[str, ...] = ()

    @property
    def analysis(self) -> TaskAnalysis:
        return TaskAnalysis(self.task)

    def add(self, part: Part, stages: Sequence[Compute], label: str = "") -> Partial:
        names = {stage.name for stage in stages}
        return Partial(self.task, (*self.parts, part), self.done | names, (*self.labels, *([label] if label else [])))


class SketchRule(Protocol):
    """One way to write loops. If `exclusive`, no later rule is tried on a stage that it applies to."""

    @property
    def exclusive(self) -> bool: ...

    def apply(self, partial: Partial, stage: Compute) -> Sequence[Partial]:
        """The alternatives for `stage`, which is not done yet; none where the rule does not apply."""
        ...


# --- inlining ---


@dataclass(frozen=True)
class InlinePart:
    stage: Compute
    decisions: tuple[Decision, ...] = ()

    def write(self, builder: TraceBuilder, values: Values) -> None:
        builder.inline(self.stage)


class AlwaysInline:
    """Cheap stages without a reduction are computed where they are read."""

    exclusive = True

    def apply(self, partial: Partial, stage: Compute) -> Sequence[Partial]:
        if not _may_inline(partial.analysis, stage) or _is_expensive(partial.analysis, stage):
            return ()
        return (partial.add(InlinePart(stage), [stage]),)


class InlineExpensive:
    """An expensive stage may be computed where it is read, too."""

    exclusive = False

    def apply(self, partial: Partial, stage: Compute) -> Sequence[Partial]:
        analysis = partial.analysis
        if not _may_inline(analysis, stage) or _uses(analysis, stage) > _MOST_COPIES:
            return ()
        return (partial.add(InlinePart(stage), [stage], f"inline {stage.name}"),)


def _may_inline(analysis: TaskAnalysis, stage: Compute) -> bool:
    """Whether the stage is no output, no reduction, and not what a reduction is computed in."""
    if stage.reduce_axes or stage.name in analysis.outputs:
        return False
    return not any(stage is plan.epilogue for plan in plans_of(analysis))


def _uses(analysis: TaskAnalysis, stage: Compute) -> int:
    return sum(sum(load.source is stage for load in loads_of(reader)) for reader in analysis.consumers(stage))


def _is_expensive(analysis: TaskAnalysis, stage: Compute) -> bool:
    return (
        _uses(analysis, stage) > 1
        and (is_transcendental(stage) or operations(stage.body) > 16)
        and not is_plain_copy(stage)
    )


# --- reductions: register tiles inside the loops of their epilogue ---


def plans_of(analysis: TaskAnalysis) -> tuple[ReductionPlan, ...]:
    """Each reduction with its neighbours."""
    plans: list[ReductionPlan] = []
    taken: set[str] = set()
    for reduction in analysis.reductions:
        plan = plan_reduction(analysis, reduction, taken)
        plans.append(plan)
        taken |= {stage.name for stage in _stages_of(plan)}
    return tuple(plans)


def _stages_of(plan: ReductionPlan) -> tuple[Compute, ...]:
    return (plan.reduction, plan.epilogue, *plan.between, *plan.prologue)


@dataclass(frozen=True)
class TiledReduction:
    """Multi-level tiles of a reduction in the loops of its epilogue (or of a copy of itself).

    for grid (parallel): [prologue] for middle: acc[rows, vectors] in registers over all reduce steps; epilogue(acc)
    Every spatial axis has a factor for the middle loops and one for the register tile, and every reduce axis one that
    is unrolled. `columns` says where the tiles of the vector axis run: in the grid, around or inside the middle loops.
    """

    task: Task
    plan: ReductionPlan
    vector: Axis | None
    batch: tuple[Axis, ...]  # move all operands: no register tile
    copied: tuple[str, ...] = ()  # operands read through a copy in which the vector axis is contiguous
    crowded: tuple[str, ...] = ()  # operands whose rows share cache sets: perhaps read through a copy
    constants: tuple[str, ...] = ()  # stored in the order of the tiles

    @property
    def name(self) -> str:
        return self.plan.reduction.name

    @cached_property
    def lanes(self) -> int:
        return TraceBuilder(self.task).lanes

    @cached_property
    def spatial(self) -> tuple[Axis, ...]:
        """Other axes that have loops, in the order of the output in memory."""
        plan = self.plan
        axes = [a for a in plan.reduction.axes if a.extent > 1 and a is not self.vector]
        return tuple(sorted(axes, key=lambda axis: -output_stride(self.task, plan, axis)))

    @cached_property
    def reduces(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.plan.reduction.reduce_axes if axis.extent > 1)

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        found: list[Decision] = []
        for axis in self.spatial:
            key = f"{self.name}.{axis.var.name}"
            found.append(
                TileSizes(key, axis.extent, 2 if axis in self.batch else 3, 32, 0 if axis in self.batch else 1)
            )
        if self.vector is not None:
            key = f"{self.name}.{self.vector.var.name}"
            found.append(TileSizes(key, ceil(self.vector.extent / self.lanes), 2, 16))
            found.append(Choice(f"{self.name}.columns", ("grid", "around", "inside")))
        for axis in self.reduces:
            found.append(TileSizes(f"{self.name}.{axis.var.name}", axis.extent, 2, 32))
        found.append(Choice(f"{self.name}.order", self._orders()))
        for stage in self.plan.prologue:
            found.append(Choice(f"{stage.name}.place", ("block", "root", "inline")))
        for tensor in self.copied:
            found.append(Choice(f"{tensor}.place", ("block", "root")))
        for tensor in self.crowded:
            found.append(Choice(f"{tensor}.place", ("none", "block", "root")))
        if self.constants and self.vector is not None:
            found.append(Choice(f"{self.name}.prefetch", ("", *self.constants), structural=False))
        if self._may_fork and compute_flops(self.plan.reduction) < _SURELY_PARALLEL:
            found.append(Choice(f"{self.name}.parallel", (True, False)))
        return tuple(decision for decision in found if not isinstance(decision, Choice) or len(decision.options) > 1)

    @property
    def _may_fork(self) -> bool:
        return self.task.target.threads > 1

    def _orders(self) -> tuple[tuple[int, ...], ...]:
        """Orders of the reduce loops: as given, the longest one outermost, and innermost."""
        given = tuple(range(len(self.reduces)))
        if not given:
            return ((),)
        longest = max(given, key=lambda index: self.reduces[index].extent)
        rest = tuple(index for index in given if index != longest)
        return tuple(dict.fromkeys([given, (longest, *rest), (*rest, longest)]))

    # --- writing ---

    def write(self, builder: TraceBuilder, values: Values) -> None:
        plan, name = self.plan, self.name
        for stage in plan.between:
            builder.inline(stage)
        prologue = self._read_prologue(builder, values)
        if plan.epilogue is plan.reduction:
            builder.add(steps.CacheWrite(name))
            acc, out = f"{name}_acc", name
            names = axis_names(plan.reduction)
            loop_of = {axis: names[axis.var] for axis in plan.reduction.axes}
        else:
            acc, out = name, plan.epilogue.name
            loop_of = epilogue_loops(builder, plan)
        block, place, column = self._write_grid(builder, values, out, loop_of)
        order = self._write_accumulator(builder, values, acc)
        if place is not None:
            builder.compute_at(acc, out, place)
        for source, where, dims in prologue:
            self._write_prologue(builder, source, where, dims, out, block)
        if self.vector is not None:
            self._pack_constants(builder, values, order)
        prefetched = values.get(f"{name}.prefetch", "")
        if prefetched and place is not None and column is not None:
            builder.add(steps.Prefetch(acc, prefetched, out, column))

    def _read_prologue(self, builder: TraceBuilder, values: Values) -> list[tuple[str, str, tuple[int, ...] | None]]:
        """Inline what is to be inlined and insert copies; gives (stage, place, order of dims) of the others."""
        found: list[tuple[str, str, tuple[int, ...] | None]] = []
        for stage in self.plan.prologue:
            where = values[f"{stage.name}.place"]
            if where == "inline":
                builder.inline(stage)
            else:
                found.append((stage.name, where, None))
        for tensor in (*self.copied, *self.crowded):
            where = values[f"{tensor}.place"]
            if where != "none":
                builder.add(steps.CacheRead(tensor, self.name))
                found.append((f"{tensor}_cache", where, self._copy_order(tensor) if tensor in self.copied else None))
        return found

    def _copy_order(self, tensor: str) -> tuple[int, ...]:
        """Dims of a copied operand, that of the vector axis last."""
        assert self.vector is not None
        load = next(load for load in loads_of(self.plan.reduction) if load.source.name == tensor)
        moves = [stride_along(index, self.vector.var) != 0 for index in load.indices]
        return tuple(sorted(range(len(moves)), key=lambda dim: moves[dim]))

    def _write_grid(
        self, builder: TraceBuilder, values: Values, out: str, loop_of: dict[Axis, str]
    ) -> tuple[str | None, str | None, str | None]:
        """Write the loops of `out`; gives those of the prologue, of the accumulator, and of the vector axis's tiles."""
        grid: list[str] = []
        middle: list[str] = []
        tile: list[str] = []
        for axis in self.spatial:
            loops = builder.split(out, loop_of[axis], *values[f"{self.name}.{axis.var.name}"])
            grid.append(loops[0])
            middle.append(loops[1])
            tile.extend(loops[2:])
        column: str | None = None
        if self.vector is not None:
            (width,) = values[f"{self.name}.{self.vector.var.name}"]
            column, *vectors = builder.split(out, loop_of[self.vector], width, self.lanes)
            where = values[f"{self.name}.columns"]
            grid = [*grid, column] if where == "grid" else grid
            middle = [column, *middle] if where == "around" else [*middle, column] if where == "inside" else middle
            tile.extend(vectors)
        units = [loop for loop in builder.loops(out) if loop not in {*grid, *middle, *tile}]
        builder.reorder(out, [*units, *grid, *middle, *tile])
        builder.unroll(out, *(tile[:-1] if self.vector is not None else tile))
        if self.vector is not None:
            builder.vectorize(out, tile[-1])
        outer = [*units, *grid]
        block = None
        if outer and self._may_fork and values.get(f"{self.name}.parallel", True):
            block = builder.parallel(out, outer)
        elif outer:
            block = outer[-1]
        return block, (middle[-1] if middle else block), column

    def _write_accumulator(self, builder: TraceBuilder, values: Values, acc: str) -> list[Axis]:
        """Reduce loops outside, the register tile unrolled inside them; gives the order of the reduce axes."""
        names = axis_names(self.plan.reduction)
        indices = values.get(f"{self.name}.order", tuple(range(len(self.reduces))))
        order = [self.reduces[index] for index in indices]
        outer: list[str] = []
        unrolled: list[str] = []
        for axis in order:
            loops = builder.split(acc, names[axis.var], *values[f"{self.name}.{axis.var.name}"])
            outer.append(loops[0])
            unrolled.append(loops[1])
        tile = [names[axis.var] for axis in self.spatial if axis not in self.batch]
        if self.vector is not None:
            tile += builder.split(acc, names[self.vector.var], self.lanes)
        units = [loop for loop in builder.loops(acc) if loop not in {*outer, *unrolled, *tile}]
        builder.reorder(acc, [*units, *outer, *unrolled, *tile])
        builder.unroll(acc, *unrolled, *(tile[:-1] if self.vector is not None else tile))
        if self.vector is not None:
            builder.vectorize(acc, tile[-1])
        return order

    def _write_prologue(
        self, builder: TraceBuilder, name: str, where: str, dims: tuple[int, ...] | None, out: str, block: str | None
    ) -> None:
        axes = list(builder.stage(name).spatial_axes)
        order = memory_order(builder, name) if dims is None else [axes[dim] for dim in dims]
        builder.reorder(name, order)
        *outer, inner = order
        compute = builder.stage(name).compute
        if compute.shape[axes.index(inner)] > self.lanes:
            inner = builder.split(name, inner, self.lanes)[1]
        builder.vectorize(name, inner)
        if where == "block" and block is not None:
            builder.compute_at(name, out, block)
        elif outer and self._may_fork and work_of(compute) >= PARALLEL_WORK:
            builder.parallel(name, outer)

    def _pack_constants(self, builder: TraceBuilder, values: Values, order: list[Axis]) -> None:
        assert self.vector is not None
        (width,) = values[f"{self.name}.{self.vector.var.name}"]
        compute = self.plan.reduction
        for load in loads_of(compute):
            if load.source.name not in self.constants:
                continue
            reordered = Compute(
                compute.name,
                compute.shape,
                compute.dtype,
                compute.axes,
                (*(axis for axis in compute.reduce_axes if axis not in order), *order),
                compute.body,
            )
            places = packed_order(reordered, load.indices, self.vector)
            if places is not None:
                tiles: Any = tuple(width * self.lanes if i is self.vector.var else 0 for i in load.indices)
                builder.add(steps.LayoutRewrite(load.source.name, tiles, places))


class TileReduction:
    """Multi-level tiling with fusion of the consumer or a cache write: an alternative for each axis of vectors."""

    exclusive = False

    def apply(self, partial: Partial, stage: Compute) -> Sequence[Partial]:
        plan = next((p for p in plans_of(partial.analysis) if p.epilogue is stage), None)
        if plan is None or not any(axis.extent > 1 for axis in plan.reduction.axes):
            return ()
        builder = TraceBuilder(partial.task)
        operands = operands_of(builder, plan, frozenset())
        found: list[Partial] = []
        axes = [axis for axis in plan.reduction.axes if axis.extent > 1]
        for axis in reversed(axes):
            copied = _strided(operands, axis)
            if copied is not None:
                part = self._part(partial.task, plan, operands, axis, copied)
                found.append(partial.add(part, _stages_of(plan), f"tile {plan.reduction.name} by {axis.var.name}"))
        if not found:
            part = self._part(partial.task, plan, operands, None, ())
            found.append(partial.add(part, _stages_of(plan), f"tile {plan.reduction.name}"))
        return found

    def _part(
        self,
        task: Task,
        plan: ReductionPlan,
        operands: list[Operand],
        vector: Axis | None,
        copied: tuple[str, ...],
    ) -> TiledReduction:
        others = [axis for axis in plan.reduction.axes if axis.extent > 1 and axis is not vector]
        batch = tuple(axis for axis in others if len(operands) > 1 and all(o.moves(axis.var) for o in operands))
        reads = [load.source.name for compute in task.dag.computes for load in loads_of(compute)]
        constants = tuple(
            operand.load.source.name
            for operand in operands
            if vector is not None
            and operand.is_constant
            and operand.moves(vector.var)
            and reads.count(operand.load.source.name) == 1
            and packed_order(plan.reduction, operand.load.indices, vector) is not None
        )
        crowded = tuple(
            dict.fromkeys(
                operand.load.source.name
                for operand in operands
                if not operand.is_free
                and operand.load.source.name not in copied
                and not isinstance(operand.load.source, Compute)
                and any(_crowds(operand, axis) for axis in others)
            )
        )
        return TiledReduction(task, plan, vector, batch, copied, crowded, constants)


def _crowds(operand: Operand, axis: Axis) -> bool:
    """Whether rows along `axis` fall into the same sets of a first-level cache."""
    step = operand.steps[axis.var]
    return bool(step) and axis.extent > 8 and (step or 0) * operand.load.source.dtype.bytes % _PAGE_BYTES == 0


def _strided(operands: list[Operand], axis: Axis) -> tuple[str, ...] | None:
    """The operands to copy so that vectors along `axis` are contiguous; None if that is not possible."""
    strided = [o for o in operands if not o.is_free and o.steps[axis.var] not in (0, 1)]
    if any(o.steps[axis.var] is None for o in strided):
        return None
    if strided and (len(operands) == 1 or any(isinstance(o.load.source, Compute) for o in strided)):
        return None  # no reuse; or a stage, whose layout follows from its own loops
    return tuple(dict.fromkeys(operand.load.source.name for operand in strided))


# --- reductions along contiguous memory: vectors of partial results ---


def _write_partial(builder: TraceBuilder, name: str, axis: str, extent: int, vectors: int, copied: bool = False) -> str:
    """rfactor `axis` into `vectors` vectors of partial results, and write both stages' loops; gives the second.

    With `copied`, the second is not `name` itself, which copies it.
    """
    lanes = builder.lanes
    builder.add(steps.Rfactor(name, axis, lanes * vectors))
    partial, final = f"{name}_rf", name
    if copied:
        builder.add(steps.CacheWrite(name))
        final = f"{name}_acc"
    stage = builder.stage(partial)
    count = -(-extent // (lanes * vectors))
    if extent % (lanes * vectors) and count > 1:  # the guarded last step runs on its own
        builder.split(partial, axis, count - 1)
    lane = stage.spatial_axes[-1]
    builder.reorder(partial, [*(loop for loop in builder.loops(partial) if loop != lane), lane])
    for written, loop in ((partial, lane), (final, builder.loops(final)[-1])):
        if vectors > 1:
            outer, loop = builder.split(written, loop, lanes)
            builder.unroll(written, outer)
        builder.vectorize(written, loop)
    return final


def _partial_choice(name: str, extent: int, lanes: int) -> Choice:
    options = tuple(v for v in _PARTIAL_VECTORS if v == 1 or v * lanes <= extent)
    return Choice(f"{name}.partial", options)


@dataclass(frozen=True)
class LaneReduction:
    """A reduction in vectors along a reduce axis, placed in a loop of its consumer or of a copy of itself."""

    task: Task
    plan: ReductionPlan
    axis: Axis

    @property
    def name(self) -> str:
        return self.plan.reduction.name

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        builder = TraceBuilder(self.task)
        found: list[Decision] = [_partial_choice(self.name, self.axis.extent, builder.lanes)]
        loops = [axis for axis in self.plan.epilogue.axes if axis.extent > 1]
        if loops:
            found.append(TileSizes(f"{self.name}.block", loops[-1].extent, 2, 1 << 20))
        if self.task.target.threads > 1:
            found.append(Choice(f"{self.name}.parallel", (True, False)))
        return tuple(found)

    def write(self, builder: TraceBuilder, values: Values) -> None:
        plan, name = self.plan, self.name
        for stage in (*plan.between, *plan.prologue):
            builder.inline(stage)
        axis = axis_names(plan.reduction)[self.axis.var]
        copied, out = plan.epilogue is plan.reduction, plan.epilogue.name
        inner = _write_partial(builder, name, axis, self.axis.extent, values[f"{name}.partial"], copied)
        loops = list(builder.loops(out))
        if not loops:
            return
        last = next(
            (n for a, n in zip(reversed(plan.epilogue.axes), reversed(loops), strict=False) if a.extent > 1), ""
        )
        place = loops[-1]
        if last:
            block, place = builder.split(out, last, *values[f"{name}.block"])
            rest = [loop for loop in builder.loops(out) if loop not in (block, place)]
            builder.reorder(out, [*rest, block, place])
            if values.get(f"{name}.parallel", False):
                builder.parallel(out, [*rest, block])
        for stage_name in (f"{name}_rf", inner):
            builder.compute_at(stage_name, out, place)


class Rfactor:
    """Reductions whose operands are contiguous along a reduce axis: partial results by lane."""

    exclusive = False

    def apply(self, partial: Partial, stage: Compute) -> Sequence[Partial]:
        plan = next((p for p in plans_of(partial.analysis) if p.epilogue is stage), None)
        if plan is None:
            return ()
        operands = operands_of(TraceBuilder(partial.task), plan, frozenset())
        axes = reversed(plan.reduction.reduce_axes)
        axis = next((a for a in axes if a.extent >= 4 and all(_is_lane(o, a) for o in operands)), None)
        if axis is None:
            return ()
        part = LaneReduction(partial.task, plan, axis)
        return (partial.add(part, _stages_of(plan), f"lanes of {plan.reduction.name}"),)


def _is_lane(operand: Operand, axis: Axis) -> bool:
    return operand.is_free or operand.steps[axis.var] in (0, 1)


@dataclass(frozen=True)
class PlainReduction:
    """A reduction to a single value: its loops as they are."""

    plan: ReductionPlan
    decisions: tuple[Decision, ...] = ()

    def write(self, builder: TraceBuilder, values: Values) -> None:
        for stage in self.plan.between:
            builder.inline(stage)


class KeepReduction:
    """The last resort for a reduction that no other rule takes."""

    exclusive = False

    def apply(self, partial: Partial, stage: Compute) -> Sequence[Partial]:
        plan = next((p for p in plans_of(partial.analysis) if p.epilogue is stage), None)
        if plan is None or any(axis.extent > 1 for axis in plan.reduction.axes):
            return ()
        covered = (plan.reduction, plan.epilogue, *plan.between)
        return (partial.add(PlainReduction(plan), covered, f"keep {plan.reduction.name}"),)


# --- rows: softmax and normalisation ---


@dataclass(frozen=True)
class RowsPart:
    """All stages of a row together: reductions in vectors of partial results, one pass each over the row."""

    task: Task

    @cached_property
    def _analysis(self) -> TaskAnalysis:
        return TaskAnalysis(self.task)

    @cached_property
    def _lanes(self) -> int:
        return TraceBuilder(self.task).lanes

    @cached_property
    def _output(self) -> Compute:
        return self.task.dag.outputs[0]

    @cached_property
    def _kept(self) -> tuple[Compute, ...]:
        """Stages without a reduction whose value may be stored for the row."""
        found = [s for s in self._analysis.stages if not s.reduce_axes and s is not self._output]
        return tuple(stage for stage in found if not is_plain_copy(stage) and operations(stage.body) > 0)

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        name, column = self._output.name, self._output.axes[-1].extent
        rows = self._output.axes[-2].extent
        found: list[Decision] = [
            TileSizes(f"{name}.rows", rows, 2, 1 << 20),
            TileSizes(f"{name}.columns", ceil(column / self._lanes), 2, 8),
            _partial_choice(name, column, self._lanes),
        ]
        found += [Choice(f"{stage.name}.place", ("row", "inline")) for stage in self._kept]
        found += [
            TileSizes(f"{s.name}.columns", ceil(column / self._lanes), 2, 8) for s in self._kept if self._is_row(s)
        ]
        if self.task.target.threads > 1:
            found.append(Choice(f"{name}.parallel", (True, False)))
        return tuple(found)

    def _is_row(self, stage: Compute) -> bool:
        return stage.shape == self._output.shape

    def write(self, builder: TraceBuilder, values: Values) -> None:
        out = self._output.name
        placed: list[str] = []
        for stage in self._analysis.stages:
            if stage in self._kept and values[f"{stage.name}.place"] == "row":
                placed.append(stage.name)
            elif not stage.reduce_axes and stage is not self._output:
                builder.inline(stage)
        *rows, column = list(builder.stage(out).axes)
        block, row = builder.split(out, rows[-1], *values[f"{out}.rows"])
        self._vectorize(builder, out, column, values[f"{out}.columns"])
        if values.get(f"{out}.parallel", False):
            builder.parallel(out, [*rows[:-1], block])
        for stage in self._analysis.stages:
            if stage.reduce_axes:
                axis = stage.reduce_axes[0]
                partial = values[f"{out}.partial"]
                vectors = partial if partial * self._lanes <= axis.extent else 1
                _write_partial(builder, stage.name, axis_names(stage)[axis.var], axis.extent, vectors)
                builder.compute_at(f"{stage.name}_rf", out, row)
                builder.compute_at(stage.name, out, row)
            elif stage.name in placed:
                if self._is_row(stage):
                    axes = list(builder.stage(stage.name).axes)
                    self._vectorize(builder, stage.name, axes[-1], values[f"{stage.name}.columns"])
                builder.compute_at(stage.name, out, row)

    def _vectorize(self, builder: TraceBuilder, stage: str, column: str, factors: Any) -> None:
        _, unrolled, vector = builder.split(stage, column, *factors, self._lanes)
        builder.unroll(stage, unrolled)
        builder.vectorize(stage, vector)


class RowReduction:
    """Chains of reductions over rows that lie in memory one after the other."""

    exclusive = True

    def apply(self, partial: Partial, stage: Compute) -> Sequence[Partial]:
        analysis = partial.analysis
        if stage.name not in analysis.outputs or not can_schedule_rows(analysis):
            return ()
        return (partial.add(RowsPart(partial.task), analysis.stages, "rows"),)


# --- stages without a reduction ---


@dataclass(frozen=True)
class InjectivePart:
    """Own loops: the others in memory order, then tiles of the vector's axis and of the axis that is read fastest."""

    task: Task
    stage: Compute
    vector: int  # dim
    tiled: tuple[int, ...]  # dims that have tiles, in memory order

    @cached_property
    def lanes(self) -> int:
        return TraceBuilder(self.task).lanes

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        name = self.stage.name
        extent = self.stage.shape[self.vector]
        found: list[Decision] = [TileSizes(f"{name}.vector", ceil(extent / self.lanes), 3, 8)]
        found += [TileSizes(f"{name}.{dim}", self.stage.shape[dim], 2, 64) for dim in self.tiled]
        if self.task.target.threads > 1:
            found.append(Choice(f"{name}.parallel", (True, False)))
        return tuple(found)

    def write(self, builder: TraceBuilder, values: Values) -> None:
        name = self.stage.name
        axes = list(builder.stage(name).spatial_axes)
        order = memory_order(builder, name)
        outer: list[str] = []
        inner: list[str] = []
        for axis in order:
            dim = axes.index(axis)
            if dim == self.vector:
                block, middle, unrolled, vector = builder.split(name, axis, *values[f"{name}.vector"], self.lanes)
                outer.append(block)
            elif dim in self.tiled:
                block, tile = builder.split(name, axis, *values[f"{name}.{dim}"])
                outer.append(block)
                inner.append(tile)
            else:
                outer.append(axis)
        builder.reorder(name, [*outer, *inner, middle, unrolled, vector])
        builder.unroll(name, unrolled)
        builder.vectorize(name, vector)
        if values.get(f"{name}.parallel", False):
            builder.parallel(name, outer)


@dataclass(frozen=True)
class ScalarPart:
    """A single value."""

    decisions: tuple[Decision, ...] = ()

    def write(self, builder: TraceBuilder, values: Values) -> None:
        pass


class OwnLoops:
    """A stage without a reduction that is stored: tiles of the axes that are written and read along memory."""

    exclusive = False

    def apply(self, partial: Partial, stage: Compute) -> Sequence[Partial]:
        if stage.reduce_axes or any(stage is plan.epilogue for plan in plans_of(partial.analysis)):
            return ()
        if not stage.axes:
            return (partial.add(ScalarPart(), [stage]),)
        builder = TraceBuilder(partial.task)
        axes = list(builder.stage(stage.name).spatial_axes)
        written = axes.index(memory_order(builder, stage.name)[-1])
        read = _fastest_read(builder, stage)
        choices = [(written, read)] if read is None or read == written else [(written, read), (read, written)]
        found = []
        for vector, tiled in choices:
            dims = () if tiled is None or tiled == vector else (tiled,)
            label = f"loops of {stage.name} by {axes[vector]}" if len(choices) > 1 else f"loops of {stage.name}"
            found.append(partial.add(InjectivePart(partial.task, stage, vector, dims), [stage], label))
        return found


def _fastest_read(builder: TraceBuilder, stage: Compute) -> int | None:
    """The dim along which the largest operand is contiguous."""
    best: tuple[int, int] | None = None
    for load in loads_of(stage):
        strides = builder.task.strides.get(load.source.name)
        if strides is None:
            continue
        offset = address(load, strides)
        for dim, axis in enumerate(stage.axes):
            size = prod(load.source.shape)
            if axis.extent > 1 and stride_along(offset, axis.var) == 1 and (best is None or size > best[0]):
                best = (size, dim)
    return None if best is None else best[1]


DEFAULT_RULES: tuple[SketchRule, ...] = (
    RowReduction(), AlwaysInline(), InlineExpensive(), TileReduction(), Rfactor(), KeepReduction(), OwnLoops(),
)  # fmt: skip
