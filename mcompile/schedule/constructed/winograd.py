"""Loops for a convolution by Winograd's F(4x4, 3x3), and the estimate that says where it pays.

    for block of tiles (parallel):
        v[36, c, t] = input transform               (registers: half of it for one vector of channels)
        for 36 points: m[t, k] = sum_c v * u        (register tiles as for any matrix product)
        y[4, 4, k] = epilogue(output transform of m)

A block's v and m stay in the second-level cache. Where there are too few tiles for all threads the three parts are
functions of their own, the products in parallel over the 36 points.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil, prod

from mcompile.ir.expr import Var
from mcompile.ir.tensor import Axis, Compute
from mcompile.schedule import steps
from mcompile.schedule.analysis import TaskAnalysis
from mcompile.schedule.constructed.builder import TraceBuilder
from mcompile.schedule.constructed.reduction import axis_map
from mcompile.schedule.constructed.tiles import choose_tile
from mcompile.schedule.task import Task
from mcompile.schedule.variants.winograd import POINTS, TILE, Convolution, find_convolution, tile_grid

VARIANT = "winograd4"
_GEMM_SHARE = 0.85  # of the FMA peak, reached by the small products
_TRANSFORM_OPERATIONS = 260  # vector operations for a tile's two input passes, and about as many for the output's
_MEMORY_BYTES_PER_CYCLE = 8.0
_SMALL_BLOCK = 14
_PAYS = 0.8  # estimated time, of the direct form's, from which it is chosen


@dataclass(frozen=True)
class WinogradPlan:
    """The convolution of a task, its vector axes, and the stage that its result is finished in."""

    conv: Convolution
    channel: int  # the image's dim that is reduced and contiguous
    filters: Axis  # of the convolution: the output's channels
    epilogue: Compute
    between: tuple[Compute, ...]

    @property
    def outer(self) -> tuple[Axis, ...]:
        """Axes of the convolution besides rows, columns and filters."""
        return tuple(axis for axis in self.conv.compute.axes[:-2] if axis is not self.filters)

    @property
    def channels(self) -> int:
        return int(self.conv.image.source.shape[self.channel])

    @property
    def tiles(self) -> int:
        return prod(tile_grid(self.conv))


def plan_winograd(task: Task) -> WinogradPlan | None:
    """What F(4x4, 3x3) would be applied to; None if the task has no such convolution of constant weights."""
    conv = find_convolution(task.dag)
    analysis = TaskAnalysis(task)
    if conv is None or conv.kernel.source.name not in task.constants or len(analysis.outputs) != 1:
        return None
    filters = [a for a in conv.compute.axes[:-2] if a.var in conv.kernel.indices]
    channels = [d for d, index in enumerate(conv.image.indices[:-2]) if index in {axis.var for axis in conv.others}]
    if len(filters) != 1 or len(channels) != 1 or filters[0].var in conv.image.indices:
        return None
    chain = [conv.compute]
    while chain[-1].name not in analysis.outputs:
        consumers = analysis.consumers(chain[-1])
        found = axis_map(consumers[0], chain[-1]) if len(consumers) == 1 else None
        if found is None or any(divisor != 1 for _, divisor, _ in found.values()):
            return None
        chain.append(consumers[0])
    return WinogradPlan(conv, channels[0], filters[0], chain[-1], tuple(chain[1:-1]))


@dataclass(frozen=True)
class _Sizes:
    """Bytes of the transformed weights, and of a tile's transformed input and products (all depths of it)."""

    weights: int
    tile: int
    batch: int

    @staticmethod
    def of(plan: WinogradPlan) -> _Sizes:
        depth = prod(axis.extent for axis in plan.conv.others) // plan.channels
        halo = prod(axis.extent for axis in plan.outer if not _is_plain(plan, axis))
        batch = prod(axis.extent for axis in plan.outer if _is_plain(plan, axis))
        weights = POINTS**2 * plan.filters.extent * plan.channels * depth * 4
        return _Sizes(weights, POINTS**2 * 4 * (plan.channels + plan.filters.extent) * halo, batch)


def pays(task: Task, plan: WinogradPlan) -> bool:
    """Whether the estimate is clearly below the direct form's."""
    lanes, threads = task.target.lanes(4), task.target.threads
    channels, filters = plan.channels, plan.filters.extent
    if channels < lanes or filters < lanes:
        return False
    images = prod(axis.extent for axis in plan.outer)
    depth = prod(axis.extent for axis in plan.conv.others) // channels
    points = images * plan.conv.height.extent * plan.conv.width.extent
    direct = points * filters * channels * depth * 9 / (2 * lanes)
    direct_bytes = 9 * filters * channels * depth * 4
    work = images * plan.tiles * POINTS**2 * filters * channels * depth / (2 * lanes) / _GEMM_SHARE
    transforms = images * plan.tiles * (ceil(channels / lanes) + ceil(filters / lanes)) * _TRANSFORM_OPERATIONS
    traffic = min(_fused_traffic(task, plan), _staged_traffic(plan))
    winograd = work + transforms + traffic / _MEMORY_BYTES_PER_CYCLE
    return winograd / threads < _PAYS * (direct + 0.3 * direct_bytes / _MEMORY_BYTES_PER_CYCLE) / threads


