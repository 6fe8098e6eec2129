"""Memory plan: when each buffer is alive, where it lies in the arena, and the table of kernel calls.

    plan = plan_memory(partition, code, constants, inputs, outputs)

`code` gives, by workload key, what a task was lowered to; `constants` says where constants lie in the artifact's blob.
All buffers of a run share one arena. A buffer is alive from the first call that writes it to the last one that reads
it or a view of it; buffers alive at the same time never overlap, so a call's outputs never lie on its inputs, except
where its code says that it can work in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from mcompile.errors import InternalError
from mcompile.graph.graph import Array, Graph, Node
from mcompile.graph.infer import HOST_MODEL
from mcompile.graph.layout import Layouts
from mcompile.graph.partition import HostUse, LoopUse, Partition, Sliced, TaskUse
from mcompile.runtime.plan import (
    Argument,
    ExecutionPlan,
    HostCall,
    KernelCall,
    NativeSegment,
    Repeat,
    Signature,
    Space,
    Tensor,
)

ALIGNMENT = 64


@dataclass(frozen=True)
class KernelCode:
    """One function of a task: its kernel's name and the names of its parameters in order."""

    kernel: str
    params: tuple[str, ...]


@dataclass(frozen=True)
class TaskCode:
    """What a task was lowered to: functions run in order.

    A parameter named in `scratch` (name -> bytes) is memory of one call of the task, one named in `prepared` a prepared
    constant; any other is a placeholder or output of the task's dag. `in_place` are (placeholder, output) pairs that
    may be the same memory.
    """

    kernels: tuple[KernelCode, ...]
    scratch: Mapping[str, int] = field(default_factory=dict)
    prepared: frozenset[str] = frozenset()
    in_place: tuple[tuple[str, str], ...] = ()


class Constants(Protocol):
    """Where constants lie: byte offsets into the artifact's blob. Asked twice for the same, they answer the same."""

    def raw(self, array: Array) -> int:
        """Of an array as it is, row-major."""

    def prepared(self, use: TaskUse, name: str) -> int:
        """Of the prepared constant that parameter `name` of the task's code takes at this use."""

    @property
    def size_bytes(self) -> int:
        """Of the whole blob; asked last."""


@dataclass(frozen=True)
class Slot:
    """A buffer of the arena that is alive in the steps first ... last (a step is one group's calls)."""

    name: str
    size_bytes: int
    first: int
    last: int


def plan_memory(
    partition: Partition,
    code: Mapping[str, TaskCode],
    constants: Constants,
    inputs: Sequence[Signature],
    outputs: Sequence[Signature],
) -> ExecutionPlan:
    """The plan of a whole model; `inputs` and `outputs` belong to the graph's by position."""
    planner = _Planner(partition, code, constants)
    bound = {value: Argument(Space.INPUT, 0, i) for i, value in enumerate(partition.layouts.graph.inputs)}
    bound |= {value: Argument(Space.OUTPUT, 0, i) for i, value in enumerate(partition.layouts.graph.outputs)}
    planner.allocate(frozenset(bound))
    segments = _segments(planner.steps(bound, Argument(Space.ARENA, 0)))
    return ExecutionPlan(tuple(inputs), tuple(outputs), segments, planner.size_bytes, constants.size_bytes)


def allocate(slots: Sequence[Slot]) -> tuple[dict[str, int], int]:
    """(offset of each slot, bytes in all): large slots first, each in the smallest gap that is free while it lives."""
    offsets: dict[str, int] = {}
    placed: list[tuple[int, int, Slot]] = []  # offset, end
    total = 0
    for slot in sorted(slots, key=lambda slot: (-slot.size_bytes, slot.first, slot.name)):
        size = aligned(slot.size_bytes)
        busy = sorted((start, end) for start, end, other in placed if _overlap(slot, other) and end > start)
        offset = _best_gap(busy, size)
        offsets[slot.name] = offset
        placed.append((offset, offset + size, slot))
        total = max(total, offset + size)
    return offsets, total


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _overlap(a: Slot, b: Slot) -> bool:
    return a.first <= b.last and b.first <= a.last


def _best_gap(busy: Sequence[tuple[int, int]], size: int) -> int:
    """The offset of the smallest gap between the busy ranges that has room; after the last one if none has."""
    best: tuple[int, int] | None = None
    end = 0
    for start, stop in busy:
        gap = start - end
        if gap >= size and (best is None or gap < best[0]):
            best = gap, end
        end = max(end, stop)
    return end if best is None else best[1]


@dataclass
class _Life:
    """A buffer while its life is being found out."""

    size_bytes: int
    first: int
    last: int

    def extend(self, step: int) -> None:
        self.first, self.last = min(self.first, step), max(self.last, step)


_Step = list[KernelCall | Repeat] | HostCall


