"""Lowering, looked at: remainders, regions of placed stages, masks, memory of our own, and what it refuses."""

from __future__ import annotations

from textwrap import dedent

import pytest

from mcompile.errors import ScheduleError
from mcompile.ir.expr import ReduceOp, select
from mcompile.ir.printer import print_func
from mcompile.ir.stmt import Allocate, Barrier, For, ForKind, If, PrimFunc, Scope, walk_stmts
from mcompile.ir.tensor import compute, placeholder, reduce_axis, reduce_over
from mcompile.schedule.lower import LoweredTask, lower, padded_extent, padded_lanes
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
    Vectorize,
)
from mcompile.schedule.task import Task
from tests.schedule.programs import F32, check, conv_task, make_task, matmul


def plus_one(*shape: int) -> Task:
    """y = x + 1"""
    names = ("i", "j")[: len(shape)]
    x = placeholder("x", shape, F32)
    return make_task([compute("y", shape, lambda *i: x[i] + 1.0, axis_names=names)])


def two_stages(*shape: int) -> Task:
    """a = x + 1; y = a * 2, with the axes kept apart by reading a reversed along the last one."""
    names = ("i", "j")[: len(shape)]
    x = placeholder("x", shape, F32)
    a = compute("a", shape, lambda *i: x[i] + 1.0, axis_names=names)
    last = shape[-1] - 1
    return make_task([compute("y", shape, lambda *i: a[(*i[:-1], last - i[-1])] * 2.0, axis_names=names)])


def kept(task: Task, *trace: Step) -> LoweredTask:
    """Lowered, after a check that the value is kept."""
    return check(task, trace)


def text(lowered: LoweredTask) -> str:
    """The function without its header."""
    (func,) = lowered.funcs
    lines = print_func(func).splitlines()
    return dedent("\n".join(lines[next(i for i, line in enumerate(lines) if line.strip().startswith("block")) + 1 :]))


def regions(lowered: LoweredTask, name: str) -> list[tuple[int, ...]]:
    """Shapes of the buffers that a placed stage is computed in, in the order of the text."""
    statements = [stmt for func in lowered.funcs for stmt in walk_stmts(func.body)]
    return [stmt.buffer.shape for stmt in statements if isinstance(stmt, Allocate) and stmt.buffer.name == name]


def masked(func: PrimFunc) -> bool:
    return any(isinstance(stmt, If) for stmt in walk_stmts(func.body)) or "select" in print_func(func)


# Remainders


def test_a_split_that_divides() -> None:
    expected = """\
    serial i.0 < 3:
        serial i.1 < 4:
            y[i.0 * 4 + i.1] = x[i.0 * 4 + i.1] + 1.0_f32"""
    assert text(kept(plus_one(12), Split("y", "i", (4,)))) == dedent(expected)


def test_a_remainder_has_loops_of_its_own() -> None:
    expected = """\
    serial i.0 < 2:
        serial i.1 < 4:
            y[i.0 * 4 + i.1] = x[i.0 * 4 + i.1] + 1.0_f32
    serial i.1_1 < 2:
        y[i.1_1 + 8] = x[i.1_1 + 8] + 1.0_f32"""
    assert text(kept(plus_one(10), Split("y", "i", (4,)))) == dedent(expected)


def test_a_remainder_at_each_level() -> None:
    expected = """\
    serial i.0 < 2:
        serial i.1 < 2:
            serial i.2 < 3:
                y[i.0 * 6 + i.1 * 3 + i.2] = x[i.0 * 6 + i.1 * 3 + i.2] + 1.0_f32
    serial i.2_1 < 3:
        y[i.2_1 + 12] = x[i.2_1 + 12] + 1.0_f32
    serial i.2_2 < 2:
        y[i.2_2 + 15] = x[i.2_2 + 15] + 1.0_f32"""
    assert text(kept(plus_one(17), Split("y", "i", (2, 3)))) == dedent(expected)


def test_a_factor_beyond_the_extent() -> None:
    assert text(kept(plus_one(5), Split("y", "i", (8,)))) == "serial i.1 < 5:\n    y[i.1] = x[i.1] + 1.0_f32"


