"""Partition: fusion groups become Tasks, and equal tasks are one.

    partition = partition_graph(layouts, groups, target)

`partition.uses` are the groups in the order in which they run: `TaskUse` (a task and the values that its tensors stand
for), `LoopUse` (a body with a partition of its own) or `HostUse`. `partition.tasks()` is the table of distinct tasks
with how often each runs, loop bodies included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from mcompile.dtypes import TensorType
from mcompile.errors import InternalError
from mcompile.graph.alignment import align
from mcompile.graph.fusion import Group, GroupKind, fuse
from mcompile.graph.graph import Array, Graph, Node
from mcompile.graph.layout import Layouts, assign_layouts, loop_body
from mcompile.graph.views import Strides, computes_of, dense_strides, rebuild, tensors_of
from mcompile.ir.expr import Binary, Call, Expr, Load, Reduce, Unary, walk
from mcompile.ir.tensor import Compute, ComputeDag, Placeholder, Tensor, build_dag, compute
from mcompile.schedule.merge_axes import merge_axes
from mcompile.schedule.task import Task
from mcompile.target import Target


@dataclass(frozen=True)
class TaskUse:
    """A place where a task runs. `values` gives, for each placeholder and output of the dag, its graph value.

    Where that value lies is told by `Layouts.storage`; its strides are in the task.
    """

    task: Task
    values: Mapping[str, str]
    nodes: tuple[str, ...]
    layouts: Layouts

    @property
    def inputs(self) -> tuple[str, ...]:
        """Values that are read, constants included."""
        return tuple(dict.fromkeys(self.values[tensor.name] for tensor in self.task.dag.placeholders))

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(self.values[tensor.name] for tensor in self.task.dag.outputs)

    @property
    def label(self) -> str:
        """The nodes it computes, for profiles."""
        return " + ".join(self.nodes)

    def constant(self, tensor: str) -> Array:
        """The array of one of the task's constants, row-major in the task's shape whatever lies in memory."""
        array = self.layouts.constant(self.values[tensor])
        placeholder = next(each for each in self.task.dag.placeholders if each.name == tensor)
        return array.reshape(placeholder.shape)


@dataclass(frozen=True)
class HostUse:
    """An operator that Python runs."""

    node: Node


@dataclass(frozen=True)
class Sliced:
    """A value of which each iteration of a loop takes one slice along `axis`; from the end if `reverse`.

    `body` is the value it is called inside of the body.
    """

    value: str
    body: str
    axis: int
    reverse: bool


@dataclass(frozen=True)
class LoopUse:
    """A Scan: `body` runs `count` times. `states`, row-major dense, go from each iteration to the next.

    `copies` copy the initial states; their placeholder and output stand for values of the graph around the loop,
    except that the output has no value there: it is the state of the first iteration.
    """

    node: Node
    count: int
    body: Partition
    initial: tuple[str, ...]  # values around the loop
    final: tuple[str, ...]  # "" where nobody wants it
    states: tuple[tuple[str, str], ...]  # (input, output) of the body
    copies: tuple[TaskUse, ...]
    scanned: tuple[Sliced, ...]
    stacked: tuple[Sliced, ...]  # value "" where nobody wants it


@dataclass(frozen=True)
class TaskWeight:
    task: Task
    weight: int  # how often a run of the model calls it


@dataclass(frozen=True)
class Partition:
    layouts: Layouts
    uses: tuple[TaskUse | LoopUse | HostUse, ...]

    def task_uses(self) -> Iterator[tuple[TaskUse, int]]:
        """Every use of a task, loop bodies included, with how often a run of the model comes there."""
        for use in self.uses:
            if isinstance(use, TaskUse):
                yield use, 1
            elif isinstance(use, LoopUse):
                yield from ((copy, 1) for copy in use.copies)
                yield from ((inner, use.count * times) for inner, times in use.body.task_uses())

    def tasks(self) -> tuple[TaskWeight, ...]:
        """The distinct tasks in order of first use."""
        weights: Counter[str] = Counter()
        tasks: dict[str, Task] = {}
        for use, times in self.task_uses():
            tasks.setdefault(use.task.workload_key, use.task)
            weights[use.task.workload_key] += times
        return tuple(TaskWeight(task, weights[key]) for key, task in tasks.items())


def partition_graph(layouts: Layouts, groups: Sequence[Group], target: Target) -> Partition:
    """A task for each group; loop bodies are laid out, fused and partitioned on their own."""
    tasks: dict[str, Task] = {}
    return _Partitioning(layouts, target, tasks).run(groups)


@dataclass
class _Partitioning:
    layouts: Layouts
    target: Target
    tasks: dict[str, Task]  # by workload key: equal tasks are one object

    def run(self, groups: Sequence[Group]) -> Partition:
        return Partition(self.layouts, tuple(self.use(group) for group in groups if not self.is_empty(group)))

    @property
    def graph(self) -> Graph:
        return self.layouts.graph

    def is_empty(self, group: Group) -> bool:
        """Whether a task has nothing to compute: all its outputs are tensors without elements."""
        empty = all(self.graph.types[value].size == 0 for value in group.outputs)
        return group.kind is GroupKind.TASK and empty

    def use(self, group: Group) -> TaskUse | LoopUse | HostUse:
        match group.kind:
            case GroupKind.HOST:
                return HostUse(self.graph.nodes[group.anchor])
            case GroupKind.LOOP:
                return self.loop(self.graph.nodes[group.anchor])
        return self.task_use(group)

    # --- tasks ---

    def task_use(self, group: Group) -> TaskUse:
        """Chain the nodes' computes on placeholders for the group's inputs."""
        tensors: dict[str, Tensor] = {
            value: Placeholder(f"x{number}", self.graph.types[value].dims, self.graph.types[value].dtype)
            for number, value in enumerate(group.inputs)
        }
        for name in group.nodes:
            node = self.graph.nodes[name]
            inputs = [tensors[value] if value else None for value in node.inputs]
            tensors.update(zip(node.outputs, computes_of(self.graph, node, inputs), strict=False))
        anchor = next(tensors[value] for value in self.graph.nodes[group.anchor].outputs if value in tensors)
        aligned = align([_compute(tensors[value]) for value in group.outputs], _compute(anchor))
        dag = canonical_dag(aligned.outputs)
        names = {tensor.name: value for value, tensor in tensors.items() if isinstance(tensor, Placeholder)}
        values = {placeholder.name: names[old] for placeholder, old in _renamed_placeholders(dag, aligned.outputs)}
        strides = {name: self.layouts.storage[value].strides for name, value in values.items()}
        for position, (tensor, value) in enumerate(zip(dag.outputs, group.outputs, strict=True)):
            values[tensor.name] = value
            strides[tensor.name] = aligned.strides(position, self.layouts.storage[value].strides)
        return self.shared(dag, values, strides, group.nodes)

    def shared(
        self, dag: ComputeDag, values: Mapping[str, str], strides: Mapping[str, Strides], nodes: tuple[str, ...]
    ) -> TaskUse:
        inputs = [tensor.name for tensor in dag.placeholders]
        constants = frozenset(name for name in inputs if self.layouts.is_constant(values[name]))
        if len(constants) == len(inputs):
            constants = frozenset()  # the result is wanted in memory at run time, so something must run
        free = {name: self.row_major(values[name]) for name in constants}
        task = merge_axes(Task(dag, {**strides, **free}, constants, self.target))
        return TaskUse(self.tasks.setdefault(task.workload_key, task), values, nodes, self.layouts)

    def row_major(self, value: str) -> Strides:
        shape = self.graph.types[value].dims
        return dense_strides(shape, range(len(shape)))

    # --- loops ---

    def loop(self, node: Node) -> LoopUse:
        """ONNX's Scan: states first, then scanned inputs; outputs likewise, the stacked ones last."""
        body = loop_body(node)
        if body is None:
            raise InternalError(f"{node.name}: {node.op} has no body")
        scans = int(node.attrs["num_scan_inputs"])
        states = len(node.inputs) - scans
        scanned = self.sliced(node, node.inputs[states:], body.inputs[states:], "input")
        outputs = (*node.outputs, *[""] * (len(body.outputs) - len(node.outputs)))
        if not scanned:
            raise InternalError(f"{node.name}: {node.op} scans no input")
        count = self.graph.types[scanned[0].value].dims[scanned[0].axis]
        stacked = self.sliced(node, outputs[states:], body.outputs[states:], "output")
        inner = self.body_partition(body, states, scanned, stacked)
        bodies = inner.layouts.graph
        return LoopUse(
            node,
            count,
            inner,
            node.inputs[:states],
            outputs[:states],
            tuple(zip(bodies.inputs[:states], bodies.outputs[:states], strict=True)),
            tuple(self.state_copy(node, value) for value in node.inputs[:states]),
            scanned,
            tuple(
                Sliced(each.value, name, each.axis, each.reverse)
                for each, name in zip(stacked, bodies.outputs[states:], strict=True)
            ),
        )

    def sliced(self, node: Node, values: Sequence[str], names: Sequence[str], end: str) -> tuple[Sliced, ...]:
        axes = node.attrs.get(f"scan_{end}_axes") or (0,) * len(values)
        directions = node.attrs.get(f"scan_{end}_directions") or (0,) * len(values)
        result = []
        for value, name, axis, direction in zip(values, names, axes, directions, strict=True):
            rank = len(self.graph.types[value].dims) if value else 1
            result.append(Sliced(value, name, int(axis) % rank, bool(direction)))
        return tuple(result)

    def body_partition(
        self, body: Graph, states: int, scanned: Sequence[Sliced], stacked: Sequence[Sliced]
    ) -> Partition:
        def row_major(types: Sequence[TensorType]) -> list[Strides]:
            return [dense_strides(each.dims, range(len(each.dims))) for each in types]

        inputs = row_major([body.types[value] for value in body.inputs])
        outputs = row_major([body.types[value] for value in body.outputs])
        for ends, first, each in ((inputs, states, scanned), (outputs, states, stacked)):
            for position, part in enumerate(each, first):
                if part.value:
                    strides = self.layouts.storage[part.value].strides
                    ends[position] = strides[: part.axis] + strides[part.axis + 1 :]
        layouts = assign_layouts(body, self.target, inputs, outputs)
        return _Partitioning(layouts, self.target, self.tasks).run(fuse(layouts))

    def state_copy(self, node: Node, value: str) -> TaskUse:
        """Copies an initial state into a row-major buffer that the loop may write."""
        type_ = self.graph.types[value]
        source = Placeholder("x0", type_.dims, type_.dtype)
        copy = compute("copy", type_.dims, lambda *index: source[index])
        strides = {"x0": self.layouts.storage[value].strides, "copy": self.row_major(value)}
        task = merge_axes(Task(build_dag([copy]), strides, frozenset(), self.target))
        return TaskUse(
            self.tasks.setdefault(task.workload_key, task), {"x0": value, "copy": ""}, (node.name,), self.layouts
        )


