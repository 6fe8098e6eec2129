"""A cheap estimate of a program's time: arithmetic, loads, latency, caches and threads, for whole populations.

Constants are of common out-of-order cores; only the order of the estimates matters, the learned model corrects them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from mcompile.ir.expr import (
    Binary,
    BinaryOp,
    Call,
    Cast,
    Compare,
    Const,
    Expr,
    Load,
    Reduce,
    Select,
    Unary,
    UnaryOp,
    Var,
    walk,
)
from mcompile.ir.stmt import ForKind
from mcompile.target import Target
from mcompile.tuning.structure import Access, Array, Measured, Nest, Structure, size_of

_CYCLES_PER_SECOND = 3e9
_PORTS = 2.0
_LATENCY = 4.0
_SPILL_CYCLES = 3.0
_L2_BYTES_PER_CYCLE, _L3_BYTES_PER_CYCLE, _MEMORY_BYTES_PER_CYCLE = 32.0, 16.0, 5.0
_L2_SHARE, _L3_SHARE, _MEMORY_SHARE = 0.3, 0.4, 0.7  # of the time that is not hidden behind arithmetic
_FORK_CYCLES = 6000.0
_LINE = 64.0
_CHEAP = {UnaryOp.NEG, UnaryOp.NOT, UnaryOp.ABS, UnaryOp.SIGN, UnaryOp.IS_NAN, UnaryOp.IS_INF}
_CHEAP |= {UnaryOp.FLOOR, UnaryOp.CEIL, UnaryOp.ROUND, UnaryOp.TRUNC}


@dataclass(frozen=True)
class Operations:
    """Of one point: multiply-adds count once."""

    fused: int = 0
    simple: int = 0  # add, multiply, minimum, ...
    divide: int = 0  # and square roots
    transcendental: int = 0
    select: int = 0  # and comparisons
    index: int = 0  # integer arithmetic that is not linear
    scalar: int = 0  # the same for all lanes

    @property
    def cycles(self) -> float:
        """Port cycles of a vector, before dividing among the ports."""
        slow = 16.0 * self.divide + 24.0 * self.transcendental
        return self.fused + self.simple + self.select + slow + 2.0 * self.index + 0.25 * self.scalar

    @property
    def instructions(self) -> float:
        """Vector instructions of a point."""
        slow = 2.0 * self.divide + 16.0 * self.transcendental
        return self.fused + self.simple + self.select + slow + 2.0 * self.index + 0.5 * self.scalar


def count_operations(body: Expr, lane: Var | None) -> Operations:
    """Arithmetic of a body, each distinct subexpression once; `lane` is the axis that vectors run along."""
    counts = {field.name: 0 for field in fields(Operations)}
    value = body
    if isinstance(body, Reduce):
        value = body.value
        if isinstance(value, Binary) and value.op is BinaryOp.MUL:
            counts["fused"], counts["simple"] = 1, -1  # the multiplication, counted below, is part of it
        else:
            counts["simple"] = 1
    stack, seen = [value], set()
    while stack:
        node = stack.pop()
        if node in seen or isinstance(node, Const | Var):
            continue
        seen.add(node)
        if isinstance(node, Load):
            counts["index"] += sum(_irregular(index) for index in node.indices)
            continue
        counts[_kind_of(node) if _is_vector(node, lane) else "scalar"] += 1
        stack.extend(node.children)
    return Operations(**{kind: max(0, count) for kind, count in counts.items()})


def _kind_of(node: Expr) -> str:
    match node:
        case Unary(op, _):
            return "simple" if op in _CHEAP else "divide" if op is UnaryOp.SQRT else "transcendental"
        case Binary(BinaryOp.DIV, _, _):
            return "divide"
        case Binary(BinaryOp.POW, _, _) | Call():
            return "transcendental"
        case Binary(BinaryOp.FLOORDIV | BinaryOp.FLOORMOD | BinaryOp.TRUNCDIV | BinaryOp.TRUNCMOD, _, _):
            return "index"
        case Select() | Compare() | Cast():
            return "select"
    return "simple"


def _is_vector(node: Expr, lane: Var | None) -> bool:
    return any(isinstance(part, Load) or part is lane for part in walk(node))


def _irregular(index: Expr) -> int:
    count, stack = 0, [index]
    while stack:
        node = stack.pop()
        if isinstance(node, Binary) and node.op in (BinaryOp.FLOORDIV, BinaryOp.FLOORMOD):
            count += 1
        if not isinstance(node, Load):
            stack.extend(node.children)
    return count


class NestFacts:
    """What is the same for all rows: operations, how loads move, which loops reuse what."""

    def __init__(self, nest: Nest, structure: Structure, target: Target) -> None:
        self.nest = nest
        self.target = target
        widest = max([nest.store.bytes, *(access.bytes for access in nest.accesses)])
        self.lanes = target.vector_bytes // max(4, nest.store.bytes)
        self.element_bytes = widest
        loops = nest.loops
        kinds = [loop.kind for loop in loops]
        self.vector = next((i for i, kind in enumerate(kinds) if kind is ForKind.VECTORIZED and loops[i].own), None)
        axes = list(nest.stage.axes.values())
        lane = axes[loops[self.vector].axis].var if self.vector is not None else None
        self.operations = count_operations(nest.compute.body, lane)
        inner = len(loops)
        while inner > nest.outer and kinds[inner - 1] in (ForKind.UNROLLED, ForKind.VECTORIZED):
            inner -= 1
        self.inner = inner  # first loop of the innermost unrolled ones
        self.unrolled = [i for i in range(inner, len(loops)) if i != self.vector]
        self.parallel = [i for i, kind in enumerate(kinds) if kind is ForKind.PARALLEL]
        spatial = len(nest.stage.spatial_axes)
        self.reduce_loops = [i for i, loop in enumerate(loops) if loop.own and loop.axis >= spatial]
        self.accesses = (nest.store, *nest.accesses)
        self.levels = tuple(min(structure.level(access.tensor), len(loops)) for access in self.accesses)

    @cached_property
    def moves(self) -> tuple[tuple[bool, ...], ...]:
        """For each access and loop: whether the loop changes the address."""
        return tuple(tuple(self._moves(access, i) for i in range(len(self.nest.loops))) for access in self.accesses)

    def _moves(self, access: Access, index: int) -> bool:
        loop = self.nest.loops[index]
        if not loop.own:
            return True  # the loops around move what the stage computes
        return bool((access.steps[:, loop.axis] != 0).any())

    @cached_property
    def vector_steps(self) -> tuple[float, ...]:
        """Elements from one lane to the next, for each access; 0: the same for all, or there is no vector."""
        if self.vector is None:
            return tuple(0.0 for _ in self.accesses)
        axis = self.nest.loops[self.vector].axis
        found = []
        for access in self.accesses:
            steps = access.steps[:, axis]
            if not (steps != 0).any():
                found.append(0.0)
            elif access.is_constant:
                found.append(1.0 if access.is_packed or access.steps[-1:, axis].any() else float(self.lanes))
            else:
                strides = access.strides if access.strides is not None else np.ones(len(steps))
                found.append(float((steps * strides).sum()))
        return tuple(found)

    def load_cost(self, index: int) -> float:
        """Instructions of one vector's load or store."""
        step = self.vector_steps[index]
        return 1.0 if step in (0.0, 1.0) or self.vector is None else 2.0 if step == -1.0 else float(self.lanes)

    @cached_property
    def ordered(self) -> tuple[int, ...]:
        """Numbers of the accesses: the store, then the loads, those of large tensors first."""
        sizes = [tensor_bytes(access) for access in self.accesses]
        return (0, *sorted(range(1, len(sizes)), key=lambda index: -sizes[index]))

    @cached_property
    def reuse_start(self) -> tuple[NDArrayInt, ...]:
        """For each access and level: the outermost level from which the loops down to it leave the address alone."""
        found = []
        for moves in self.moves:
            starts = [0]
            for level in range(1, len(self.nest.loops) + 1):
                starts.append(level if moves[level - 1] else starts[-1])
            found.append(np.array(starts))
        return tuple(found)


