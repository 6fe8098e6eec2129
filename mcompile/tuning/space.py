"""Space generators: the sketches of a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mcompile.errors import McompileError, ScheduleError
from mcompile.schedule.constructed import construct
from mcompile.schedule.constructed.builder import TraceBuilder
from mcompile.schedule.lower import lower
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
                if step.iterator in stage.axes and count:
                    extent = -(-stage.axes[step.iterator].extent // max(1, fixed))
                    key = f"{number}.{step.stage}.{step.iterator}"
                    product = int(np.prod(step.factors[:count]))
                    found[number] = (TileSizes(key, max(extent, product), count + 1, max(extent, product)), fixed)
            builder.add(step)
        return found

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
            variants = variants_of(task) if task.target.kind == "cpu" else {}
            derived = tuple(s for name, written in variants.items() for s in self._derive(task, name, written))
            constructed = (constructed_sketch(task)[0],) if self.seeded or not derived else ()
            self._sketches[key] = (*constructed, *derived)
        return self._sketches[key]

    def seed(self, task: Task) -> tuple[int, tuple[int, ...]] | None:
        return (0, constructed_sketch(task)[1]) if self.seeded else None

    def seed_trace(self, task: Task) -> Trace | None:
        return construct(task) if self.seeded else None

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
