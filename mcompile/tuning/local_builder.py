"""Builds candidates in child processes of this machine."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from mcompile.target import available_cores
from mcompile.tuning.build_child import BuildAnswer, BuildRequest
from mcompile.tuning.child import Child, ChildDiedError, ChildTimeoutError
from mcompile.tuning.trial import BuiltCandidate, ErrorKind, MeasureInput

_ANSWER = "mcompile.tuning.build_child:answer"
BUILD = "mcompile.tuning.build_child:build_code"


@dataclass(frozen=True)
class _Work:
    """What a child is busy with."""

    index: int
    start: float
    deadline: float


class LocalBuilder:
    """`workers` child processes, kept from round to round. `build` names what makes a candidate's code."""

    def __init__(
        self,
        workers: int | None = None,
        timeout_seconds: float = 10.0,
        memory_bytes: int = 4 << 30,
        build: str = BUILD,
    ) -> None:
        self._workers = workers or available_cores()
        self._timeout_seconds = timeout_seconds
        self._memory_bytes = memory_bytes
        self._build = build
        self._idle: list[Child] = []

    def build(self, inputs: Sequence[MeasureInput]) -> list[BuiltCandidate]:
        """See Builder. A child that dies or takes too long is replaced, and its candidate has an error."""
        waiting = deque(range(len(inputs)))
        results: dict[int, BuiltCandidate] = {}
        busy: dict[Child, _Work] = {}
        missing = min(self._workers, len(inputs)) - len(self._idle)
        self._idle += [Child(_ANSWER, self._memory_bytes) for _ in range(missing)]  # they start side by side
        try:
            while waiting or busy:
                while waiting and len(busy) < self._workers:
                    index = waiting.popleft()
                    self._start(index, inputs[index], busy, results)
                self._finish_some(inputs, busy, results)
        finally:
            for child in busy:  # after an interrupt
                child.close()
        return [results[index] for index in range(len(inputs))]

    def _start(
        self, index: int, candidate: MeasureInput, busy: dict[Child, _Work], results: dict[int, BuiltCandidate]
    ) -> None:
        key = candidate.task.workload_key
        start = time.monotonic()
        try:
            child = self._take_child()
            task = None if key in child.known else candidate.task
            start = time.monotonic()
            child.send(BuildRequest(key, task, candidate.trace, self._build))
        except (ChildDiedError, ChildTimeoutError) as error:
            results[index] = _failed(candidate, error, start)
            return
        child.known.add(key)
        busy[child] = _Work(index, start, start + self._timeout_seconds)

    def _take_child(self) -> Child:
        self._idle = [child for child in self._idle if child.is_alive]
        child = self._idle.pop() if self._idle else Child(_ANSWER, self._memory_bytes)
        child.wait_ready()
        return child

    def _finish_some(
        self, inputs: Sequence[MeasureInput], busy: dict[Child, _Work], results: dict[int, BuiltCandidate]
    ) -> None:
        """Wait for an answer or a time limit, and take all that are there."""
        if not busy:
            return
        poll = select.poll()
        for child in busy:
            poll.register(child.fileno(), select.POLLIN | select.POLLHUP)
        soonest = min(work.deadline for work in busy.values())
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, soonest - time.monotonic()) * 1e3)}
        now = time.monotonic()
        for child, work in list(busy.items()):
            if child.fileno() not in ready and now < work.deadline:
                continue
            del busy[child]
            results[work.index] = self._finish(child, inputs[work.index], work)

    def _finish(self, child: Child, candidate: MeasureInput, work: _Work) -> BuiltCandidate:
        try:
            answer: BuildAnswer = child.receive(max(0.0, work.deadline - time.monotonic()))
        except (ChildDiedError, ChildTimeoutError) as error:
            return _failed(candidate, error, work.start)
        self._idle.append(child)
        return BuiltCandidate(candidate, answer.code, answer.error, answer.message, answer.seconds)

    def close(self) -> None:
        """End the children."""
        while self._idle:
            self._idle.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _failed(candidate: MeasureInput, error: ChildDiedError | ChildTimeoutError, start: float) -> BuiltCandidate:
    seconds = time.monotonic() - start
    if isinstance(error, ChildTimeoutError):
        return BuiltCandidate(candidate, None, ErrorKind.BUILD_TIMEOUT, f"not built after {seconds:.1f} s", seconds)
    kind = ErrorKind.OUT_OF_MEMORY if error.is_out_of_memory else ErrorKind.BUILD_ERROR
    return BuiltCandidate(candidate, None, kind, f"the building process {error}", seconds)