def _fused_traffic(task: Task, plan: WinogradPlan) -> float:
    """Bytes from beyond the second-level cache where a block's parts stay in it: weights, perhaps for each block."""
    sizes = _Sizes.of(plan)
    if sizes.weights <= task.target.l2_bytes // 2:
        return sizes.weights
    return sizes.weights * ceil(plan.tiles / block_tiles(task, plan)) * sizes.batch


def _staged_traffic(plan: WinogradPlan) -> float:
    """Likewise where all tiles' parts are written and read again."""
    sizes = _Sizes.of(plan)
    return sizes.weights + 2 * sizes.tile * plan.tiles * sizes.batch


def block_tiles(task: Task, plan: WinogradPlan) -> int:
    """Tiles of a block: whole rows of tiles or even parts of one, such that its parts stay in the second-level cache.

    Small weights are read again for each block at little cost, so a block is about as large as a register tile; large
    ones are read as seldom as the cache allows.
    """
    sizes = _Sizes.of(plan)
    down, across = tile_grid(plan.conv)
    choices = [part for part in range(1, across) if across % part == 0]
    choices += [across * rows for rows in range(1, down + 1)]
    fitting = [tiles for tiles in choices if tiles * sizes.tile <= 0.8 * task.target.l2_bytes] or choices[:1]
    if sizes.weights <= task.target.l2_bytes // 2:
        return min(fitting, key=lambda tiles: abs(tiles - _SMALL_BLOCK))
    threads = task.target.threads

    def busiest(tiles: int) -> int:
        return ceil(ceil(plan.tiles / tiles) * sizes.batch / threads) * tiles

    best = min(busiest(tiles) for tiles in fitting)
    return max(tiles for tiles in fitting if busiest(tiles) <= 1.1 * best)


def _is_plain(plan: WinogradPlan, axis: Axis) -> bool:
    """Whether the image is read at exactly this axis (a batch), not at a window around it (depth)."""
    return axis.var in plan.conv.image.indices


def _is_staged(task: Task, plan: WinogradPlan) -> bool:
    sizes = _Sizes.of(plan)
    if task.target.threads > 1 and ceil(plan.tiles / block_tiles(task, plan)) * sizes.batch < task.target.threads:
        return True
    return _staged_traffic(plan) < _fused_traffic(task, plan)


def schedule_winograd(builder: TraceBuilder, plan: WinogradPlan, staged: bool | None = None) -> None:
    """Write the steps; the builder's task has the variant's dag.

    `staged`: each part is a function of its own, for all tiles; None leaves that to the estimate.
    """
    _Winograd(builder, plan, _is_staged(builder.task, plan) if staged is None else staged).write()


