"""Checks that a plan can be run: every kernel known, every address inside its space, every size sane.

How many bytes a kernel reads behind an address is not recorded, so this catches damage and bugs, not malice: an
artifact is native code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mcompile.dtypes import TensorType
from mcompile.errors import ArtifactError
from mcompile.runtime.plan import (
    Argument,
    ExecutionPlan,
    HostCall,
    Kernel,
    KernelCall,
    NativeSegment,
    Repeat,
    Signature,
    Space,
    Tensor,
)

MAX_BYTES = 1 << 42  # of a space
MAX_SCRATCH_BYTES = 1 << 32  # of a kernel, per thread
MAX_COUNT = 1 << 31  # of a Repeat
MAX_ARGS = 4096  # of a kernel; their pointers lie on the stack
MAX_DIMS = 64
_SHOWN = 20


def verify_plan(plan: ExecutionPlan, kernels: Sequence[Kernel]) -> None:
    """Raises ArtifactError that lists what is wrong (the first twenty problems)."""
    problems = list(_Verifier(plan, kernels).problems())
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise ArtifactError("\n  - ".join(["the plan cannot be run:", *problems[:_SHOWN], *more]))


class _Verifier:
    def __init__(self, plan: ExecutionPlan, kernels: Sequence[Kernel]) -> None:
        self.plan = plan
        self.kernels: Mapping[str, Kernel] = {kernel.name: kernel for kernel in kernels}
        self.kernel_list = kernels
        self.spaces: Mapping[Space, tuple[int, ...]] = {}

    def problems(self) -> Iterator[str]:
        sizes = list(self._sizes())
        yield from sizes
        if sizes:
            return  # without the spaces' sizes no address can be checked
        self.spaces = {
            Space.ARENA: (self.plan.arena_bytes,),
            Space.CONSTANTS: (self.plan.constants_bytes,),
            Space.INPUT: tuple(signature.type.size_bytes for signature in self.plan.inputs),
            Space.OUTPUT: tuple(signature.type.size_bytes for signature in self.plan.outputs),
        }
        yield from self._kernels()
        for number, segment in enumerate(self.plan.segments):
            where = f"segment {number}"
            if isinstance(segment, NativeSegment):
                yield from self._native(segment, where)
            else:
                yield from self._host(segment, where)

    def _sizes(self) -> Iterator[str]:
        for name, size in (("arena", self.plan.arena_bytes), ("constants", self.plan.constants_bytes)):
            if not 0 <= size <= MAX_BYTES:
                yield f"{name} of {size} bytes"
        for kind, signatures in (("input", self.plan.inputs), ("output", self.plan.outputs)):
            yield from _signatures(kind, signatures)

    def _kernels(self) -> Iterator[str]:
        if len(self.kernels) != len(self.kernel_list):
            yield "two kernels have the same name"
        for kernel in self.kernel_list:
            if not kernel.name or not 0 <= kernel.parallel_extent <= MAX_BYTES:
                yield f"kernel {kernel.name!r} has parallel extent {kernel.parallel_extent}"
            if not 0 <= kernel.scratch_bytes <= MAX_SCRATCH_BYTES:
                yield f"kernel {kernel.name!r} wants {kernel.scratch_bytes} bytes of scratch"

    def _native(self, segment: NativeSegment, where: str) -> Iterator[str]:
        for number, call in enumerate(segment.calls):
            if isinstance(call, KernelCall):
                yield from self._call(call, 1, f"{where}, call {number}")
            else:
                yield from self._repeat(call, f"{where}, repeat {number}")

    def _repeat(self, repeat: Repeat, where: str) -> Iterator[str]:
        if not 0 <= repeat.count <= MAX_COUNT:
            yield f"{where}: {repeat.count} iterations"
            return
        for number, call in enumerate(repeat.calls):
            yield from self._call(call, repeat.count, f"{where}, call {number}")

    def _call(self, call: KernelCall, count: int, where: str) -> Iterator[str]:
        if call.kernel not in self.kernels:
            yield f"{where}: there is no kernel {call.kernel!r}"
        if len(call.args) > MAX_ARGS:
            yield f"{where}: {len(call.args)} arguments"
        for number, argument in enumerate(call.args):
            problem = self._outside(argument, 0, count)
            if problem:
                yield f"{where} ({call.kernel}), argument {number}: {problem}"

    def _host(self, call: HostCall, where: str) -> Iterator[str]:
        for tensor in (*call.inputs, *call.outputs):
            problem = self._tensor(tensor)
            if problem:
                yield f"{where} ({call.op}), tensor {tensor.name!r}: {problem}"
        for tensor in call.outputs:
            if tensor.place.space not in (Space.ARENA, Space.OUTPUT):
                yield f"{where} ({call.op}), tensor {tensor.name!r}: cannot write to {tensor.place.space.value}"

    def _tensor(self, tensor: Tensor) -> str | None:
        if not _is_sane(tensor.type):
            return f"type {tensor.type}"
        if tensor.place.offset % tensor.type.dtype.bytes:
            return f"offset {tensor.place.offset} is not a multiple of {tensor.type.dtype.bytes}"
        return self._outside(tensor.place, tensor.type.size_bytes, 1)

    def _outside(self, argument: Argument, size: int, count: int) -> str | None:
        """What is wrong with `size` bytes at an argument, in any of `count` iterations."""
        spaces = self.spaces[argument.space]
        if not 0 <= argument.index < len(spaces):
            return f"there is no {argument.space.value} {argument.index}"
        limit = spaces[argument.index]
        first, last = sorted((argument.offset, argument.offset + argument.step * max(count - 1, 0)))
        if first < 0 or last + size > limit:
            return f"bytes {first} to {last + size} of {argument.space.value}, which has {limit}"
        return None


def _signatures(kind: str, signatures: Sequence[Signature]) -> Iterator[str]:
    for signature in signatures:
        if not _is_sane(signature.type):
            yield f"{kind} {signature.name!r} of type {signature.type}"
    if len({signature.name for signature in signatures}) != len(signatures):
        yield f"two {kind}s have the same name"


def _is_sane(type_: TensorType) -> bool:
    if not type_.is_static or len(type_.shape) > MAX_DIMS or any(dim < 0 for dim in type_.dims):
        return False
    return type_.size_bytes <= MAX_BYTES and max(type_.dims, default=0) <= MAX_BYTES