NDArrayInt = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True)
class Block:
    """The innermost unrolled loops of one nest, for n rows."""

    tile: Array  # vectors
    vectors: Array  # of the vectorized loop alone
    accumulators: Array
    reduce_steps: Array
    loads: Array
    operands: Array
    code: Array  # vector instructions


@dataclass(frozen=True)
class Draft:
    """Of one nest, for n rows; cycles are of all threads together."""

    block: Block
    points: Array
    blocks: Array  # iterations of the loops around the unrolled ones
    registers: Array
    in_registers: Array  # whether a reduction's results stay in registers
    arithmetic: Array
    latency: Array
    spills: Array
    compute_cycles: Array
    footprints: Array  # (accesses, levels, n) bytes
    traffic: Array  # (accesses, 3, n) bytes that come from beyond the first, second, third cache
    parallel: Array  # iterations of the parallel loops
    imbalance: Array
    cycles: Array  # of the busiest thread


def measure_block(facts: NestFacts, measured: Measured, n: int) -> Block:
    """Sizes of what is unrolled."""
    extents = measured.extents
    ones = np.ones(n)
    vectors = np.ceil(extents[facts.vector] / facts.lanes) if facts.vector is not None else ones
    tile = _product(extents, facts.unrolled, ones) * vectors
    reduce_steps = _product(extents, [i for i in facts.unrolled if i in facts.reduce_loops], ones)
    loads, operands = _tile_loads(facts, extents, vectors, ones)
    code = tile * (facts.operations.instructions + 1.0) + loads + 4.0
    return Block(tile, vectors, tile / reduce_steps, reduce_steps, loads, operands, code)


