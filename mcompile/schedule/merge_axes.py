"""Canonical tasks: unit dims dropped and neighbouring dims that always go together merged into one.

    y[0, c, h, w] = x[0, c, h, w] + b[c]   ->   y[c, hw] = x[c, hw] + b[c]

Fewer loops, simpler addresses, and more tasks that are equal. Memory is untouched: only shapes and strides change.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mcompile.ir.expr import Expr, Load, Reduce, Var, as_expr, substitute, transform, var, walk
from mcompile.ir.tensor import Axis, Compute, ComputeDag, Placeholder, Tensor
from mcompile.schedule.task import Task

Pair = tuple[str, int]  # (tensor, d): its dims d and d + 1; for reduce axes d counts on after the spatial ones


def merge_axes(task: Task) -> Task:
    """The canonical form of `task`: same memory, same values."""
    task = _drop_unit_dims(task)
    while True:
        merged = _merge_once(task)
        if merged is None:
            return task
        task = merged


def _drop_unit_dims(task: Task) -> Task:
    kept = {t.name: tuple(d for d, extent in enumerate(t.shape) if extent != 1) for t in task.dag.tensors}
    new: dict[str, Tensor] = {}

    def rebuild(tensor: Tensor) -> Tensor:
        dims = kept[tensor.name]
        shape = tuple(tensor.shape[d] for d in dims)
        if not isinstance(tensor, Compute):
            return Placeholder(tensor.name, shape, tensor.dtype)
        units = {a.var: as_expr(0) for a in (*tensor.axes, *tensor.reduce_axes) if a.extent == 1}

        def change(node: Expr) -> Expr | None:
            if isinstance(node, Load) and node.source.name in new and node.source is not new[node.source.name]:
                return Load(new[node.source.name], tuple(node.indices[d] for d in kept[node.source.name]))
            return None

        body = transform(substitute(tensor.body, units), change)
        reduce_axes = tuple(a for a in tensor.reduce_axes if a.extent != 1)
        if isinstance(body, Reduce):
            body = Reduce(body.op, body.value, tuple(a.var for a in reduce_axes)) if reduce_axes else body.value
        return Compute(tensor.name, shape, tensor.dtype, tuple(tensor.axes[d] for d in dims), reduce_axes, body)

    for tensor in task.dag.tensors:
        new[tensor.name] = rebuild(tensor)
    strides = {n: tuple(values[d] for d in kept[n]) for n, values in task.strides.items()}
    return _with_tensors(task, new, strides)


def _with_tensors(task: Task, new: dict[str, Tensor], strides: dict[str, tuple[int, ...]]) -> Task:
    outputs = tuple(new[output.name] for output in task.dag.outputs)
    dag = ComputeDag(tuple(new.values()), outputs)  # type: ignore[arg-type]
    return replace(task, dag=dag, strides=strides)


@dataclass
class _Groups:
    """Union-find over pairs that can only be merged together; `bad` ones cannot be merged at all."""

    parents: dict[Pair, Pair] = field(default_factory=dict)
    bad: set[Pair] = field(default_factory=set)

    def find(self, pair: Pair) -> Pair:
        root = self.parents.setdefault(pair, pair)
        if root == pair:
            return pair
        self.parents[pair] = self.find(root)
        return self.parents[pair]

    def union(self, a: Pair, b: Pair) -> None:
        root, other = self.find(a), self.find(b)
        if root != other:
            self.parents[other] = root
            if other in self.bad:
                self.bad.add(root)

    def reject(self, pair: Pair) -> None:
        self.bad.add(self.find(pair))


def _merge_once(task: Task) -> Task | None:
    groups = _Groups()
    for tensor in task.dag.tensors:
        _judge_strides(task, tensor, groups)
        if isinstance(tensor, Compute):
            _judge_body(tensor, groups)
    chosen = next((groups.find(pair) for pair in list(groups.parents) if groups.find(pair) not in groups.bad), None)
    if chosen is None:
        return None
    return _apply(task, {pair for pair in groups.parents if groups.find(pair) == chosen})


def _judge_strides(task: Task, tensor: Tensor, groups: _Groups) -> None:
    strides = task.strides.get(tensor.name)
    for dim in range(len(tensor.shape) - 1):
        groups.find((tensor.name, dim))
        if strides is not None and strides[dim] != strides[dim + 1] * tensor.shape[dim + 1]:
            groups.reject((tensor.name, dim))


def _judge_body(compute: Compute, groups: _Groups) -> None:
    """Relate the pairs of axes of `compute` to the pairs of dims that its loads walk in lockstep with them."""
    axes = (*compute.axes, *compute.reduce_axes)
    position = {axis.var: index for index, axis in enumerate(axes)}
    body = compute.body.value if isinstance(compute.body, Reduce) else compute.body
    spatial = len(compute.axes)
    for index in range(spatial, len(axes) - 1):
        groups.find((compute.name, index))
    for load in walk(body):
        if isinstance(load, Load):
            _judge_load(compute, load, position, groups)
    for user in walk(body):
        for child in user.children:
            if isinstance(child, Var) and child in position and not isinstance(user, Load):
                _reject_axis(compute, position[child], groups)
    if isinstance(body, Var) and body in position:
        _reject_axis(compute, position[body], groups)


def _reject_axis(compute: Compute, index: int, groups: _Groups) -> None:
    groups.reject((compute.name, index - 1))
    groups.reject((compute.name, index))


def _judge_load(compute: Compute, load: Load, position: dict[Var, int], groups: _Groups) -> None:
    source, indices = load.source, load.indices
    spatial = len(compute.axes)
    extents = [axis.extent for axis in (*compute.axes, *compute.reduce_axes)]
    where = [position.get(index, -1) if isinstance(index, Var) else -1 for index in indices]
    paired: set[tuple[int, int]] = set()  # (dim, axis position) walked in lockstep
    for dim in range(len(indices) - 1):
        axis = where[dim]
        together = axis >= 0 and where[dim + 1] == axis + 1 and axis + 1 != spatial
        if together and source.shape[dim : dim + 2] == (extents[axis], extents[axis + 1]):
            groups.union((compute.name, axis), (source.name, dim))
            paired.add((dim, axis))
        else:
            groups.reject((source.name, dim))
    for dim, axis in enumerate(where):
        if axis < 0:
            continue
        if (dim, axis) not in paired:  # the pair (axis, axis + 1) is not walked together here
            groups.reject((compute.name, axis))
        if (dim - 1, axis - 1) not in paired:
            groups.reject((compute.name, axis - 1))


def _apply(task: Task, pairs: set[Pair]) -> Task:
    """Merge the given pairs (one class of the union-find); a pair's neighbour is left for the next round."""
    taken: set[Pair] = set()
    for name, dim in sorted(pairs):
        if (name, dim - 1) not in taken:
            taken.add((name, dim))
    if len(taken) != len(pairs):  # overlapping pairs of one tensor: (d, d+1) and (d+1, d+2) are related
        taken = pairs
    new: dict[str, Tensor] = {}
    strides = dict(task.strides)
    for tensor in task.dag.tensors:
        new[tensor.name] = _merge_tensor(tensor, taken, new)
        if tensor.name in strides:
            values = strides[tensor.name]
            strides[tensor.name] = tuple(s for d, s in enumerate(values) if (tensor.name, d) not in taken)
    return _with_tensors(task, new, strides)


