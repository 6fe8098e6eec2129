"""Space generators: the sketches of a task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mcompile.errors import McompileError, ScheduleError
from mcompile.ir.expr import Binary, BinaryOp, Const, walk
from mcompile.schedule.constructed import construct
from mcompile.schedule.constructed.builder import TraceBuilder
from mcompile.schedule.constructed.winograd import VARIANT, plan_winograd, schedule_winograd
from mcompile.schedule.lower import lower
from mcompile.schedule.state import Stage
from mcompile.schedule.steps import LayoutRewrite, Prefetch, Split, Step, Trace, Variant, Vectorize
from mcompile.schedule.task import Task
from mcompile.schedule.variants import make_variant, variant_names
from mcompile.tuning.rules import DEFAULT_RULES, InlinePart, Partial, SketchRule
from mcompile.tuning.sketch import Choice, Decision, Sketch, TileSizes, Values

MAX_SKETCHES = 12


class SpaceGenerator(Protocol):
    """Gives the sketches of a task; there is at least one."""

    def generate(self, task: Task) -> tuple[Sketch, ...]: ...

    def seed(self, task: Task) -> tuple[int, tuple[int, ...]] | None:
        """The constructed schedule: (index of a sketch, values), if it is in the space."""
        ...


@runtime_checkable
class SeededSpace(Protocol):
    """A space that knows its seed before the sketches are made, which takes longer."""

    def seed_trace(self, task: Task) -> Trace | None:
        """What the seed's sketch gives for the seed's values."""
        ...


@dataclass(frozen=True)
class TracePart:
    """A given trace whose tile sizes are open, as the knobs of a template; a prefetch may be left out."""

    trace: Trace
    task: Task

    @cached_property
    def _splits(self) -> dict[int, tuple[TileSizes, int]]:
        """Step number -> (open factors, the fixed last factor or 0)."""
        builder = TraceBuilder(self.task)
        vectors = {(step.stage, step.iterator) for step in self.trace if isinstance(step, Vectorize)}
        found: dict[int, tuple[TileSizes, int]] = {}
        for number, step in enumerate(self.trace):
            if isinstance(step, Split):
                stage = builder.stage(step.stage)
                last = f"{step.iterator}.{len(step.factors)}"
                fixed = step.factors[-1] if (step.stage, last) in vectors else 0
                count = len(step.factors) - bool(fixed)
                if count and not _interleaves(builder, step):
                    extent = -(-_extent_of(stage, step.iterator) // max(1, fixed))
                    key = f"{number}.{step.stage}.{step.iterator}"
                    product = int(np.prod(step.factors[:count]))
                    found[number] = (TileSizes(key, max(extent, product), count + 1, max(extent, product)), fixed)
            builder.add(step)
        return {number: sizes for number, sizes in found.items() if self._is_in_order(builder, number)}

    def _is_in_order(self, builder: TraceBuilder, number: int) -> bool:
        """Whether the outer loops of a split stand outside its inner ones, so that any factor will do."""
        step = self.trace[number]
        assert isinstance(step, Split)
        stage = builder.stage(step.stage)
        fused = {fuse.fused: fuse.components for fuse in stage.fuses.values()}

        def parts(loop: str) -> list[str]:
            return [part for component in fused[loop] for part in parts(component)] if loop in fused else [loop]

        places = [
            [
                place
                for place, loop in enumerate(stage.loops)
                if any(part == child or part.startswith((f"{child}.", f"{child}@")) for part in parts(loop))
            ]
            for child in (f"{step.iterator}.{level}" for level in range(len(step.factors) + 1))
        ]
        return all(max(outer) < min(inner) for outer, inner in pairwise(filter(None, places)))

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        found: list[Decision] = [sizes for sizes, _ in self._splits.values()]
        if any(isinstance(step, Prefetch) for step in self.trace):
            found.append(Choice("prefetch", (True, False), structural=False))
        return tuple(found)

    @cached_property
    def values(self) -> tuple[int, ...]:
        """The row that gives the trace itself."""
        found: list[int] = []
        for number, (sizes, _) in self._splits.items():
            step = self.trace[number]
            assert isinstance(step, Split)
            found.extend(step.factors[: sizes.columns])
        return (*found, *([0] if any(isinstance(step, Prefetch) for step in self.trace) else []))

    def write(self, builder: TraceBuilder, values: Values) -> None:
        widths: dict[int, Any] = {}  # width of a tile as it was -> as it is
        for number, step in enumerate(self.trace):
            if isinstance(step, Prefetch) and not values["prefetch"]:
                continue
            builder.add(self._changed(number, step, values, widths))

    def _changed(self, number: int, step: Step, values: Values, widths: dict[int, Any]) -> Step:
        if isinstance(step, LayoutRewrite):
            return replace(step, tiles=tuple(widths.get(tile, tile) for tile in step.tiles))
        if not isinstance(step, Split) or number not in self._splits:
            return step
        sizes, fixed = self._splits[number]
        factors = values[sizes.name]
        if fixed:
            widths[step.factors[-2] * fixed] = factors[-1] * fixed
        return replace(step, factors=(*factors, *([fixed] if fixed else [])))


def _interleaves(builder: TraceBuilder, step: Split) -> bool:
    """Whether a split follows from how the stage's indices divide the axis."""
    stage = builder.stage(step.stage)
    if step.iterator not in stage.axes:
        return False
    variable = stage.axes[step.iterator].var
    return any(
        isinstance(node, Binary) and node.op in (BinaryOp.FLOORDIV, BinaryOp.FLOORMOD)
        and node.a is variable and isinstance(node.b, Const) and node.b.value in step.factors
        for node in walk(builder.expanded(step.stage).body)
    )  # fmt: skip