def test_parallel_iterations_branch_on_the_remainder() -> None:
    expected = """\
    parallel i.0 < 3:
        if i.0 < 2:
            serial i.1 < 4:
                y[i.1 + min(i.0, 1) * 4] = x[i.1 + min(i.0, 1) * 4] + 1.0_f32
        else:
            serial i.1_1 < 2:
                y[i.1_1 + 8] = x[i.1_1 + 8] + 1.0_f32"""
    assert text(kept(plus_one(10), Split("y", "i", (4,)), Parallel("y", "i.0"))) == dedent(expected)


def test_fused_loops_branch_on_the_remainder() -> None:
    lowered = kept(two_stages(3, 10), ComputeInline("a"), Split("y", "j", (4,)), Fuse("y", ("i", "j.0")))
    assert "if i@j.0 % 3 < 2:" in text(lowered)
    assert "serial i@j.0 < 9:" in text(lowered)


def test_both_dims_leave_a_remainder() -> None:
    trace = [Split("y", "i", (2,)), Split("y", "j", (4,)), Reorder("y", ("i.0", "j.0", "i.1", "j.1"))]
    lowered = kept(two_stages(5, 10), ComputeInline("a"), *trace)
    (func,) = lowered.funcs
    assert sum(isinstance(stmt, For) and stmt.var.name == "j.1" for stmt in walk_stmts(func.body)) == 4
    assert not masked(func)


def test_an_inner_part_outside_its_outer_part() -> None:
    trace = (Split("y", "i", (4,)), Reorder("y", ("i.1", "i.0")))
    kept(plus_one(12), *trace)
    with pytest.raises(ScheduleError, match=r"y: i\.1 stands outside i\.0, which leaves a remainder"):
        lower(plus_one(10), trace)


@pytest.mark.parametrize("extent", [2, 7, 12, 13])
@pytest.mark.parametrize("factors", [(1,), (3,), (5, 1), (2, 3), (2, 2, 2), (20,)], ids=str)
def test_every_remainder_is_computed(extent: int, factors: tuple[int, ...]) -> None:
    kept(plus_one(extent), Split("y", "i", factors))
    kept(plus_one(extent), Split("y", "i", factors), Parallel("y", "i.0"))
    last = f"i.{len(factors)}"
    kept(plus_one(extent), Split("y", "i", factors), Vectorize("y", last))


# Masks


@pytest.mark.parametrize("extent", range(2, 50))
def test_masks_only_where_vectors_are_not_whole(extent: int) -> None:
    (func,) = kept(plus_one(extent), Vectorize("y", "i")).funcs
    is_whole = extent % 16 == 0 or extent & (extent - 1) == 0
    assert masked(func) != is_whole
    loop = next(stmt for stmt in walk_stmts(func.body) if isinstance(stmt, For))
    assert loop.kind is ForKind.VECTORIZED
    assert loop.extent == padded_lanes(extent)


def test_padded_lanes() -> None:
    assert [padded_lanes(n) for n in (1, 2, 3, 5, 9, 16, 17, 32, 40, 48)] == [1, 2, 4, 8, 16, 16, 32, 32, 48, 48]


def test_padded_extent_holds_the_last_vector() -> None:
    assert [padded_extent(n) for n in (1, 3, 5, 9, 16, 17, 19, 25, 32)] == [1, 4, 8, 16, 16, 17, 20, 32, 32]


def test_memory_of_our_own_takes_whole_vectors() -> None:
    """No mask around the store; a load of memory that is not ours is masked."""
    trace = [ComputeAt("a", "y", "i"), Vectorize("a", "j")]
    expected = """\
    serial i < 4:
        allocate local a: f32[1, 16] strides [16, 1]:
            block a:
                vectorized j < 16:
                    a[0, j] = select(j < 11, x[i, j], 0.0_f32) + 1.0_f32
            serial j_1 < 11:
                y[i, j_1] = a[0, 10 - j_1] * 2.0_f32"""
    assert text(kept(two_stages(4, 11), *trace)).replace("-j_1 + 10", "10 - j_1") == dedent(expected)


def test_lanes_of_a_reduction_are_masked() -> None:
    """A lane beyond the extent must not be summed, wherever the sum is stored."""
    task = make_task([matmul(3, 5, 7)])
    trace = (CacheWrite("y"), Vectorize("y_acc", "k"), ComputeAt("y_acc", "y", "m"))
    assert "if k < 7:" in text(kept(task, *trace))


