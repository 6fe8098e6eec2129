"""Kernels built by several processes: this one, and workers started for one compile.

A worker is a fresh interpreter that runs `serve`, not a fork, so a process with threads may compile;
and not multiprocessing's, so a program needs no main guard. Tasks go to it and kernels come back as pickles over its
own pipes. Which process builds a task changes nothing in the result.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import mcompile.errors
from mcompile.backend.cpu.build import build_kernel
from mcompile.errors import BuildError, InternalError, McompileError
from mcompile.graph.partition import compute_flops
from mcompile.ir.stmt import Block, PrimFunc, walk_stmts
from mcompile.ir.tensor import ComputeDag
from mcompile.ir.verify import verify_func
from mcompile.runtime.plan import Kernel
from mcompile.schedule.constructed import construct
from mcompile.schedule.lower import LoweredTask, lower
from mcompile.schedule.steps import Trace
from mcompile.schedule.task import Task

_LENGTH = struct.Struct("<Q")
_TASKS_WORTH_A_WORKER = 3  # fewer are built sooner than a worker has started


@dataclass(frozen=True)
class BuildJob:
    """`name` is the first kernel's; more of the same task get a number behind it. No `trace`: one is constructed."""

    name: str
    task: Task
    trace: Trace | None = None


@dataclass(frozen=True)
class BuiltTask:
    """The trace, what it was lowered to, and a kernel for each of its functions."""

    trace: Trace
    lowered: LoweredTask
    kernels: tuple[Kernel, ...]


def build_task(job: BuildJob) -> BuiltTask:
    """Schedule, lower and build one task. Raises BuildError; an InternalError says which task it was."""
    try:
        trace = construct(job.task) if job.trace is None else job.trace
        lowered = lower(job.task, trace, job.name)
        for func in lowered.funcs:
            verify_func(func)
        kernels = [build_kernel(func, job.task.target) for func in lowered.funcs]
        flops = _flops_of_funcs(job.task.dag, lowered.funcs)
        return BuiltTask(trace, lowered, tuple(map(_with_flops, kernels, flops)))
    except McompileError as error:
        raise type(error)(f"task {job.name}: {error}") from error
    except Exception as error:
        raise InternalError(f"task {job.name}: {type(error).__name__}: {error}") from error


def _with_flops(kernel: Kernel, flops: int) -> Kernel:
    return replace(kernel, flops=flops)


def _flops_of_funcs(dag: ComputeDag, funcs: Sequence[PrimFunc]) -> list[int]:
    """Each function's part of the dag's arithmetic: a compute counts where its stage stands; inlined, with the last."""
    blocks = [{stmt.name for stmt in walk_stmts(func.body) if isinstance(stmt, Block)} for func in funcs]
    flops = [0] * len(funcs)
    for compute in dag.computes:
        home = next((index for index, names in enumerate(blocks) if compute.name in names), len(funcs) - 1)
        flops[home] += compute_flops(compute)
    return flops


def build_tasks(
    jobs: Sequence[BuildJob], workers: int, progress: Callable[[int], None] = lambda done: None
) -> tuple[BuiltTask, ...]:
    """The built tasks in the order of `jobs`, by up to `workers` processes. `progress` gets the number done so far.

    Raises the error of the first job, in order, that failed.
    """
    queue = _Queue(jobs, progress)
    others = min(workers, len(jobs) // _TASKS_WORTH_A_WORKER) - 1
    threads = [threading.Thread(target=queue.work_elsewhere, daemon=True) for _ in range(others)]
    for thread in threads:
        thread.start()
    try:
        queue.work(build_task)
    finally:
        queue.close()
        for thread in threads:
            thread.join()
    return queue.finish()


class _Queue:
    """Jobs to be taken, and the results by job."""

    def __init__(self, jobs: Sequence[BuildJob], progress: Callable[[int], None]) -> None:
        self._jobs = jobs
        self._progress = progress
        self._lock = threading.Lock()
        self._next = 0
        self._results: dict[int, BuiltTask] = {}
        self._errors: dict[int, BaseException] = {}

    def work(self, build: Callable[[BuildJob], BuiltTask]) -> None:
        """Build until no job is left, or one has failed."""
        while (index := self._take()) is not None:
            try:
                result = build(self._jobs[index])
            except BaseException as error:  # raised by `finish`, whichever thread met it
                with self._lock:
                    self._errors[index] = error
                return
            with self._lock:
                self._results[index] = result
                self._progress(len(self._results))

    def work_elsewhere(self) -> None:
        """As `work`, in a process of its own."""
        with _Worker() as worker:
            self.work(worker.build)

    def close(self) -> None:
        """No more jobs are taken."""
        with self._lock:
            self._next = len(self._jobs) if len(self._results) < len(self._jobs) else self._next

    def finish(self) -> tuple[BuiltTask, ...]:
        if self._errors:
            raise self._errors[min(self._errors)]
        return tuple(self._results[index] for index in range(len(self._jobs)))

    def _take(self) -> int | None:
        with self._lock:
            if self._errors or self._next >= len(self._jobs):
                return None
            self._next += 1
            return self._next - 1


class _Worker:
    """The parent's end of a worker process."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
        self._child = subprocess.Popen(
            [sys.executable, "-c", "from mcompile.build_pool import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for the parent, also while this one starts
            env={**os.environ, "PYTHONPATH": path},
        )

    def build(self, job: BuildJob) -> BuiltTask:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            _write(self._child.stdin, job)
            answer = _read(self._child.stdout)
        except (OSError, EOFError) as error:
            raise BuildError(f"task {job.name}: its build process died (status {self._child.wait()})") from error
        if isinstance(answer, BuiltTask):
            return answer
        kind, message = answer
        raise getattr(mcompile.errors, kind, InternalError)(message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                stream.close()
        self._child.wait()


def _write(stream: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _read(stream: IO[bytes]) -> Any:
    """Raises EOFError at the end of the stream."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    data = stream.read(_LENGTH.unpack(header)[0])
    return pickle.loads(data)


def serve() -> None:
    """A worker's life: jobs on stdin, built tasks or (kind, message) of an error on stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes our pipe
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    while True:
        try:
            job = _read(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Any = build_task(job)
        except McompileError as error:
            answer = (type(error).__name__, str(error))
        _write(answers, answer)