class _Winograd:
    def __init__(self, builder: TraceBuilder, plan: WinogradPlan, staged: bool) -> None:
        self.builder, self.plan = builder, plan
        self.name = plan.conv.compute.name
        self.lanes = builder.lanes
        self.staged = staged
        self.block = plan.tiles if self.staged else block_tiles(builder.task, plan)

    def write(self) -> None:
        self._inline()
        block, inner = self._output()
        self._transformed_image(block)
        self._products(block)
        self._half_output(inner)

    def _inline(self) -> None:
        kept = {f"{self.name}{part}" for part in ("_bd", "_v", "_m", "_am")} | {self.plan.epilogue.name}
        for stage in self.builder.analysis.stages:
            if stage.name not in kept:
                self.builder.inline(stage)

    def _axis(self, stage: str, position: int) -> str:
        return list(self.builder.stage(stage).axes)[position]

    def _output(self) -> tuple[str | None, str]:
        """The epilogue's loops; gives the loop of a block of tiles (None: staged) and that of one vector of filters."""
        builder, out = self.builder, self.plan.epilogue.name
        loops = self._epilogue_loops()
        rows, row = builder.split(out, loops[self.plan.conv.height], TILE)
        columns, column = builder.split(out, loops[self.plan.conv.width], TILE)
        filters, lane = builder.split(out, loops[self.plan.filters], self.lanes)
        plain = [loops[axis] for axis in self.plan.outer if _is_plain(self.plan, axis)]
        halo = [loops[axis] for axis in self.plan.outer if not _is_plain(self.plan, axis)]
        builder.reorder(out, [*plain, rows, columns, *halo, filters, row, column, lane])
        tiles = builder.fuse(out, [rows, columns])
        block, tile = builder.split(out, tiles, self.block)
        builder.reorder(out, [*plain, block, *halo, tile, filters, row, column, lane])
        builder.unroll(out, row, column)
        builder.vectorize(out, lane)
        if self.staged:
            return None, builder.parallel(out, [*plain, block, *halo, tile, filters])
        if builder.task.target.threads > 1:
            return builder.parallel(out, [*plain, block]), filters
        return block, filters

    def _epilogue_loops(self) -> dict[Axis, str]:
        """The epilogue's loop for each axis of the convolution, by position: the stages between keep the order."""
        chain = list(dict.fromkeys([self.plan.conv.compute, *self.plan.between, self.plan.epilogue]))
        axes: list[Axis] = list(chain[0].axes)
        for producer, consumer in pairwise(chain):
            step = axis_map(consumer, producer)
            assert step is not None
            position = {axis: index for index, axis in enumerate(producer.axes)}
            axes = [step[position[axis]][0] for axis in axes]
        names = list(self.builder.stage(self.plan.epilogue.name).spatial_axes)
        positions = [self.plan.epilogue.axes.index(axis) for axis in axes]
        return {axis: names[place] for axis, place in zip(self.plan.conv.compute.axes, positions, strict=True)}

    def _transformed_image(self, block: str | None) -> None:
        builder, v, half = self.builder, f"{self.name}_v", f"{self.name}_bd"
        a, b, *place, t = builder.stage(v).spatial_axes
        channel = place[self.plan.channel]
        vectors, lane = builder.split(v, channel, self.lanes)
        others = [axis for axis in place if axis != channel]
        builder.reorder(v, [*others, t, vectors, a, b, lane])
        builder.unroll(v, a, b)
        builder.vectorize(v, lane)
        inner = vectors
        if block is None:
            inner = builder.parallel(v, [*others, t, vectors])
        else:
            builder.compute_at(v, self.plan.epilogue.name, block)
        *place, t, a, j = builder.stage(half).spatial_axes
        channel = place[self.plan.channel]
        others = [axis for axis in place if axis != channel]
        vectors, lane = builder.split(half, channel, self.lanes)
        builder.reorder(half, [*others, t, vectors, j, a, lane])
        builder.unroll(half, a, j)
        builder.vectorize(half, lane)
        builder.compute_at(half, v, inner)

    def _products(self, block: str | None) -> None:
        builder, m = self.builder, f"{self.name}_m"
        reduction = builder.stage(m).compute
        steps_count = prod(axis.extent for axis in reduction.reduce_axes)
        filters = self._filter_position()
        width = reduction.axes[2 + filters].extent
        tile = choose_tile(self.block, width, steps_count, self.lanes, True, builder.task.target)
        builder.add(steps.CacheWrite(m))
        a, b, *place, t = builder.stage(m).spatial_axes
        column = place[filters]
        others = [axis for axis in place if axis != column]
        vectors = builder.split(m, column, tile.vectors, self.lanes)
        rows = builder.split(m, t, tile.rows)
        builder.reorder(m, [a, b, vectors[0], *others, *rows, *vectors[1:]])
        builder.unroll(m, rows[1], vectors[1])
        builder.vectorize(m, vectors[2])
        if block is None:
            builder.parallel(m, [a, b])
        else:
            builder.compute_at(m, self.plan.epilogue.name, block)
        self._accumulator(f"{m}_acc", m, rows[0], filters)
        self._pack(tile.vectors * self.lanes)
        if _Sizes.of(self.plan).weights > builder.task.target.l2_bytes // 2:
            builder.add(steps.Prefetch(f"{m}_acc", f"{self.name}_u", m, vectors[0]))

    def _filter_position(self) -> int:
        return self.plan.conv.compute.axes[:-2].index(self.plan.filters)

    def _accumulator(self, acc: str, target: str, place: str, filters: int) -> None:
        builder = self.builder
        stage = builder.stage(acc)
        a, b, *lead, t = stage.spatial_axes
        reduces = list(stage.reduce_axes)
        vector, lane = builder.split(acc, lead[filters], self.lanes)
        others = [axis for index, axis in enumerate(lead) if index != filters]
        builder.reorder(acc, [a, b, *others, *reduces, t, vector, lane])
        builder.unroll(acc, t, vector)
        builder.vectorize(acc, lane)
        builder.compute_at(acc, target, place)

    def _pack(self, width: int) -> None:
        """Weights in the order in which the products read them."""
        indices = self.plan.conv.kernel.indices[:-2]
        reduces: list[Var] = [axis.var for axis in self.plan.conv.others]
        filters = indices.index(self.plan.filters.var)
        inner = sorted((d for d in range(len(indices)) if d != filters), key=lambda d: reduces.index(indices[d]))  # type: ignore[arg-type]
        tiles = (0, 0, *(width if dim == filters else 0 for dim in range(len(indices))))
        order = ((0, 0), (1, 0), (2 + filters, 0), *((2 + dim, 0) for dim in inner), (2 + filters, 1))
        self.builder.add(steps.LayoutRewrite(f"{self.name}_u", tiles, order))

    def _half_output(self, inner: str) -> None:
        builder, half = self.builder, f"{self.name}_am"
        *lead, t, r, b = builder.stage(half).spatial_axes
        filters = lead[self._filter_position()]
        vectors, lane = builder.split(half, filters, self.lanes)
        others = [axis for axis in lead if axis != filters]
        builder.reorder(half, [*others, t, vectors, b, r, lane])
        builder.unroll(half, r, b)
        builder.vectorize(half, lane)
        builder.compute_at(half, self.plan.epilogue.name, inner)
