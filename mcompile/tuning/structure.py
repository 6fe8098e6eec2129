"""The loop nest of every stage of a sketch, with sizes of whole populations: a column of numbers for each loop.

Built once for each combination of structural choices, from the state that the sketch's steps leave with `Size`s for
tile sizes; `measure` then gives extents and regions for any rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcompile.ir.affine import as_affine
from mcompile.ir.expr import Binary, BinaryOp, Const, Expr, Load, Reduce, Var, walk
from mcompile.ir.stmt import ForKind
from mcompile.ir.tensor import Compute
from mcompile.schedule.analysis import TaskAnalysis
from mcompile.schedule.constructed.builder import TraceBuilder
from mcompile.schedule.state import Stage
from mcompile.tuning.sketch import Matrix, Size

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Loop:
    """One loop; a fused one counts as its components."""

    name: str
    axis: int  # of the stage that it belongs to
    kind: ForKind
    own: bool = True  # False: a loop of the stage that this one is computed in


@dataclass(frozen=True)
class Access:
    """A load: index d moves by steps[d, a] each time axis a of the reader grows by divisors[d, a]."""

    tensor: str
    steps: Array
    divisors: Array | None  # None: all 1
    offsets: Array  # constants in the indices
    shape: Array
    strides: Array | None  # in elements; None: a buffer of our own, contiguous along its last dim
    bytes: int
    is_constant: bool
    is_packed: bool
    is_local: bool

    def windows(self, spans: Array) -> Array:
        """(dims, levels, n): how far each index runs as the axes run over `spans`."""
        if self.divisors is None:
            return np.asarray(1.0 + np.tensordot(self.steps, spans - 1.0, axes=(1, 0)))
        result = np.ones((len(self.steps), *spans.shape[1:]))
        for dim, axis in zip(*np.nonzero(self.steps), strict=True):
            moved = np.floor((spans[axis] - 1.0) / self.divisors[dim, axis] + 1e-9)
            result[dim] += self.steps[dim, axis] * moved
        return result


@dataclass(frozen=True)
class Nest:
    """A stage's loops from outermost to innermost: `outer` ones of the stage that it is computed in, then its own."""

    stage: Stage
    compute: Compute  # with inlined stages put in
    loops: tuple[Loop, ...]
    outer: int
    accesses: tuple[Access, ...]
    store: Access
    target: str | None

    @property
    def is_reduction(self) -> bool:
        return bool(self.compute.reduce_axes)


@dataclass(frozen=True)
class Measured:
    """Sizes of a nest for n rows. Level l is what the loops from l inwards cover; level 0 is everything.

    `extents` (loops, n) are iterations, between the exact and the rounded-up number where a tile is cut off.
    `spans` (axes, loops + 1, n): how far each axis runs.
    """

    extents: Array
    spans: Array


@dataclass
class Structure:
    """Nests in topological order."""

    nests: tuple[Nest, ...]
    _readers: dict[str, list[tuple[str, Access]]] = field(default_factory=dict)

    def level(self, tensor: str) -> int:
        """How many loops stand around a local buffer; 0 for any other tensor."""
        return next((nest.outer for nest in self.nests if nest.stage.name == tensor), 0)

    @staticmethod
    def of(builder: TraceBuilder) -> Structure:
        return _Reader(builder).structure()

    def measure(self, values: Matrix) -> dict[str, Measured]:
        """Sizes of every nest, for each row of `values`."""
        found: dict[str, Measured] = {}
        for nest in reversed(self.nests):
            found[nest.stage.name] = self._measure(nest, values, found)
        return found

    def _measure(self, nest: Nest, values: Matrix, found: Mapping[str, Measured]) -> Measured:
        n = len(values)
        axes = list(nest.stage.axes.values())
        whole = np.array([float(axis.extent) for axis in axes])
        if nest.target is None:
            region = np.broadcast_to(whole[:, None, None], (len(axes), 1, n))
            outer = np.ones((0, n))
        else:
            region = self._region(nest, found, whole)
            outer = found[nest.target].extents[: nest.outer]
        own = _own_extents(nest, values, region[:, -1, :])
        spans = np.empty((len(axes), len(nest.loops) + 1, n))
        spans[:, : nest.outer + 1] = region
        running = np.ones((len(axes), n))
        for index in range(len(nest.loops) - 1, nest.outer - 1, -1):
            spans[:, index + 1] = running
            running[nest.loops[index].axis] *= own[index - nest.outer]
        np.minimum(spans, whole[:, None, None], out=spans)
        return Measured(np.concatenate([outer, own]) if nest.outer else own, spans)

    def _region(self, nest: Nest, found: Mapping[str, Measured], whole: Array) -> Array:
        """What is needed of each axis at the levels of the target's loops, down to where the stage is computed."""
        levels = nest.outer + 1
        needed: Array | None = None
        readers = self._readers.get(nest.stage.name, ())
        least = np.min([access.offsets for _, access in readers], axis=0) if readers else np.zeros(0)
        for reader, access in readers:
            spans = found[reader].spans
            if spans.shape[1] < levels:  # read outside the target: all of it
                continue
            window = access.windows(spans[:, :levels]) + (access.offsets - least)[:, None, None]
            needed = window if needed is None else np.maximum(needed, window)
        n = next(iter(found.values())).extents.shape[1]
        region = np.broadcast_to(whole[:, None, None], (len(whole), levels, n)).copy()
        if needed is not None:
            spatial = len(needed)
            region[:spatial] = np.minimum(region[:spatial], needed)
        return region