def _extent_of(stage: Stage, name: str) -> int:
    """The largest number of iterations of a loop."""
    if name in stage.axes:
        return stage.axes[name].extent
    for split in stage.splits.values():
        if split.outer == name:
            return -(-_extent_of(stage, split.parent) // split.factor)
        if split.inner == name:
            return min(split.factor, _extent_of(stage, split.parent))
    fuse = next(fuse for fuse in stage.fuses.values() if fuse.fused == name)
    return prod(_extent_of(stage, component) for component in fuse.components)


def winograd_sketches(task: Task) -> tuple[Sketch, ...]:
    """3x3 convolutions by Winograd's algorithm: block by block, or each part for all blocks; tile sizes are open."""
    plan = None if task.target.exact else plan_winograd(task)
    if plan is None:
        return ()
    written = replace(task, dag=make_variant(task.dag, VARIANT))
    found = []
    for staged in (False, True):
        builder = TraceBuilder(written)
        schedule_winograd(builder, plan, staged)
        name = f"{VARIANT} {'in stages' if staged else 'by blocks'}"
        part = TracePart(builder.trace, written)
        found.append(Sketch(task, name, (part,), VARIANT, written, part.values))
    return tuple(found)


def constructed_sketch(task: Task) -> tuple[Sketch, tuple[int, ...]]:
    """The constructed schedule with its tile sizes open, and the row that gives it."""
    trace = construct(task)
    if trace and isinstance(trace[0], Variant):
        name = trace[0].name
        written = replace(task, dag=make_variant(task.dag, name))
        part = TracePart(trace[1:], written)
        return Sketch(task, f"constructed {name}", (part,), name, written, part.values), part.values
    part = TracePart(trace, task)
    return Sketch(task, "constructed", (part,), reference=part.values), part.values


def variants_of(task: Task) -> dict[str, Task]:
    """The task itself, under no name, and the same with each other dag that computes it."""
    found = {"": task}
    for name in () if task.target.exact else variant_names():
        try:
            found[name] = replace(task, dag=make_variant(task.dag, name))
        except ScheduleError:
            continue
    return found


@dataclass(frozen=True)
class TemplateSpace:
    """Knobs around the constructed rules, as in AutoTVM: one sketch."""

    def generate(self, task: Task) -> tuple[Sketch, ...]:
        return (constructed_sketch(task)[0],)

    def seed(self, task: Task) -> tuple[int, tuple[int, ...]] | None:
        return 0, constructed_sketch(task)[1]

    def seed_trace(self, task: Task) -> Trace | None:
        return construct(task)


@dataclass(frozen=True)
class SketchSpace:
    """Sketches derived by rules, the user's first; unless `seeded` is off, the constructed schedule is one of them."""

    rules: Sequence[SketchRule] = ()
    seeded: bool = True
    defaults: Sequence[SketchRule] = DEFAULT_RULES
    _sketches: dict[str, tuple[Sketch, ...]] = field(default_factory=dict, compare=False, repr=False)

    def generate(self, task: Task) -> tuple[Sketch, ...]:
        """The same sketches for equal tasks; they keep what they know of populations."""
        key = f"{task.workload_key} {task.target}"
        if key not in self._sketches:
            self._sketches[key] = self._make(task)
        return self._sketches[key]

    def seed(self, task: Task) -> tuple[int, tuple[int, ...]] | None:
        return (0, constructed_sketch(task)[1]) if self.seeded else None

    def seed_trace(self, task: Task) -> Trace | None:
        return construct(task) if self.seeded else None

    def _make(self, task: Task) -> tuple[Sketch, ...]:
        derived: list[Sketch] = []
        if task.target.kind == "cpu":
            templates = winograd_sketches(task)
            variants = {name: t for name, t in variants_of(task).items() if not (templates and name == VARIANT)}
            for name, written in variants.items():
                derived += self._derive(task, name, written)
            derived += templates
        if not self.seeded and derived:
            return _distinct(derived)
        constructed, values = constructed_sketch(task)
        trace = constructed.instantiate(values)
        others = [s for s in derived if not s.reference or s.instantiate(s.reference) != trace]
        return _distinct([constructed, *others])

    def _derive(self, task: Task, variant: str, written: Task) -> tuple[Sketch, ...]:
        """Apply the rules to every stage from output to input; sketches of which no random row lowers are left out."""
        partials = [Partial(written)]
        for stage in reversed(partials[0].analysis.stages):
            partials = [
                grown
                for partial in partials
                for grown in ([partial] if stage.name in partial.done else self._grow(partial, stage))
            ][:MAX_SKETCHES]
        other = written if variant else None
        found = (
            Sketch(
                task,
                "; ".join([variant] * bool(variant) + list(partial.labels)) or "plain",
                _inlining_first(partial),
                variant,
                other,
            )
            for partial in partials
        )
        return tuple(sketch for sketch in found if _can_lower(sketch))

    def _grow(self, partial: Partial, stage: Any) -> list[Partial]:
        found: list[Partial] = []
        for rule in (*self.rules, *self.defaults):
            alternatives = rule.apply(partial, stage)
            found.extend(alternatives)
            if alternatives and rule.exclusive:
                break
        return found


def _distinct(sketches: Sequence[Sketch]) -> tuple[Sketch, ...]:
    """The same with distinct names."""
    names: Counter[str] = Counter()
    found = []
    for sketch in sketches:
        names[sketch.name] += 1
        again = names[sketch.name]
        found.append(sketch if again == 1 else replace(sketch, name=f"{sketch.name} ({again})"))
    return tuple(found)


def _inlining_first(partial: Partial) -> tuple[Any, ...]:
    return tuple(sorted(partial.parts, key=lambda part: not isinstance(part, InlinePart)))


def _can_lower(sketch: Sketch) -> bool:
    rng = np.random.default_rng(0)
    try:
        for row in sketch.sample(rng, 8):  # one by one: each costs what is common to all rows of its structure
            if not sketch.legal(row[None])[0]:
                continue
            try:
                lower(sketch.task, sketch.instantiate(row.tolist()))
                return True
            except ScheduleError:
                continue
    except McompileError:
        return False
    return False


__all__ = ["SeededSpace", "SketchSpace", "SpaceGenerator", "TemplateSpace", "TracePart", "constructed_sketch"]
