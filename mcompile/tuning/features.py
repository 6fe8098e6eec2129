"""Features of stores: a row of numbers for each stage of each program, for the learned cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcompile.schedule.constructed.builder import TraceBuilder
from mcompile.schedule.state import Stage
from mcompile.tuning.draft import Block, Draft, NestFacts, draft_nest, measure_block, seconds_of, tensor_bytes
from mcompile.tuning.sketch import Matrix, Size
from mcompile.tuning.structure import Array, Measured, Nest, Structure

FEATURE_VERSION = 2
_BUFFERS = 5
_CURVE = 8
_MAX_CODE = 2500.0  # estimated vector instructions of a program, above those with all tiles of one point
_MAX_UNROLLED = 256.0  # of one stage's block
_MAX_LOCAL_BYTES = 8 << 20

_SCALAR_NAMES = (
    "points", "blocks", "tile", "vector_extent", "unrolled_reduce", "loops", "outer_loops", "inner_extent",
    "reduce_extent", "is_reduction", "is_attached", "is_vector", "in_registers", "registers", "register_pressure",
    "spills", "fused", "simple", "divide", "transcendental", "select", "index", "scalar",
    "arithmetic", "loads", "latency", "arithmetic_bound", "load_bound", "latency_bound",
    "compute_cycles", "l2_cycles", "l3_cycles", "memory_cycles", "draft_cycles", "draft_share",
    "parallel", "imbalance", "is_parallel", "threads", "code", "local_bytes", "flag_0", "flag_1", "repeats",
)  # fmt: skip
_BUFFER_NAMES = (
    "bytes", "is_constant", "is_packed", "is_local", "is_broadcast", "is_contiguous", "is_strided",
    "tile_bytes", "l1_traffic", "l2_traffic", "l3_traffic", "reuse",
)  # fmt: skip
FEATURE_NAMES: tuple[str, ...] = (
    *_SCALAR_NAMES,
    *(f"buffer{index}_{name}" for index in range(_BUFFERS) for name in _BUFFER_NAMES),
    *(f"intensity_{index}" for index in range(_CURVE)),
)


Rows = tuple[int, bytes]


@dataclass(frozen=True)
class Features:
    """`rows[i]` describes a store of program `program[i]`, by FEATURE_NAMES; programs in order."""

    rows: NDArray[np.float32]
    program: NDArray[np.int64]


def join_features(parts: Sequence[tuple[NDArray[np.int64], Features]]) -> Features:
    """Features of groups of rows, each with the rows' numbers, put in the order of the rows."""
    if not parts:
        return Features(np.zeros((0, len(FEATURE_NAMES)), np.float32), np.zeros(0, np.int64))
    rows = np.concatenate([features.rows for _, features in parts])
    program = np.concatenate([group[features.program] for group, features in parts])
    order = np.argsort(program, kind="stable")
    return Features(rows[order], program[order])


