"""Register tiles and grids: limits hold for any extents, and choices for known networks are what they should be."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcompile.ir.stmt import Allocate, For, ForKind, Scope, walk_stmts
from mcompile.schedule.constructed import construct
from mcompile.schedule.constructed.tiles import (
    Loops,
    block_cycles,
    choose_block,
    choose_tile,
    column_cycles,
    fits_registers,
    tile_cycles,
)
from mcompile.schedule.lower import lower
from mcompile.schedule.task import Task
from mcompile.target import parse_target
from tests.schedule.programs import conv_task, make_task, matmul

LEVELS = ["x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64"]
ACCUMULATORS = 8  # two multiply-adds a cycle, four cycles each: as many must be under way


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 4000),
    columns=st.integers(1, 4000),
    steps=st.integers(1, 5000),
    broadcast=st.booleans(),
    level=st.sampled_from(LEVELS),
)
def test_any_tile_fits(rows: int, columns: int, steps: int, broadcast: bool, level: str) -> None:
    target = parse_target(level, threads=2)
    lanes = target.lanes(4)
    tile = choose_tile(rows, columns, steps, lanes, broadcast, target)
    assert fits_registers(tile.rows, tile.vectors, broadcast, target)
    assert 1 <= tile.rows <= rows
    assert 1 <= tile.vectors <= ceil(columns / lanes)


def test_registers_hold_the_operands_too() -> None:
    """A row of the first is a scalar, of the second a vector of its own."""
    target = parse_target("x86-64-v4", threads=1)
    assert fits_registers(14, 2, True, target)  # 28 + 2 + 1 of 32
    assert not fits_registers(15, 2, True, target)
    assert fits_registers(15, 2, False, target)
    assert not fits_registers(31, 1, False, target)


def test_bounds_of_a_step() -> None:
    target = parse_target("x86-64-v4", threads=1)
    assert tile_cycles(1, 1, True, 1, target) >= 4  # a chain of multiply-adds
    assert tile_cycles(14, 2, True, 1, target) >= 14  # two ports
    assert tile_cycles(14, 2, True, 1, target) < tile_cycles(14, 2, False, 1, target)  # a load for each point


CONTRACTIONS = {  # rows, columns, reduction length
    "resnet50 conv2 3x3": (56, 64, 576),
    "resnet50 conv2 1x1": (3136, 256, 64),
    "resnet50 conv3 3x3": (28, 128, 1152),
    "resnet50 conv4 3x3": (14, 256, 2304),
    "resnet50 conv5 3x3": (7, 512, 4608),
    "resnet50 conv5 1x1": (49, 2048, 512),
    "resnet50 stem": (112, 64, 147),
    "bert projection": (128, 768, 768),
    "bert up": (128, 3072, 768),
    "bert down": (128, 768, 3072),
    "bert scores": (128, 128, 64),
    "bert context": (128, 64, 128),
}


@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("name", CONTRACTIONS)
def test_tiles_of_known_shapes(name: str, level: str) -> None:
    """Enough accumulators to hide the latency, nearly all of the points useful, loads rarer than multiply-adds."""
    rows, columns, steps = CONTRACTIONS[name]
    target = parse_target(level, threads=2)
    lanes = target.lanes(4)
    tile = choose_tile(rows, columns, steps, lanes, True, target)
    assert tile.rows * tile.vectors >= ACCUMULATORS
    assert tile.rows + tile.vectors <= tile.rows * tile.vectors
    full, tail = divmod(rows, tile.rows)
    groups, rest = divmod(ceil(columns / lanes), tile.vectors)
    cycles = sum(
        count * tile_cycles(*size, True, steps, target)
        for count, size in (
            (full * groups, (tile.rows, tile.vectors)),
            (groups, (tail, tile.vectors)),
            (full, (tile.rows, rest)),
            (1, (tail, rest)),
        )
        if count and prod(size)
    )
    peak = rows * columns / lanes / 2
    assert peak / cycles > 0.75


def test_a_vector_times_a_matrix_spreads_over_columns() -> None:
    target = parse_target("x86-64-v4", threads=2)
    tile = choose_tile(1, 1000, 2048, 16, True, target)
    assert (tile.rows, tile.vectors >= ACCUMULATORS) == (1, True)


def known_tasks(level: str) -> dict[str, Task]:
    return {
        "conv2": conv_task(1, 64, 56, 56, 64, 3, 1, 1, target=level),
        "conv2 1x1": conv_task(1, 64, 56, 56, 256, 1, target=level),
        "conv4 strided": conv_task(1, 256, 28, 28, 512, 1, 2, target=level),
        "conv5": conv_task(1, 512, 7, 7, 512, 3, 1, 1, target=level),
        "stem": conv_task(1, 3, 224, 224, 64, 7, 2, 3, target=level),
        "bert up": make_task([matmul(128, 3072, 768)], {}, ("b",), target=level),
        "bert scores": make_task([matmul(128, 128, 64, 12)], {"b": (0, 2, 1)}, target=level),
        "classifier": make_task([matmul(1, 1000, 2048)], {}, ("b",), target=level),
    }


@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("name", known_tasks("x86-64-v4"))
def test_accumulators_stay_in_registers(name: str, level: str) -> None:
    """Of the direct algorithm; its innermost loops are vectors, its outermost ones parallel."""
    task = known_tasks(level)[name]
    task = replace(task, target=replace(task.target, exact=True))
    lowered = lower(task, construct(task))
    statements = [stmt for func in lowered.funcs for stmt in walk_stmts(func.body)]
    names = {stage.name for stage in task.dag.computes if stage.reduce_axes}
    accumulators = [
        stmt.buffer
        for stmt in statements
        if isinstance(stmt, Allocate)
        and stmt.buffer.scope is Scope.LOCAL
        and stmt.buffer.name.removesuffix("_acc") in names
    ]
    assert accumulators
    for buffer in accumulators:
        assert buffer.size_bytes < task.target.vector_registers * task.target.vector_bytes
    kinds = {stmt.kind for stmt in statements if isinstance(stmt, For)}
    assert kinds >= {ForKind.VECTORIZED, ForKind.PARALLEL}
    assert sum(func.parallel_extent for func in lowered.funcs) >= 2


LOOPS = Loops(
    points=3136, columns=8, batch=1, unit=14, halo=0.0, cycles=1e6, shared_bytes=1 << 16, point_bytes=1 << 20,
    stored_bytes=0,
)  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_best_block(threads: int) -> None:
    target = parse_target("x86-64-v4", threads=threads)
    units, cycles = choose_block(LOOPS, target)
    count = ceil(LOOPS.points / LOOPS.unit)
    assert 1 <= units <= count
    assert cycles == min(block_cycles(LOOPS, other, target) for other in range(1, count + 1))
    assert ceil(count / units) >= threads  # every thread has a block


def test_more_threads_take_less_time() -> None:
    one, two = (parse_target("x86-64-v4", threads=threads) for threads in (1, 2))
    assert choose_block(LOOPS, two)[1] < choose_block(LOOPS, one)[1]
    assert column_cycles(LOOPS, two) < column_cycles(LOOPS, one)


def test_a_halo_asks_for_larger_blocks() -> None:
    target = parse_target("x86-64-v4", threads=2)
    assert choose_block(replace(LOOPS, halo=50.0), target)[0] >= choose_block(LOOPS, target)[0]


def test_large_weights_are_shared_out_by_columns() -> None:
    """Every block would read them all."""
    target = parse_target("x86-64-v4", threads=2)
    heavy = replace(LOOPS, points=49, unit=7, columns=32, shared_bytes=8 << 20, point_bytes=100 << 10)
    assert column_cycles(heavy, target) < choose_block(heavy, target)[1]
    light = replace(LOOPS, columns=1, shared_bytes=4 << 10)
    assert choose_block(light, target)[1] < column_cycles(light, target)
