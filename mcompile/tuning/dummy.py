"""A builder and a runner that compute nothing: a tuning loop's logic can be tested in no time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from mcompile.schedule.steps import print_trace
from mcompile.tuning.trial import BuiltCandidate, ErrorKind, MeasureInput, MeasureResult

Cost = Callable[[MeasureInput], "float | ErrorKind"]


class DummyBuilder:
    """Every candidate is built at once, without code."""

    def build(self, inputs: Sequence[MeasureInput]) -> list[BuiltCandidate]:
        return [BuiltCandidate(candidate, None) for candidate in inputs]


class DummyRunner:
    """What a candidate costs, or the error it ends in, is a function of it."""

    def __init__(self, cost: Cost | None = None) -> None:
        self._cost = cost or scattered_cost
        self.measured: list[MeasureInput] = []

    def run(self, built: Sequence[BuiltCandidate], incumbent_seconds: float | None = None) -> list[MeasureResult]:
        return [self._result(candidate) for candidate in built]

    def _result(self, built: BuiltCandidate) -> MeasureResult:
        if built.error is not None:
            return MeasureResult((), built.error, built.message)
        self.measured.append(built.input)
        cost = self._cost(built.input)
        if isinstance(cost, ErrorKind):
            return MeasureResult((), cost, "as the cost function says", timestamp=float(len(self.measured)))
        return MeasureResult((cost,), timestamp=float(len(self.measured)))


def scattered_cost(candidate: MeasureInput) -> float:
    """Between 1 and 2 ms, by a hash of the trace: the same in every process."""
    digest = hashlib.sha256(print_trace(candidate.trace).encode()).digest()
    return 1e-3 * (1.0 + int.from_bytes(digest[:6], "big") / 2**48)