class Population:
    """What is known of all rows of a sketch with the same structural choices."""

    def __init__(self, builder: TraceBuilder, flags: tuple[int, ...], reference: tuple[int, ...] = ()) -> None:
        self.target = builder.task.target
        self.structure = Structure.of(builder)
        self.facts = [NestFacts(nest, self.structure, self.target) for nest in self.structure.nests]
        self.flags = flags
        self.reference = reference
        self._sizes: tuple[Rows, tuple[dict[str, Measured], list[Block]]] | None = None
        self._drafts: tuple[Rows, list[Draft]] | None = None

    def _measure(self, values: Matrix) -> tuple[dict[str, Measured], list[Block]]:
        """Sizes; those of the last call are kept, since one population is asked several things."""
        key = len(values), values.tobytes()
        if self._sizes is None or self._sizes[0] != key:
            measured = self.structure.measure(values)
            blocks = [measure_block(facts, measured[facts.nest.stage.name], len(values)) for facts in self.facts]
            self._sizes = key, (measured, blocks)
        return self._sizes[1]

    def _draft(self, values: Matrix) -> list[Draft]:
        key = len(values), values.tobytes()
        if self._drafts is None or self._drafts[0] != key:
            measured, blocks = self._measure(values)
            found = [
                draft_nest(facts, measured[facts.nest.stage.name], block, len(values))
                for facts, block in zip(self.facts, blocks, strict=True)
            ]
            self._drafts = key, found
        return self._drafts[1]

    @cached_property
    def _most_code(self) -> float:
        """As much above the least as is bearable, and not less than what the reference row has."""
        if self.reference:
            row = np.array([self.reference], np.int64)
            return max(self._least_code + _MAX_CODE, 1.2 * float(self._code(row)[0]))
        return self._least_code + _MAX_CODE

    @cached_property
    def _least_code(self) -> float:
        columns = max((max(size.columns) for nest in self.structure.nests for size in _sizes(nest.stage)), default=-1)
        return float(self._code(np.ones((1, columns + 1), np.int64))[0])

    def _code(self, values: Matrix) -> Array:
        _, blocks = self._measure(values)
        copies = {nest.stage.name: _copies(nest, values) for nest in self.structure.nests}
        places = [nest.stage.name if nest.target is None else nest.target for nest in self.structure.nests]
        code = [block.code * copies[place] for block, place in zip(blocks, places, strict=True)]
        return np.asarray(np.sum(code, axis=0))

    def legal(self, values: Matrix) -> NDArray[np.bool_]:
        """Code, unrolled blocks and local buffers of bearable size."""
        most = self._most_code
        measured, blocks = self._measure(values)
        result = np.asarray(self._code(values) <= most)
        for facts, block in zip(self.facts, blocks, strict=True):
            nest = facts.nest
            result &= block.tile <= _MAX_UNROLLED
            if nest.is_reduction and nest.target is not None and facts.unrolled:
                result &= block.accumulators <= self.target.vector_registers
            if nest.target is not None:
                result &= _local_bytes(nest, measured[nest.stage.name]) <= _MAX_LOCAL_BYTES
        return result

    def draft_seconds(self, values: Matrix) -> NDArray[np.float64]:
        drafts = self._draft(values)
        return np.asarray(seconds_of(np.sum([draft.cycles for draft in drafts], axis=0)))

    def features(self, values: Matrix) -> Features:
        n, count = len(values), len(self.facts)
        measured, drafts = self._measure(values)[0], self._draft(values)
        total = np.sum([draft.cycles for draft in drafts], axis=0)
        rows = np.zeros((n, count, len(FEATURE_NAMES)), np.float32)
        flags = [values[:, column].astype(np.float64) for column in self.flags[:2]]
        for index, (facts, draft) in enumerate(zip(self.facts, drafts, strict=True)):
            columns = _store_columns(facts, measured[facts.nest.stage.name], draft, total, flags)
            rows[:, index] = columns.T
        program = np.repeat(np.arange(n), count)
        return Features(rows.reshape(n * count, len(FEATURE_NAMES)), program)


def _store_columns(facts: NestFacts, measured: Measured, draft: Draft, total: Array, flags: list[Array]) -> Array:
    """(features, n) of one stage; sizes as log2(1 + x)."""
    n = len(total)
    values = np.zeros((len(FEATURE_NAMES), n))
    scalars = _scalars(facts, measured, draft, total, flags)
    for index, name in enumerate(_SCALAR_NAMES):
        values[index] = scalars[name]
    start = len(_SCALAR_NAMES)
    for place, index in enumerate(facts.ordered[:_BUFFERS]):
        _write_buffer(values[start + place * len(_BUFFER_NAMES) :], facts, draft, index)
    values[start + _BUFFERS * len(_BUFFER_NAMES) :] = _intensity(facts, measured, draft)
    return np.where(values >= 0, np.log2(1.0 + np.abs(values)), values)


