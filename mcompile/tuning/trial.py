"""What a trial is: a candidate, its code, what measuring gave. A candidate's failure is a value, never an exception."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from mcompile.runtime.plan import Kernel
from mcompile.schedule.lower import Preparation
from mcompile.schedule.steps import Trace
from mcompile.schedule.task import Task


class ErrorKind(StrEnum):
    """Why a candidate has no cost."""

    ILLEGAL = "illegal"  # its trace does not fit its task
    BUILD_ERROR = "build error"
    BUILD_TIMEOUT = "build timeout"
    CRASH = "crash"
    RUN_TIMEOUT = "run timeout"
    WRONG_ANSWER = "wrong answer"
    OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class MeasureInput:
    """A candidate: a program for a task."""

    task: Task
    trace: Trace


@dataclass(frozen=True)
class CandidateCode:
    """What it takes to run a candidate: kernels in order, and what each parameter is (see LoweredTask)."""

    kernels: tuple[Kernel, ...]
    params: tuple[tuple[str, ...], ...]  # of each kernel, in order
    scratch: Mapping[str, int]  # bytes
    preparations: tuple[Preparation, ...]


@dataclass(frozen=True)
class BuiltCandidate:
    """A candidate with its code, or with the error that it has none for."""

    input: MeasureInput
    code: CandidateCode | None
    error: ErrorKind | None = None
    message: str = ""
    build_seconds: float = 0.0


@dataclass(frozen=True)
class MeasureResult:
    """`costs` are the seconds of each timed run, empty if there is an `error`. `timestamp`: seconds since 1970."""

    costs: tuple[float, ...]
    error: ErrorKind | None = None
    message: str = ""
    build_seconds: float = 0.0
    run_seconds: float = 0.0  # that measuring took, checks included
    timestamp: float = 0.0

    @property
    def cost_seconds(self) -> float:
        """What one run takes; infinity for an error."""
        return math.inf if self.error is not None else robust_seconds(self.costs)


class Builder(Protocol):
    """Makes candidates' code."""

    def build(self, inputs: Sequence[MeasureInput]) -> list[BuiltCandidate]:
        """The candidates in the order of `inputs`. Nothing is being built any more when it returns."""
        ...


class Runner(Protocol):
    """Measures candidates."""

    def run(self, built: Sequence[BuiltCandidate], incumbent_seconds: float | None = None) -> list[MeasureResult]:
        """The results in the order of `built`. A candidate clearly slower than the best so far may get one run only."""
        ...


def robust_seconds(costs: Sequence[float]) -> float:
    """The median of the faster half: other programs on the machine only ever make a run slower."""
    if not costs:
        return math.inf
    ordered = sorted(costs)
    return ordered[(len(ordered) - 1) // 4]