def draft_nest(facts: NestFacts, measured: Measured, block: Block, n: int) -> Draft:
    """The estimate of one stage."""
    extents = measured.extents
    ones = np.ones(n)
    is_reduction = facts.nest.is_reduction
    outside = extents[: facts.inner].prod(axis=0) if facts.inner else ones
    arithmetic = block.tile * (facts.operations.cycles / _PORTS)
    registers = block.accumulators + np.minimum(block.operands, 8.0) if is_reduction else block.operands
    in_registers, spills, latency, stores = ones, np.zeros(n), ones, block.tile * facts.load_cost(0)
    if is_reduction:
        in_registers = _holds_results(facts, measured, block)
        excess = np.maximum(0.0, registers - float(facts.target.vector_registers))
        spilled = np.where(in_registers > 0, np.minimum(excess, block.accumulators), block.accumulators)
        spills = spilled * block.reduce_steps
        latency, stores = _LATENCY * block.reduce_steps, np.zeros(n)
    access_cycles = block.loads / _PORTS + _SPILL_CYCLES * spills + stores
    per_block = np.maximum(np.maximum(arithmetic, access_cycles), latency) + 0.1 * block.loads + 1.0
    compute_cycles = outside * per_block
    if is_reduction:  # results are set and stored once for each pass over the reduction
        passes = outside / _product(extents, [i for i in facts.reduce_loops if i < facts.inner], ones)
        compute_cycles += passes * (block.accumulators * (1.5 + facts.load_cost(0)) + 8.0)
    footprints, traffic = _memory(facts, measured, n)
    parallel = _product(extents, facts.parallel, ones)
    threads = float(facts.target.threads)
    share = np.ceil(np.ceil(parallel - 1e-9) / threads)
    imbalance = share * threads / np.maximum(1.0, parallel) if facts.parallel else ones * threads
    moved = traffic.sum(axis=0)
    memory = (
        _L2_SHARE / _L2_BYTES_PER_CYCLE * moved[0]
        + _L3_SHARE / _L3_BYTES_PER_CYCLE * moved[1]
        + _MEMORY_SHARE / _MEMORY_BYTES_PER_CYCLE * moved[2]
    )
    cycles = (np.maximum(compute_cycles, moved[1] / _L3_BYTES_PER_CYCLE) + memory) * imbalance / threads
    if facts.parallel and facts.nest.target is None:
        cycles += _FORK_CYCLES
    points = extents.prod(axis=0) if len(extents) else ones
    return Draft(
        block, points, outside, registers, in_registers, arithmetic, latency, spills, compute_cycles, footprints,
        traffic, parallel, imbalance, cycles,
    )  # fmt: skip


