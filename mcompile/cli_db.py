"""`mcompile db`: the records that tuning keeps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcompile.cli_io import (
    AsJson,
    Dims,
    Shapes,
    Threads,
    parse_dims,
    parse_shapes,
    print_json,
    print_table,
    shown_progress,
)
from mcompile.errors import OptionError

if TYPE_CHECKING:
    from mcompile.schedule.task import Task
    from mcompile.tuning.check import CheckedRecord
    from mcompile.tuning.records import Database

db_app = typer.Typer(help="The records that tuning keeps.", no_args_is_help=True)

DatabaseFile = Annotated[Path | None, typer.Option("--db", metavar="F", help="Database [default: the cache's].")]


@db_app.command("list")
def list_command(db: DatabaseFile = None, as_json: AsJson = False) -> None:
    """Workloads: trials, failed ones, the best program's time."""
    from mcompile.tuning.records import VERSION

    with _existing(db) as database:
        rows = database.summary()
    if as_json:
        return print_json([asdict(row) for row in rows])
    cells = [
        (
            row.workload_key,
            row.target_key,
            row.version + ("" if row.version == VERSION else " (not used)"),
            str(row.trials),
            str(row.failed),
            "none" if row.best_seconds is None else f"{row.best_seconds * 1e3:.4g} ms",
            datetime.fromtimestamp(row.timestamp, UTC).isoformat(timespec="seconds"),
        )
        for row in rows
    ]
    print_table(("workload", "target", "version", "trials", "failed", "best", "last trial"), cells)


@db_app.command("export")
def export_command(
    output: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="A record a line.")],
    db: DatabaseFile = None,
    as_json: AsJson = False,
) -> None:
    """Write all records as lines of JSON."""
    from mcompile.tuning.records import export_records

    with _existing(db) as database:
        count = export_records(database, output)
    _print_result({"exported": count, "file": str(output)}, as_json)


@db_app.command("import")
def import_command(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="What export has written.")],
    db: DatabaseFile = None,
    as_json: AsJson = False,
) -> None:
    """Add records from lines of JSON; broken lines are left out and named. Exit 1 if there were any."""
    from mcompile.tuning.records import Database, default_path, import_records

    with Database(db or default_path()) as database:
        report = import_records(database, source)
    for problem in report.broken:
        print(f"{source}: {problem}", file=sys.stderr)
    _print_result({"added": report.added, "known": report.known, "broken": len(report.broken)}, as_json)
    if report.broken:
        raise typer.Exit(1)


@db_app.command("prune")
def prune_command(
    keep: Annotated[int | None, typer.Option(min=1, help="Fastest programs kept of each workload.")] = None,
    other_versions: Annotated[bool, typer.Option(help="Forget what other versions of mcompile measured.")] = True,
    target: Annotated[list[str] | None, typer.Option(metavar="KEY", help="Forget this target's records.")] = None,
    db: DatabaseFile = None,
    as_json: AsJson = False,
) -> None:
    """Forget records. Tuning may measure again what is forgotten."""
    with _existing(db) as database:
        removed = database.prune(keep, other_versions, target or ())
    _print_result({"removed": removed}, as_json)


@db_app.command("check")
def check_command(
    models: Annotated[list[Path] | None, typer.Argument(metavar="MODEL..", help="ONNX models.")] = None,
    threads: Threads = None,
    shape: Shapes = None,
    dim: Dims = None,
    remove: Annotated[bool, typer.Option("--remove", help="Forget the records that fail.")] = False,
    db: DatabaseFile = None,
    as_json: AsJson = False,
) -> None:
    """Check the file, and run the best records for the MODELs' tasks against the reference. Exit 1 if one fails."""
    with _existing(db) as database:
        problems = database.problems()
        checked = _check(database, models or [], threads, shape, dim)
        failed = [each for each in checked if each.error is not None]
        if remove:
            for each in failed:
                database.remove(each.record)
    for problem in problems:
        print(problem, file=sys.stderr)
    _print_checked(checked, problems, as_json)
    if failed or problems:
        raise typer.Exit(1)


def _check(
    database: Database, models: Sequence[Path], threads: int | None, shape: list[str] | None, dim: list[str] | None
) -> list[CheckedRecord]:
    if not models:
        return []
    from mcompile.tuning.check import check_best
    from mcompile.tuning.measure import LocalBuilder, LocalRunner

    tasks = _tasks_of(models, threads, shape, dim)
    with LocalBuilder() as builder, LocalRunner() as runner, shown_progress() as progress:
        return check_best(tasks, database, builder, runner, progress)


def _tasks_of(
    models: Sequence[Path], threads: int | None, shape: list[str] | None, dim: list[str] | None
) -> list[Task]:
    """The distinct tasks of several models."""
    from mcompile import driver

    options = driver.CompileOptions("cpu", threads, parse_shapes(shape), parse_dims(dim))
    tasks = (job.task for model in models for job in driver.plan_program(model, options).jobs)
    return list({task.workload_key: task for task in tasks}.values())


def existing_databases(paths: Sequence[Path]) -> tuple[Database, ...]:
    """Raises OptionError if one is not there."""
    return tuple(_existing(path) for path in paths)


def _existing(path: Path | None) -> Database:
    """Raises OptionError if there is no such file."""
    from mcompile.tuning.records import Database, default_path

    path = path or default_path()
    if not path.exists():
        raise OptionError(f"--db {path}: no such file")
    return Database(path)


# --- printing ---


def _print_checked(checked: Sequence[CheckedRecord], problems: Sequence[str], as_json: bool) -> None:
    rows = [
        {
            "workload": each.record.workload_key,
            "recorded_seconds": each.record.cost_seconds,
            "measured_seconds": None if each.error is not None else each.measured_seconds,
            "error": each.error,
            "message": each.message,
        }
        for each in checked
    ]
    if as_json:
        return print_json({"problems": list(problems), "records": rows})
    cells = [
        (
            each.record.workload_key,
            f"{each.record.cost_seconds * 1e3:.4g} ms",
            f"{each.measured_seconds * 1e3:.4g} ms" if each.error is None else "",
            f"FAILED: {each.error}: {each.message}" if each.error is not None else "right",
        )
        for each in checked
    ]
    print_table(("workload", "recorded", "measured", ""), cells)
    print("FAILED" if problems or any(each.error for each in checked) else "PASSED")


def _print_result(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        return print_json(values)
    print("\n".join(f"{name:<10}{value}" for name, value in values.items()))
