"""ScheduleState: the stages, loops and annotations that a Trace leaves behind when it is replayed on a dag."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod

from mcompile.errors import ScheduleError
from mcompile.ir.expr import Expr, Load, Reduce, Var, select, substitute, transform, var
from mcompile.ir.stmt import ForKind, Scope, Thread
from mcompile.ir.tensor import Axis, Compute, ComputeDag, Tensor
from mcompile.schedule import steps
from mcompile.schedule.steps import LayoutRewrite, Step, Trace
from mcompile.schedule.variants import make_variant


@dataclass(frozen=True)
class SplitRelation:
    """parent = outer * factor + inner"""

    parent: str
    outer: str
    inner: str
    factor: int


@dataclass(frozen=True)
class FuseRelation:
    components: tuple[str, ...]
    fused: str


@dataclass(frozen=True)
class At:
    """Computed inside loop `iterator` of stage `target`, in a buffer of `scope`."""

    target: str
    iterator: str
    scope: Scope


@dataclass
class Stage:
    """One Compute being scheduled: its loops from outermost to innermost, and how they derive from its axes."""

    compute: Compute
    loops: list[str] = field(default_factory=list)
    splits: dict[str, SplitRelation] = field(default_factory=dict)  # by parent
    fuses: dict[str, FuseRelation] = field(default_factory=dict)  # by each component
    kinds: dict[str, ForKind | Thread] = field(default_factory=dict)
    axes: dict[str, Axis] = field(default_factory=dict)
    reduce_names: set[str] = field(default_factory=set)  # every iterator that derives from a reduce axis
    attach: At | None = None
    inlined: bool = False

    @property
    def name(self) -> str:
        return self.compute.name

    @staticmethod
    def of(compute: Compute) -> Stage:
        stage = Stage(compute)
        for axis in (*compute.axes, *compute.reduce_axes):
            name, number = axis.var.name, 1
            while name in stage.axes:
                number += 1
                name = f"{axis.var.name}{number}"
            stage.axes[name] = axis
            stage.loops.append(name)
        stage.reduce_names = set(stage.loops[len(compute.axes) :])
        return stage

    @property
    def spatial_axes(self) -> tuple[str, ...]:
        return tuple(self.axes)[: len(self.compute.axes)]

    @property
    def reduce_axes(self) -> tuple[str, ...]:
        return tuple(self.axes)[len(self.compute.axes) :]

    def is_reduce(self, iterator: str) -> bool:
        return iterator in self.reduce_names


@dataclass
class ScheduleState:
    """Stages by name in topological order; `layouts` are the constants stored in another order."""

    dag: ComputeDag
    stages: dict[str, Stage]
    layouts: dict[str, LayoutRewrite] = field(default_factory=dict)
    prefetches: dict[str, steps.Prefetch] = field(default_factory=dict)  # by stage

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(output.name for output in self.dag.outputs)

    def stage(self, name: str) -> Stage:
        if name not in self.stages:
            raise ScheduleError(f"no stage {name}; stages: {', '.join(self.stages)}")
        return self.stages[name]


def replay(dag: ComputeDag, trace: Trace) -> ScheduleState:
    """Apply `trace` to `dag`. Raises ScheduleError at the first illegal step."""
    if trace and isinstance(trace[0], steps.Variant):
        dag, trace = make_variant(dag, trace[0].name), trace[1:]
    state = ScheduleState(dag, {compute.name: Stage.of(compute) for compute in dag.computes})
    for number, step in enumerate(trace):
        try:
            apply_step(state, step)
        except ScheduleError as error:
            raise ScheduleError(f"step {number} ({step}): {error}") from None
    check_state(state)
    return state


def check_state(state: ScheduleState) -> None:
    """Raises ScheduleError where a later step undid what an earlier one relied on."""
    for stage in state.stages.values():
        if stage.inlined:
            continue
        if stage.attach is not None:
            target, iterator = state.stages[stage.attach.target], stage.attach.iterator
            _require(not target.inlined, f"{stage.name} is computed in {target.name}, which is inlined")
            gone = f"{stage.name} is computed in loop {iterator} of {target.name}, which is gone"
            _require(iterator in target.loops, f"{gone}; loops: {', '.join(target.loops)}")
        for name in stage.loops:
            _check_kind(stage, name, stage.kinds.get(name))


def apply_step(state: ScheduleState, step: Step) -> None:
    """Apply one step in place."""
    _require(not isinstance(step, steps.Variant), "a variant is chosen by the first step")
    _APPLY[type(step)](state, step)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ScheduleError(message)


def _loop(stage: Stage, iterator: str) -> int:
    _require(iterator in stage.loops, f"{stage.name} has no loop {iterator}; loops: {', '.join(stage.loops)}")
    return stage.loops.index(iterator)


def _split(state: ScheduleState, step: steps.Split) -> None:
    stage = state.stage(step.stage)
    position = _loop(stage, step.iterator)
    _require(bool(step.factors) and all(factor >= 1 for factor in step.factors), "factors must be >= 1")
    parent, names = step.iterator, [f"{step.iterator}.0"]
    for level in range(len(step.factors)):
        last = level == len(step.factors) - 1
        inner = f"{step.iterator}.{level + 1}" + ("" if last else "+")  # "+": itself split again
        outer = f"{step.iterator}.{level}"
        _require(outer not in stage.splits and outer not in stage.axes, f"{outer} exists already")
        stage.splits[parent] = SplitRelation(parent, outer, inner, prod(step.factors[level:]))
        if stage.is_reduce(step.iterator):
            stage.reduce_names |= {outer, inner}
        parent = inner
        names.append(f"{step.iterator}.{level + 1}")
    stage.loops[position : position + 1] = names


def _fuse(state: ScheduleState, step: steps.Fuse) -> None:
    stage = state.stage(step.stage)
    _require(len(step.iterators) >= 2, "fuse takes two loops or more")
    position = _loop(stage, step.iterators[0])
    end = position + len(step.iterators)
    _require(tuple(stage.loops[position:end]) == step.iterators, "fused loops must be adjacent, outermost first")
    _require(len({stage.is_reduce(name) for name in step.iterators}) == 1, "cannot fuse spatial with reduce loops")
    fused = "@".join(step.iterators)
    relation = FuseRelation(step.iterators, fused)
    for name in step.iterators:
        stage.fuses[name] = relation
    if stage.is_reduce(step.iterators[0]):
        stage.reduce_names.add(fused)
    stage.loops[position:end] = [fused]


def _reorder(state: ScheduleState, step: steps.Reorder) -> None:
    stage = state.stage(step.stage)
    _require(sorted(step.iterators) == sorted(stage.loops), f"reorder must name every loop: {', '.join(stage.loops)}")
    stage.loops = list(step.iterators)


def _compute_at(state: ScheduleState, step: steps.ComputeAt) -> None:
    stage, target = state.stage(step.stage), state.stage(step.target)
    _loop(target, step.iterator)
    _require(step.stage not in state.output_names, f"{step.stage} is an output")
    _require(not target.inlined and not stage.inlined, "an inlined stage has no loops")
    order = list(state.stages)
    _require(order.index(step.stage) < order.index(step.target), f"{step.target} does not come after {step.stage}")
    _require(step.scope in ("local", "shared"), f"scope: expected local or shared, got {step.scope}")
    stage.attach = At(step.target, step.iterator, Scope(step.scope))


def _compute_inline(state: ScheduleState, step: steps.ComputeInline) -> None:
    stage = state.stage(step.stage)
    _require(step.stage not in state.output_names, f"{step.stage} is an output")
    _require(not stage.compute.reduce_axes, f"{step.stage} is a reduction")
    stage.inlined = True


def _insert_before(state: ScheduleState, name: str, new: Stage) -> None:
    entries = list(state.stages.items())
    position = [key for key, _ in entries].index(name)
    _require(new.name not in state.stages, f"stage {new.name} exists already")
    entries.insert(position, (new.name, new))
    state.stages = dict(entries)


def _fresh_axes(axes: Iterable[Axis]) -> tuple[tuple[Axis, ...], dict[Var, Expr]]:
    fresh = {axis: Axis(var(axis.var.name), axis.extent) for axis in axes}
    return tuple(fresh.values()), {axis.var: new.var for axis, new in fresh.items()}


def _cache_write(state: ScheduleState, step: steps.CacheWrite) -> None:
    """The body moves to `stage_acc`; the stage keeps its name and copies."""
    stage = state.stage(step.stage)
    _require(stage.loops == list(stage.axes), "cache_write must come before the stage's loops are changed")
    old = stage.compute
    acc = Compute(f"{old.name}_acc", old.shape, old.dtype, old.axes, old.reduce_axes, old.body)
    axes, renamed = _fresh_axes(old.axes)
    copy = Compute(old.name, old.shape, old.dtype, axes, (), acc[tuple(renamed[axis.var] for axis in old.axes)])
    _insert_before(state, step.stage, Stage.of(acc))
    state.stages[step.stage] = Stage.of(copy)


def _cache_read(state: ScheduleState, step: steps.CacheRead) -> None:
    reader = state.stage(step.reader)
    source = next((t for t in reader.compute.inputs if t.name == step.tensor), None)
    _require(source is not None, f"{step.reader} does not read {step.tensor}")
    assert source is not None
    axes = tuple(Axis(var(f"c{dim}"), extent) for dim, extent in enumerate(source.shape))
    body = source[tuple(axis.var for axis in axes)]
    cache = Compute(f"{step.tensor}_cache", source.shape, source.dtype, axes, (), body)
    _insert_before(state, step.reader, Stage.of(cache))
    reader.compute = map_loads(reader.compute, lambda load: cache[load.indices] if load.source is source else None)


def map_loads(compute: Compute, change: Callable[[Load], Expr | None]) -> Compute:
    """`compute` with some loads replaced."""
    body = transform(compute.body, lambda node: change(node) if isinstance(node, Load) else None)
    return Compute(compute.name, compute.shape, compute.dtype, compute.axes, compute.reduce_axes, body)


def _rfactor(state: ScheduleState, step: steps.Rfactor) -> None:
    stage = state.stage(step.stage)
    _require(stage.loops == list(stage.axes), "rfactor must come before the stage's loops are changed")
    _require(step.axis in stage.reduce_axes, f"{step.axis} is no reduce axis of {step.stage}")
    _require(step.factor >= 1, "factor must be >= 1")
    old, axis = stage.compute, stage.axes[step.axis]
    reduce = old.body
    assert isinstance(reduce, Reduce)
    lane, outer = Axis(var("v"), step.factor), Axis(var(axis.var.name), -(-axis.extent // step.factor))
    position = outer.var * step.factor + lane.var
    value = substitute(reduce.value, {axis.var: position})
    if axis.extent % step.factor:
        value = select(position < axis.extent, value, reduce.op.identity(value.dtype))
    reduce_axes = tuple(outer if a is axis else a for a in old.reduce_axes)
    body = Reduce(reduce.op, value, tuple(a.var for a in reduce_axes))
    partial = Compute(f"{old.name}_rf", (*old.shape, step.factor), old.dtype, (*old.axes, lane), reduce_axes, body)
    axes, renamed = _fresh_axes(old.axes)
    final_lane = Axis(var("v"), step.factor)
    final_value = partial[(*(renamed[a.var] for a in old.axes), final_lane.var)]
    final = Compute(
        old.name, old.shape, old.dtype, axes, (final_lane,), Reduce(reduce.op, final_value, (final_lane.var,))
    )
    _insert_before(state, step.stage, Stage.of(partial))
    state.stages[step.stage] = Stage.of(final)


def _annotate(kind: ForKind) -> Callable[[ScheduleState, Step], None]:
    def apply(state: ScheduleState, step: Step) -> None:
        assert isinstance(step, steps.Vectorize | steps.Unroll | steps.Parallel)
        stage = state.stage(step.stage)
        _loop(stage, step.iterator)
        _check_kind(stage, step.iterator, kind)
        stage.kinds[step.iterator] = kind

    return apply


def _check_kind(stage: Stage, name: str, kind: ForKind | Thread | None) -> None:
    position = stage.loops.index(name)
    if kind is ForKind.PARALLEL:
        is_root = position == 0 and stage.attach is None
        _require(is_root, f"{stage.name}: only the outermost loop of a root stage can be parallel, {name} is not")
        _require(not stage.is_reduce(name), f"{stage.name}: a reduce loop cannot be parallel, {name} is one")
    if kind is ForKind.VECTORIZED:
        is_innermost = position == len(stage.loops) - 1
        _require(is_innermost, f"{stage.name}: only the innermost loop can be vectorized, {name} is not")


def _bind(state: ScheduleState, step: steps.Bind) -> None:
    stage = state.stage(step.stage)
    _loop(stage, step.iterator)
    threads = {thread.value: thread for thread in Thread}
    _require(step.thread in threads, f"thread: expected one of {', '.join(threads)}, got {step.thread}")
    stage.kinds[step.iterator] = threads[step.thread]


def _layout_rewrite(state: ScheduleState, step: LayoutRewrite) -> None:
    tensor: Tensor | None = next((t for t in state.dag.tensors if t.name == step.tensor), None)
    _require(tensor is not None, f"no tensor {step.tensor}")
    assert tensor is not None
    parts = {(dim, part) for dim, tile in enumerate(step.tiles) for part in range(2 if tile else 1)}
    _require(len(step.tiles) == len(tensor.shape), f"{step.tensor} has {len(tensor.shape)} dims")
    _require(all(tile >= 0 for tile in step.tiles), "tiles must be >= 0")
    _require(set(step.order) == parts and len(step.order) == len(parts), f"order must list each of {sorted(parts)}")
    state.layouts[step.tensor] = step


def _prefetch(state: ScheduleState, step: steps.Prefetch) -> None:
    stage = state.stage(step.stage)
    target = state.stage(step.target)
    _require(step.loop in (*target.loops, *target.fuses), f"{step.target} has no loop {step.loop}")
    _require(stage.attach is not None and stage.attach.target == step.target, f"{step.stage} is not in {step.target}")
    _require(bool(stage.reduce_axes), f"{step.stage} is no reduction")
    layout = state.layouts.get(step.tensor)
    _require(layout is not None and any(layout.tiles), f"{step.tensor} is not stored in tiles")
    state.prefetches[step.stage] = step


_APPLY: dict[type[Step], Callable[[ScheduleState, Step], None]] = {
    steps.Split: _split,  # type: ignore[dict-item]
    steps.Fuse: _fuse,  # type: ignore[dict-item]
    steps.Reorder: _reorder,  # type: ignore[dict-item]
    steps.ComputeAt: _compute_at,  # type: ignore[dict-item]
    steps.ComputeInline: _compute_inline,  # type: ignore[dict-item]
    steps.CacheWrite: _cache_write,  # type: ignore[dict-item]
    steps.CacheRead: _cache_read,  # type: ignore[dict-item]
    steps.Rfactor: _rfactor,  # type: ignore[dict-item]
    steps.Vectorize: _annotate(ForKind.VECTORIZED),
    steps.Unroll: _annotate(ForKind.UNROLLED),
    steps.Parallel: _annotate(ForKind.PARALLEL),
    steps.Bind: _bind,  # type: ignore[dict-item]
    LayoutRewrite: _layout_rewrite,  # type: ignore[dict-item]
    steps.Prefetch: _prefetch,  # type: ignore[dict-item]
}