class _Planner:
    """Plans the calls of one partition: the model's, or a loop body's."""

    def __init__(
        self, partition: Partition, code: Mapping[str, TaskCode], constants: Constants, is_body: bool = False
    ) -> None:
        self.partition = partition
        self.layouts: Layouts = partition.layouts
        self.graph: Graph = partition.layouts.graph
        self.code = code
        self.constants = constants
        self.is_body = is_body
        self.bodies: dict[int, _Planner] = {}  # by step
        self.lives: dict[str, _Life] = {}
        self.shared: dict[str, str] = {}  # buffer -> the buffer in whose place it is written
        self.offsets: dict[str, int] = {}
        self.size_bytes = 0

    # --- lives ---

    def allocate(self, bound: frozenset[str]) -> None:
        """Place every buffer; `bound` values own memory that lies elsewhere."""
        for step, use in enumerate(self.partition.uses):
            match use:
                case TaskUse():
                    self.live_task(step, use, bound)
                case HostUse(node=node):
                    self.live_values(step, (*node.inputs, *node.outputs), bound)
                case LoopUse():
                    self.live_loop(step, use, bound)
        for step, use in enumerate(self.partition.uses):
            if isinstance(use, TaskUse):
                self.share(step, use, bound)
        slots = [Slot(name, life.size_bytes, life.first, life.last) for name, life in self.lives.items()]
        self.offsets, self.size_bytes = allocate(slots)

    def live_task(self, step: int, use: TaskUse, bound: frozenset[str], tag: str = "") -> None:
        self.live_values(step, use.values.values(), bound)
        for name, size in self.code[use.task.workload_key].scratch.items():
            self.lives[f"scratch\0{step}{tag}\0{name}"] = _Life(size, step, step)

    def live_values(self, step: int, values: Iterable[str], bound: frozenset[str]) -> None:
        for value in values:
            base = self.layouts.storage[value].base if value else ""
            if not base or base in bound or base in self.graph.constants:
                continue
            life = self.lives.setdefault(base, _Life(self.graph.types[base].size_bytes, step, step))
            life.extend(step)

    def live_loop(self, step: int, use: LoopUse, bound: frozenset[str]) -> None:
        sliced = [part.value for part in (*use.scanned, *use.stacked)]
        self.live_values(step, (*use.initial, *use.final, *sliced), bound)
        for number, copy in enumerate(use.copies):
            self.live_task(step, replace(copy, values={"x0": copy.values["x0"]}), bound, f"\0{number}")
        graph = use.body.layouts.graph
        for number, (state, _) in enumerate(use.states):
            size = graph.types[state].size_bytes
            self.lives[_state(step, number, False)] = _Life(size, step, step)
            if not use.final[number]:
                self.lives[_state(step, number, True)] = _Life(size, step, step)
        for part in use.stacked:
            if not part.value:
                self.lives[f"unused\0{step}\0{part.body}"] = _Life(graph.types[part.body].size_bytes, step, step)
        body = self.bodies[step] = _Planner(use.body, self.code, self.constants, is_body=True)
        body.allocate(frozenset((*graph.inputs, *graph.outputs)))
        self.lives[f"body\0{step}"] = _Life(body.size_bytes, step, step)

    def share(self, step: int, use: TaskUse, bound: frozenset[str]) -> None:
        """Write an output over an input that dies here, where the code can and both own their whole buffer."""
        for source, result in self.code[use.task.workload_key].in_place:
            old, new = use.values[source], use.values[result]
            place, wanted = self.layouts.storage[old], self.layouts.storage[new]
            if place.base != old or wanted.base != new or place.strides != wanted.strides:
                continue
            if sum(self.layouts.storage[value].base == old for value in use.values.values()) > 1:
                continue  # another input reads the same buffer in another order
            old, new = self.root(old), self.root(new)
            before, after = self.lives.get(old), self.lives.get(new)
            if before is None or after is None or old == new or {old, new} & bound:
                continue
            if before.last == step and after.first == step and before.size_bytes >= after.size_bytes:
                before.last = after.last
                del self.lives[new]
                self.shared[new] = old
                return

    def root(self, base: str) -> str:
        while base in self.shared:
            base = self.shared[base]
        return base

    # --- calls ---

    def steps(self, bound: Mapping[str, Argument], arena: Argument) -> list[_Step]:
        """The calls of each step, `bound` values at their arguments and the others from `arena` on."""
        return [self.emit(step, use, _Places(self, bound, arena)) for step, use in enumerate(self.partition.uses)]

    def emit(self, step: int, use: TaskUse | LoopUse | HostUse, places: _Places) -> _Step:
        match use:
            case TaskUse():
                return list(self.emit_task(step, use, places))
            case HostUse(node=node):
                return self.emit_host(node, places)
        return self.emit_loop(step, use, places)

    def emit_task(
        self, step: int, use: TaskUse, places: _Places, tag: str = "", values: Mapping[str, Argument] | None = None
    ) -> list[KernelCall]:
        code = self.code[use.task.workload_key]

        def argument(name: str) -> Argument:
            if values and name in values:
                return values[name]
            if name in code.scratch:
                return places.slot(f"scratch\0{step}{tag}\0{name}")
            if name in code.prepared:
                return Argument(Space.CONSTANTS, self.constants.prepared(use, name))
            if name in use.task.constants:
                return Argument(Space.CONSTANTS, self.constants.raw(use.constant(name)))
            return places.value(use.values[name])

        return [
            KernelCall(kernel.kernel, tuple(argument(name) for name in kernel.params), use.label)
            for kernel in code.kernels
        ]

    def emit_host(self, node: Node, places: _Places) -> HostCall:
        def tensor(value: str) -> Tensor:
            return Tensor(value, self.graph.types[value], places.value(value))

        inputs = tuple(tensor(value) for value in node.inputs if value)
        outputs = tuple(tensor(value) for value in node.outputs if value)
        return HostCall(node.op, node.name, node.attrs[HOST_MODEL], inputs, outputs)

    def emit_loop(self, step: int, use: LoopUse, places: _Places) -> list[KernelCall | Repeat]:
        """Each state has two buffers, read and written in turn; the last iteration writes the one that is wanted."""
        calls: list[KernelCall | Repeat] = []
        states = [self.state_buffers(step, number, use, places) for number in range(len(use.states))]
        for number, copy in enumerate(use.copies):
            calls += self.emit_task(step, copy, places, f"\0{number}", {"copy": states[number][0]})

        def iteration(start: int, stride: int) -> list[KernelCall]:
            bound = self.body_ends(step, use, places, states, start, stride)
            steps = self.bodies[step].steps(bound, places.slot(f"body\0{step}"))
            return [call for each in steps for call in _plain_calls(each, use.node)]

        pairs, rest = divmod(use.count, 2)
        if self.is_body:  # a Repeat cannot hold another one
            return [*calls, *(call for start in range(use.count) for call in iteration(start, 0))]
        if pairs == 1:
            calls += [*iteration(0, 0), *iteration(1, 0)]
        elif pairs:
            calls.append(Repeat(pairs, (*iteration(0, 2), *iteration(1, 2))))
        if rest:
            calls += iteration(use.count - 1, 0)
        return calls

    def state_buffers(self, step: int, number: int, use: LoopUse, places: _Places) -> tuple[Argument, Argument]:
        """(read by even iterations, written by them)"""
        final = use.final[number]
        last = places.value(final) if final else places.slot(_state(step, number, True))
        other = places.slot(_state(step, number, False))
        return (other, last) if use.count % 2 else (last, other)

    def body_ends(
        self,
        step: int,
        use: LoopUse,
        places: _Places,
        states: Sequence[tuple[Argument, Argument]],
        start: int,
        stride: int,
    ) -> dict[str, Argument]:
        """Where the body's inputs and outputs lie in iteration `start`, moving on by `stride` iterations a time."""
        bound: dict[str, Argument] = {}
        for (before, after), buffers in zip(use.states, states, strict=True):
            bound[before], bound[after] = buffers if start % 2 == 0 else buffers[::-1]
        for part in (*use.scanned, *use.stacked):
            if part.value:
                bound[part.body] = self.slice_argument(part, use.count, places.value(part.value), start, stride)
            else:
                bound[part.body] = places.slot(f"unused\0{step}\0{part.body}")
        return bound

    def slice_argument(self, part: Sliced, count: int, place: Argument, start: int, stride: int) -> Argument:
        width = self.layouts.storage[part.value].strides[part.axis] * self.graph.types[part.value].dtype.bytes
        index, width = (count - 1 - start, -width) if part.reverse else (start, width)
        return replace(place, offset=place.offset + index * abs(width), step=place.step + stride * width)


