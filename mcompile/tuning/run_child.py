"""What the measuring child does: run a candidate, check its answer, time it.

Kernels are timed inside the thread pool's walker, as in a compiled model: all threads are awake, and neither Python nor
a thread's waking is counted. Activations stay in the caches from one run to the next; constants are cycled through
copies, because in a model other layers' constants have been read in between.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm

from mcompile.backend.cpu.llvm import object_code
from mcompile.errors import McompileError
from mcompile.runtime.cpu import LoadedKernels
from mcompile.runtime.loader import LoadedCode
from mcompile.runtime.memory import Array, Bytes, aligned_empty
from mcompile.runtime.plan import Kernel
from mcompile.runtime.pool import process_pool
from mcompile.schedule.task import Task
from mcompile.target import parse_target
from mcompile.tuning.trial import CandidateCode, ErrorKind
from mcompile.tuning.trial_task import ConstantCopies, TrialTask

_TASKS = 6  # kept at a time
_HOPELESS_FACTOR, _HOPELESS_SECONDS = 4.0, 0.02  # a first run slower than both is not repeated

_COMPARING_SECONDS, _LEAST_ROUNDS = 0.5, 2  # that comparing may take, for each candidate
_LONG_SECONDS = 0.1  # of a run that needs no more than one other
_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@dataclass(frozen=True)
class RunOptions:
    """How to time. `stream_bytes`: constants are copied until they fill so much (default: twice the L2 caches)."""

    race_factor: float = 1.5  # a candidate so much slower than the best when checked and in one run gets no other
    runs: tuple[int, int] = (5, 40)  # least and most timed runs of the others
    budget_seconds: float = 8e-3  # that these take together, within the bounds of `runs`
    stream_bytes: int | None = None
    copies: int = 8  # at most, of the constants
    seed: int = 0


@dataclass(frozen=True)
class TaskRequest:
    """Get ready for a task's candidates."""

    key: str
    task: Task
    reference: Path
    seed: int


@dataclass(frozen=True)
class RunRequest:
    key: str
    code: CandidateCode
    incumbent_seconds: float | None
    options: RunOptions


@dataclass(frozen=True)
class CompareRequest:
    """Time candidates of one task in turns."""

    key: str
    codes: tuple[CandidateCode, ...]
    rounds: int
    options: RunOptions


@dataclass(frozen=True)
class RunAnswer:
    """`costs`: for each candidate. `is_fouled`: the process may have been harmed and should be replaced."""

    costs: tuple[tuple[float, ...], ...] = ()
    error: ErrorKind | None = None
    message: str = ""
    is_fouled: bool = False


class _RunError(Exception):
    def __init__(self, answer: RunAnswer) -> None:
        self.answer = answer


_requests: OrderedDict[str, TaskRequest] = OrderedDict()
_tasks: OrderedDict[str, TrialTask] = OrderedDict()


def answer(request: TaskRequest | RunRequest | CompareRequest) -> RunAnswer:
    """What goes wrong is in the answer, unless it ends the process."""
    try:
        if isinstance(request, TaskRequest):
            _requests[request.key] = request
            _trial_task(request.key)
            return RunAnswer()
        if isinstance(request, RunRequest):
            return RunAnswer((_measure(request),))
        return RunAnswer(_compare(request))
    except _RunError as error:
        return error.answer
    except MemoryError as error:
        _tasks.clear()
        return RunAnswer(error=ErrorKind.OUT_OF_MEMORY, message=str(error))
    except McompileError as error:
        return RunAnswer(error=ErrorKind.CRASH, message=str(error))
    except Exception as error:  # whatever a candidate provokes must not end the tuning
        return RunAnswer(error=ErrorKind.CRASH, message=f"{type(error).__name__}: {error}", is_fouled=True)


def _trial_task(key: str) -> TrialTask:
    if key not in _tasks:
        while len(_tasks) >= _TASKS:
            _tasks.popitem(last=False)
        request = _requests[key]
        _tasks[key] = TrialTask(request.task, request.reference, request.seed)
    _tasks.move_to_end(key)
    return _tasks[key]


# --- measuring ---


def _measure(request: RunRequest) -> tuple[float, ...]:
    options, incumbent = request.options, request.incumbent_seconds
    task = _trial_task(request.key)
    memory = _constants_memory(_stream_bytes(task.task, options))
    bench = _Bench(task, request.code, options, memory)
    checked = bench.checked_run()
    if incumbent is not None and checked > max(_HOPELESS_SECONDS, _HOPELESS_FACTOR * incumbent):
        return (checked,)
    first = bench.timed_runs(1)
    if incumbent is not None and min(checked, first[0]) > options.race_factor * incumbent:
        return first  # twice too slow: not for an interruption
    least, most = options.runs if first[0] < _LONG_SECONDS else (2, 2)
    count = min(most, max(least, int(options.budget_seconds / max(first[0], 1e-9))))
    return first + bench.timed_runs(count - 1)


