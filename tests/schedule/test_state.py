"""What each primitive does to the loops, and what it refuses."""

from __future__ import annotations

import pytest

from mcompile.errors import ScheduleError
from mcompile.ir.expr import ReduceOp
from mcompile.ir.printer import print_dag
from mcompile.ir.stmt import ForKind
from mcompile.ir.tensor import ComputeDag, build_dag, compute, placeholder, reduce_axis, reduce_over
from mcompile.schedule.state import ScheduleState, Stage, apply_step, replay
from mcompile.schedule.steps import (
    Bind,
    CacheRead,
    CacheWrite,
    ComputeAt,
    ComputeInline,
    Fuse,
    LayoutRewrite,
    Parallel,
    Prefetch,
    Reorder,
    Rfactor,
    Split,
    Step,
    Unroll,
    Vectorize,
)
from tests.schedule.programs import F32


def matmul_dag() -> ComputeDag:
    """pre = a + 1; y = pre b; out = y * 2; last = out - y: `out` and `last` are outputs."""
    a, b, k = placeholder("a", (6, 10), F32), placeholder("b", (10, 8), F32), reduce_axis(10)
    pre = compute("pre", (6, 10), lambda i, k: a[i, k] + 1.0, axis_names=("i", "k"))
    y = compute(
        "y",
        (6, 8),
        lambda i, j: reduce_over(ReduceOp.SUM, pre[i, k.var] * b[k.var, j], [k]),
        [k],
        ("i", "j"),
    )
    out = compute("out", (6, 8), lambda i, j: y[i, j] * 2.0, axis_names=("i", "j"))
    last = compute("last", (6, 8), lambda i, j: out[i, j] - y[i, j], axis_names=("i", "j"))
    return build_dag([out, last])


def after(*trace: Step) -> ScheduleState:
    return replay(matmul_dag(), trace)


def show(state: ScheduleState) -> str:
    """A stage a line: its loops outermost first, where it is computed."""
    return "\n".join(_show_stage(stage) for stage in state.stages.values())


def _show_stage(stage: Stage) -> str:
    if stage.inlined:
        return f"{stage.name}: inlined"
    loops = [f"{_kind(stage, name)}{name}" for name in stage.loops]
    place = f" at {stage.attach.target}/{stage.attach.iterator} {stage.attach.scope.value}" if stage.attach else ""
    return f"{stage.name}: {' '.join(loops)}{place}"


def _kind(stage: Stage, name: str) -> str:
    kind = stage.kinds.get(name)
    return "" if kind is None else f"{kind.value}:"


def test_no_steps() -> None:
    assert show(after()) == "pre: i k\ny: i j k\nout: i j\nlast: i j"


def changed(*trace: Step) -> list[str]:
    """The lines of `show` that the trace added or changed."""
    before = show(after()).splitlines()
    return [line for line in show(after(*trace)).splitlines() if line not in before]