@dataclass(frozen=True)
class _Places:
    """Where the buffers of a planner's partition lie."""

    planner: _Planner
    bound: Mapping[str, Argument]
    arena: Argument

    def slot(self, name: str) -> Argument:
        return replace(self.arena, offset=self.arena.offset + self.planner.offsets[name])

    def value(self, value: str) -> Argument:
        """Where the first element of a value lies."""
        layouts, graph = self.planner.layouts, self.planner.graph
        storage = layouts.storage[value]
        offset = storage.offset * graph.types[value].dtype.bytes
        if storage.base in graph.constants:
            return Argument(Space.CONSTANTS, self.planner.constants.raw(graph.constants[storage.base]) + offset)
        base = self.bound[storage.base] if storage.base in self.bound else self.slot(self.planner.root(storage.base))
        return replace(base, offset=base.offset + offset)


def _state(step: int, number: int, last: bool) -> str:
    return f"state\0{step}\0{number}\0{'last' if last else 'other'}"


def _plain_calls(step: _Step, loop: Node) -> list[KernelCall]:
    calls = [] if isinstance(step, HostCall) else [call for call in step if isinstance(call, KernelCall)]
    if isinstance(step, HostCall) or len(calls) < len(step):
        raise InternalError(f"{loop.name}: the body of a loop may hold kernel calls only")
    return calls


def _segments(steps: Sequence[_Step]) -> tuple[NativeSegment | HostCall, ...]:
    """Neighbouring native calls in one segment."""
    segments: list[NativeSegment | HostCall] = []
    calls: list[KernelCall | Repeat] = []
    for step in steps:
        if isinstance(step, HostCall):
            if calls:
                segments.append(NativeSegment(tuple(calls)))
                calls = []
            segments.append(step)
        else:
            calls += step
    if calls:
        segments.append(NativeSegment(tuple(calls)))
    return tuple(segments)
