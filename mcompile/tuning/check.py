"""Runs the best records again: is each program still right, and as fast as its record says?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mcompile.schedule.task import Task
from mcompile.tuning.record import TuningRecord, target_key
from mcompile.tuning.records import TuningDatabase
from mcompile.tuning.trial import Builder, ErrorKind, MeasureInput, Runner


@dataclass(frozen=True)
class CheckedRecord:
    """`measured_seconds` is infinite where there is an error."""

    record: TuningRecord
    measured_seconds: float
    error: ErrorKind | None
    message: str


def check_best(
    tasks: Sequence[Task],
    database: TuningDatabase,
    builder: Builder,
    runner: Runner,
    progress: Callable[[str], None] = lambda text: None,
) -> list[CheckedRecord]:
    """The best record of each task that has one, built, compared with the reference and timed."""
    found = [(task, database.best(task.workload_key, target_key(task.target))) for task in tasks]
    known = [(task, record) for task, record in found if record is not None]
    progress(f"building {len(known)} programs")
    built = builder.build([MeasureInput(task, record.trace) for task, record in known])
    checked = []
    for number, ((_, record), candidate) in enumerate(zip(known, built, strict=True)):
        progress(f"running {number + 1} of {len(known)} programs")
        (result,) = runner.run([candidate])
        checked.append(CheckedRecord(record, result.cost_seconds, result.error, result.message))
    return checked