def _product(extents: Array, loops: list[int], ones: Array) -> Array:
    return extents[loops].prod(axis=0) if loops else ones


def _tile_loads(facts: NestFacts, extents: Array, vectors: Array, ones: Array) -> tuple[Array, Array]:
    """(load instructions, distinct operands) of one unrolled block."""
    loads, operands = np.zeros_like(ones), np.zeros_like(ones)
    for index in range(1, len(facts.accesses)):
        moving = [i for i in facts.unrolled if facts.moves[index][i]]
        count = _product(extents, moving, ones)
        if facts.vector is not None and facts.moves[index][facts.vector]:
            count = count * vectors
            operands = operands + np.minimum(count, 16.0)
        else:
            operands = operands + 1.0
        loads = loads + count * facts.load_cost(index)
    return loads, operands


def _holds_results(facts: NestFacts, measured: Measured, block: Block) -> Array:
    """1 where the whole result is a local buffer whose elements are all in the unrolled block."""
    nest = facts.nest
    if nest.target is None:
        return np.zeros_like(block.tile)
    spatial = len(nest.stage.spatial_axes)
    region = measured.spans[:spatial, nest.outer].prod(axis=0)
    lanes = measured.extents[facts.vector] if facts.vector is not None else 1.0
    return np.where(region <= block.accumulators / block.vectors * lanes * 1.01, 1.0, 0.0)


def _memory(facts: NestFacts, measured: Measured, n: int) -> tuple[Array, Array]:
    spans, extents = measured.spans, measured.extents
    levels = spans.shape[1]
    iterations = np.ones((levels, n))  # of the loops outside each level
    if len(extents):
        np.cumprod(extents, axis=0, out=iterations[1:])
    footprints = np.empty((len(facts.accesses), levels, n))
    for index, access in enumerate(facts.accesses):
        footprints[index] = _footprint(access, spans)
        level = facts.levels[index]  # a local buffer is one, used again and again
        footprints[index][:level] = footprints[index][level]
    total = footprints.sum(axis=0)
    traffic = np.zeros((len(facts.accesses), 3, n))
    rows = np.arange(n)
    target = facts.target
    shared = target.l3_bytes if target.l3_bytes else target.l2_bytes
    for cache, size in enumerate((0.75 * target.l1_bytes, 0.75 * target.l2_bytes, 0.75 * shared)):
        fits = total <= size
        level = np.where(fits.any(axis=0), fits.argmax(axis=0), levels - 1)
        for index, access in enumerate(facts.accesses):
            if access.is_local and cache == 2:
                continue
            start = facts.reuse_start[index][level]
            moved = footprints[index][level, rows] * iterations[start, rows]
            first = footprints[index][0] if (access.is_constant and cache == 2) else 0.0
            traffic[index, cache] = np.where(level == 0, first, moved)
    return footprints, traffic


def _footprint(access: Access, spans: Array) -> Array:
    """Bytes of the cache lines that are touched at each level."""
    if not len(access.shape):
        return np.full(spans.shape[1:], _LINE)
    windows = access.windows(spans)
    np.minimum(windows, access.shape[:, None, None], out=windows)
    size = float(access.bytes)
    if access.is_packed:
        return np.asarray(np.maximum(_LINE, windows.prod(axis=0) * size))
    contiguous = len(access.shape) - 1
    if access.strides is not None:
        contiguous = int(np.argmin(np.where(access.shape > 1, access.strides, np.inf)))
    windows[contiguous] = np.maximum(1.0, windows[contiguous] * (size / _LINE) + (0.5 if size < _LINE else 0.0))
    np.minimum(windows[contiguous], max(1.0, access.shape[contiguous] * size / _LINE), out=windows[contiguous])
    return np.asarray(windows.prod(axis=0) * _LINE)


def seconds_of(cycles: Array) -> Array:
    return cycles / _CYCLES_PER_SECOND


def tensor_bytes(access: Access) -> float:
    return size_of(access.shape) * access.bytes