def test_a_vector_longer_than_its_memory_is_masked() -> None:
    """17 elements in one vector of 32 lanes; the buffer holds 17."""
    trace = (ComputeAt("a", "y", "i"), Vectorize("a", "j"))
    assert "if j < 17:" in text(kept(two_stages(2, 17), *trace))


# Regions


def conv_loops(task: Task) -> dict[str, str]:
    """The conv's loops without its unit dims, by place: channels, rows, columns."""
    names = [axis.var.name for axis in next(c for c in task.dag.computes if c.name == "conv").axes]
    return dict(zip(("channels", "rows", "columns"), names[-3:], strict=True))


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (2, 2), (5, 3), (2, 3)])
def test_region_of_a_row(kernel: int, stride: int) -> None:
    """A row of the output needs kernel rows of the padded input, and all columns that windows touch."""
    task = conv_task(1, 3, 12, 11, 4, kernel, stride, 1)
    loops = conv_loops(task)
    columns = (11 + 2 - kernel) // stride * stride + kernel
    lowered = kept(task, Reorder("conv", order(task, loops["rows"])), ComputeAt("pad", "conv", loops["rows"]))
    assert regions(lowered, "pad") == [(3, kernel, padded_extent(columns))]


def order(task: Task, *first: str) -> tuple[str, ...]:
    conv = next(c for c in task.dag.computes if c.name == "conv")
    names = [axis.var.name for axis in (*conv.axes, *conv.reduce_axes)]
    return (*first, *(name for name in names if name not in first))


def test_region_of_a_tile_and_of_its_remainder() -> None:
    """7 rows in tiles of 3: two tiles that need 5 padded rows each, and one that needs 3."""
    task = conv_task(1, 2, 7, 6, 3, 3, 1, 1)
    loops = conv_loops(task)
    rows = f"{loops['rows']}.0"
    trace = [Split("conv", loops["rows"], (3,)), Reorder("conv", _split_order(task, loops["rows"]))]
    lowered = kept(task, *trace, ComputeAt("pad", "conv", rows))
    assert regions(lowered, "pad") == [(2, 5, 8), (2, 3, 8)]


def _split_order(task: Task, name: str) -> tuple[str, ...]:
    rest = [loop for loop in order(task) if loop != name]
    return (f"{name}.0", f"{name}.1", *rest)


def test_region_inside_the_reduction() -> None:
    """At the innermost reduce loop one element is needed."""
    task = conv_task(1, 3, 5, 5, 4, 3, 1, 1)
    lowered = kept(task, ComputeAt("pad", "conv", order(task)[-1]))
    assert regions(lowered, "pad") == [(1, 1, 1)]


def test_region_through_a_placed_consumer() -> None:
    """pad is needed by conv, which is itself computed in rows of relu."""
    task = conv_task(1, 2, 6, 5, 4, 3, 1, 1)
    relu = next(c for c in task.dag.computes if c.name == "relu")
    rows = relu.axes[-2].var.name
    loops = (rows, *(axis.var.name for axis in relu.axes if axis.var.name != rows))
    trace = [
        ComputeInline("bias"),
        Reorder("relu", loops),
        ComputeAt("conv", "relu", rows),
        ComputeAt("pad", "relu", rows),
    ]
    lowered = kept(task, *trace)
    assert regions(lowered, "pad") == [(2, 3, 8)]
    assert regions(lowered, "conv") == [(4, 1, 8)]  # 5 columns; whole vectors


def windows(extent: int, kernel: int, stride: int) -> Task:
    """Sums of windows over squares."""
    x, k = placeholder("x", (extent,), F32), reduce_axis(kernel)
    square = compute("square", (extent,), lambda i: x[i] * x[i], axis_names=("i",))
    count = (extent - kernel) // stride + 1
    return make_task(
        [compute("y", (count,), lambda i: reduce_over(ReduceOp.SUM, square[i * stride + k.var], [k]), [k], ("o",))]
    )


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (2, 3), (1, 2)])
@pytest.mark.parametrize("tile", [1, 2, 4])
def test_region_of_strided_windows(kernel: int, stride: int, tile: int) -> None:
    task = windows(40, kernel, stride)
    (count,) = task.dag.outputs[0].shape
    lowered = kept(task, Split("y", "o", (tile,)), ComputeAt("square", "y", "o.0"))
    sizes = [tile, *([count % tile] if count % tile else [])]
    needed = [(size - 1) * stride + kernel for size in sizes]
    assert regions(lowered, "square") == [(padded_extent(size),) for size in needed]