# --- dags ---


def _compute(tensor: Tensor) -> Compute:
    if not isinstance(tensor, Compute):
        raise InternalError(f"{tensor.name}: expected something computed, got an input")
    return tensor


def canonical_dag(outputs: Sequence[Compute]) -> ComputeDag:
    """The dag of `outputs` under names that depend on its structure only, so that equal tasks have equal text.

    Placeholders are x0, x1, ... in order of first use; computes keep their names, a repeated one with a number.
    """
    names: dict[Tensor, str] = {}
    used: set[str] = set()
    for tensor in tensors_of(outputs):
        inputs = sum(isinstance(each, Placeholder) for each in names)
        stem = tensor.name if isinstance(tensor, Compute) else f"x{inputs}"
        name, number = stem, 0
        while name in used:
            number += 1
            name = f"{stem}_{number}"
        used.add(name)
        names[tensor] = name
    return build_dag(rebuild(outputs, names))


def _renamed_placeholders(dag: ComputeDag, outputs: Sequence[Tensor]) -> Iterator[tuple[Placeholder, str]]:
    """Each placeholder of a canonical dag with its name before."""
    old = [tensor.name for tensor in tensors_of(outputs) if isinstance(tensor, Placeholder)]
    return zip(dag.placeholders, old, strict=True)


