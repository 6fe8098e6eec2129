"""Graphs for tests, and two ways to run one: node by node, and by the plan, each kernel being its task evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

import mcompile.ops  # noqa: F401  (registers the operators)
from mcompile.dtypes import DType, TensorType
from mcompile.graph.fusion import Group, fuse
from mcompile.graph.graph import Graph, Node
from mcompile.graph.infer import HOST_MODEL, apply
from mcompile.graph.layout import Layouts, assign_layouts, loop_body
from mcompile.graph.memory_plan import KernelCode, TaskCode, plan_memory
from mcompile.graph.partition import Partition, TaskUse, partition_graph, same_index_inputs
from mcompile.graph.views import rebuild, tensors_of
from mcompile.ir.interpret import evaluate
from mcompile.ir.tensor import Compute, Placeholder, Tensor, build_dag
from mcompile.ops.registry import lookup
from mcompile.runtime.plan import Argument, ExecutionPlan, HostCall, KernelCall, Repeat, Signature, Space
from mcompile.schedule.task import Task
from mcompile.target import parse_target

Array = NDArray[Any]
TARGET = parse_target("x86-64-v3", threads=1)


class Builder:
    """Makes a graph in one expression a node."""

    def __init__(self, name: str = "test") -> None:
        self.graph = Graph(name)
        self.rng = np.random.default_rng(0)

    def input(self, *shape: int, name: str = "", dtype: DType = DType.FLOAT32) -> str:
        name = name or f"in{len(self.graph.inputs)}"
        self.graph.inputs = (*self.graph.inputs, name)
        self.graph.types[name] = TensorType(shape, dtype)
        return name

    def weight(self, *shape: int) -> str:
        return self.constant(self.rng.standard_normal(shape).astype(np.float32))

    def constant(self, array: Any) -> str:
        array = np.asarray(array)
        name = f"const{len(self.graph.constants)}"
        return self.graph.add_constant(name, array, TensorType(array.shape, DType.from_numpy(array.dtype)))

    def __call__(self, op: str, *inputs: str, **attrs: Any) -> str:
        stem = f"{op.lower()}{len(self.graph.nodes)}"
        return apply(self.graph, op, inputs, attrs, stem=stem)

    def many(self, op: str, *inputs: str, **attrs: Any) -> tuple[str, ...]:
        first = self(op, *inputs, **attrs)
        node = self.graph.producer(first)
        assert node is not None
        return node.outputs

    def host(self, op: str, *inputs: str) -> str:
        """A node of one output like its first input, that Python runs."""
        name = self.graph.fresh(f"host{len(self.graph.nodes)}")
        node = Node(name, op, inputs, (name,), {HOST_MODEL: b"model"})
        self.graph.add(node, [self.graph.types[inputs[0]]])
        return name

    def outputs(self, *values: str) -> Graph:
        self.graph.outputs = values
        return self.graph


# --- node by node ---


def evaluate_graph(graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """All values, each node's computes evaluated on its own."""
    values: dict[str, Array] = {**graph.constants, **inputs}
    for node in graph.topological():
        arrays = [values[value] if value else None for value in node.inputs]
        values.update(zip(node.outputs, evaluate_node(node, arrays), strict=False))
    return values


def evaluate_node(node: Node, arrays: Sequence[Array | None]) -> Sequence[Array]:
    if HOST_MODEL in node.attrs:
        assert arrays[0] is not None
        return [np.exp(arrays[0])]
    body = loop_body(node)
    if body is not None:
        return _scan(node, body, [array for array in arrays if array is not None])
    op = lookup(node.op, node.domain)
    assert op is not None
    inputs: list[Tensor | None] = [
        None if array is None else Placeholder(f"x{i}", array.shape, DType.from_numpy(array.dtype))
        for i, array in enumerate(arrays)
    ]
    outputs = op.compute(inputs, node.attrs)
    named = rebuild(outputs, {t: f"c{i}" for i, t in enumerate(tensors_of(outputs)) if isinstance(t, Compute)})
    dag = build_dag(named)
    given = {f"x{i}": array for i, array in enumerate(arrays) if array is not None}
    results = evaluate(dag, {tensor.name: given[tensor.name] for tensor in dag.placeholders})
    return [results[output.name] for output in named]


def _scan(node: Node, body: Graph, arrays: Sequence[Array]) -> list[Array]:
    scans = int(node.attrs["num_scan_inputs"])
    states, scanned = list(arrays[: len(arrays) - scans]), arrays[len(arrays) - scans :]
    count = len(body.outputs) - len(states)
    axes = node.attrs.get("scan_input_axes") or (0,) * scans
    reverse = node.attrs.get("scan_input_directions") or (0,) * scans
    out_axes = node.attrs.get("scan_output_axes") or (0,) * count
    out_reverse = node.attrs.get("scan_output_directions") or (0,) * count
    length = scanned[0].shape[axes[0]]
    stacked: list[list[Array]] = [[] for _ in range(count)]
    for step in range(length):
        slices = [
            np.take(array, length - 1 - step if back else step, axis)
            for array, axis, back in zip(scanned, axes, reverse, strict=True)
        ]
        values = evaluate_graph(body, dict(zip(body.inputs, [*states, *slices], strict=True)))
        results = [values[output] for output in body.outputs]
        states = results[: len(states)]
        for rows, row in zip(stacked, results[len(states) :], strict=True):
            rows.append(row)
    joined = [
        np.stack(rows[::-1] if back else rows, axis)
        for rows, axis, back in zip(stacked, out_axes, out_reverse, strict=True)
    ]
    return [*states, *joined]


# --- by the plan ---


