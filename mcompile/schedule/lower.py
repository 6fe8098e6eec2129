"""Lowering: (Task, Trace) -> PrimFuncs, one for each stage that is computed at root level.

Loops open from outermost to innermost. When a loop is the outer part of a split whose factor does not divide, the rest
of the nest is emitted twice: once for full tiles, once for the remainder with its exact extent; so inner loops always
have constant extents, and a stage computed inside a tile computes exactly what the tile needs. Lanes are masked only
where the extent of a vectorized loop is neither a power of two nor a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from mcompile.errors import InternalError, ScheduleError
from mcompile.ir.affine import as_affine
from mcompile.ir.bounds import bounds
from mcompile.ir.expr import (
    Binary,
    BinaryOp,
    Const,
    Expr,
    Load,
    Reduce,
    Select,
    Var,
    all_of,
    as_expr,
    binary,
    minimum,
    select,
    substitute,
    transform,
    var,
    walk,
)
from mcompile.ir.simplify import simplify
from mcompile.ir.stmt import (
    Allocate,
    Barrier,
    Block,
    Buffer,
    For,
    ForKind,
    If,
    Prefetch,
    PrimFunc,
    Scope,
    Stmt,
    Store,
    Thread,
    seq,
    walk_stmts,
)
from mcompile.ir.tensor import ComputeDag, Tensor, build_dag, row_major
from mcompile.schedule.state import At, FuseRelation, ScheduleState, SplitRelation, Stage, map_loads, replay
from mcompile.schedule.steps import LayoutRewrite, Trace
from mcompile.schedule.task import Task

Ranges = dict[Var, tuple[int, int]]
_ALIASING_BYTES = 2048  # rows at multiples of this crowd a few sets of a first-level cache
_CACHE_LINE_BYTES = 64


@dataclass(frozen=True)
class Preparation:
    """A parameter computed once, when the artifact is linked, from constants of the task.

    `dag` (None: the constant `tensor` as it is) is evaluated on the task's constants, then stored as `layout` says.
    """

    tensor: str
    dag: ComputeDag | None
    layout: LayoutRewrite | None


@dataclass(frozen=True)
class LoweredTask:
    """The functions of a task, to be run in order with a barrier between; parameters are bound by buffer name.

    A name in `scratch` is memory of one call of the task; one in `preparations` a prepared constant; any other a
    placeholder or output of the task.
    """

    funcs: tuple[PrimFunc, ...]
    scratch: tuple[Buffer, ...]
    preparations: tuple[Preparation, ...]


def lower(task: Task, trace: Trace, name: str = "kernel") -> LoweredTask:
    """Lower `task` under `trace`; functions are called `name`, `name_1`, ... Raises ScheduleError if illegal."""
    return _Lowering(task, replay(task.dag, trace)).run(name)


@dataclass(frozen=True)
class _Span:
    """An axis's needed range [low, low + extent); `exact`: it never leaves the axis, else it may by a little."""

    low: Expr
    extent: int
    exact: bool = True


@dataclass(frozen=True)
class _Placement:
    """Where a stage's (or placeholder's) elements are: element `index` lies at buffer[index - origin]."""

    buffer: Buffer
    origin: tuple[Expr, ...] | None = None
    layout: LayoutRewrite | None = None


@dataclass(frozen=True)
class _Frame:
    """One stage being emitted: the region it computes, the loops opened so far, and what it can see."""

    stage: Stage
    mins: Mapping[str, Expr]  # by axis
    values: Mapping[str, Expr]  # by opened iterator
    extents: Mapping[str, int]  # by iterator, where known
    masks: tuple[Expr, ...]
    placements: Mapping[str, _Placement]
    guarded: frozenset[str] = frozenset()  # axes whose region may leave the tensor
    overrun: frozenset[str] = frozenset()  # axes whose loops may leave the region
    prefetch: Prefetch | None = None  # offset of a reduction's first step; later ones are `prefetch_step` on
    prefetch_step: int = 0

    def opened(self, iterator: str, value: Expr) -> _Frame:
        return replace(self, values={**self.values, iterator: value})

    def sized(self, iterator: str, extent: int) -> _Frame:
        return replace(self, extents={**self.extents, iterator: extent})


@dataclass
class _Family:
    """How a stage's iterators derive from each other."""

    by_outer: dict[str, SplitRelation] = field(default_factory=dict)
    by_inner: dict[str, SplitRelation] = field(default_factory=dict)
    by_fused: dict[str, FuseRelation] = field(default_factory=dict)


