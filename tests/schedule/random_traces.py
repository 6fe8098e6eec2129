"""Random small tasks and random legal traces of them, from any source of choices: hypothesis or a seeded sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mcompile.dtypes import DType
from mcompile.errors import ScheduleError
from mcompile.ir.expr import Cast, Expr, ReduceOp, Unary, UnaryOp, all_of, maximum, minimum, select
from mcompile.ir.tensor import Compute, Tensor, compute, placeholder, reduce_axis, reduce_over
from mcompile.schedule.lower import lower
from mcompile.schedule.merge_axes import merge_axes
from mcompile.schedule.state import ScheduleState, Stage, apply_step
from mcompile.schedule.steps import (
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
    Trace,
    Unroll,
    Vectorize,
)
from mcompile.schedule.task import Task
from tests.schedule.programs import F32, conv2d, matmul, plain_task, relu, softmax

T = TypeVar("T")
Choose = Callable[[Sequence[Any]], Any]

_LARGEST_VECTOR = 48
_LARGEST_UNROLL = 64  # copies of a stage's body


# Tasks


def random_task(choose: Choose, target: str = "cpu") -> Task:
    """A task of a random kind and shape; the order in which its arguments lie in memory is random too."""
    return merge_axes(random_plain_task(choose, target))


def random_plain_task(choose: Choose, target: str = "cpu") -> Task:
    """The same before its axes are merged."""
    outputs, constants = choose(_KINDS)(choose)
    tensors = _reachable(outputs)
    orders = {t.name: _order(choose, len(t.shape)) for t in tensors if not isinstance(t, Compute) or t in outputs}
    return plain_task(outputs, orders, constants if choose([False, True]) else (), target=target)


def _order(choose: Choose, rank: int) -> tuple[int, ...]:
    row_major = tuple(range(rank))
    swapped = (*row_major[:-2], *row_major[:-3:-1])
    channels_last = (*row_major[:1], *row_major[2:], *row_major[1:2])
    return choose([row_major, row_major, swapped, channels_last])


def _reachable(outputs: list[Compute]) -> list[Tensor]:
    found: dict[Tensor, None] = {}
    stack: list[Tensor] = [*outputs]
    while stack:
        tensor = stack.pop()
        found[tensor] = None
        if isinstance(tensor, Compute):
            stack.extend(tensor.inputs)
    return list(found)


Drawn = tuple[list[Compute], tuple[str, ...]]  # outputs, names of constants


def _conv(choose: Choose) -> Drawn:
    kernel, stride, pad = choose([(1, 1, 0), (3, 1, 1), (3, 2, 1), (2, 2, 0), (3, 1, 0)])
    groups = choose([1, 1, 2])
    channels, filters = groups * choose([1, 2, 3]), groups * choose([1, 3, 5])
    size = (choose([3, 4, 5]), choose([3, 5, 6]))
    return [conv2d(choose([1, 2]), channels, *size, filters, kernel, stride, pad, groups)], ("w", "b")


def _depthwise(choose: Choose) -> Drawn:
    channels = choose([3, 5, 17])
    return [conv2d(1, channels, choose([3, 5]), 4, channels, 3, choose([1, 2]), 1, channels)], ("w", "b")


def _matmul(choose: Choose) -> Drawn:
    y = matmul(choose([1, 5, 7, 12]), choose([1, 6, 18, 33]), choose([1, 4, 9]), choose([1, 1, 3]))
    return [relu(y) if choose([False, True]) else y], choose([("b",), ("a",)])


def _transposed_epilogue(choose: Choose) -> Drawn:
    rows, heads, width = choose([3, 5]), choose([2, 3]), choose([4, 6])
    y = matmul(rows, heads * width, choose([4, 7]))
    return [compute("z", (heads, rows, width), lambda h, i, j: y[0, i, h * width + j] * 0.5 + 1.0)], ("b",)


def _softmax(choose: Choose) -> Drawn:
    return [softmax(choose([1, 3, 6]), choose([5, 16, 37]))], ()


def _normalisation(choose: Choose) -> Drawn:
    """Rows less their mean, by their deviation; scaled by a vector."""
    rows, columns = choose([2, 5]), choose([6, 16, 21])
    x, scale = placeholder("x", (rows, columns), F32), placeholder("scale", (columns,), F32)
    k, k2 = reduce_axis(columns), reduce_axis(columns)
    total = compute("total", (rows,), lambda i: reduce_over(ReduceOp.SUM, x[i, k.var], [k]), [k])
    centred = compute("centred", (rows, columns), lambda i, j: x[i, j] - total[i] * (1 / columns))
    power = compute(
        "power", (rows,), lambda i: reduce_over(ReduceOp.SUM, centred[i, k2.var] * centred[i, k2.var], [k2]), [k2]
    )
    y = compute("y", (rows, columns), lambda i, j: centred[i, j] / Unary(UnaryOp.SQRT, power[i] + 1.0) * scale[j])
    return [y], ("scale",)


def _elementwise(choose: Choose) -> Drawn:
    """A chain with a value read twice, broadcasts, and a second output where drawn."""
    shape = (choose([1, 3]), choose([2, 5]), choose([7, 16, 19]))
    a, b, c = placeholder("a", shape, F32), placeholder("b", shape[-1:], F32), placeholder("c", shape[1:2], F32)
    first = compute("first", shape, lambda i, j, k: a[i, j, k] * b[k] + c[j])
    second = compute("second", shape, lambda i, j, k: maximum(first[i, j, k], first[i, j, shape[2] - 1 - k]))
    third = compute("third", (shape[2], shape[0], shape[1]), lambda k, i, j: second[i, j, k] - b[k])
    return [second, third] if choose([False, True]) else [third], ("b", "c")


def _pooling(choose: Choose) -> Drawn:
    """Windows over a padded input: the largest, or the sum."""
    channels, size = choose([1, 3, 17]), choose([4, 5, 7])
    kernel, stride = choose([(2, 2), (3, 2), (3, 1)])
    op = choose([ReduceOp.MAX, ReduceOp.SUM])
    x = placeholder("x", (channels, size, size), F32)
    low = -3.0 if op is ReduceOp.MAX else 0.0
    pad = compute(
        "pad",
        (channels, size, size + 1),
        lambda c, h, w: select(w < size, x[c, h, w], low),
        axis_names=("c", "h", "w"),
    )
    kh, kw = reduce_axis(kernel, "kh"), reduce_axis(kernel, "kw")
    out = (channels, (size - kernel) // stride + 1, (size + 1 - kernel) // stride + 1)
    y = compute(
        "pool",
        out,
        lambda c, h, w: reduce_over(op, pad[c, h * stride + kh.var, w * stride + kw.var], [kh, kw]),
        [kh, kw],
        ("c", "h", "w"),
    )
    return [compute("scaled", out, lambda c, h, w: y[c, h, w] * 0.25)], ()


def _quantised(choose: Choose) -> Drawn:
    """Bytes multiplied, summed as INT32, and cast to floats."""
    m, n, k = choose([3, 5]), choose([6, 17]), choose([4, 10])
    a, b = placeholder("a", (m, k), DType.INT8), placeholder("b", (n, k), DType.INT8)
    axis = reduce_axis(k)

    def wide(value: Any) -> Any:
        return Cast(DType.INT32, value)

    y = compute(
        "y",
        (m, n),
        lambda i, j: reduce_over(ReduceOp.SUM, wide(a[i, axis.var]) * wide(b[j, axis.var]), [axis]),
        [axis],
    )
    return [compute("z", (m, n), lambda i, j: Cast(F32, y[i, j]) * 0.125)], ("b",)


def _interleaved(choose: Choose) -> Drawn:
    """A sum written to every second column, as a transposed convolution in sub-pixel form is."""
    rows, columns, phases, k = choose([2, 3]), choose([3, 5]), choose([2, 3]), reduce_axis(choose([3, 6]))
    x, w = placeholder("x", (rows, columns, k.extent), F32), placeholder("w", (phases, k.extent), F32)
    part = compute(
        "part",
        (rows, columns, phases),
        lambda i, j, p: reduce_over(ReduceOp.SUM, x[i, j, k.var] * w[p, k.var], [k]),
        [k],
        ("i", "j", "p"),
    )
    return [compute("y", (rows, columns * phases), lambda i, j: part[i, j // phases, j % phases])], ("w",)


def _graph(choose: Choose) -> Drawn:
    """Some stages, each of a random form, over random earlier ones; the last, and sometimes others, are outputs."""
    shape = (choose([1, 2, 3]), choose([4, 5]), choose([6, 16, 17]))
    tensors: list[Tensor] = [placeholder("x", shape, F32), placeholder("y", shape, F32)]
    stages: list[Compute] = []
    for number in range(choose([2, 3, 4, 5])):
        stages.extend(choose(_FORMS)(f"s{number}", choose, tensors))
        tensors.append(stages[-1])
    others = [stage for stage in stages[:-1] if choose([False, False, True])]
    return [*others, stages[-1]], ("y",)


Form = Callable[[str, Choose, list[Tensor]], list[Compute]]


def _unary(name: str, choose: Choose, tensors: list[Tensor]) -> list[Compute]:
    source = choose(tensors)
    function: Callable[[Expr], Expr] = choose(
        [lambda x: maximum(x, 0.0), lambda x: x * 0.5 + 1.0, lambda x: Unary(UnaryOp.EXP, minimum(x, 1.0))]
    )
    return [compute(name, source.shape, lambda *i: function(source[i]))]


def _binary(name: str, choose: Choose, tensors: list[Tensor]) -> list[Compute]:
    a = choose(tensors)
    b = choose([tensor for tensor in tensors if tensor.shape == a.shape])
    function: Callable[[Expr, Expr], Expr] = choose(
        [lambda x, y: x + y, lambda x, y: x - y * 0.5, maximum, lambda x, y: select(x < y, x, y)]
    )
    return [compute(name, a.shape, lambda *i: function(a[i], b[i]))]


def _mirrored(name: str, choose: Choose, tensors: list[Tensor]) -> list[Compute]:
    source = choose(tensors)
    last = source.shape[-1] - 1
    return [compute(name, source.shape, lambda *i: source[(*i[:-1], last - i[-1])])]


def _shifted(name: str, choose: Choose, tensors: list[Tensor]) -> list[Compute]:
    source, dim = choose(tensors), choose([0, 1])

    def body(*indices: Expr) -> Expr:
        moved = (*indices[:dim], indices[dim] - 1, *indices[dim + 1 :])
        return select(indices[dim] >= 1, source[moved], 0.5)

    return [compute(name, source.shape, body)]


def _transposed(name: str, choose: Choose, tensors: list[Tensor]) -> list[Compute]:
    source = choose(tensors)
    return [compute(name, source.shape[::-1], lambda *i: source[i[::-1]])]


def _reshaped(name: str, choose: Choose, tensors: list[Tensor]) -> list[Compute]:
    """The last two dims as one, which is then cut the other way round."""
    source = choose(tensors)
    *outer, rows, columns = source.shape

    def body(*indices: Expr) -> Expr:
        position = indices[-2] * rows + indices[-1]
        return source[(*indices[:-2], position // columns, position % columns)]

    return [compute(name, (*outer, columns, rows), body)]


def _centred(name: str, choose: Choose, tensors: list[Tensor]) -> list[Compute]:
    """Each row less its sum or largest element."""
    source, op = choose(tensors), choose([ReduceOp.SUM, ReduceOp.MAX])
    k = reduce_axis(source.shape[-1])
    row = compute(f"{name}_row", source.shape[:-1], lambda *i: reduce_over(op, source[(*i, k.var)], [k]), [k])
    return [row, compute(name, source.shape, lambda *i: source[i] - row[i[:-1]] * 0.25)]


def _windowed(name: str, choose: Choose, tensors: list[Tensor]) -> list[Compute]:
    """Sums of three neighbours, what is beyond the edge counted as nothing."""
    source = choose(tensors)
    k, extent = reduce_axis(3), source.shape[-1]

    def body(*indices: Expr) -> Expr:
        place = indices[-1] + k.var - 1
        inside = select(all_of([place >= 0, place < extent]), source[(*indices[:-1], place)], 0.0)
        return reduce_over(ReduceOp.SUM, inside, [k])

    return [compute(name, source.shape, body, [k])]


_FORMS: tuple[Form, ...] = (
    _unary, _binary, _binary, _mirrored, _shifted, _transposed, _reshaped, _centred, _windowed,
)  # fmt: skip

_KINDS: tuple[Callable[[Choose], Drawn], ...] = (
    *[_graph] * 3, _conv, _depthwise, _matmul, _transposed_epilogue, _softmax, _normalisation, _elementwise, _pooling,
    _quantised, _interleaved,
)  # fmt: skip


# Traces


def random_trace(task: Task, choose: Choose, proposals: int = 16) -> Trace:
    """A trace that lowers: of the proposed steps those that are legal after the ones before."""
    state = ScheduleState(task.dag, {c.name: Stage.of(c) for c in task.dag.computes})
    taken: Trace = ()
    for _ in range(proposals):
        step = choose(_PROPOSALS)(state, choose)
        if step is None:
            continue
        try:
            apply_step(state, step)
        except ScheduleError:
            continue
        taken = (*taken, step)
    if _lowers(task, taken):
        return taken
    kept: Trace = ()
    for step in taken:
        if _lowers(task, (*kept, step)):
            kept = (*kept, step)
    return kept


def _lowers(task: Task, trace: Trace) -> bool:
    try:
        lower(task, trace)
    except ScheduleError:
        return False
    return True


def _stage(state: ScheduleState, choose: Choose) -> Stage:
    return choose(list(state.stages.values()))


def _a_loop(state: ScheduleState, choose: Choose) -> tuple[Stage, str] | None:
    stage = _stage(state, choose)
    return (stage, choose(stage.loops)) if stage.loops else None


def _propose_split(state: ScheduleState, choose: Choose) -> Step | None:
    if (found := _a_loop(state, choose)) is None:
        return None
    factors = choose([(2,), (3,), (4,), (8,), (16,), (2, 3), (3, 2), (2, 4), (1,), (2, 2, 2)])
    return Split(found[0].name, found[1], factors)


def _propose_fuse(state: ScheduleState, choose: Choose) -> Step | None:
    stage = _stage(state, choose)
    if len(stage.loops) < 2:
        return None
    count = choose([2, 2, min(3, len(stage.loops))])
    start = choose(range(len(stage.loops) - count + 1))
    return Fuse(stage.name, tuple(stage.loops[start : start + count]))


def _propose_reorder(state: ScheduleState, choose: Choose) -> Step | None:
    """One loop to another place."""
    if (found := _a_loop(state, choose)) is None:
        return None
    stage, moved = found
    loops = [name for name in stage.loops if name != moved]
    loops.insert(choose(range(len(loops) + 1)), moved)
    return Reorder(stage.name, tuple(loops))


def _propose_compute_at(state: ScheduleState, choose: Choose) -> Step | None:
    stage, found = _stage(state, choose), _a_loop(state, choose)
    return ComputeAt(stage.name, found[0].name, found[1]) if found is not None else None


def _propose_consumer(state: ScheduleState, choose: Choose) -> Step | None:
    """Compute a stage in a loop of one that reads it."""
    stage = _stage(state, choose)
    readers = [r for r in state.stages.values() if any(source.name == stage.name for source in r.compute.inputs)]
    if not readers or not (reader := choose(readers)).loops:
        return None
    return ComputeAt(stage.name, reader.name, choose(reader.loops))


def _propose_inline(state: ScheduleState, choose: Choose) -> Step | None:
    return ComputeInline(_stage(state, choose).name)


def _propose_cache_write(state: ScheduleState, choose: Choose) -> Step | None:
    return CacheWrite(_stage(state, choose).name)


def _propose_cache_read(state: ScheduleState, choose: Choose) -> Step | None:
    stage = _stage(state, choose)
    return CacheRead(choose(stage.compute.inputs).name, stage.name) if stage.compute.inputs else None


def _propose_rfactor(state: ScheduleState, choose: Choose) -> Step | None:
    stage = _stage(state, choose)
    if not stage.reduce_axes:
        return None
    return Rfactor(stage.name, choose(stage.reduce_axes), choose([1, 2, 3, 4, 16]))


def _propose_vectorize(state: ScheduleState, choose: Choose) -> Step | None:
    stage = _stage(state, choose)
    if not stage.loops or extent_of(stage, stage.loops[-1]) > _LARGEST_VECTOR:
        return None
    return Vectorize(stage.name, stage.loops[-1])


def _propose_unroll(state: ScheduleState, choose: Choose) -> Step | None:
    if (found := _a_loop(state, choose)) is None:
        return None
    stage, name = found
    copies = extent_of(stage, name)
    for other, kind in stage.kinds.items():
        copies *= extent_of(stage, other) if kind is not None and other in stage.loops else 1
    return Unroll(stage.name, name) if copies <= _LARGEST_UNROLL else None


def _propose_parallel(state: ScheduleState, choose: Choose) -> Step | None:
    stage = _stage(state, choose)
    return Parallel(stage.name, stage.loops[0]) if stage.loops else None


def _propose_layout(state: ScheduleState, choose: Choose) -> Step | None:
    """Tiles of a placeholder's or stage's dims, in a random order; legal for constants only."""
    tensor = choose(state.dag.tensors)
    tiles = tuple(choose([0, 0, 2, 3, 4]) for _ in tensor.shape)
    parts = [(dim, part) for dim, tile in enumerate(tiles) for part in range(2 if tile else 1)]
    order: list[tuple[int, int]] = []
    for part in parts:
        order.insert(choose(range(len(order) + 1)), part)
    return LayoutRewrite(tensor.name, tiles, tuple(order))


def _propose_prefetch(state: ScheduleState, choose: Choose) -> Step | None:
    """Of a tensor in tiles, by a reduction that is computed inside another stage, in any loop of that."""
    placed = [stage for stage in state.stages.values() if stage.attach is not None and stage.reduce_axes]
    if not placed or not state.layouts:
        return None
    stage = choose(placed)
    target = state.stages[stage.attach.target]
    loops = [*target.loops, *target.fuses]
    return Prefetch(stage.name, choose(list(state.layouts)), target.name, choose(loops)) if loops else None


def extent_of(stage: Stage, name: str) -> int:
    """The largest number of iterations of a loop."""
    if name in stage.axes:
        return stage.axes[name].extent
    for split in stage.splits.values():
        if split.outer == name:
            return -(-extent_of(stage, split.parent) // split.factor)
        if split.inner == name:
            return min(split.factor, extent_of(stage, split.parent))
    fuse = next(fuse for fuse in stage.fuses.values() if fuse.fused == name)
    total = 1
    for component in fuse.components:
        total *= extent_of(stage, component)
    return total


_PROPOSALS: tuple[Callable[[ScheduleState, Choose], Step | None], ...] = (
    *[_propose_split] * 4, *[_propose_fuse] * 2, *[_propose_reorder] * 3, _propose_compute_at,
    *[_propose_consumer] * 4, *[_propose_inline] * 2, *[_propose_cache_write] * 2, _propose_cache_read,
    *[_propose_rfactor] * 2, *[_propose_vectorize] * 2, _propose_unroll, *[_propose_parallel] * 2,
    *[_propose_layout] * 2, _propose_prefetch,
)  # fmt: skip
