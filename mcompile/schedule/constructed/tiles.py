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


def tile_cycles(rows: int, vectors: int, broadcast: bool) -> float:
    """Cycles of one reduction step of a register tile: the slowest of FMA ports, load ports and FMA latency.

    With `broadcast` one operand is a scalar for each row, the other a vector for each column; else each point of the
    tile loads a vector of its own.
    """
    loads = rows + vectors if broadcast else rows * vectors + vectors
    return max(rows * vectors / _FMA_PORTS, loads / _LOAD_PORTS, _FMA_LATENCY)


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
            cost = _total_cycles(extent_rows, columns, rows, vectors, steps, broadcast)
            if cost < best_cost * 0.999:
                best, best_cost = RegisterTile(rows, vectors), cost
    return best


def _total_cycles(extent_rows: int, columns: int, rows: int, vectors: int, steps: int, broadcast: bool) -> float:
    full_rows, tail_rows = divmod(extent_rows, rows)
    full_columns, tail_columns = divmod(columns, vectors)
    total = 0.0
    for row_count, row_size in ((full_rows, rows), (1, tail_rows)):
        for column_count, column_size in ((full_columns, vectors), (1, tail_columns)):
            if row_size and column_size:
                overhead = 10 + 2.0 * row_size * column_size
                per_tile = steps * tile_cycles(row_size, column_size, broadcast) + overhead
                total += row_count * column_count * per_tile
    return total


def balanced_blocks(extent: int, unit: int, threads: int, outer: int, largest: int, halo: float = 0.0) -> int:
    """How many units of `unit` a block of the parallel loop holds.

    `extent` points are cut in blocks, `outer` such loops run in parallel besides; a block holds at most `largest`
    points; `halo` points are computed twice for each block. Minimises the busiest thread's work.
    """
    count = ceil(extent / unit)
    best, best_cost = 1, float("inf")
    for size in range(1, count + 1):
        if size > 1 and size * unit > largest:
            break
        blocks = ceil(count / size) * outer
        share = ceil(blocks / threads)
        cost = share * (min(size * unit, extent) + halo + 0.02 * unit)
        if cost <= best_cost * 1.0001:
            best, best_cost = size, cost
    return best
