"""Where the time of a run goes: one row a kernel call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mcompile.runtime.plan import HostCall, Kernel
from mcompile.runtime.table import CallTable, Words


@dataclass(frozen=True)
class CallTiming:
    """One call of the plan. `seconds` is the median over runs of all its `count` executions in one run together."""

    segment: int
    kernel: str  # of a host operator: its op
    node: str
    is_host: bool
    count: int
    parallel_extent: int
    flops: int  # of all executions, as are the bytes
    moved_bytes: int
    seconds: float
    min_seconds: float

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        return self.moved_bytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Profile:
    """Timings of all calls in the plan's order; `seconds` is the median of a whole run, its Python included."""

    threads: int
    repeat: int
    seconds: float
    calls: tuple[CallTiming, ...]

    @property
    def kernel_seconds(self) -> float:
        return sum(call.seconds for call in self.calls)

    def by_kernel(self) -> tuple[CallTiming, ...]:
        """Calls of the same kernel added up (their nodes joined), the slowest first."""
        groups: dict[tuple[str, bool], list[CallTiming]] = {}
        for call in self.calls:
            groups.setdefault((call.kernel, call.is_host), []).append(call)
        merged = [_merge(calls) for calls in groups.values()]
        return tuple(sorted(merged, key=lambda call: (-call.seconds, call.kernel)))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "kernel_seconds": self.kernel_seconds, "calls": [asdict(call) for call in self.calls]}


def _merge(calls: Sequence[CallTiming]) -> CallTiming:
    first = calls[0]
    return CallTiming(
        first.segment,
        first.kernel,
        ", ".join(dict.fromkeys(call.node for call in calls if call.node)),
        first.is_host,
        sum(call.count for call in calls),
        first.parallel_extent,
        sum(call.flops for call in calls),
        sum(call.moved_bytes for call in calls),
        sum(call.seconds for call in calls),
        sum(call.min_seconds for call in calls),
    )


def table_timings(number: int, table: CallTable, kernels: dict[str, Kernel], runs: Sequence[Words]) -> list[CallTiming]:
    """Of a native segment, from the nanoseconds that each run charged to each record."""
    samples = np.array(runs).reshape(len(runs), len(table.calls)) * 1e-9
    timings = []
    for position, (call, count) in enumerate(zip(table.calls, table.counts, strict=True)):
        if call is None:
            continue
        kernel, column = kernels[call.kernel], samples[:, position]
        timings.append(
            CallTiming(
                number,
                kernel.name,
                call.node,
                False,
                count,
                kernel.parallel_extent,
                kernel.flops * count,
                kernel.moved_bytes * count,
                float(np.median(column)),
                float(column.min()),
            )
        )
    return timings


def host_timing(number: int, call: HostCall, runs: Sequence[Words]) -> CallTiming:
    """Of a host operator."""
    seconds = np.array([run[0] for run in runs]) * 1e-9
    median, least = float(np.median(seconds)), float(seconds.min())
    return CallTiming(number, call.op, call.node, True, 1, 1, 0, 0, median, least)