def test_region_of_a_reversed_read() -> None:
    lowered = kept(two_stages(3, 12), Split("y", "j", (4,)), ComputeAt("a", "y", "j.0"))
    assert regions(lowered, "a") == [(1, 4)]


def test_region_of_two_readers_in_one_loop() -> None:
    """e is read by the sum and by the output; both inside a row."""
    x, k = placeholder("x", (4, 6), F32), reduce_axis(6)
    e = compute("e", (4, 6), lambda i, j: x[i, j] * x[i, j], axis_names=("i", "j"))
    total = compute("total", (4,), lambda i: reduce_over(ReduceOp.SUM, e[i, k.var], [k]), [k], ("i",))
    y = compute("y", (4, 6), lambda i, j: e[i, j] / total[i], axis_names=("i", "j"))
    lowered = kept(make_task([y]), ComputeAt("total", "y", "i"), ComputeAt("e", "y", "i"))
    assert regions(lowered, "e") == [(1, 8)]
    assert regions(lowered, "total") == [(1,)]


def test_region_under_part_of_a_fused_loop() -> None:
    """A tile of a fused loop crosses rows: what it needs is guarded, since it may be less than the region."""
    trace = [Fuse("y", ("i", "j")), Split("y", "i@j", (4,)), ComputeAt("a", "y", "i@j.0")]
    lowered = kept(two_stages(5, 6), *trace)
    assert regions(lowered, "a") == [(2, 8), (1, 2)]
    assert "if " in text(lowered)


def test_a_region_beyond_the_tensor_is_guarded() -> None:
    """What a Select skips is not computed: shift[j] = j < 4 ? a[j] : a[j - 4], both halves placed in tiles of 3."""
    x = placeholder("x", (4,), F32)
    a = compute("a", (4,), lambda i: x[i] + 1.0, axis_names=("i",))
    b = compute("b", (4,), lambda i: x[i] * 2.0, axis_names=("i",))
    y = compute("y", (8,), lambda j: select(j < 4, a[j], b[j - 4]), axis_names=("j",))
    trace = (Split("y", "j", (3,)), ComputeAt("a", "y", "j.0"), ComputeAt("b", "y", "j.0"))
    assert "if " in text(kept(make_task([y]), *trace))


# Memory


def own_strides(task: Task, name: str, *trace: Step) -> tuple[int, ...]:
    lowered = kept(task, *trace)
    return next(buffer.strides for buffer in lowered.scratch if buffer.name == name)


def test_memory_follows_the_loops() -> None:
    assert own_strides(two_stages(6, 10), "a") == (10, 1)
    assert own_strides(two_stages(6, 10), "a", Reorder("a", ("j", "i"))) == (1, 6)
    trace = [Split("a", "j", (4,)), Reorder("a", ("j.0", "i", "j.1"))]
    assert own_strides(two_stages(6, 10), "a", *trace) == (10, 1)  # by each dim's innermost loop


def test_rows_are_set_apart_in_the_cache() -> None:
    """Rows of 2048 bytes or a multiple would share cache sets: a line more between them."""
    assert own_strides(two_stages(2, 512), "a") == (528, 1)
    assert own_strides(two_stages(2, 1024), "a") == (1040, 1)
    assert own_strides(two_stages(2, 520), "a") == (520, 1)


def test_functions_and_their_memory() -> None:
    lowered = lower(two_stages(4, 5), (), "block")
    assert [func.name for func in lowered.funcs] == ["block", "block_1"]
    assert [[param.name for param in func.params] for func in lowered.funcs] == [["x", "a"], ["a", "y"]]
    assert [[param.name for param in func.outputs] for func in lowered.funcs] == [["a"], ["y"]]
    assert [buffer.name for buffer in lowered.scratch] == ["a"]
    assert lowered.preparations == ()


def test_arguments_lie_as_the_task_says() -> None:
    x = placeholder("x", (3, 4), F32)
    task = make_task([compute("y", (3, 4), lambda i, j: x[i, j] * 2.0)], {"x": (1, 0)})
    (func,) = kept(task).funcs
    assert [param.strides for param in func.params] == [(1, 3), (4, 1)]


# Constants


def weights(m: int, n: int, k: int) -> Task:
    return make_task([matmul(m, n, k)], {}, ("b",))


