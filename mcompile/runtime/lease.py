"""The memory of one run: arena, scratch, base addresses. Concurrent runs have one each; they are reused."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mcompile.errors import OptionError
from mcompile.runtime.host import HostOperator
from mcompile.runtime.loader import LoadedCode
from mcompile.runtime.memory import Array, Bytes, address, aligned_empty, round_up
from mcompile.runtime.plan import ExecutionPlan, Kernel, NativeSegment, Space, Tensor
from mcompile.runtime.table import Bases, CallTable, Words, build_table
from mcompile.runtime.walker import Job


@dataclass(frozen=True)
class Program:
    """What all runs of a session share: the plan, ready for this process."""

    plan: ExecutionPlan
    constants: Bytes
    code: LoadedCode
    segments: tuple[CallTable | HostOperator, ...]
    bases: Bases
    scratch_bytes: int  # of each thread
    threads: int


def link_program(plan: ExecutionPlan, kernels: Sequence[Kernel], constants: Bytes, threads: int) -> Program:
    """Load the code of a verified plan and lay out its tables."""
    code = LoadedCode(kernels)
    bases = Bases(len(plan.inputs), len(plan.outputs))
    by_name: Mapping[str, Kernel] = {kernel.name: kernel for kernel in kernels}
    segments = tuple(
        build_table(segment, by_name, code.addresses, bases)
        if isinstance(segment, NativeSegment)
        else HostOperator(segment)
        for segment in plan.segments
    )
    scratch = max((round_up(kernel.scratch_bytes) for kernel in kernels), default=0)
    return Program(plan, constants, code, segments, bases, scratch, threads)


class Lease:
    """One run's memory and jobs; used by one run at a time."""

    def __init__(self, program: Program) -> None:
        plan = program.plan
        try:
            self._arena = aligned_empty(round_up(plan.arena_bytes) + program.threads * program.scratch_bytes)
        except (MemoryError, ValueError) as error:
            raise OptionError(f"no memory for a run of this model: it needs {plan.arena_bytes} bytes") from error
        self._program = program
        arena = address(self._arena)
        self._bases = (ctypes.c_int64 * program.bases.count)(arena, address(program.constants))
        self._first_input = 2
        scratch = arena + round_up(plan.arena_bytes)
        bases = ctypes.addressof(self._bases)
        self._steps: list[Job | Callable[[Sequence[Array], Sequence[Array]], None]] = [
            _make_job(segment, bases, scratch, program)
            if isinstance(segment, CallTable)
            else _Binding(segment, self._arena, program.constants)
            for segment in program.segments
        ]
        self._jobs = tuple(ctypes.addressof(step) if isinstance(step, Job) else step for step in self._steps)

    def execute(
        self, run: Callable[[int, int], int], pool: int, inputs: Sequence[Array], outputs: Sequence[Array]
    ) -> None:
        """Run all segments; `run` and `pool` are the walker's entry and the pool's state."""
        self._set_bases(inputs, outputs)
        for job in self._jobs:
            if type(job) is int:
                run(pool, job)
            else:
                job(inputs, outputs)  # type: ignore[operator]

    def profile(
        self, run: Callable[[int, int], int], pool: int, inputs: Sequence[Array], outputs: Sequence[Array]
    ) -> list[Words]:
        """As `execute`; gives for each segment the nanoseconds of its records (of a host operator: one number)."""
        self._set_bases(inputs, outputs)
        return [self._profile_step(step, run, pool, inputs, outputs) for step in self._steps]

    def _profile_step(
        self,
        step: Job | Callable[[Sequence[Array], Sequence[Array]], None],
        run: Callable[[int, int], int],
        pool: int,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
    ) -> Words:
        if not isinstance(step, Job):
            start = time.perf_counter_ns()
            step(inputs, outputs)
            return np.array([time.perf_counter_ns() - start], np.int64)
        times: Words = np.zeros(step.count + 1, np.int64)
        step.times = address(times)
        try:
            run(pool, ctypes.addressof(step))
        finally:
            step.times = 0
        return times[1:]

    def _set_bases(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        position = 2
        bases = self._bases
        for array in inputs:
            bases[position] = array.__array_interface__["data"][0]
            position += 1
        for array in outputs:
            bases[position] = array.__array_interface__["data"][0]
            position += 1


def _make_job(table: CallTable, bases: int, scratch: int, program: Program) -> Job:
    threads = program.threads if table.has_parallel else 1
    records = len(table.records)
    return Job(address(table.records), records, bases, scratch, program.scratch_bytes, threads, table.max_args, 0)


class _Binding:
    """A host operator with its tensors in one lease's memory."""

    def __init__(self, operator: HostOperator, arena: Bytes, constants: Bytes) -> None:
        self._operator = operator
        self._inputs = [_place(tensor, arena, constants) for tensor in operator.call.inputs]
        self._outputs = [_place(tensor, arena, constants) for tensor in operator.call.outputs]

    def __call__(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        self._operator.run(
            [_resolve(place, inputs, outputs) for place in self._inputs],
            [_resolve(place, inputs, outputs) for place in self._outputs],
        )


def _place(tensor: Tensor, arena: Bytes, constants: Bytes) -> Array | Tensor:
    """The tensor in arena or constants; a tensor in an input or output is found at each run."""
    if tensor.place.space is Space.ARENA:
        return _view(arena, tensor)
    if tensor.place.space is Space.CONSTANTS:
        return _view(constants, tensor)
    return tensor


def _resolve(place: Array | Tensor, inputs: Sequence[Array], outputs: Sequence[Array]) -> Array:
    if not isinstance(place, Tensor):
        return place
    space = inputs if place.place.space is Space.INPUT else outputs
    return _view(space[place.place.index].reshape(-1).view(np.uint8), place)


def _view(memory: Bytes, tensor: Tensor) -> Array:
    start = tensor.place.offset
    dtype = tensor.type.dtype.numpy
    return memory[start : start + tensor.type.size_bytes].view(dtype).reshape(tensor.type.dims)
