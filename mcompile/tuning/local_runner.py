"""Measures candidates on this machine, in a child process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from mcompile.errors import McompileError
from mcompile.schedule.task import Task
from mcompile.tuning.child import Child, ChildDiedError, ChildTimeoutError
from mcompile.tuning.run_child import CompareRequest, RunAnswer, RunOptions, RunRequest, TaskRequest
from mcompile.tuning.trial import BuiltCandidate, ErrorKind, MeasureResult

_ANSWER = "mcompile.tuning.run_child:answer"
_REFERENCE_SECONDS = 300.0  # for the reference of a task


class MeasuringError(McompileError):
    """A task's reference cannot be computed: no candidate of it can be measured."""


class LocalRunner:
    """One child process that loads each candidate, checks its result against `ir.evaluate`'s, and times it.

    The child is replaced after a crash, a hang, or a write outside the outputs. A crash counts only if it happens in
    a fresh child too. References are computed once for each task.
    """

    def __init__(
        self, options: RunOptions | None = None, timeout_seconds: float = 3.0, memory_bytes: int = 8 << 30
    ) -> None:
        self._options = options or RunOptions()
        self._timeout_seconds = timeout_seconds
        self._memory_bytes = memory_bytes
        self._child: Child | None = None
        self._references = tempfile.TemporaryDirectory(prefix="mcompile-")

    def run(self, built: Sequence[BuiltCandidate], incumbent_seconds: float | None = None) -> list[MeasureResult]:
        """See Runner. The best of `built` so far takes over from `incumbent_seconds` for those of the same task."""
        best: dict[str, float] = {}
        results = []
        for candidate in built:
            key = candidate.input.task.workload_key
            incumbent = min(best.get(key, float("inf")), incumbent_seconds or float("inf"))
            result = self._run_one(candidate, incumbent if incumbent < float("inf") else None)
            best[key] = min(incumbent, result.cost_seconds)
            results.append(result)
        return results

    def compare(self, built: Sequence[BuiltCandidate], rounds: int = 20) -> list[MeasureResult]:
        """Time candidates of one task in turns, so that all see the same machine; for finalists. They must have code.

        An error of one is an error of all.
        """
        codes = [candidate.code for candidate in built]
        if not built or None in codes or len({candidate.input.task.workload_key for candidate in built}) > 1:
            raise ValueError("compare: expected built candidates of one task")
        start = time.perf_counter()
        task = built[0].input.task
        request = CompareRequest(
            task.workload_key, tuple(code for code in codes if code is not None), rounds, self._options
        )
        answer = self._ask(task, request, self._timeout_seconds * len(built))
        seconds = time.perf_counter() - start
        if answer.error is not None:
            return [MeasureResult((), answer.error, answer.message, 0.0, seconds, time.time()) for _ in built]
        return [MeasureResult(costs, run_seconds=seconds, timestamp=time.time()) for costs in answer.costs]

    def _run_one(self, candidate: BuiltCandidate, incumbent: float | None) -> MeasureResult:
        if candidate.code is None:
            error = candidate.error or ErrorKind.BUILD_ERROR
            return MeasureResult((), error, candidate.message, candidate.build_seconds, 0.0, time.time())
        start = time.perf_counter()
        task = candidate.input.task
        request = RunRequest(task.workload_key, candidate.code, incumbent, self._options)
        answer = self._ask(task, request, self._timeout_seconds)
        seconds = time.perf_counter() - start
        costs = answer.costs[0] if answer.error is None else ()
        return MeasureResult(costs, answer.error, answer.message, candidate.build_seconds, seconds, time.time())

    def _ask(self, task: Task, request: RunRequest | CompareRequest, timeout_seconds: float) -> RunAnswer:
        """The answer; of a fresh child, if one that had done other things before crashes."""
        try:
            while True:
                child = self._ready_child(task)
                is_fresh = child.answers <= 1  # the task's
                try:
                    answer: RunAnswer = child.request(request, timeout_seconds)
                    break
                except ChildDiedError as error:
                    self._child = None
                    if is_fresh:
                        kind = ErrorKind.OUT_OF_MEMORY if error.is_out_of_memory else ErrorKind.CRASH
                        return RunAnswer(error=kind, message=f"the measuring process {error}")
        except ChildTimeoutError:
            self._child = None
            return RunAnswer(error=ErrorKind.RUN_TIMEOUT, message=f"no answer after {timeout_seconds:g} s")
        except MeasuringError as error:
            return RunAnswer(error=ErrorKind.CRASH, message=str(error))
        if answer.is_fouled:
            self.close_child()
        return answer

    def _ready_child(self, task: Task) -> Child:
        """A child that knows the task. Raises MeasuringError."""
        if self._child is not None and not self._child.is_alive:
            self.close_child()
        key = task.workload_key
        try:
            if self._child is None:
                self._child = Child(_ANSWER, self._memory_bytes)
                self._child.wait_ready()
            if key not in self._child.known:
                path = Path(self._references.name, key)
                answer = self._child.request(TaskRequest(key, task, path, self._options.seed), _REFERENCE_SECONDS)
                if answer.error is not None:
                    raise MeasuringError(f"no reference for task {key}: {answer.message}")
                self._child.known.add(key)
        except (ChildDiedError, ChildTimeoutError) as error:
            self.close_child()
            raise MeasuringError(f"no reference for task {key}: {error or 'it took too long'}") from error
        return self._child

    def close_child(self) -> None:
        """End the child; the next candidate gets a fresh one."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def close(self) -> None:
        """End the child and forget the references."""
        self.close_child()
        self._references.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