@pytest.mark.parametrize(
    ("tiles", "parts", "shape"),
    [
        ((0, 0), ((1, 0), (0, 0)), (10, 7)),
        ((0, 4), ((1, 0), (0, 0), (1, 1)), (3, 7, 4)),
        ((3, 4), ((1, 0), (0, 0), (0, 1), (1, 1)), (3, 3, 3, 4)),
        ((8, 16), ((0, 1), (1, 1), (0, 0), (1, 0)), (8, 16, 1, 1)),
    ],
)
def test_layout_rewrite(tiles: tuple[int, ...], parts: tuple[tuple[int, int], ...], shape: tuple[int, ...]) -> None:
    """B[k, n] of 7 x 10, in tiles that do not divide, packed when linking."""
    step = LayoutRewrite("b", tiles, parts)
    lowered = kept(weights(4, 10, 7), step)
    assert next(param.shape for func in lowered.funcs for param in func.params if param.name == "b") == shape
    assert [(p.tensor, p.dag, p.layout) for p in lowered.preparations] == [("b", None, step)]


def test_layout_rewrite_of_what_is_no_constant() -> None:
    step = LayoutRewrite("a", (0, 0), ((1, 0), (0, 0)))
    with pytest.raises(ScheduleError, match="layout_rewrite: a is not a constant"):
        lower(weights(4, 10, 7), (step,))


def scaled_weights() -> Task:
    """y = x (w * 2): the product of constants is computed when linking."""
    x, w, k = placeholder("x", (3, 5), F32), placeholder("w", (5, 4), F32), reduce_axis(5)
    twice = compute("twice", (5, 4), lambda i, j: w[i, j] * 2.0, axis_names=("i", "j"))
    y = compute(
        "y", (3, 4), lambda i, j: reduce_over(ReduceOp.SUM, x[i, k.var] * twice[k.var, j], [k]), [k], ("m", "n")
    )
    return make_task([y], {}, ("w",))


def test_a_stage_of_constants_is_prepared() -> None:
    layout = LayoutRewrite("twice", (0, 4), ((1, 0), (0, 0), (1, 1)))
    for trace in ((), (layout,)):
        lowered = kept(scaled_weights(), *trace)
        assert len(lowered.funcs) == 1
        (preparation,) = lowered.preparations
        assert preparation.tensor == "twice"
        assert preparation.dag is not None
        assert [p.name for p in preparation.dag.placeholders] == ["w"]


def test_a_stage_of_constants_may_be_inlined() -> None:
    assert kept(scaled_weights(), ComputeInline("twice")).preparations == ()


# Caches and partial reductions


def test_a_register_tile() -> None:
    """The accumulator of a tile is zeroed, summed and written, remainders included."""
    tile = [Split("y", "m", (3,)), Split("y", "n", (8,)), Reorder("y", ("m.0", "n.0", "m.1", "n.1"))]
    acc = [Reorder("y_acc", ("k", "m", "n")), Vectorize("y_acc", "n"), ComputeAt("y_acc", "y", "n.0")]
    lowered = kept(weights(7, 20, 9), CacheWrite("y"), *tile, Vectorize("y", "n.1"), *acc)
    assert regions(lowered, "y_acc") == [(3, 8), (3, 4), (1, 8), (1, 4)]
    assert not masked(lowered.funcs[0])


def test_cache_read_of_a_tile() -> None:
    trace = [CacheRead("a", "y"), Split("y", "m", (3,)), ComputeAt("a_cache", "y", "m.0")]
    assert regions(kept(weights(7, 4, 5), *trace), "a_cache") == [(3, 8), (1, 8)]


@pytest.mark.parametrize("factor", [1, 3, 4, 16, 50])
def test_rfactor(factor: int) -> None:
    """A dot product of 37 in lanes, their remainder guarded."""
    task = make_task([matmul(1, 2, 37)])
    trace = [Rfactor("y", "k", factor), Reorder("y_rf", ("n", "k", "v")), Vectorize("y_rf", "v")]
    kept(task, *trace)
    kept(task, *trace, ComputeAt("y_rf", "y", "n"))


# Threads of a block


