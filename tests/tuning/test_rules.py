"""What each rule gives: register tiles of every shape, places of prologues, partial results, rows, own loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mcompile.ir.expr import ReduceOp, Unary, UnaryOp
from mcompile.ir.stmt import ForKind, PrimFunc, Scope, Store, walk_stmts
from mcompile.ir.tensor import compute, placeholder, reduce_axis, reduce_over
from mcompile.schedule.lower import LoweredTask, lower
from mcompile.schedule.state import replay
from mcompile.schedule.steps import CacheRead, LayoutRewrite, Trace
from mcompile.schedule.task import Task
from mcompile.tuning.sketch import Choice, Sketch
from mcompile.tuning.space import SketchSpace
from tests.schedule.programs import F32, conv_task, make_task, matmul, relu, run_natively, softmax
from tests.schedule.programs import check as check_with


def check(task: Task, trace: Trace) -> LoweredTask:
    return check_with(task, trace, run_natively(task.target))


def sketches_of(task: Task) -> dict[str, Sketch]:
    return {sketch.name: sketch for sketch in SketchSpace(seeded=False).generate(task) if not sketch.variant}


def row_of(sketch: Sketch, **chosen: Any) -> list[int]:
    """Decisions by name (dots as __); tile sizes not named are 1, choices not named the first option."""
    row: list[int] = []
    for decision in sketch.decisions:
        given = chosen.pop(decision.name.replace(".", "__"), None)
        if isinstance(decision, Choice):
            row.append(0 if given is None else decision.options.index(given))
        else:
            row.extend([1] * decision.columns if given is None else given)
    assert not chosen, f"no decisions {chosen}; there are {[d.name for d in sketch.decisions]}"
    return row


def local_buffers(func: PrimFunc) -> dict[str, int]:
    stores = [stmt.buffer for stmt in walk_stmts(func.body) if isinstance(stmt, Store)]
    return {buffer.name: int(np.prod(buffer.shape)) for buffer in stores if buffer.scope is Scope.LOCAL}


def kinds(task: Task, trace: Trace, stage: str) -> dict[str, ForKind]:
    found = replay(task.dag, trace).stage(stage)
    return {name: kind for name, kind in found.kinds.items() if isinstance(kind, ForKind)}


def test_register_tile_of_many_rows_and_vectors() -> None:
    task = make_task([relu(matmul(24, 96, 36))], constants=("b",))
    sketch = sketches_of(task)["tile y by n"]
    trace = sketch.instantiate(row_of(sketch, y__m=[2, 6], y__n=[2], y__k=[4], y__columns="around"))
    lowered = check(task, trace)
    lanes = task.target.lanes(4)
    assert local_buffers(lowered.funcs[0])["y"] == 6 * 2 * lanes
    assert set(kinds(task, trace, "y").values()) == {ForKind.UNROLLED, ForKind.VECTORIZED}
    layout = next(step for step in trace if isinstance(step, LayoutRewrite))
    assert max(layout.tiles) == 2 * lanes


@pytest.mark.parametrize("columns", ["grid", "around", "inside"])
@pytest.mark.parametrize("place", ["block", "root", "inline"])
def test_convolution_with_its_padding_in_any_place(place: str, columns: str) -> None:
    task = conv_task(1, 8, 9, 9, 32, 3, 1, 1)
    sketch = sketches_of(task)["tile conv by oc"]
    row = row_of(
        sketch, conv__oh=[2, 1], conv__ow=[1, 4], conv__oc=[1], conv__kw=[3], conv__columns=columns, pad__place=place
    )
    lowered = check(task, sketch.instantiate(row))
    assert len(lowered.funcs) == (2 if place == "root" else 1)
    assert ("pad" in local_buffers(lowered.funcs[-1])) == (place == "block")


def test_reduce_loops_in_any_order_are_followed_by_the_weights() -> None:
    task = conv_task(1, 8, 6, 6, 32, 3, 1, 0)
    sketch = sketches_of(task)["tile conv by oc"]
    order = next(d for d in sketch.decisions if d.name == "conv.order")
    assert isinstance(order, Choice)
    layouts = set()
    for option in order.options:
        trace = sketch.instantiate(row_of(sketch, conv__order=option, conv__ow=[1, 2]))
        check(task, trace)
        layouts.add(next(step.order for step in trace if isinstance(step, LayoutRewrite)))
    assert len(layouts) == len(order.options)


def test_strided_operand_is_read_through_a_copy() -> None:
    """a . b^T with both given at run time: b is not contiguous along the columns."""
    a, b, k = placeholder("a", (12, 20), F32), placeholder("b", (48, 20), F32), reduce_axis(20)
    y = compute("y", (12, 48), lambda i, j: reduce_over(ReduceOp.SUM, a[i, k.var] * b[j, k.var], [k]), [k], ("i", "j"))
    task = make_task([y])
    found = sketches_of(task)
    sketch = found["tile y by j"]
    for place in ("block", "root"):
        trace = sketch.instantiate(row_of(sketch, y__i=[1, 4], y__j=[2], b__place=place))
        assert any(isinstance(step, CacheRead) and step.tensor == "b" for step in trace)
        check(task, trace)
    assert "lanes of y" in found


@pytest.mark.parametrize("partial", [1, 2, 4])
def test_partial_results_by_lane(partial: int) -> None:
    x, k = placeholder("x", (6, 200), F32), reduce_axis(200)
    task = make_task([compute("y", (6,), lambda i: reduce_over(ReduceOp.SUM, x[i, k.var], [k]), [k])])
    sketch = sketches_of(task)["lanes of y"]
    check(task, sketch.instantiate(row_of(sketch, y__partial=partial, y__block=[2])))


@pytest.mark.parametrize("place", ["row", "inline"])
def test_rows_of_a_softmax(place: str) -> None:
    task = make_task([softmax(10, 70)])
    sketch = sketches_of(task)["rows"]
    lowered = check(task, sketch.instantiate(row_of(sketch, y__rows=[4], y__columns=[2], e__place=place)))
    assert len(lowered.funcs) == 1
    assert ("e" in local_buffers(lowered.funcs[0])) == (place == "row")


def test_transposition_may_be_vectorized_along_either_side() -> None:
    x = placeholder("x", (40, 36), F32)
    task = make_task([compute("y", (36, 40), lambda i, j: x[j, i])])
    found = sketches_of(task)
    assert len(found) == 2
    for sketch in found.values():
        rows = sketch.sample_legal(np.random.default_rng(0), 3)
        for row in rows.tolist():
            check(task, sketch.instantiate(row))


def test_expensive_stage_is_stored_or_computed_again() -> None:
    x = placeholder("x", (8, 64), F32)
    e = compute("e", (8, 64), lambda i, j: Unary(UnaryOp.EXP, x[i, j]))
    task = make_task([compute("y", (8, 64), lambda i, j: e[i, j] + e[i, 63 - j])])
    counts = set()
    for sketch in sketches_of(task).values():
        row = sketch.sample_legal(np.random.default_rng(0), 1)[0].tolist()
        counts.add(len(check(task, sketch.instantiate(row)).funcs))
    assert counts == {1, 2}


def test_epilogue_of_a_chain_holds_the_reduction() -> None:
    y = matmul(6, 32, 8)
    scaled = compute("scaled", y.shape, lambda h, i, j: y[h, i, j] * 0.5)
    task = make_task([relu(scaled)], constants=("b",))
    for sketch in sketches_of(task).values():
        trace = sketch.instantiate(sketch.sample_legal(np.random.default_rng(0), 1)[0].tolist())
        assert len(check(task, trace).funcs) <= 2


def test_single_value_keeps_its_loops() -> None:
    x, k = placeholder("x", (50,), F32), reduce_axis(50)
    total = compute("y", (), lambda: reduce_over(ReduceOp.SUM, x[k.var], [k]), [k])
    task = make_task([total])
    assert sketches_of(task)
    for sketch in sketches_of(task).values():
        row = sketch.sample_legal(np.random.default_rng(0), 1)[0].tolist()
        check(task, sketch.instantiate(row))


def test_accumulators_beyond_the_registers_are_not_legal() -> None:
    task = make_task([matmul(64, 256, 32)], constants=("b",))
    sketch = sketches_of(task)["tile y by n"]
    few, many = row_of(sketch, y__m=[1, 4], y__n=[2]), row_of(sketch, y__m=[1, 16], y__n=[4])
    lower(task, sketch.instantiate(many))  # it would work, slowly
    assert sketch.legal(np.array([few, many])).tolist() == [True, False]