def compute_flops(tensor: Compute) -> int:
    """Arithmetic operations: one for each operator of the body at each point (index arithmetic aside)."""
    points = prod(tensor.shape) * prod(axis.extent for axis in tensor.reduce_axes)
    return points * _operations(tensor.body)


def _operations(body: Expr) -> int:
    """Operators applied to loaded values."""
    loaded: set[Expr] = set()
    count = 0
    for node in walk(body):
        if isinstance(node, Load):
            loaded.add(node)
        elif any(child in loaded for child in node.children):
            loaded.add(node)
            count += isinstance(node, Binary | Unary | Call | Reduce)
    return count


def same_index_inputs(task: Task) -> tuple[tuple[str, str], ...]:
    """(placeholder, output) pairs where the output may be written over the placeholder, element by element.

    Every element of the output must load the placeholder at its own index only, through any number of pointwise
    computes; types and strides must be equal. Whether a schedule keeps the order of reads and writes that this needs
    is for its owner to say.
    """
    pairs = []
    if len(task.dag.outputs) != 1:
        return ()
    output = task.dag.outputs[0]
    for source in task.dag.placeholders:
        alike = source.type == output.type and source.name not in task.constants
        if alike and task.strides[source.name] == task.strides[output.name] and _loads_own_index(task.dag, source):
            pairs.append((source.name, output.name))
    return tuple(pairs)


def _loads_own_index(dag: ComputeDag, source: Placeholder) -> bool:
    """Whether `source` reaches the output through loads at the same index only."""
    depends: set[Tensor] = {source}
    for tensor in dag.computes:
        axes = tuple(axis.var for axis in tensor.axes)
        loads = [node for node in walk(tensor.body) if isinstance(node, Load) and node.source in depends]
        if any(load.indices != axes for load in loads):
            return False
        if loads:
            depends.add(tensor)
    return True