def shared_tile() -> tuple[Task, list[Step]]:
    """Each block of threads reads its part of x once."""
    task = two_stages(4, 16)
    trace: list[Step] = [Bind("y", "i", "blockIdx.x"), Split("y", "j", (8,)), Bind("y", "j.1", "threadIdx.x")]
    return task, [*trace, ComputeAt("a", "y", "j.0", "shared"), Bind("a", "j", "threadIdx.x")]


def test_shared_memory() -> None:
    task, trace = shared_tile()
    lowered = kept(task, *trace)
    (func,) = lowered.funcs
    allocate = next(stmt for stmt in walk_stmts(func.body) if isinstance(stmt, Allocate))
    assert allocate.buffer.scope is Scope.SHARED
    assert allocate.buffer.shape == (1, 8)
    assert sum(isinstance(stmt, Barrier) for stmt in walk_stmts(func.body)) == 2


def test_shared_memory_inside_the_threads_is_for_all_of_them() -> None:
    """Placed inside the thread loop, the region covers what every thread of the block reads."""
    trace = [Bind("y", "i", "blockIdx.x"), Bind("y", "j", "threadIdx.x"), ComputeAt("a", "y", "j", "shared")]
    lowered = kept(two_stages(3, 8), *trace, Bind("a", "j", "threadIdx.x"))
    assert regions(lowered, "a") == [(1, 8)]


def test_a_remainder_of_threads_is_guarded() -> None:
    trace = [Split("y", "i", (4,)), Bind("y", "i.0", "blockIdx.x"), Bind("y", "i.1", "threadIdx.x")]
    (func,) = kept(plus_one(10), *trace).funcs
    loops = [(stmt.var.name, stmt.extent) for stmt in walk_stmts(func.body) if isinstance(stmt, For)]
    assert loops == [("i.0", 3), ("i.1", 4)]
    assert masked(func)


# What is refused


def diamond() -> Task:
    """a is read by b and by y."""
    x = placeholder("x", (4, 6), F32)
    a = compute("a", (4, 6), lambda i, j: x[i, j] + 1.0, axis_names=("i", "j"))
    b = compute("b", (4, 6), lambda i, j: a[i, 5 - j] * 2.0, axis_names=("i", "j"))
    return make_task([compute("y", (4, 6), lambda i, j: a[i, j] + b[i, j], axis_names=("i", "j"))])


def weights_in_tiles(*trace: Step) -> list[Step]:
    return [LayoutRewrite("b", (0, 4), ((1, 0), (0, 0), (1, 1))), CacheWrite("y"), Split("y", "n", (4,)), *trace]


REFUSED: dict[str, tuple[Task, list[Step], str]] = {
    "an earlier reader": (diamond(), [ComputeAt("a", "y", "i")], "b reads a outside of where it is computed"),
    "a later reader": (diamond(), [ComputeAt("a", "b", "i")], "a is also read by y, outside b"),
    "a reader in an outer loop": (
        diamond(),
        [ComputeAt("a", "y", "j"), ComputeAt("b", "y", "i")],
        "b reads a outside of where it is computed",
    ),
    "inside a vector": (
        two_stages(4, 8),
        [Vectorize("y", "j"), ComputeAt("a", "y", "j")],
        "a cannot be computed in y's vectorized loop j",
    ),
    "shared by no threads": (
        two_stages(4, 8),
        [ComputeAt("a", "y", "i", "shared")],
        "a cannot be shared by the threads of y: no loop is bound to them",
    ),
    "prefetch inside": (
        weights(5, 10, 7),
        weights_in_tiles(ComputeAt("y_acc", "y", "n.0"), Prefetch("y_acc", "b", "y", "n.1")),
        r"prefetch: y_acc is not computed inside loop n\.1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    task, trace, message = REFUSED[name]
    with pytest.raises(ScheduleError, match=message):
        lower(task, tuple(trace))


def test_both_readers_inside() -> None:
    lowered = kept(diamond(), ComputeAt("a", "y", "i"), ComputeAt("b", "y", "i"))
    assert regions(lowered, "a") == [(1, 8)]
    kept(diamond(), ComputeAt("a", "y", "i"), ComputeAt("b", "y", "j"))


def test_prefetch_keeps_the_value() -> None:
    trace = weights_in_tiles(
        ComputeAt("y_acc", "y", "n.0"), Reorder("y", ("n.0", "m", "n.1")), Prefetch("y_acc", "b", "y", "n.0")
    )
    assert "prefetch b" in text(kept(weights(5, 10, 7), *trace))