def _own_extents(nest: Nest, values: Matrix, region: Array) -> Array:
    """Iterations of the stage's own loops, where the axes run over `region`."""
    stage = nest.stage
    by_outer = {relation.outer: relation for relation in stage.splits.values()}
    by_inner = {relation.inner: relation for relation in stage.splits.values()}
    by_fused = {fuse.fused: fuse for fuse in stage.fuses.values()}
    known: dict[str, Array] = dict(zip(stage.axes, region, strict=True))

    def factor_of(factor: Any) -> Any:
        return factor.evaluate(values).astype(np.float64) if isinstance(factor, Size) else float(factor)

    def extent(name: str) -> Array:
        if name not in known:
            if "#" in name:
                return part_of_fused(*name.split("#"))
            if name in by_fused:
                result = np.ones(region.shape[1])
                for part in by_fused[name].components:
                    result = result * extent(part)
            elif name in by_outer:
                parent, factor = extent(by_outer[name].parent), factor_of(by_outer[name].factor)
                ratio = parent / factor
                result = np.maximum(1.0, 0.5 * (ratio + np.ceil(ratio - 1e-9)))
            else:
                relation = by_inner[name]
                result = np.minimum(extent(relation.parent), factor_of(relation.factor))
            known[name] = result
        return known[name]

    def part_of_fused(component: str, name: str) -> Array:
        """The share of one component in a part of a split fused loop: the inner part takes the last ones first."""
        relation = by_inner.get(name) or by_outer[name]
        left = np.minimum(extent(relation.parent), factor_of(relation.factor))
        for other in reversed(by_fused[relation.parent].components):
            inner = np.minimum(left, extent(other))
            left = np.maximum(1.0, left / inner)
            if other == component:
                break
        return np.asarray(inner if name == relation.inner else np.maximum(1.0, extent(component) / inner))

    own = [extent(loop.name) for loop in nest.loops[nest.outer :]]
    return np.stack(own) if own else np.ones((0, region.shape[1]))


class _Reader:
    """Builds the structure from a builder's state."""

    def __init__(self, builder: TraceBuilder) -> None:
        self.builder = builder
        self.task = builder.task
        constant = set(TaskAnalysis(builder.task).constant)
        self.stages = {n: s for n, s in builder.state.stages.items() if not s.inlined and n not in constant}
        self.constant = constant
        self.computes = {name: builder.expanded(name) for name in self.stages}
        self.nests: dict[str, Nest] = {}

    def structure(self) -> Structure:
        for name in reversed(self.stages):
            self.nests[name] = self._nest(name)
        structure = Structure(tuple(self.nests[name] for name in self.stages))
        for nest in structure.nests:
            for access in nest.accesses:
                structure._readers.setdefault(access.tensor, []).append((nest.stage.name, access))
        return structure

    def _nest(self, name: str) -> Nest:
        stage, compute = self.stages[name], self.computes[name]
        outer: tuple[Loop, ...] = ()
        target: str | None = None
        if stage.attach is not None:
            target = stage.attach.target
            around = self.nests[target].loops
            components = components_of(self.stages[target], stage.attach.iterator)
            last = max(i for i, loop in enumerate(around) if loop.own and loop.name in components)
            outer = tuple(Loop(loop.name, loop.axis, loop.kind, False) for loop in around[: last + 1])
        own = tuple(
            Loop(part, self._axis(stage, part), _kind(stage, loop))
            for loop in stage.loops
            for part in components_of(stage, loop)
        )
        variables = [axis.var for axis in stage.axes.values()]
        body = compute.body.value if isinstance(compute.body, Reduce) else compute.body
        loads = dict.fromkeys(node for node in walk(body) if isinstance(node, Load))
        accesses = tuple(self._access(load, variables) for load in loads if not _only_in_index(load, body))
        return Nest(stage, compute, (*outer, *own), len(outer), accesses, self._store(stage, variables), target)

    def _axis(self, stage: Stage, name: str) -> int:
        by_child = {child: r.parent for r in stage.splits.values() for child in (r.outer, r.inner)}
        by_child |= {fuse.fused: fuse.components[-1] for fuse in stage.fuses.values()}
        name = name.partition("#")[0]
        while name not in stage.axes:
            name = by_child[name]
        return list(stage.axes).index(name)

    def _access(self, load: Load, variables: list[Var]) -> Access:
        dims = (len(load.indices), len(variables))
        pairs = np.array([_steps(index, variables) for index in load.indices]).reshape(*dims, 2)
        steps, divisors = np.abs(pairs[:, :, 0]), pairs[:, :, 1]
        name = load.source.name
        constant = name in self.constant
        return Access(
            name,
            steps,
            divisors if (divisors != 1.0).any() else None,
            np.array([float(as_affine(index).const) for index in load.indices]),
            np.array([float(extent) for extent in load.source.shape]),
            self._strides(name, load.source.shape),
            load.source.dtype.bytes,
            constant,
            name in self.builder.state.layouts,
            self._is_local(name),
        )

    def _store(self, stage: Stage, variables: list[Var]) -> Access:
        count = len(stage.compute.axes)
        steps, offsets = np.eye(count, len(variables)), np.zeros(count)
        shape = np.array([float(extent) for extent in stage.compute.shape])
        strides = self._strides(stage.name, stage.compute.shape)
        size = stage.compute.dtype.bytes
        return Access(stage.name, steps, None, offsets, shape, strides, size, False, False, self._is_local(stage.name))

    def _is_local(self, name: str) -> bool:
        stage = self.stages.get(name)
        return stage is not None and stage.attach is not None

    def _strides(self, name: str, shape: tuple[int, ...]) -> Array | None:
        known = self.task.strides.get(name)
        if known is not None:
            return np.array([float(stride) for stride in known])
        if name in self.constant:
            return None
        stage = self.stages.get(name)
        if stage is None:
            return None
        depth = [
            max(i for i, part in enumerate(_flat(stage)) if self._axis(stage, part) == d) for d in range(len(shape))
        ]
        strides = np.ones(len(shape))
        step = 1.0
        for dim in sorted(range(len(shape)), key=lambda d: -depth[d]):
            strides[dim] = step
            step *= shape[dim]
        return strides


