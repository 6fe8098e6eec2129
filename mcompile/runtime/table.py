"""A native segment as the table that the compiled walker reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcompile.runtime.memory import address
from mcompile.runtime.plan import Argument, Kernel, KernelCall, NativeSegment, Repeat, Space

Words = NDArray[np.int64]


@dataclass(frozen=True)
class Bases:
    """Numbers of the spaces in a run's array of base addresses: arena, constants, inputs, outputs."""

    inputs: int
    outputs: int

    @property
    def count(self) -> int:
        return 2 + self.inputs + self.outputs

    def index(self, argument: Argument) -> int:
        if argument.space is Space.INPUT:
            return 2 + argument.index
        if argument.space is Space.OUTPUT:
            return 2 + self.inputs + argument.index
        return 0 if argument.space is Space.ARENA else 1


@dataclass(frozen=True)
class CallTable:
    """Records in memory (`walker.ll` says how), and the call behind each (None: a loop's head)."""

    records: Words
    arguments: Words  # the records point into it
    calls: tuple[KernelCall | None, ...]
    counts: tuple[int, ...]  # how often each record runs
    max_args: int
    has_parallel: bool


def build_table(
    segment: NativeSegment, kernels: Mapping[str, Kernel], addresses: Mapping[str, int], bases: Bases
) -> CallTable:
    """The table of a verified segment. Loops that run nothing are left out."""
    flat = list(_flatten(segment))
    calls = [call for call, _, _ in flat]
    arguments = _arguments(calls, bases)
    records: Words = np.zeros((len(flat), 4), np.int64)
    place = address(arguments)
    for record, (call, count, body) in zip(records, flat, strict=True):
        if call is None:
            record[:] = 0, count, body, 0
            continue
        record[:] = addresses[call.kernel], kernels[call.kernel].parallel_extent, len(call.args), place
        place += len(call.args) * _ARGUMENT_BYTES
    parallel = any(call is not None and kernels[call.kernel].parallel_extent > 1 for call in calls)
    counts = tuple(1 if call is None else count for call, count, _ in flat)
    most = max((len(call.args) for call in calls if call is not None), default=0)
    return CallTable(records, arguments, tuple(calls), counts, most, parallel)


_ARGUMENT_BYTES = 24


def _flatten(segment: NativeSegment) -> Sequence[tuple[KernelCall | None, int, int]]:
    """(call, how often it runs, 0), or (None, iterations, calls in the loop)."""
    flat: list[tuple[KernelCall | None, int, int]] = []
    for item in segment.calls:
        if isinstance(item, Repeat):
            if item.count and item.calls:
                flat.append((None, item.count, len(item.calls)))
                flat.extend((call, item.count, 0) for call in item.calls)
        else:
            flat.append((item, 1, 0))
    return flat


def _arguments(calls: Sequence[KernelCall | None], bases: Bases) -> Words:
    rows = [(bases.index(arg), arg.offset, arg.step) for call in calls if call is not None for arg in call.args]
    return np.array(rows, np.int64).reshape(len(rows), 3)