class _Lowering:
    def __init__(self, task: Task, state: ScheduleState) -> None:
        self.task = task
        self.state = state
        self.ranges: Ranges = {}
        self.loose: set[Var] = set()  # stand-ins for iterators that may run less far than their range
        self.threads: list[Var] = []  # variables of threadIdx loops
        self.threaded = 0  # how many THREAD loops are open
        self.stages: dict[str, Stage] = {}
        self.constant: set[str] = set(task.constants)
        self.families: dict[str, _Family] = {}
        self._inline()
        self.consumers: dict[str, list[str]] = {}
        for stage in self.stages.values():
            for source in stage.compute.inputs:
                self.consumers.setdefault(source.name, []).append(stage.name)

    # --- preparation of the dag ---

    def _inline(self) -> None:
        """Substitute inlined stages into their readers; find the stages that depend on constants only."""
        inlined: dict[str, Stage] = {}

        def expand(load: Load) -> Expr | None:
            stage = inlined.get(load.source.name)
            if stage is None:
                return None
            axes = (axis.var for axis in stage.compute.axes)
            return substitute(stage.compute.body, dict(zip(axes, load.indices, strict=True)))

        for stage in self.state.stages.values():
            new = replace(stage, compute=map_loads(stage.compute, expand))
            if stage.inlined:
                inlined[stage.name] = new
                continue
            inputs = new.compute.inputs
            if inputs and all(source.name in self.constant for source in inputs) and not self._is_output(stage):
                self.constant.add(stage.name)
            self.stages[stage.name] = new
            self.families[stage.name] = _family(new)

    def _is_output(self, stage: Stage) -> bool:
        return stage.name in self.state.output_names

    def _global_placements(self) -> dict[str, _Placement]:
        placements = {}
        for name in self.state.layouts:
            if name not in self.constant:
                raise ScheduleError(f"layout_rewrite: {name} is not a constant")
        roots = [s.compute for s in self.stages.values() if s.attach is None or s.name in self.constant]
        for tensor in (*self.state.dag.placeholders, *roots):
            layout = self.state.layouts.get(tensor.name)
            placements[tensor.name] = _Placement(self._global_buffer(tensor, layout), None, layout)
        return placements

    def _global_buffer(self, tensor: Tensor, layout: LayoutRewrite | None) -> Buffer:
        if layout is not None:
            shape = tuple(_part_extent(tensor.shape[dim], layout.tiles[dim], part) for dim, part in layout.order)
            return Buffer(tensor.name, shape, tensor.dtype, row_major(shape))
        strides = self.task.strides.get(tensor.name)
        if strides is None and tensor.name in self.constant:
            strides = row_major(tensor.shape)
        elif strides is None:
            strides = _ordered_strides(tensor.shape, _memory_order(self.stages[tensor.name]), tensor.dtype.bytes)
        return Buffer(tensor.name, tensor.shape, tensor.dtype, strides)

    # --- the functions ---

    def run(self, name: str) -> LoweredTask:
        placements = self._global_placements()
        funcs: list[PrimFunc] = []
        for stage in self.stages.values():
            if stage.attach is None and stage.name not in self.constant:
                body = self._root(stage, placements)
                funcs.append(_prim_func(name if not funcs else f"{name}_{len(funcs)}", body))
        params = {buffer.name: buffer for func in funcs for buffer in func.params}
        own = {t.name for t in self.state.dag.placeholders} | set(self.state.output_names)
        scratch = tuple(b for n, b in params.items() if n not in own and n not in self.constant)
        preparations = tuple(p for n in params if (p := self._preparation(n)) is not None)
        return LoweredTask(tuple(funcs), scratch, preparations)

    def _preparation(self, name: str) -> Preparation | None:
        layout = self.state.layouts.get(name)
        if name in self.stages and name in self.constant:
            return Preparation(name, build_dag([self.stages[name].compute]), layout)
        return None if layout is None else Preparation(name, None, layout)

    def _root(self, stage: Stage, placements: dict[str, _Placement]) -> Stmt:
        zero = as_expr(0)
        extents = {name: axis.extent for name, axis in stage.axes.items()}
        frame = _Frame(stage, dict.fromkeys(stage.axes, zero), {}, extents, (), placements)
        return Block(stage.name, self._loops(frame, 0))

    # --- loops ---

    def _loops(self, frame: _Frame, position: int, init: bool = False) -> Stmt:
        """The loops from `position` inwards; with `init`, only the spatial ones, storing the reduction's identity."""
        stage = frame.stage
        if position == len(stage.loops):
            return self._body(frame, init)
        name = stage.loops[position]
        if not stage.is_reduce(name):
            return self._open(frame, name, lambda inner: self._loops(inner, position + 1, init), init)
        if init:
            return self._loops(frame, position + 1, init)
        is_last = not any(stage.is_reduce(later) for later in stage.loops[position + 1 :])
        is_last = is_last and stage.kinds.get(name) is not ForKind.VECTORIZED

        def inside(inner: _Frame) -> Stmt:
            return seq(self._prefetch(inner) if is_last else None, self._loops(inner, position + 1))

        loop = self._open(frame, name, inside, init)
        if any(stage.is_reduce(outer) for outer in stage.loops[:position]):
            return loop
        return seq(self._loops(frame, position, init=True), loop)

    def _open(self, frame: _Frame, name: str, rest: Callable[[_Frame], Stmt], init: bool) -> Stmt:
        """Open loop `name`, then compute what is attached to it, then `rest`."""

        def inside(inner: _Frame) -> Stmt:
            return self._complete(inner, name, lambda f: rest(f) if init else self._attached(f, name, rest))

        kind = frame.stage.kinds.get(name, ForKind.SERIAL)
        extent = self._extent(frame, name)
        relation = self._family(frame).by_outer.get(name)
        if relation is None:
            if kind is ForKind.VECTORIZED:
                return self._vector_loop(frame, name, extent, inside)
            return self._loop(frame, name, extent, kind, lambda inner: self._resolve_fused(inner, name, inside))
        parent = self._extent(frame, relation.parent)
        full, tail = divmod(parent, relation.factor)
        parts: list[Stmt] = []
        if isinstance(kind, Thread):  # a block's threads all run the same loops: guard what is too much
            sized = frame.sized(relation.inner, relation.factor)
            if tail:
                sized = replace(sized, overrun=sized.overrun | self._root_axes(frame, relation.parent))
            return self._loop(sized, name, extent, kind, inside)
        if kind is ForKind.PARALLEL:
            return self._loop(frame, name, extent, kind, lambda inner: self._resolve(inner, name, inside))
        if full:
            sized = frame.sized(relation.inner, relation.factor)
            parts.append(self._loop(sized, name, full, kind, inside))
        if tail:
            sized = frame.sized(relation.inner, tail).opened(name, as_expr(full))
            parts.append(inside(sized))
        return seq(*parts)

    def _loop(
        self, frame: _Frame, name: str, extent: int, kind: ForKind | Thread, rest: Callable[[_Frame], Stmt]
    ) -> Stmt:
        is_thread = isinstance(kind, Thread)
        if extent == 1 and not is_thread and kind is not ForKind.PARALLEL:
            return rest(frame.opened(name, as_expr(0)))
        loop_var = var(name)
        self.ranges[loop_var] = (0, extent - 1)
        if isinstance(kind, Thread) and kind.value.startswith("threadIdx"):
            self.threads.append(loop_var)
        self.threaded += is_thread
        body = rest(frame.opened(name, loop_var))
        self.threaded -= is_thread
        if isinstance(kind, Thread):
            return For(loop_var, extent, body, ForKind.THREAD, kind)
        assert isinstance(kind, ForKind)
        return For(loop_var, extent, body, kind)

    def _vector_loop(self, frame: _Frame, name: str, extent: int, rest: Callable[[_Frame], Stmt]) -> Stmt:
        lanes = padded_lanes(extent)
        if extent == 1:
            return rest(frame.opened(name, as_expr(0)))
        lane = var(name)
        self.ranges[lane] = (0, lanes - 1)
        inner = frame.opened(name, lane)
        if lanes != extent:
            inner = replace(inner, masks=(*inner.masks, lane < extent))
        return For(lane, lanes, rest(inner), ForKind.VECTORIZED)

    def _resolve_fused(self, frame: _Frame, name: str, rest: Callable[[_Frame], Stmt]) -> Stmt:
        """After a fused loop was opened: give its components their values, and branch on their remainders."""
        relation = self._family(frame).by_fused.get(name)
        if relation is None:
            return rest(frame)
        for component in relation.components:
            value = simplify(self._component(frame, relation, component), self.ranges)
            frame = frame.opened(component, value)

        def resolve(inner: _Frame, remaining: tuple[str, ...]) -> Stmt:
            if not remaining:
                return complete(inner, relation.components)
            return self._resolve(inner, remaining[0], lambda deeper: resolve(deeper, remaining[1:]))

        def complete(inner: _Frame, remaining: tuple[str, ...]) -> Stmt:
            if not remaining:
                return rest(inner)
            return self._complete(inner, remaining[0], lambda deeper: complete(deeper, remaining[1:]))

        return resolve(frame, relation.components)

    def _complete(self, frame: _Frame, name: str, rest: Callable[[_Frame], Stmt]) -> Stmt:
        """After a loop was opened: resolve the fused iterators that it was the last missing part of."""
        family = self._family(frame)
        relation = family.by_inner.get(name) or family.by_outer.get(name)
        if relation is None:
            return rest(frame)
        parent = relation.parent
        if parent in frame.values or not {relation.outer, relation.inner} <= frame.values.keys():
            return rest(frame)
        frame = frame.opened(parent, simplify(self._value(frame, parent), self.ranges))
        return self._resolve_fused(frame, parent, lambda inner: self._complete(inner, parent, rest))

    def _resolve(self, frame: _Frame, name: str, rest: Callable[[_Frame], Stmt]) -> Stmt:
        """Loop `name` has a value that is not known to be a full tile: branch on it where the split leaves a rest."""
        if name in self._family(frame).by_fused:
            return self._resolve_fused(frame, name, rest)
        relation = self._family(frame).by_outer.get(name)
        if relation is None:
            return rest(frame)
        full, tail = divmod(self._extent(frame, relation.parent), relation.factor)
        if not tail or not full:
            return rest(frame.sized(relation.inner, relation.factor if full else tail))
        tile = minimum(frame.values[name], full - 1)  # as it is in this branch; so that bounds know it, too
        then = rest(frame.sized(relation.inner, relation.factor).opened(name, tile))
        last = rest(frame.sized(relation.inner, tail).opened(name, as_expr(full)))
        return If(frame.values[name] < full, then, last)

    # --- iterators ---

    def _family(self, frame: _Frame) -> _Family:
        return self.families[frame.stage.name]

    def _extent(self, frame: _Frame, name: str) -> int:
        if name in frame.extents:
            return frame.extents[name]
        family = self._family(frame)
        if name in family.by_fused:
            return prod(self._extent(frame, component) for component in family.by_fused[name].components)
        if name in family.by_outer:
            relation = family.by_outer[name]
            return -(-self._extent(frame, relation.parent) // relation.factor)
        relation = family.by_inner[name]
        parent = self._extent(frame, relation.parent)
        if parent > relation.factor and parent % relation.factor:
            raise ScheduleError(f"{frame.stage.name}: {name} stands outside {relation.outer}, which leaves a remainder")
        return min(parent, relation.factor)

    def _likely_extent(self, frame: _Frame, name: str, delta: Var) -> int:
        """The extent of an iterator that is not opened yet; its factor where that depends on outer loops."""
        relation = self._family(frame).by_inner.get(name)
        if name in frame.extents or relation is None:
            return self._extent(frame, name)
        parent = self._extent(frame, relation.parent)
        if parent > relation.factor and parent % relation.factor:
            self.loose.add(delta)
        return min(parent, relation.factor)

    def _root_axes(self, frame: _Frame, name: str) -> frozenset[str]:
        """The axes that an iterator derives from."""
        if name in frame.stage.axes:
            return frozenset([name])
        family = self._family(frame)
        if name in family.by_fused:
            parts = family.by_fused[name].components
            return frozenset[str]().union(*(self._root_axes(frame, part) for part in parts))
        return self._root_axes(frame, (family.by_outer.get(name) or family.by_inner[name]).parent)

    def _component(self, frame: _Frame, relation: FuseRelation, component: str, deltas: Ranges | None = None) -> Expr:
        value = self._value(frame, relation.fused, deltas)
        position = relation.components.index(component)
        inner = prod(self._extent(frame, name) for name in relation.components[position + 1 :])
        value = value // inner
        return value if position == 0 else value % self._extent(frame, component)

    def _touched(self, frame: _Frame, name: str) -> bool:
        """Whether `name` or anything it is made of was opened."""
        if name in frame.values:
            return True
        if name in frame.stage.splits:
            relation = frame.stage.splits[name]
            return self._touched(frame, relation.outer) or self._touched(frame, relation.inner)
        return name in frame.stage.fuses and self._touched(frame, frame.stage.fuses[name].fused)

    def _value(self, frame: _Frame, name: str, deltas: Ranges | None = None) -> Expr:
        """The value of an iterator from the opened loops.

        With `deltas`, what is not opened yet is a fresh variable, whose range is put there.
        """
        if name in frame.values:
            return frame.values[name]
        if not self._touched(frame, name):
            if deltas is None:
                raise InternalError(f"{frame.stage.name}: {name} has no value here")
            delta = var(name)
            deltas[delta] = (0, self._likely_extent(frame, name, delta) - 1)
            return delta
        if name in frame.stage.splits:
            relation = frame.stage.splits[name]
            return self._value(frame, relation.outer, deltas) * relation.factor + self._value(
                frame, relation.inner, deltas
            )
        return self._component(frame, frame.stage.fuses[name], name, deltas)

    # --- stages computed inside others ---

    def _attached(self, frame: _Frame, name: str, rest: Callable[[_Frame], Stmt]) -> Stmt:
        here = [
            stage
            for stage in self.stages.values()
            if stage.attach is not None and (stage.attach.target, stage.attach.iterator) == (frame.stage.name, name)
        ]
        return self._attach(frame, here, rest)

    def _attach(self, frame: _Frame, stages: list[Stage], rest: Callable[[_Frame], Stmt]) -> Stmt:
        if not stages:
            return rest(frame)
        stage, remaining = stages[0], stages[1:]
        assert stage.attach is not None
        self._check_place(stage.name, stage.attach, frame)
        region = self._region(stage, frame)
        placement = self._place(stage, stage.attach, region)
        placements = {**frame.placements, stage.name: placement}
        producer = self._prefetching(frame, self._inner_frame(stage, region, placements))
        nest = Block(stage.name, self._loops(producer, 0))
        inner = self._attach(replace(frame, placements=placements), remaining, rest)
        barrier = Barrier() if stage.attach.scope is Scope.SHARED else None
        return Allocate(placement.buffer, seq(nest, barrier, inner, barrier))

    def _check_place(self, name: str, attach: At, frame: _Frame) -> None:
        """Refuse places where memory cannot be had, or is not what the step asks for."""
        kinds = frame.stage.kinds
        if kinds.get(attach.iterator) is ForKind.VECTORIZED:
            raise ScheduleError(f"{name} cannot be computed in {attach.target}'s vectorized loop {attach.iterator}")
        if attach.scope is Scope.SHARED and not self.threaded:
            raise ScheduleError(f"{name} cannot be shared by the threads of {attach.target}: no loop is bound to them")

    def _prefetching(self, frame: _Frame, producer: _Frame) -> _Frame:
        """Give a reduction its prefetch, if the trace has one: its share of the next tile of a constant."""
        step = self.state.prefetches.get(producer.stage.name)
        if step is None:
            return producer
        placement = frame.placements.get(step.tensor)
        is_read = any(source.name == step.tensor for source in producer.stage.compute.inputs)
        if placement is None or placement.layout is None or not is_read:
            raise ScheduleError(f"prefetch: {producer.stage.name} does not read {step.tensor} in tiles")
        tiled = next(dim for dim, tile in enumerate(placement.layout.tiles) if tile)
        tile_elements = placement.buffer.strides[placement.layout.order.index((tiled, 0))]
        loops, outer = frame.stage.loops, step.loop
        while outer in frame.stage.fuses:
            outer = frame.stage.fuses[outer].fused
        if step.loop not in frame.values or outer not in loops:
            raise ScheduleError(f"prefetch: {producer.stage.name} is not computed inside loop {step.loop}")
        part: Expr = as_expr(0)
        parts = 1
        for name in loops[loops.index(outer) + 1 :]:
            if name in frame.values:
                part = part * self._extent(frame, name) + frame.values[name]
                parts *= self._extent(frame, name)
        steps_count = prod(producer.extents[name] for name in producer.stage.reduce_axes)
        elements = -(-tile_elements // steps_count)  # to fetch at each step, if one part did all
        share = max(1, elements // parts)
        offset = self._tile_start(producer, step.tensor, placement) + tile_elements + part * (share * steps_count)
        prefetch = Prefetch(placement.buffer, simplify(offset, self.ranges))
        return replace(producer, prefetch=prefetch, prefetch_step=share)

    def _tile_start(self, producer: _Frame, tensor: str, placement: _Placement) -> Expr:
        """The offset of the first element of `tensor` that the reduction reads."""
        loads = (node for node in walk(producer.stage.compute.body) if isinstance(node, Load))
        load = next(node for node in loads if node.source.name == tensor)
        env = {axis.var: producer.mins[name] for name, axis in producer.stage.axes.items()}
        indices = self._indices(placement, tuple(substitute(index, env) for index in load.indices))
        start: Expr = as_expr(0)
        for index, stride in zip(indices, placement.buffer.strides, strict=True):
            start = start + index * stride
        return start

    def _prefetch(self, frame: _Frame) -> Stmt | None:
        if frame.prefetch is None:
            return None
        position: Expr = as_expr(0)
        for name in frame.stage.reduce_axes:
            position = position * frame.extents[name] + self._value(frame, name)
        buffer, step = frame.prefetch.buffer, frame.prefetch_step
        offset = frame.prefetch.offset + position * step
        line = _CACHE_LINE_BYTES // buffer.dtype.bytes
        return seq(*(Prefetch(buffer, simplify(offset + ahead, self.ranges)) for ahead in range(0, step, line)))

    def _place(self, stage: Stage, attach: At, region: list[_Span]) -> _Placement:
        extents = [span.extent for span in region]
        order = _memory_order(stage)
        if order:
            extents[order[-1]] = padded_extent(extents[order[-1]])
        strides = _ordered_strides(tuple(extents), order, stage.compute.dtype.bytes)
        buffer = Buffer(stage.name, tuple(extents), stage.compute.dtype, strides, attach.scope)
        return _Placement(buffer, tuple(span.low for span in region))

    def _inner_frame(self, stage: Stage, region: list[_Span], placements: Mapping[str, _Placement]) -> _Frame:
        mins: dict[str, Expr] = dict.fromkeys(stage.axes, as_expr(0))
        extents = {name: axis.extent for name, axis in stage.axes.items()}
        for name, span in zip(stage.spatial_axes, region, strict=True):
            mins[name], extents[name] = span.low, span.extent
        guarded = frozenset(n for n, span in zip(stage.spatial_axes, region, strict=True) if not span.exact)
        return _Frame(stage, mins, {}, extents, (), placements, guarded)

    def _region(self, stage: Stage, frame: _Frame) -> list[_Span]:
        """What the rest of `frame`'s loops will read of each axis of `stage`."""
        region: list[_Span | None] = []
        shared = stage.attach is not None and stage.attach.scope is Scope.SHARED
        for consumer in self.consumers.get(stage.name, ()):
            env, deltas, exact = self._environment(self.stages[consumer], frame, stage)
            if shared:  # all threads of the block read it
                deltas |= self._thread_ranges()
            ranges = {**self.ranges, **deltas}
            guarded = _guarded_loads(self.stages[consumer].compute.body)
            for load in walk(self.stages[consumer].compute.body):
                if isinstance(load, Load) and load.source.name == stage.name:
                    indices = [simplify(substitute(index, env), ranges) for index in load.indices]
                    found = [_interval(index, deltas, ranges, self.loose) for index in indices]
                    exact_here = exact and load not in guarded
                    found = [span and replace(span, exact=span.exact and exact_here) for span in found]
                    region = [self._union(a, b) for a, b in zip(region, found, strict=True)] if region else list(found)
        return [self._clamp(part, dim) for part, dim in zip(region, stage.compute.shape, strict=True)]

    def _environment(self, consumer: Stage, frame: _Frame, producer: Stage) -> tuple[dict[Var, Expr], Ranges, bool]:
        """What the axes of `consumer` run over: expressions in opened loops and fresh variables with ranges.

        The last value tells whether that is exact, or may leave the axes.
        """
        deltas: Ranges = {}
        if consumer is frame.stage:
            env = {a.var: frame.mins[n] + self._value(frame, n, deltas) for n, a in consumer.axes.items()}
            return env, deltas, not (frame.overrun or frame.guarded)
        if not self._is_inside(consumer, frame.stage):
            raise ScheduleError(f"{producer.name} is also read by {consumer.name}, outside {frame.stage.name}")
        region = self._region(consumer, frame)
        env = {}
        for name, axis in consumer.axes.items():
            delta = var(name)
            spatial = consumer.spatial_axes
            span = region[spatial.index(name)] if name in spatial else _Span(as_expr(0), axis.extent)
            deltas[delta] = (0, span.extent - 1)
            env[axis.var] = span.low + delta
        return env, deltas, all(span.exact for span in region)

    def _thread_ranges(self) -> Ranges:
        """The index variables of a block's threads."""
        return {thread: self.ranges[thread] for thread in self.threads}

    def _is_inside(self, stage: Stage, target: Stage) -> bool:
        while stage.attach is not None:
            if stage.attach.target == target.name:
                return True
            stage = self.stages[stage.attach.target]
        return False

    def _union(self, a: _Span | None, b: _Span | None) -> _Span | None:
        if a is None or b is None:
            return None
        difference = simplify(b.low - a.low, self.ranges)
        if not isinstance(difference, Const):
            return None
        offset = int(difference.value)
        low = a.low if offset >= 0 else b.low
        return _Span(low, max(a.extent, offset + b.extent) - min(0, offset), a.exact and b.exact)

    def _clamp(self, span: _Span | None, dim: int) -> _Span:
        if span is None or span.extent >= dim:
            return _Span(as_expr(0), dim)
        return replace(span, low=simplify(span.low, self.ranges))

    # --- statements ---

    def _body(self, frame: _Frame, init: bool) -> Stmt:
        stage = frame.stage
        placement = frame.placements[stage.name]
        env: dict[Var, Expr] = {}
        masks: list[Expr] = []
        for name, axis in stage.axes.items():
            if init and stage.is_reduce(name):
                continue
            value = self._value(frame, name)
            env[axis.var] = simplify(frame.mins[name] + value, self.ranges)
            if name in frame.overrun:
                masks.append(simplify(value, self.ranges) < frame.extents[name])
            if name in frame.guarded:
                masks.extend(self._outside(env[axis.var], axis.extent))
        position = tuple(env[stage.axes[name].var] for name in stage.spatial_axes)
        indices = self._indices(placement, position)
        lanes: Expr | None = None
        if frame.masks and self._keeps_lanes(stage, placement.buffer, indices):
            lanes = all_of(list(frame.masks))
        else:
            masks = [*frame.masks, *masks]
        body = stage.compute.body
        if isinstance(body, Reduce):
            target = Load(placement.buffer, indices)
            if init:
                value = body.op.identity(body.dtype)
            else:
                value = self._resolve_loads(frame, substitute(body.value, env), lanes)
                value = binary(body.op.combiner, target, value)
        else:
            value = self._resolve_loads(frame, substitute(body, env), lanes)
        store = Store(placement.buffer, indices, simplify(value, self.ranges))
        return If(simplify(all_of(masks), self.ranges), store) if masks else store

    def _outside(self, value: Expr, extent: int) -> list[Expr]:
        """Guards for a value that may leave [0, extent): a region may be a little larger than what is needed."""
        found = bounds(value, self.ranges)
        low, high = found if found is not None else (-1, extent)
        return [*([value >= 0] if low < 0 else []), *([value < extent] if high >= extent else [])]

    def _keeps_lanes(self, stage: Stage, buffer: Buffer, indices: tuple[Expr, ...]) -> bool:
        """Whether the lanes beyond a vectorized loop's extent may be computed and stored too."""
        return stage.attach is not None and not stage.is_reduce(stage.loops[-1]) and self._fits(buffer, indices)

    def _fits(self, buffer: Buffer, indices: tuple[Expr, ...]) -> bool:
        """Whether an access stays inside the buffer, lanes beyond a loop's extent included."""
        found = [bounds(index, self.ranges) for index in indices]
        return all(b is not None and b[0] >= 0 and b[1] < extent for b, extent in zip(found, buffer.shape, strict=True))

    def _resolve_loads(self, frame: _Frame, expr: Expr, lanes: Expr | None) -> Expr:
        """Loads of tensors become loads of buffers.

        A stage whose buffer holds whole vectors computes all lanes; `lanes` (None: all) are those that are needed, and
        whose loads are in bounds.
        """
        partial = {node for node in walk(lanes) if isinstance(node, Var)} if lanes is not None else set()

        def resolve(node: Expr) -> Expr | None:
            if not isinstance(node, Load) or isinstance(node.source, Buffer):
                return None
            placement = frame.placements.get(node.source.name)
            if placement is None:
                raise ScheduleError(f"{frame.stage.name} reads {node.source.name} outside of where it is computed")
            load = Load(placement.buffer, self._indices(placement, node.indices))
            if lanes is None or not any(part in partial for part in walk(load)):
                return load
            return load if self._fits(placement.buffer, load.indices) else select(lanes, load, 0)

        return transform(expr, resolve)

    def _indices(self, placement: _Placement, indices: tuple[Expr, ...]) -> tuple[Expr, ...]:
        if placement.layout is not None:
            tiles = placement.layout.tiles
            parts = [_part_index(indices[dim], tiles[dim], part) for dim, part in placement.layout.order]
            return tuple(simplify(part, self.ranges) for part in parts)
        if placement.origin is None:
            return tuple(simplify(index, self.ranges) for index in indices)
        return tuple(simplify(i - low, self.ranges) for i, low in zip(indices, placement.origin, strict=True))


def _guarded_loads(body: Expr) -> set[Expr]:
    """Loads that a Select may skip: their indices may leave the tensor where it does."""
    values = (value for node in walk(body) if isinstance(node, Select) for value in node.children[1:])
    return {load for value in values for load in walk(value) if isinstance(load, Load)}


def _family(stage: Stage) -> _Family:
    family = _Family()
    for relation in stage.splits.values():
        family.by_outer[relation.outer] = relation
        family.by_inner[relation.inner] = relation
    for fuse in stage.fuses.values():
        family.by_fused[fuse.fused] = fuse
    return family


def padded_lanes(extent: int) -> int:
    """Lanes of a vector loop of `extent`: itself if a power of two or a multiple of 16, else the next power of two."""
    if extent % 16 == 0:
        return extent
    return -(-extent // 16) * 16 if extent > 16 else 1 << (extent - 1).bit_length()


def padded_extent(extent: int) -> int:
    """Extent of a LOCAL buffer's innermost dim such that whole vectors of its last, partial tile fit in."""
    tail = extent % 16
    return extent if tail == 0 else extent - tail + (1 << (tail - 1).bit_length())


def _part_extent(extent: int, tile: int, part: int) -> int:
    if not tile:
        return extent
    return tile if part else -(-extent // tile)


def _part_index(index: Expr, tile: int, part: int) -> Expr:
    if not tile:
        return index
    return index % tile if part else index // tile


def _memory_order(stage: Stage) -> list[int]:
    """Dims from outermost to innermost in the order in which the stage's loops run over them."""
    axes = stage.spatial_axes

    def depth(name: str) -> int:
        if name in stage.splits:
            return max(depth(stage.splits[name].outer), depth(stage.splits[name].inner))
        if name in stage.fuses:
            return depth(stage.fuses[name].fused)
        return stage.loops.index(name)

    return sorted(range(len(axes)), key=lambda dim: (depth(axes[dim]), dim))


def _ordered_strides(shape: tuple[int, ...], order: list[int], element_bytes: int) -> tuple[int, ...]:
    """Strides of a dense buffer of our own, rows set apart where they would all fall into the same cache sets."""
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(order):
        if step > 1 and step * element_bytes % _ALIASING_BYTES == 0:
            step += _CACHE_LINE_BYTES // element_bytes
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def _interval(expr: Expr, deltas: Ranges, ranges: Ranges, loose: set[Var]) -> _Span | None:
    """The span of an index as the variables of `deltas` run; None if unknown."""
    affine = as_affine(expr)
    low: Expr = as_expr(affine.const)
    extent, exact = 1, True
    for term, factor in affine.terms.items():
        if not any(isinstance(node, Var) and node in deltas for node in walk(term)):
            low = low + term * factor
            continue
        part = _term_interval(term, deltas, ranges, loose)
        if part is None:
            return None
        low = low + part.low * factor + (min(0, factor) * (part.extent - 1))
        extent += abs(factor) * (part.extent - 1)
        exact = exact and part.exact
    return _Span(low, extent, exact)


def _term_interval(term: Expr, deltas: Ranges, ranges: Ranges, loose: set[Var]) -> _Span | None:
    match term:
        case Var():
            return _Span(as_expr(deltas[term][0]), deltas[term][1] + 1, term not in loose)
        case Binary(BinaryOp.FLOORDIV | BinaryOp.FLOORMOD as op, x, Const(c)) if int(c) > 0:
            inner = _interval(x, deltas, ranges, loose)
            if inner is None:
                return None
            step = int(c)
            start = simplify(inner.low % step, ranges)
            offset = int(start.value) if isinstance(start, Const) else None
            if op is BinaryOp.FLOORDIV:
                if offset is None:
                    return _Span(inner.low // step, (inner.extent - 2) // step + 2, False)
                return _Span(inner.low // step, (offset + inner.extent - 1) // step + 1, inner.exact)
            if offset is not None and offset + inner.extent <= step:
                return _Span(as_expr(offset), inner.extent, inner.exact)
            return _Span(as_expr(0), step)
    return None


def _prim_func(name: str, body: Stmt) -> PrimFunc:
    """Parameters are the GLOBAL buffers in order of first use: loads of a statement before its store."""
    params: dict[Buffer, None] = {}
    outputs: dict[Buffer, None] = {}

    def note(expr: Expr) -> None:
        for node in walk(expr):
            if isinstance(node, Load) and node.source.scope is Scope.GLOBAL:
                params[node.source] = None

    for stmt in walk_stmts(body):
        match stmt:
            case Store(buffer=buffer, indices=indices, value=value):
                for expr in (*indices, value):
                    note(expr)
                if buffer.scope is Scope.GLOBAL:
                    params[buffer] = None
                    outputs[buffer] = None
            case If(condition=condition):
                note(condition)
    return PrimFunc(name, tuple(params), tuple(outputs), body)