def _flat(stage: Stage) -> list[str]:
    return [part for loop in stage.loops for part in components_of(stage, loop)]


def components_of(stage: Stage, name: str) -> list[str]:
    """The loops that a fused loop is made of, `component#` with its part's name of one that was split; else itself."""
    fused = {fuse.fused: fuse for fuse in stage.fuses.values()}
    if name in fused:
        return [part for component in fused[name].components for part in components_of(stage, component)]
    relation = next((r for r in stage.splits.values() if name in (r.outer, r.inner) and r.parent in fused), None)
    if relation is None:
        return [name]
    return [f"{component}#{name}" for component in fused[relation.parent].components]


def _kind(stage: Stage, loop: str) -> ForKind:
    kind = stage.kinds.get(loop, ForKind.SERIAL)
    return kind if isinstance(kind, ForKind) else ForKind.SERIAL


def _only_in_index(load: Load, body: Expr) -> bool:
    """Whether the load is only part of another load's index."""
    return False if load is body else not _reaches(body, load)


def _reaches(expr: Expr, load: Load) -> bool:
    stack, seen = [expr], set()
    while stack:
        node = stack.pop()
        if node is load:
            return True
        if node in seen or isinstance(node, Load):
            continue
        seen.add(node)
        stack.extend(node.children)
    return False


Step = tuple[float, float]  # factor and divisor: the index moves by factor * (distance // divisor)


def _steps(index: Expr, variables: list[Var]) -> list[Step]:
    """How an index moves along each variable."""
    found: dict[Var, Step] = {}
    for term, factor in as_affine(index).terms.items():
        for variable, (step, divisor) in _term_steps(term).items():
            old, least = found.get(variable, (0.0, divisor))
            found[variable] = (old + factor * step, min(least, divisor))
    return [found.get(variable, (0.0, 1.0)) for variable in variables]


def _term_steps(term: Expr) -> dict[Var, Step]:
    match term:
        case Var():
            return {term: (1.0, 1.0)}
        case Binary(BinaryOp.FLOORDIV | BinaryOp.FLOORMOD as op, x, Const(c)) if int(c) > 0:
            result: dict[Var, Step] = {}
            for inner, factor in as_affine(x).terms.items():
                for variable, (step, divisor) in _term_steps(inner).items():
                    result[variable] = (step * factor, divisor)
            if op is BinaryOp.FLOORDIV:
                return {v: _divided(step, divisor, float(int(c))) for v, (step, divisor) in result.items()}
            return result
    return {node: (1.0, 1.0) for node in walk(term) if isinstance(node, Var)}


def _divided(step: float, divisor: float, by: float) -> Step:
    if abs(step) >= by:
        return step / by, divisor
    return (1.0 if step >= 0 else -1.0), divisor * by / abs(step) if step else 1.0


def size_of(shape: Array) -> float:
    return float(prod(shape.tolist()))