@dataclass
class Blob:
    """Constants at 64-byte boundaries."""

    data: bytearray = field(default_factory=bytearray)
    known: dict[bytes, int] = field(default_factory=dict)

    def raw(self, array: Array) -> int:
        data = np.ascontiguousarray(array).tobytes()
        if data not in self.known:
            self.data += bytes(-len(self.data) % 64)
            self.known[data] = len(self.data)
            self.data += data
        return self.known[data]

    def prepared(self, use: TaskUse, name: str) -> int:
        raise AssertionError(f"{use.label}: nothing is prepared here, but {name} was asked for")

    @property
    def size_bytes(self) -> int:
        return len(self.data)


@dataclass
class Planned:
    """A graph laid out, fused, partitioned and planned."""

    layouts: Layouts
    groups: tuple[Group, ...]
    partition: Partition
    plan: ExecutionPlan
    blob: Blob
    tasks: dict[str, Task]

    @property
    def copies(self) -> int:
        return len(self.layouts.copies)

    def kernel_nodes(self) -> list[set[str]]:
        return [set(group.nodes) for group in self.groups]

    def calls(self) -> int:
        return sum(len(segment.calls) if not isinstance(segment, HostCall) else 1 for segment in self.plan.segments)


def plan_graph(graph: Graph, *, in_place: bool = False, **options: bool) -> Planned:
    layouts = assign_layouts(graph, TARGET)
    groups = fuse(layouts, **options)
    partition = partition_graph(layouts, groups, TARGET)
    code, tasks = {}, {}
    for item in partition.tasks():
        task = item.task
        params = (*(tensor.name for tensor in task.dag.placeholders), *(tensor.name for tensor in task.dag.outputs))
        pairs = same_index_inputs(task) if in_place else ()
        key = task.workload_key
        code[key] = TaskCode((KernelCode(key, params),), {}, frozenset(), pairs)
        tasks[key] = task
    signatures = [
        [Signature(v, graph.types[v], graph.types[v].shape) for v in e] for e in (graph.inputs, graph.outputs)
    ]
    blob = Blob()
    plan = plan_memory(partition, code, blob, *signatures)
    return Planned(layouts, groups, partition, plan, blob, tasks)


def run_plan(planned: Planned, inputs: Sequence[Array]) -> list[Array]:
    """Run the plan on bytes; the arena starts as NaNs."""
    plan = planned.plan
    memory = {
        (Space.ARENA, 0): np.full(plan.arena_bytes + 64, 0xFF, np.uint8),
        (Space.CONSTANTS, 0): np.frombuffer(bytes(planned.blob.data) + bytes(64), np.uint8),
    }
    memory |= {(Space.INPUT, i): _bytes(array) for i, array in enumerate(inputs)}
    memory |= {(Space.OUTPUT, i): np.full(s.type.size_bytes, 0xFF, np.uint8) for i, s in enumerate(plan.outputs)}
    for segment in plan.segments:
        if isinstance(segment, HostCall):
            _run_host(segment, memory)
            continue
        for call in segment.calls:
            if isinstance(call, KernelCall):
                _run_kernel(planned.tasks[call.kernel], call, memory, 0)
            else:
                assert isinstance(call, Repeat)
                for step in range(call.count):
                    for inner in call.calls:
                        _run_kernel(planned.tasks[inner.kernel], inner, memory, step)
    return [memory[Space.OUTPUT, i].view(s.type.dtype.numpy).reshape(s.type.dims) for i, s in enumerate(plan.outputs)]


Memory = Mapping[tuple[Space, int], NDArray[np.uint8]]


def _bytes(array: Array) -> NDArray[np.uint8]:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def _array(
    memory: Memory, place: Argument, shape: Sequence[int], strides: Sequence[int], dtype: DType, step: int
) -> Array:
    """The strided array at a place; an address outside of the space fails."""
    space = memory[place.space, place.index]
    offset = place.offset + step * place.step
    span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    assert offset >= 0
    assert offset + span * dtype.bytes <= len(space)
    flat = space[offset : offset + span * dtype.bytes].view(dtype.numpy)
    writable = place.space in (Space.ARENA, Space.OUTPUT)
    return as_strided(flat, shape, [s * dtype.bytes for s in strides], writeable=writable)


def _run_kernel(task: Task, call: KernelCall, memory: Memory, step: int) -> None:
    tensors = (*task.dag.placeholders, *task.dag.outputs)
    arrays = {
        tensor.name: _array(memory, place, tensor.shape, task.strides[tensor.name], tensor.dtype, step)
        for tensor, place in zip(tensors, call.args, strict=True)
    }
    results = evaluate(task.dag, {tensor.name: arrays[tensor.name].copy() for tensor in task.dag.placeholders})
    for output in task.dag.outputs:
        arrays[output.name][...] = results[output.name]


def _run_host(call: HostCall, memory: Memory) -> None:
    from mcompile.ir.tensor import row_major

    def array(tensor: Any) -> Array:
        return _array(memory, tensor.place, tensor.type.dims, row_major(tensor.type.dims), tensor.type.dtype, 0)

    array(call.outputs[0])[...] = np.exp(array(call.inputs[0]))


def check(graph: Graph, *, in_place: bool = False, **options: bool) -> Planned:
    """The plan's outputs must be those of the graph evaluated node by node."""
    rng = np.random.default_rng(1)
    inputs = {
        value: rng.standard_normal(graph.types[value].dims).astype(graph.types[value].dtype.numpy)
        for value in graph.inputs
    }
    planned = plan_graph(graph, in_place=in_place, **options)
    values = evaluate_graph(graph, inputs)
    results = run_plan(planned, [inputs[value] for value in graph.inputs])
    for output, result in zip(graph.outputs, results, strict=True):
        np.testing.assert_allclose(result, values[output], rtol=1e-5, atol=1e-5, err_msg=output)
    return planned