def _scalars(facts: NestFacts, measured: Measured, draft: Draft, total: Array, flags: list[Array]) -> dict[str, Any]:
    nest, operations = facts.nest, facts.operations
    extents = measured.extents
    bound = np.maximum.reduce([draft.arithmetic, draft.block.loads / 2, draft.latency])
    traffic = draft.traffic.sum(axis=0)
    spatial = len(nest.stage.spatial_axes)
    reduce_extent = float(np.prod([axis.extent for axis in list(nest.stage.axes.values())[spatial:]], initial=1.0))
    unrolled_reduce = [i for i in facts.unrolled if i in facts.reduce_loops]
    return {
        "points": draft.points,
        "blocks": draft.blocks,
        "tile": draft.block.tile,
        "vector_extent": extents[facts.vector] if facts.vector is not None else 0.0,
        "unrolled_reduce": extents[unrolled_reduce].prod(axis=0) if unrolled_reduce else 1.0,
        "loops": len(nest.loops),
        "outer_loops": nest.outer,
        "inner_extent": extents[facts.inner - 1] if facts.inner else 1.0,
        "reduce_extent": reduce_extent,
        "is_reduction": nest.is_reduction,
        "is_attached": nest.target is not None,
        "is_vector": facts.vector is not None,
        "in_registers": draft.in_registers,
        "registers": draft.registers,
        "register_pressure": draft.registers / facts.target.vector_registers,
        "spills": draft.spills,
        "fused": operations.fused,
        "simple": operations.simple,
        "divide": operations.divide,
        "transcendental": operations.transcendental,
        "select": operations.select,
        "index": operations.index,
        "scalar": operations.scalar,
        "arithmetic": draft.arithmetic,
        "loads": draft.block.loads,
        "latency": draft.latency,
        "arithmetic_bound": draft.arithmetic / bound,
        "load_bound": draft.block.loads / 2 / bound,
        "latency_bound": draft.latency / bound,
        "compute_cycles": draft.compute_cycles,
        "l2_cycles": traffic[0] / 32.0,
        "l3_cycles": traffic[1] / 16.0,
        "memory_cycles": traffic[2] / 5.0,
        "draft_cycles": draft.cycles,
        "draft_share": draft.cycles / total,
        "parallel": draft.parallel,
        "imbalance": draft.imbalance,
        "is_parallel": bool(facts.parallel),
        "threads": facts.target.threads,
        "code": draft.block.code,
        "local_bytes": _local_bytes(nest, measured) if nest.target is not None else 0.0,
        "flag_0": flags[0] if flags else 0.0,
        "flag_1": flags[1] if len(flags) > 1 else 0.0,
        "repeats": extents[: nest.outer].prod(axis=0) if nest.outer else 1.0,
    }


def _write_buffer(rows: Array, facts: NestFacts, draft: Draft, index: int) -> None:
    access = facts.accesses[index]
    step = facts.vector_steps[index]
    size = tensor_bytes(access)
    rows[0] = size
    rows[1], rows[2], rows[3] = access.is_constant, access.is_packed, access.is_local
    rows[4], rows[5], rows[6] = step == 0.0, step == 1.0, step not in (0.0, 1.0)
    rows[7] = draft.footprints[index, facts.inner]
    rows[8:11] = draft.traffic[index]
    rows[11] = draft.points * (access.bytes / max(1.0, size))


def _intensity(facts: NestFacts, measured: Measured, draft: Draft) -> Array:
    """Operations for each byte touched, at places evenly spread over the depth of the loops."""
    extents, levels = measured.extents, measured.spans.shape[1]
    n = len(draft.points)
    inside = np.ones((levels, n))
    if len(extents):
        inside[:-1] = np.cumprod(extents[::-1], axis=0)[::-1]
    touched = draft.footprints.sum(axis=0)
    curve = inside * max(1.0, facts.operations.cycles) / touched
    places = np.linspace(0, levels - 1, _CURVE)
    low = np.floor(places).astype(int)
    high = np.minimum(low + 1, levels - 1)
    share = (places - low)[:, None]
    return np.asarray(curve[low] * (1 - share) + curve[high] * share)


def _local_bytes(nest: Nest, measured: Measured) -> Array:
    spatial = len(nest.stage.spatial_axes)
    return np.asarray(measured.spans[:spatial, nest.outer].prod(axis=0) * nest.store.bytes)


def _copies(nest: Nest, values: Matrix) -> Array:
    """How often the innermost body is written: once more for each remainder that a split leaves."""
    result = np.ones(len(values))
    for name, axis in nest.stage.axes.items():
        factors = _factors(nest.stage, name, values)
        if factors:
            result = result * _tails(np.full(len(values), axis.extent), factors)
    return result


def _sizes(stage: Stage) -> list[Size]:
    factors: list[Any] = [relation.factor for relation in stage.splits.values()]
    return [factor for factor in factors if isinstance(factor, Size)]


def _factors(stage: Stage, name: str, values: Matrix) -> list[Matrix]:
    """Sizes of the tiles of an axis, largest first."""
    found: list[Matrix] = []
    while name in stage.splits:
        relation = stage.splits[name]
        factor: Any = relation.factor
        found.append(factor.evaluate(values) if isinstance(factor, Size) else np.full(len(values), factor))
        name = relation.inner
    return found


def _tails(extent: Matrix, factors: list[Matrix]) -> Array:
    if not factors:
        return (extent > 0).astype(np.float64)
    first, rest = factors[0], factors[1:]
    full = np.where(extent >= first, _tails(np.minimum(first, extent), rest), 0.0)
    return np.asarray(full + np.where(extent % first > 0, _tails(extent % first, rest), 0.0))