def _compare(request: CompareRequest) -> tuple[tuple[float, ...], ...]:
    task = _trial_task(request.key)
    share = _stream_bytes(task.task, request.options) // len(request.codes)
    benches = [_Bench(task, code, request.options, aligned_empty(share)) for code in request.codes]
    for bench in benches:
        bench.checked_run()
    deadline = time.monotonic() + _COMPARING_SECONDS * len(benches)
    rounds: list[list[float]] = []
    while len(rounds) < _LEAST_ROUNDS or (len(rounds) < request.rounds and time.monotonic() < deadline):
        rounds.append([bench.timed_runs(1)[0] for bench in benches])
    return tuple(zip(*rounds, strict=True))


class _Bench:
    """A candidate's code, loaded, with its buffers."""

    def __init__(self, task: TrialTask, code: CandidateCode, options: RunOptions, memory: Bytes) -> None:
        self._task = task
        self._code = code
        self._threads = task.task.target.threads
        _place_threads(self._threads)
        self._constants = ConstantCopies(task.constants_of(code), options.copies, memory)
        self._scratch = {name: aligned_empty(size) for name, size in code.scratch.items()}
        self._wake = replace(_wake_kernel(), parallel_extent=self._threads)
        self._loaded = LoadedCode((self._wake, *code.kernels))
        self._next_copy = 0

    def checked_run(self) -> float:
        """Seconds of the first run, whose result is right: otherwise raises _RunError."""
        self._task.clear_outputs()
        for memory in self._scratch.values():
            memory[:] = 0xFF  # NaN: what is read must have been written
        (seconds,) = self.timed_runs(1)
        problem = self._task.problem()
        if problem:
            _tasks.clear()  # its inputs may have been overwritten
            is_fouled = "outside" in problem
            raise _RunError(RunAnswer(error=ErrorKind.WRONG_ANSWER, message=problem, is_fouled=is_fouled))
        return seconds

    def timed_runs(self, count: int) -> tuple[float, ...]:
        """Seconds of so many runs, in one job of the pool."""
        if count < 1:
            return ()
        runs = range(self._next_copy, self._next_copy + count)
        self._next_copy += count
        kernels = (self._wake, *self._code.kernels * count)
        buffers = [[], *(buffers for run in runs for buffers in self._buffers(self._constants[run]))]
        seconds = LoadedKernels(kernels, buffers, self._threads, self._loaded).profile()[1:]
        width = len(self._code.kernels)
        return tuple(sum(seconds[i * width : (i + 1) * width]) for i in range(count))

    def _buffers(self, constants: dict[str, Array]) -> list[list[Array]]:
        inputs = {name: placed.flat for name, placed in self._task.inputs.items()}
        outputs = {name: placed.flat for name, placed in self._task.outputs.items()}
        by_name: dict[str, Array] = {**inputs, **outputs, **self._scratch, **constants}
        return [[by_name[name] for name in params] for params in self._code.params]


def _stream_bytes(task: Task, options: RunOptions) -> int:
    near_caches = task.target.l2_bytes * task.target.threads
    return options.stream_bytes if options.stream_bytes is not None else 2 * near_caches


@cache
def _constants_memory(size: int) -> Bytes:
    return aligned_empty(size)


@cache
def _wake_kernel() -> Kernel:
    """A parallel kernel that does nothing: after its barrier all threads of the pool are awake."""
    target = parse_target("cpu", 1)
    text = (
        f'target triple = "{target.triple}"\n'
        "define void @wake(ptr %buffers, ptr %scratch, i64 %begin, i64 %end) {\n  ret void\n}"
    )
    return Kernel("wake", llvm.get_process_triple(), object_code(text, target), 1, 0)


@cache
def _place_threads(threads: int) -> None:
    """Each thread of the pool on a core of its own, if there are so many."""
    if len(_CORES) < threads:
        return
    process_pool().ensure(threads)
    time.sleep(0.001)  # until the threads have their ids
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("mcompile-")]
    os.sched_setaffinity(0, {_CORES[0]})
    for thread, core in zip(workers, _CORES[1:], strict=False):
        if thread.native_id is not None:
            os.sched_setaffinity(thread.native_id, {core})
