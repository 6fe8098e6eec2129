"""PassManager: names, times, verifies, dumps, skips and bisects passes over any program (a Graph, a PrimFunc).

A pass is a function from program to program that returns *the same object* when it changed nothing. What a program is
(how it prints, when it is legal) is handed in as callbacks.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from mcompile.config import Config
from mcompile.errors import InternalError, McompileError

T = TypeVar("T")


@dataclass(frozen=True)
class Pass(Generic[T]):
    """A named program transformation."""

    name: str
    run: Callable[[T], T]


@dataclass(frozen=True)
class Repeat(Generic[T]):
    """Passes run in order, again and again, until a whole round changes nothing (or `limit` rounds ran)."""

    name: str
    passes: tuple[Pass[T], ...]
    limit: int = 8


@dataclass(frozen=True)
class Timing:
    name: str
    seconds: float
    changed: bool


def as_pass(function: Callable[[T], T]) -> Pass[T]:
    """The pass named after a function."""
    return Pass(function.__name__, function)


@dataclass
class PassManager(Generic[T]):
    """Runs a pipeline. `verify` raises on an illegal program, `text` prints it; `timings` holds what ran."""

    name: str
    verify: Callable[[T], None]
    text: Callable[[T], str]
    config: Config
    timings: list[Timing] = field(default_factory=list)

    def run(self, pipeline: Sequence[Pass[T] | Repeat[T]], program: T) -> T:
        """The program after all passes. Raises InternalError naming the pass that failed or broke the program."""
        self._dump("input", program, changed=True)
        for step in pipeline:
            program = self._repeat(step, program) if isinstance(step, Repeat) else self._run_pass(step, program)
        if self.config.verify == 1:
            self._verify("the last pass", program)
        return program

    def _repeat(self, group: Repeat[T], program: T) -> T:
        quiet = 0  # passes since the last change: a whole round of them is a fixpoint
        for _ in range(group.limit):
            for step in group.passes:
                new = self._run_pass(step, program)
                quiet = quiet + 1 if new is program else 0
                program = new
                if quiet == len(group.passes):
                    return program
        return program

    def _run_pass(self, step: Pass[T], program: T) -> T:
        if step.name in self.config.skip_passes:
            return program
        if self.config.pass_limit is not None and len(self.timings) >= self.config.pass_limit:
            return program
        start = time.perf_counter()
        try:
            new = step.run(program)
        except McompileError:
            raise
        except Exception as error:
            raise InternalError(f"{self.name}: pass {step.name} failed{self._after()}: {error!r}") from error
        changed = new is not program
        self.timings.append(Timing(step.name, time.perf_counter() - start, changed))
        if self.config.debug >= 2:
            print(f"{self.name}: {self.timings[-1]}", file=sys.stderr)
        self._dump(step.name, new, changed)
        if self.config.verify >= 2 and changed:
            self._verify(f"pass {step.name}", new)
        return new

    def _verify(self, where: str, program: T) -> None:
        try:
            self.verify(program)
        except InternalError as error:
            dumped = f"; dumps are in {self.config.dump}" if self.config.dump else ""
            raise InternalError(f"{self.name}: after {where}{self._after()}: {error}{dumped}") from error

    def _after(self) -> str:
        names = [timing.name for timing in self.timings if timing.changed]
        return f" (passes that changed something before: {', '.join(names[-8:]) or 'none'})"

    def _dump(self, name: str, program: T, changed: bool) -> None:
        if self.config.dump is None:
            return
        folder = self.config.dump / re.sub(r"[^\w.-]+", "_", self.name)
        folder.mkdir(parents=True, exist_ok=True)
        same = "" if changed else ".same"
        content = self.text(program) if changed else "(unchanged)\n"
        (folder / f"{len(self.timings):03}_{name}{same}.txt").write_text(content)


def bisect(run: Callable[[int], Any], is_good: Callable[[Any], bool], total: int) -> int:
    """The smallest number of passes whose result is bad, by halving; `run(n)` gives the program after n passes.

    `run(0)` must be good and `run(total)` bad; the culprit is pass number `bisect(...)`, counted from 1.
    """
    good, bad = 0, total
    while bad - good > 1:
        middle = (good + bad) // 2
        if is_good(run(middle)):
            good = middle
        else:
            bad = middle
    return bad
