"""Analytic choice of register tiles and of the outer loops' grid."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from mcompile.target import Target


@dataclass(frozen=True)
class RegisterTile:
    """`rows` points of the tile axis by `vectors` vectors of the vector axis, all held in registers."""

    rows: int
    vectors: int


_FMA_PORTS = 2
_FMA_LATENCY = 4
_LOAD_PORTS = 2
_REFILL_BYTES_PER_CYCLE = 20  # from the second-level cache


def tile_cycles(rows: int, vectors: int, broadcast: bool, steps: int, target: Target) -> float:
    """Cycles of one reduction step of a register tile.

    The slowest of FMA ports, load ports, FMA latency and second-level cache, and a tenth of a cycle for each load,
    since caches seldom serve at their peak.

    With `broadcast` one operand is a scalar for each row, the other a vector for each column; else each point of the
    tile loads a vector of its own.
    """
    loads = rows + vectors if broadcast else rows * vectors + vectors
    column_bytes, row_bytes = vectors * target.vector_bytes, rows * 4
    refilled = sum(size for size in (column_bytes, row_bytes) if size * steps > target.l1_bytes // 2)
    bound = max(rows * vectors / _FMA_PORTS, loads / _LOAD_PORTS, _FMA_LATENCY, refilled / _REFILL_BYTES_PER_CYCLE)
    return bound + 0.1 * loads


def fits_registers(rows: int, vectors: int, broadcast: bool, target: Target) -> bool:
    operands = vectors + 1 if broadcast else 2
    return rows * vectors + operands <= target.vector_registers


def choose_tile(
    extent_rows: int, extent_vector: int, steps: int, lanes: int, broadcast: bool, target: Target
) -> RegisterTile:
    """The tile with the least estimated time for extents that it need not divide; `steps` is the reduction length."""
    columns = ceil(extent_vector / lanes)
    best, best_cost = RegisterTile(1, 1), float("inf")
    for vectors in range(1, min(columns, 16) + 1):
        for rows in range(1, min(extent_rows, target.vector_registers - 2) + 1):
            if not fits_registers(rows, vectors, broadcast, target):
                continue
            cost = _total_cycles(extent_rows, columns, rows, vectors, steps, broadcast, target)
            if cost < best_cost * 0.999:
                best, best_cost = RegisterTile(rows, vectors), cost
    return best


def _total_cycles(
    extent_rows: int, columns: int, rows: int, vectors: int, steps: int, broadcast: bool, target: Target
) -> float:
    full_rows, tail_rows = divmod(extent_rows, rows)
    full_columns, tail_columns = divmod(columns, vectors)
    total = 0.0
    for row_count, row_size in ((full_rows, rows), (1, tail_rows)):
        for column_count, column_size in ((full_columns, vectors), (1, tail_columns)):
            if row_size and column_size:
                overhead = 10 + 2.0 * row_size * column_size
                per_tile = steps * tile_cycles(row_size, column_size, broadcast, steps, target) + overhead
                total += row_count * column_count * per_tile
    return total


@dataclass(frozen=True)
class Loops:
    """Sizes of a tiled reduction, for the choice of its grid: bytes, points and cycles of all its iterations.

    `points` of the tile axis (rows included) times `columns` register tiles of the vector axis, for each of `batch`
    independent problems. `unit` points are the least that a block may hold; `halo` points a block computes besides.
    """

    points: int
    columns: int
    batch: int
    unit: int
    halo: float
    cycles: float
    shared_bytes: int  # operands read along the vector axis: weights
    point_bytes: int  # operands read along the points, all of them
    stored_bytes: int  # prologues, written and read again


_OVERLAP = 0.3  # the share of memory time that is not hidden behind arithmetic
_CACHE_BYTES_PER_CYCLE = 32.0
_MEMORY_BYTES_PER_CYCLE = 6.0


def _read_cycles(size_bytes: float, target: Target) -> float:
    """Cycles that reading an operand again costs: from the second-level cache if it can stay there."""
    speed = _CACHE_BYTES_PER_CYCLE if size_bytes <= target.l2_bytes / 2 else _MEMORY_BYTES_PER_CYCLE
    return _OVERLAP * size_bytes / speed


def column_cycles(loops: Loops, target: Target) -> float:
    """The busiest thread's time where threads share the columns: every column reads all points."""
    share = ceil(loops.columns * loops.batch / target.threads)
    column = loops.cycles / (loops.columns * loops.batch)
    weights = _OVERLAP * loops.shared_bytes / loops.columns / _MEMORY_BYTES_PER_CYCLE
    prologue = 2 * _read_cycles(loops.stored_bytes, target) / _OVERLAP / target.threads
    return share * (column + weights + _read_cycles(loops.point_bytes, target)) + prologue


def block_cycles(loops: Loops, units: int, target: Target) -> float:
    """The busiest thread's time where threads share blocks of `units` units: every block reads all weights."""
    size = min(units * loops.unit, loops.points)
    share = ceil(ceil(loops.points / (units * loops.unit)) * loops.batch / target.threads)
    point = loops.cycles / (loops.points * loops.batch)
    block_bytes = loops.point_bytes * size / loops.points
    reads = _read_cycles(loops.shared_bytes, target) + loops.columns * _read_cycles(block_bytes, target)
    prologue = 2 * _read_cycles(loops.stored_bytes * size / loops.points, target) / _OVERLAP
    return share * (point * (size + loops.halo) + reads + prologue + 50)


def choose_block(loops: Loops, target: Target) -> tuple[int, float]:
    """(units of a block, busiest thread's cycles) for the best block size."""
    count = ceil(loops.points / loops.unit)
    return min(((units, block_cycles(loops, units, target)) for units in range(1, count + 1)), key=lambda pair: pair[1])