LEGAL: dict[str, tuple[list[Step], list[str]]] = {
    "split": ([Split("y", "j", (4, 2))], ["y: i j.0 j.1 j.2 k"]),
    "split again": ([Split("y", "j", (4,)), Split("y", "j.1", (3,))], ["y: i j.0 j.1.0 j.1.1 k"]),
    "split reduce": ([Split("y", "k", (3,))], ["y: i j k.0 k.1"]),
    "fuse": ([Fuse("y", ("i", "j"))], ["y: i@j k"]),
    "fuse parts": ([Split("y", "j", (4,)), Fuse("y", ("i", "j.0"))], ["y: i@j.0 j.1 k"]),
    "split fused": ([Fuse("out", ("i", "j")), Split("out", "i@j", (16,))], ["out: i@j.0 i@j.1"]),
    "reorder": ([Reorder("y", ("k", "j", "i"))], ["y: k j i"]),
    "compute_at": ([ComputeAt("pre", "y", "i")], ["pre: i k at y/i local"]),
    "compute_at shared": ([ComputeAt("pre", "y", "i", "shared")], ["pre: i k at y/i shared"]),
    "compute_at again": ([ComputeAt("pre", "y", "i"), ComputeAt("pre", "y", "j")], ["pre: i k at y/j local"]),
    "compute_inline": ([ComputeInline("pre")], ["pre: inlined"]),
    "cache_write": ([CacheWrite("y")], ["y_acc: i j k", "y: i j"]),
    "cache_read": ([CacheRead("b", "y")], ["b_cache: c0 c1"]),
    "rfactor": ([Rfactor("y", "k", 4)], ["y_rf: i j v k", "y: i j v"]),
    "vectorize": ([Vectorize("out", "j")], ["out: i vectorized:j"]),
    "unroll": ([Unroll("y", "k")], ["y: i j unrolled:k"]),
    "parallel": ([Parallel("y", "i")], ["y: parallel:i j k"]),
    "bind": ([Bind("y", "j", "threadIdx.x")], ["y: i threadIdx.x:j k"]),
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal(name: str) -> None:
    trace, lines = LEGAL[name]
    assert changed(*trace) == lines


def test_new_stages_come_before_their_reader() -> None:
    state = after(CacheWrite("y"), CacheRead("b", "y_acc"), Rfactor("y_acc", "k", 5))
    assert list(state.stages) == ["pre", "b_cache", "y_acc_rf", "y_acc", "y", "out", "last"]


def body(state: ScheduleState, name: str) -> str:
    compute = state.stages[name].compute
    return print_dag(ComputeDag((compute,), (compute,))).splitlines()[0]


def test_cache_write_moves_the_body() -> None:
    state = after(CacheWrite("y"))
    assert body(state, "y_acc") == "y_acc[i < 6, j < 8; k < 10]: f32 = reduce_sum(pre[i, k] * b[k, j]; k)"
    assert body(state, "y") == "y[i < 6, j < 8]: f32 = y_acc[i, j]"


def test_cache_read_changes_one_reader() -> None:
    state = after(CacheRead("y", "last"))
    assert body(state, "y_cache") == "y_cache[c0 < 6, c1 < 8]: f32 = y[c0, c1]"
    assert body(state, "out") == "out[i < 6, j < 8]: f32 = y[i, j] * 2.0_f32"
    assert body(state, "last") == "last[i < 6, j < 8]: f32 = out[i, j] - y_cache[i, j]"


def test_rfactor_guards_what_does_not_divide() -> None:
    state = after(Rfactor("y", "k", 4))
    product = "pre[i, k * 4 + v] * b[k * 4 + v, j]"
    head = "y_rf[i < 6, j < 8, v < 4; k < 3]: f32 = reduce_sum"
    assert body(state, "y_rf") == f"{head}(select(k * 4 + v < 10, {product}, 0.0_f32); k)"
    assert body(state, "y") == "y[i < 6, j < 8; v < 4]: f32 = reduce_sum(y_rf[i, j, v]; v)"
    assert "select" not in body(after(Rfactor("y", "k", 5)), "y_rf")


def test_layout_rewrite_is_noted() -> None:
    step = LayoutRewrite("b", (0, 4), ((1, 0), (0, 0), (1, 1)))
    assert after(step).layouts == {"b": step}


def test_prefetch_is_noted() -> None:
    layout = LayoutRewrite("b", (0, 4), ((1, 0), (0, 0), (1, 1)))
    step = Prefetch("y_acc", "b", "y", "j.0")
    state = after(layout, CacheWrite("y"), Split("y", "j", (4,)), ComputeAt("y_acc", "y", "j.0"), step)
    assert state.prefetches == {"y_acc": step}


def test_axes_of_one_name_are_told_apart() -> None:
    k = reduce_axis(3, "i")
    x = placeholder("x", (4, 3), F32)
    y = compute("y", (4,), lambda i: reduce_over(ReduceOp.SUM, x[i, k.var], [k]), [k], ("i",))
    assert replay(build_dag([y]), ()).stages["y"].loops == ["i", "i2"]


def test_iterators_of_a_reduce_axis_are_known() -> None:
    stage = after(Split("y", "k", (2,)), Fuse("y", ("k.0", "k.1")), Split("y", "k.0@k.1", (3,))).stages["y"]
    assert [name for name in stage.loops if stage.is_reduce(name)] == ["k.0@k.1.0", "k.0@k.1.1"]


ILLEGAL: dict[str, tuple[list[Step], str]] = {
    "unknown stage": ([Split("z", "i", (2,))], "no stage z; stages: pre, y, out, last"),
    "placeholder": ([Split("a", "i", (2,))], "no stage a"),
    "split: unknown loop": ([Split("y", "n", (2,))], "y has no loop n; loops: i, j, k"),
    "split: loop is gone": ([Split("y", "i", (2,)), Split("y", "i", (2,))], "y has no loop i; loops: i.0, i.1, j, k"),
    "split: no factors": ([Split("y", "i", ())], "factors must be >= 1"),
    "split: factor 0": ([Split("y", "i", (2, 0))], "factors must be >= 1"),
    "fuse: one loop": ([Fuse("y", ("i",))], "fuse takes two loops or more"),
    "fuse: no loop": ([Fuse("y", ())], "fuse takes two loops or more"),
    "fuse: unknown loop": ([Fuse("y", ("n", "i"))], "y has no loop n"),
    "fuse: not adjacent": ([Reorder("y", ("i", "k", "j")), Fuse("y", ("i", "j"))], "must be adjacent"),
    "fuse: inner first": ([Fuse("y", ("j", "i"))], "outermost first"),
    "fuse: beyond the last": ([Fuse("y", ("k", "n"))], "must be adjacent"),
    "fuse: mixed": ([Fuse("y", ("j", "k"))], "cannot fuse spatial with reduce loops"),
    "reorder: one missing": ([Reorder("y", ("k", "i"))], "reorder must name every loop: i, j, k"),
    "reorder: one twice": ([Reorder("y", ("k", "i", "i"))], "reorder must name every loop"),
    "reorder: unknown": ([Reorder("y", ("k", "i", "n"))], "reorder must name every loop"),
    "compute_at: output": ([ComputeAt("out", "last", "i")], "out is an output"),
    "compute_at: unknown loop": ([ComputeAt("pre", "y", "n")], "y has no loop n"),
    "compute_at: earlier": ([ComputeAt("y", "pre", "i")], "pre does not come after y"),
    "compute_at: itself": ([ComputeAt("y", "y", "i")], "y does not come after y"),
    "compute_at: inlined": ([ComputeInline("pre"), ComputeAt("pre", "y", "i")], "an inlined stage has no loops"),
    "compute_at: scope": ([ComputeAt("pre", "y", "i", "global")], "expected local or shared, got global"),
    "compute_inline: output": ([ComputeInline("out")], "out is an output"),
    "compute_inline: reduction": ([ComputeInline("y")], "y is a reduction"),
    "cache_write: late": ([Split("y", "i", (2,)), CacheWrite("y")], "cache_write must come before the stage's loops"),
    "cache_write: twice": ([CacheWrite("y"), CacheWrite("y")], "stage y_acc exists already"),
    "cache_read: no reader": ([CacheRead("a", "y")], "y does not read a"),
    "cache_read: twice": ([CacheRead("y", "out"), CacheRead("y", "last")], "stage y_cache exists already"),
    "rfactor: late": ([Reorder("y", ("k", "i", "j")), Rfactor("y", "k", 2)], "rfactor must come before"),
    "rfactor: spatial": ([Rfactor("y", "i", 2)], "i is no reduce axis of y"),
    "rfactor: factor 0": ([Rfactor("y", "k", 0)], "factor must be >= 1"),
    "rfactor: twice": ([Rfactor("y", "k", 2), Rfactor("y", "v", 2)], "stage y_rf exists already"),
    "vectorize: unknown loop": ([Vectorize("y", "n")], "y has no loop n"),
    "vectorize: outer": ([Vectorize("y", "j")], "only the innermost loop can be vectorized"),
    "parallel: inner": ([Parallel("y", "j")], "only the outermost loop of a root stage can be parallel"),
    "parallel: attached": ([ComputeAt("pre", "y", "i"), Parallel("pre", "i")], "outermost loop of a root stage"),
    "parallel: reduce": ([Reorder("y", ("k", "i", "j")), Parallel("y", "k")], "a reduce loop cannot be parallel"),
    "unroll: unknown loop": ([Unroll("y", "n")], "y has no loop n"),
    "bind: unknown loop": ([Bind("y", "n", "threadIdx.x")], "y has no loop n"),
    "bind: unknown thread": ([Bind("y", "i", "warp")], "expected one of blockIdx.x, .*threadIdx.z, got warp"),
    "layout: unknown": ([LayoutRewrite("w", (0, 0), ((0, 0), (1, 0)))], "no tensor w"),
    "layout: dims": ([LayoutRewrite("b", (0,), ((0, 0),))], "b has 2 dims"),
    "layout: negative": ([LayoutRewrite("b", (0, -2), ((0, 0), (1, 0), (1, 1)))], "tiles must be >= 0"),
    "layout: part missing": ([LayoutRewrite("b", (0, 4), ((0, 0), (1, 0)))], "order must list each of"),
    "layout: part twice": ([LayoutRewrite("b", (0, 0), ((0, 0), (0, 0), (1, 0)))], "order must list each of"),
    "layout: no such part": ([LayoutRewrite("b", (0, 0), ((0, 0), (1, 1)))], "order must list each of"),
    "prefetch: unknown loop": ([Prefetch("y", "b", "out", "n")], "out has no loop n"),
    "prefetch: at root": ([Prefetch("y", "b", "out", "i")], "y is not in out"),
    "prefetch: no reduction": ([ComputeAt("pre", "y", "i"), Prefetch("pre", "b", "y", "i")], "pre is no reduction"),
    "prefetch: no tiles": ([ComputeAt("y", "out", "i"), Prefetch("y", "b", "out", "i")], "b is not stored in tiles"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal(name: str) -> None:
    trace, message = ILLEGAL[name]
    *legal, last = trace
    state = after(*legal)
    before = show(state)
    with pytest.raises(ScheduleError, match=message):
        apply_step(state, last)
    assert show(state) == before  # a search may go on with another step


def test_a_new_loop_needs_a_new_name() -> None:
    x = compute("x", (4, 6), lambda i, j: placeholder("p", (4, 6), F32)[i, j], axis_names=("i", "i.0"))
    with pytest.raises(ScheduleError, match=r"i\.0 exists already"):
        replay(build_dag([x]), (Split("x", "i", (2,)),))


def test_replay_names_the_step() -> None:
    with pytest.raises(ScheduleError, match=r"step 1 \(Vectorize\(stage='y', iterator='i'\)\): .*innermost"):
        after(Split("y", "k", (2,)), Vectorize("y", "i"))


UNDONE: dict[str, tuple[list[Step], str]] = {
    "attached loop is split": ([ComputeAt("pre", "y", "i"), Split("y", "i", (2,))], "loop i of y, which is gone"),
    "attached loop is fused": ([ComputeAt("pre", "y", "i"), Fuse("y", ("i", "j"))], "gone; loops: i@j, k"),
    "target has no such loop": ([ComputeAt("pre", "y", "k"), CacheWrite("y")], "loop k of y, which is gone"),
    "vectorized no longer innermost": ([Vectorize("out", "j"), Reorder("out", ("j", "i"))], "out: only the innermost"),
    "parallel no longer outermost": ([Parallel("out", "i"), Reorder("out", ("j", "i"))], "out: only the outermost"),
    "parallel placed": ([Parallel("pre", "i"), ComputeAt("pre", "y", "i")], "pre: only the outermost"),
}


@pytest.mark.parametrize("name", UNDONE)
def test_what_a_later_step_undid(name: str) -> None:
    trace, message = UNDONE[name]
    with pytest.raises(ScheduleError, match=message):
        after(*trace)


def test_an_inlined_target_computes_nothing() -> None:
    x = placeholder("x", (4,), F32)
    first = compute("first", (4,), lambda i: x[i] + 1.0, axis_names=("i",))
    second = compute("second", (4,), lambda i: first[i] * 2.0, axis_names=("i",))
    third = compute("third", (4,), lambda i: second[i] - 1.0, axis_names=("i",))
    trace = (ComputeAt("first", "second", "i"), ComputeInline("second"))
    with pytest.raises(ScheduleError, match="first is computed in second, which is inlined"):
        replay(build_dag([third]), trace)


def test_annotations_move_with_their_loops() -> None:
    state = after(Vectorize("out", "j"), Reorder("out", ("j", "i")), Reorder("out", ("i", "j")))
    assert state.stages["out"].kinds == {"j": ForKind.VECTORIZED}