def _merge_shape(name: str, shape: tuple[int, ...], pairs: set[Pair]) -> tuple[int, ...]:
    merged: list[int] = []
    for dim, extent in enumerate(shape):
        if dim and (name, dim - 1) in pairs:
            merged[-1] *= extent
        else:
            merged.append(extent)
    return tuple(merged)


def _merge_tensor(tensor: Tensor, pairs: set[Pair], new: dict[str, Tensor]) -> Tensor:
    shape = _merge_shape(tensor.name, tensor.shape, pairs)
    if not isinstance(tensor, Compute):
        return Placeholder(tensor.name, shape, tensor.dtype)
    axes: list[Axis] = []
    owner: dict[Var, Axis] = {}
    for index, axis in enumerate((*tensor.axes, *tensor.reduce_axes)):
        if index and (tensor.name, index - 1) in pairs:
            axes[-1] = Axis(axes[-1].var, axes[-1].extent * axis.extent)
        else:
            axes.append(Axis(var(axis.var.name), axis.extent))
        owner[axis.var] = axes[-1]

    def change(node: Expr) -> Expr | None:
        if not isinstance(node, Load) or node.source is new.get(node.source.name):
            return None
        indices = [
            owner[index].var if isinstance(index, Var) and index in owner else index
            for dim, index in enumerate(node.indices)
            if not (dim and (node.source.name, dim - 1) in pairs)
        ]
        return Load(new[node.source.name], tuple(indices))

    body = tensor.body
    value = body.value if isinstance(body, Reduce) else body
    value = transform(value, change)
    value = substitute(value, {old: axis.var for old, axis in owner.items()})
    count = len(shape)
    if isinstance(body, Reduce):
        value = Reduce(body.op, value, tuple(axis.var for axis in axes[count:]))
    return Compute(tensor.name, shape, tensor.dtype, tuple(axes[:count]), tuple(axes[count:]), value)
