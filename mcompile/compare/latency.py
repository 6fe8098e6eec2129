"""Two engines timed in alternating blocks, so that a machine that changes its speed changes it for both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mcompile.compare.side import Side

_BLOCK_SECONDS = 0.25  # what a block aims to last, so that switching costs little
_MOST_BLOCKS = 10  # of each side
_RESAMPLES = 1000


@dataclass(frozen=True)
class Latency:
    """Milliseconds of a run of one engine."""

    median_ms: float
    p50_ms: float
    p99_ms: float
    low_ms: float  # the smallest and the largest block median
    high_ms: float
    runs: int


@dataclass(frozen=True)
class Race:
    """Both latencies; `speedup` is theirs / ours by medians, with its 95 % bootstrap interval over block pairs."""

    ours: Latency
    theirs: Latency
    speedup: float
    speedup_low: float
    speedup_high: float


def race(ours: Side, theirs: Side, feeds: Path, repeat: int) -> Race:
    """Time at least `repeat` runs of each side, one stopped while the other runs. Both are running afterwards."""
    sides = (ours, theirs)
    for side in sides:
        side.stop()
    size, blocks = _plan_blocks(max(_block(side, feeds, warmup=2, repeat=1)[0] for side in sides), repeat)
    seconds: tuple[list[list[float]], list[list[float]]] = ([], [])
    for number in range(blocks):
        for index in (0, 1) if number % 2 == 0 else (1, 0):
            seconds[index].append(_block(sides[index], feeds, warmup=1, repeat=size))
    for side in sides:
        side.resume()
    return summarise(seconds[0], seconds[1])


def summarise(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Race:
    """The Race of two lists of blocks (seconds of each run), the n-th blocks measured side by side."""
    ratios = np.array([np.median(b) / np.median(a) for a, b in zip(ours, theirs, strict=True)])
    picks = np.random.default_rng(0).integers(0, len(ratios), (_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[picks], axis=1), [2.5, 97.5])
    first, second = _latency(ours), _latency(theirs)
    return Race(first, second, second.median_ms / first.median_ms, float(low), float(high))


def _plan_blocks(seconds: float, repeat: int) -> tuple[int, int]:
    """(runs of a block, blocks of each side) for runs of about `seconds`."""
    size = max(1, min(repeat, round(_BLOCK_SECONDS / max(seconds, 1e-6))))
    blocks = -(-repeat // size)
    if blocks > _MOST_BLOCKS:
        return -(-repeat // _MOST_BLOCKS), _MOST_BLOCKS
    return (size, blocks) if blocks >= 4 else (max(1, -(-repeat // 4)), min(4, repeat))


def _block(side: Side, feeds: Path, warmup: int, repeat: int) -> list[float]:
    side.resume()
    seconds = side.time(feeds, warmup, repeat)
    side.stop()
    return seconds


def _latency(blocks: Sequence[Sequence[float]]) -> Latency:
    runs = np.concatenate([np.asarray(block) for block in blocks]) * 1e3
    medians = [float(np.median(block)) * 1e3 for block in blocks]
    p50, p99 = np.percentile(runs, [50, 99])
    return Latency(float(np.median(runs)), float(p50), float(p99), min(medians), max(medians), len(runs))
