"""`mcompile tune`: searches for faster schedules of models' tasks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from mcompile.cli_io import (
    AsJson,
    Dims,
    Exact,
    Shapes,
    Threads,
    Workers,
    note,
    parse_dims,
    parse_shapes,
    print_json,
    print_pairs,
)
from mcompile.errors import OptionError

if TYPE_CHECKING:
    from mcompile.tuner import TunedModel, TuneResult
    from mcompile.tuning.task_scheduler import Objective
    from mcompile.tuning.tune import Budget, Callback

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}


def tune_command(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL..", help="ONNX models, tuned together.")],
    time: Annotated[str | None, typer.Option("--time", help="As 90s, 5m, 1h [default: 5m].")] = None,
    trials: Annotated[int | None, typer.Option("--trials", min=1, help="Programs to measure.")] = None,
    db: Annotated[Path | None, typer.Option("--db", metavar="F", help="Database [default: the cache's].")] = None,
    objective: Annotated[
        str, typer.Option(help="latency (sum), geomean (of speed-ups), or required:10ms,5ms (of each model).")
    ] = "latency",
    patience: Annotated[
        int | None, typer.Option(min=1, help="Leave a task alone after so many rounds without progress.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the search.")] = 0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Artifact; of several models a folder [default: none].")
    ] = None,
    report: Annotated[Path | None, typer.Option("--report", metavar="OUT.html", help="Write a page of curves.")] = None,
    threads: Threads = None,
    workers: Workers = None,
    shape: Shapes = None,
    dim: Dims = None,
    exact: Exact = False,
    as_json: AsJson = False,
) -> None:
    """Search for faster schedules of the MODELs' tasks, and compile with them where they are faster.

    Ctrl-C ends the search and keeps what was found; a second run goes on from there. `compile --db` uses the records.
    """
    from mcompile import driver, tuner
    from mcompile.tuning.records import Database, default_path
    from mcompile.tuning.task_scheduler import GradientScheduler
    from mcompile.tuning.tune import Budget, TuneOptions

    default_seconds = None if trials is not None else 300.0
    budget = Budget(parse_seconds(time) if time is not None else default_seconds, trials)
    names = _names(models)
    options = TuneOptions(
        budget=budget,
        seed=seed,
        objective=parse_objective(objective, len(models)),
        scheduler=GradientScheduler(patience=patience),
    )
    compiling = driver.CompileOptions("cpu", threads, parse_shapes(shape), parse_dims(dim), workers, exact=exact)
    with Database(db or default_path()) as database, _view(names, budget) as (progress, view):
        model_path = (db or default_path()).with_suffix(".model.json")
        request = tuner.TuneRequest(compiling, options, database, model_path, (view,))
        result = tuner.tune_models(models, names, request, progress)
    paths = _save(result.models, output)
    if report is not None:
        from mcompile.tuning.report import write_report

        write_report(report, result.report, names, [_outcome(model) for model in result.models])
    if as_json:
        return print_json(result.to_json())
    _print_result(result, paths, report)


def parse_seconds(text: str) -> float:
    """`90`, `90s`, `5m`, `1h`, `10ms`. Raises OptionError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(ms|s|m|h|)\s*", text)
    if match is None or float(match[1]) <= 0:
        raise OptionError(f"--time {text}: expected a time like 90s, 5m or 1h")
    return float(match[1]) * _UNITS[match[2]]


def parse_objective(text: str, models: int) -> Objective:
    """Raises OptionError."""
    from mcompile.tuning.task_scheduler import GeomeanSpeedup, LatencyRequirement, total_latency

    kind, _, rest = text.partition(":")
    if kind == "latency" and not rest:
        return total_latency
    if kind == "geomean" and not rest:
        return GeomeanSpeedup((1.0,) * models)  # what the speed-ups refer to does not change where it is least
    if kind == "required":
        required = tuple(parse_seconds(part) for part in rest.split(","))
        if len(required) != models:
            raise OptionError(f"--objective {text}: expected {models} latencies, one for each model")
        return LatencyRequirement(required)
    raise OptionError(f"--objective {text}: expected latency, geomean or required:10ms,...")


def _names(models: Sequence[Path]) -> list[str]:
    stems = [model.stem for model in models]
    return [stem if stems.count(stem) == 1 else f"{stem}#{number}" for number, stem in enumerate(stems)]


@contextmanager
def _view(names: Sequence[str], budget: Budget) -> Iterator[tuple[Callable[[str], None], Callback]]:
    """What shows progress of the compile, and what shows the search."""
    from mcompile.tuning.view import LineView, LiveView

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield note_line, LineView(names, budget, note)
        return
    with LiveView(names, budget, console) as view:
        yield view.say, view


def note_line(text: str) -> None:
    if text:
        note(text)


def _save(models: Sequence[TunedModel], output: Path | None) -> list[Path]:
    from mcompile.driver import save_artifact

    if output is None:
        return []
    if len(models) == 1:
        paths = [output]
    else:
        output.mkdir(parents=True, exist_ok=True)
        paths = [output / f"{model.name}.mcm" for model in models]
    for model, path in zip(models, paths, strict=True):
        save_artifact(model.artifact, path)
    return paths


def _outcome(model: TunedModel) -> str:
    if model.race is None:
        return f"{model.name}: no schedule was better than the untuned one"
    race = model.race
    ours, theirs = race.ours.median_ms, race.theirs.median_ms
    interval = f"95 % interval {race.speedup_low:.2f} to {race.speedup_high:.2f}"
    if model.is_tuned:
        times = f"{theirs:.3f} ms untuned, {ours:.3f} ms tuned: {race.speedup:.2f} times as fast ({interval})"
        return f"{model.name}: {times}, {model.tuned_tasks} of {model.tasks} tasks tuned"
    return f"{model.name}: {theirs:.3f} ms untuned, tuned build not faster ({ours:.3f} ms): untuned kept"


def _print_result(result: TuneResult, paths: Sequence[Path], report: Path | None) -> None:
    tuning = result.report
    for model in result.models:
        print(_outcome(model))
    pairs: dict[str, Any] = {
        "trials": f"{tuning.progress.trials} ({tuning.success_share:.0%} successful)",
        "known before": f"{tuning.resumed_trials} trials",
        "search": f"{tuning.progress.seconds:.1f} s; ended: {tuning.ended}",
        "of which": f"proposing {tuning.proposing_seconds:.1f} s, building {tuning.building_seconds:.1f} s, "
        f"running {tuning.running_seconds:.1f} s",
        "time": f"{result.seconds:.1f} s",
    }
    if paths:
        pairs["artifact"] = ", ".join(map(str, paths))
    if report is not None:
        pairs["report"] = str(report)
    print_pairs(pairs)
