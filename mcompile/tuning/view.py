"""What tuning shows while it runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mcompile.tuning.tune import Budget, Progress, RoundEnded, TaskProgress, TrialEnded

_ROWS = 14
_LINE_EVERY_SECONDS = 5.0
_BARS = "▁▂▃▄▅▆▇█"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if math.isfinite(seconds) else "?"


def time_left(progress: Progress, budget: Budget) -> str:
    if budget.seconds is not None:
        return f"{max(0.0, budget.seconds - progress.seconds):.0f} s left"
    return f"{max(0, (budget.trials or 0) - progress.trials)} trials left"


def heaviest(tasks: Sequence[TaskProgress]) -> list[TaskProgress]:
    """By what they cost in all models together."""

    def share(task: TaskProgress) -> float:
        return sum(task.weights) * task.best_seconds if math.isfinite(task.best_seconds) else math.inf

    return sorted(tasks, key=share, reverse=True)


class LineView:
    """A line every few seconds."""

    def __init__(self, models: Sequence[str], budget: Budget, show: Callable[[str], None]) -> None:
        self._models, self._budget, self._show = models, budget, show
        self._last = -math.inf

    def __call__(self, event: TrialEnded | RoundEnded) -> None:
        if not isinstance(event, RoundEnded):
            return
        progress = event.progress
        if progress.seconds - self._last < _LINE_EVERY_SECONDS:
            return
        self._last = progress.seconds
        latencies = ", ".join(
            f"{name} {milliseconds(seconds)}" for name, seconds in zip(self._models, progress.latencies, strict=True)
        )
        failed = sum(sum(task.failures.values()) for task in progress.tasks)
        self._show(
            f"{progress.seconds:6.1f} s  {progress.trials} trials ({failed} failed)  {latencies}  "
            f"{time_left(progress, self._budget)}"
        )


class LiveView:
    """A table of the heaviest tasks and a line on each model. Use it as a context."""

    def __init__(self, models: Sequence[str], budget: Budget, console: Console) -> None:
        self._models, self._budget = models, budget
        self._latencies: list[list[float]] = [[] for _ in models]
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def __call__(self, event: TrialEnded | RoundEnded) -> None:
        if isinstance(event, RoundEnded):
            for past, seconds in zip(self._latencies, event.progress.latencies, strict=True):
                past.append(seconds)
            self._live.update(self.render(event.progress), refresh=True)

    def say(self, text: str) -> None:
        """Show what is being done before or after the search."""
        self._live.update(Text(text), refresh=True)

    def render(self, progress: Progress) -> Group:
        """What is shown."""
        head = f"{progress.seconds:.0f} s, {progress.trials} trials, {time_left(progress, self._budget)}"
        lines = [
            Text(f"{name}: {milliseconds(past[-1]) if past else '?'} {sparkline(past)}")
            for name, past in zip(self._models, self._latencies, strict=True)
        ]
        return Group(Text(head), *lines, task_table(progress))


def task_table(progress: Progress) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("task", "runs", "untuned", "best", "of bound", "gain", "trials", "failed"):
        table.add_column(name, justify="left" if name in ("task", "failed") else "right")
    shown = heaviest(progress.tasks)
    for task in shown[:_ROWS]:
        failed = ", ".join(f"{count} {reason}" for reason, count in task.failures.items())
        table.add_row(
            ("> " if task.name == progress.current else "  ") + task.name,
            f"{sum(task.weights):.0f}",
            milliseconds(task.untuned_seconds),
            milliseconds(task.best_seconds),
            f"{task.bound_share:.0%}",
            milliseconds(task.gain),
            str(task.trials),
            failed,
        )
    if len(shown) > _ROWS:
        table.add_row(f"  and {len(shown) - _ROWS} lighter ones", *[""] * 7)
    return table


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A curve in one line of text."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2 or max(finite) == min(finite):
        return ""
    step = max(1, -(-len(finite) // width))
    shown = finite[::step]
    low, high = min(finite), max(finite)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in shown)
