"""One self-contained page on a tuning: curves, tasks before and after, where the trials went."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcompile.errors import OptionError
from mcompile.tuning.tune import TaskProgress, TuneReport
from mcompile.tuning.view import heaviest, milliseconds

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; width: 100% } th, td { text-align: right; padding: .15em .6em }
th { border-bottom: 1px solid #999; font-weight: 600 } th:first-child, td:first-child { text-align: left }
td.text { text-align: left; color: #666; font-size: 85% } svg { max-width: 100%; height: auto }
"""


def write_report(
    path: Path, report: TuneReport, models: Sequence[str], outcome: Sequence[str] = (), title: str = "mcompile tune"
) -> None:
    """Write the page. `outcome`: a line on each model's end. Raises OptionError if it cannot be written or drawn."""
    text = report_html(report, models, outcome, title)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror or error}") from error


def report_html(report: TuneReport, models: Sequence[str], outcome: Sequence[str], title: str) -> str:
    progress = report.progress
    facts = [
        f"{progress.seconds:.0f} s, {progress.trials} trials, {report.success_share:.0%} of them successful; "
        f"ended: {report.ended}",
        f"{report.resumed_trials} trials were known before",
        f"proposing {report.proposing_seconds:.1f} s, building {report.building_seconds:.1f} s, "
        f"running {report.running_seconds:.1f} s",
        *(
            f"{name}: sum of tasks {milliseconds(before)} untuned, {milliseconds(after)} tuned"
            for name, before, after in zip(models, report.untuned_latencies, progress.latencies, strict=True)
        ),
        *outcome,
    ]
    sections = [
        f"<h1>{html.escape(title)}</h1>",
        "<ul>" + "".join(f"<li>{html.escape(fact)}</li>" for fact in facts) + "</ul>",
        "<h2>Latency over trials and time</h2>" + _curves(report, models),
        "<h2>Tasks</h2>" + _bars(progress.tasks) + _table(progress.tasks),
    ]
    head = f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
    return f"{head}<style>{_STYLE}</style><body>{''.join(sections)}</body></html>"


def _table(tasks: Sequence[TaskProgress]) -> str:
    names = ("task", "runs", "untuned", "tuned", "speed-up", "of bound", "trials", "failed", "schedule")
    rows = ["<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"]
    for task in heaviest(tasks):
        known = math.isfinite(task.best_seconds) and math.isfinite(task.untuned_seconds)
        cells = (
            task.name,
            f"{sum(task.weights):.0f}",
            milliseconds(task.untuned_seconds),
            milliseconds(task.best_seconds),
            f"{task.untuned_seconds / task.best_seconds:.2f}" if known else "?",
            f"{task.bound_share:.0%}",
            str(task.trials),
            ", ".join(f"{count} {reason}" for reason, count in task.failures.items()),
        )
        row = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr>{row}<td class="text">{html.escape(task.source)}</td></tr>')
    return "<table>" + "".join(rows) + "</table>"


def _figure(columns: int, height: float) -> tuple[Any, Any]:
    """A figure with axes side by side. Raises OptionError without the plotting library."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError("--report needs matplotlib: pip install 'mcompile[tune]'") from error
    figure = Figure(figsize=(11, height), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _svg(figure: Any) -> str:
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.hashsalt": "mcompile"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _curves(report: TuneReport, models: Sequence[str]) -> str:
    figure, (by_trials, by_seconds) = _figure(2, 3.6)
    for number, name in enumerate(models):
        points = [point for point in report.curve if math.isfinite(point.latencies[number])]
        latencies = [point.latencies[number] * 1e3 for point in points]
        by_trials.step([point.trials for point in points], latencies, where="post", label=name)
        by_seconds.step([point.seconds for point in points], latencies, where="post", label=name)
    for axes, label in ((by_trials, "trials"), (by_seconds, "seconds")):
        axes.set_xlabel(label)
        axes.set_ylabel("sum of tasks, ms")
        axes.grid(alpha=0.3)
        if models:
            axes.legend()
    return _svg(figure)


def _bars(tasks: Sequence[TaskProgress]) -> str:
    shown = [task for task in heaviest(tasks) if math.isfinite(task.best_seconds)][:30]
    figure, (times, trials) = _figure(2, max(2.5, 0.28 * len(shown) + 1))
    places = list(range(len(shown)))
    weights = [sum(task.weights) * 1e3 for task in shown]

    def of_tasks(values: Sequence[float]) -> list[float]:
        return [value * weight if math.isfinite(value) else 0.0 for value, weight in zip(values, weights, strict=True)]

    times.barh(places, of_tasks([task.untuned_seconds for task in shown]), color="#ccc", label="untuned")
    times.barh(places, of_tasks([task.best_seconds for task in shown]), 0.55, color="#37a", label="tuned")
    bounds = of_tasks([task.bound_seconds for task in shown])
    times.scatter(bounds, places, color="#c33", marker="|", label="bound", zorder=3)
    trials.barh(places, [task.trials for task in shown], color="#8b6")
    trials.barh(places, [sum(task.failures.values()) for task in shown], color="#c33", label="failed")
    for axes, label in ((times, "ms of a run"), (trials, "trials")):
        axes.set_yticks(places, [task.name for task in shown], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel(label)
        axes.legend()
    return _svg(figure)
