"""Records: kept whatever happens, never used for what they were not measured on."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcompile.errors import OptionError
from mcompile.schedule.steps import ComputeAt, LayoutRewrite, Split, Trace, Unroll
from mcompile.target import parse_target
from mcompile.tuning.record import RecordError, make_record, record_from_line, record_to_line, target_key
from mcompile.tuning.records import (
    VERSION,
    Database,
    MemoryDatabase,
    OrderedDatabases,
    TuningRecord,
    export_records,
    import_records,
    trace_text,
)
from mcompile.tuning.trial import ErrorKind, MeasureResult

ROOT = Path(__file__).parents[2]
TARGET = "there-2t-0"


def trace_of(number: int) -> Trace:
    return (
        Split("y", "i", (number, 4)),
        ComputeAt("y_acc", "y", "i.1"),
        LayoutRewrite("w", (8, 0), ((0, 0), (1, 0), (0, 1))),
        Unroll("y", "i.2"),
    )


def record_of(number: int, cost: float | None = None, workload: str = "w", timestamp: float = 1.0) -> TuningRecord:
    """`cost` None: it crashed."""
    error = ErrorKind.CRASH if cost is None else None
    costs = () if cost is None else (cost, cost * 1.5)
    return TuningRecord(workload, TARGET, VERSION, trace_of(number), "tiled", (number, 4), costs, error, "", timestamp)


def test_the_best_is_the_fastest_that_is_right(tmp_path: Path) -> None:
    with Database(tmp_path / "new" / "t.db") as database:
        assert database.best("w", TARGET) is None
        for number, cost in enumerate([3e-3, None, 1e-3, 2e-3]):
            database.add(record_of(number, cost))
        best = database.best("w", TARGET)
        assert best == record_of(2, 1e-3)
        assert best is not None
        assert best.cost_seconds == 1e-3
        assert database.history("w", TARGET) == [3e-3, float("inf"), 1e-3, 2e-3]
        assert database.measured("w", TARGET) == {trace_text(trace_of(number)) for number in range(4)}
        assert database.records("w", TARGET)[1] == record_of(1)
        assert database.best("other", TARGET) is None
    with Database(tmp_path / "new" / "t.db") as again:
        assert again.best("w", TARGET) == best


def test_a_later_measurement_of_a_program_replaces_the_earlier() -> None:
    database = MemoryDatabase()
    database.add(record_of(1, 1e-3, timestamp=5.0))
    database.add(record_of(2, 2e-3, timestamp=6.0))
    database.add(record_of(1, 3e-3, timestamp=7.0))
    database.add(record_of(2, 1e-4, timestamp=4.0))
    assert database.history("w", TARGET) == [3e-3, 2e-3]
    assert database.best("w", TARGET) == record_of(2, 2e-3, timestamp=6.0)


def test_records_of_another_target_or_version_are_never_used(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    with Database(path) as database:
        database.add(record_of(1, 1e-3))
        database.add(replace(record_of(2, 1e-6), target_key="elsewhere"))
        database.add(replace(record_of(3, 1e-6), version="0.0.1"))
        assert database.best("w", TARGET) == record_of(1, 1e-3)
        assert len(database.records("w", TARGET)) == len(database.measured("w", TARGET)) == 1
        assert database.history("w", TARGET) == [1e-3]
        assert len(database.scan()) == 3
    with Database(path, version="0.0.1") as old:
        assert old.history("w", TARGET) == [1e-6]


def test_target_keys_tell_machines_apart() -> None:
    target = parse_target("x86-64-v3", 2)
    others = [
        replace(target, cpu="znver4"),
        replace(target, features=(*target.features, "vnni")),
        replace(target, threads=3),
        replace(target, l2_bytes=2 << 20),
    ]
    keys = {target_key(each) for each in (target, *others)}
    assert len(keys) == 5
    assert target_key(parse_target("x86-64-v3", 2)) in keys
    assert target_key(target).startswith("x86-64-v3-2t-")


def test_a_trial_becomes_a_record() -> None:
    result = MeasureResult((1e-3, 2e-3), timestamp=3.0)
    target = parse_target("x86-64-v3", 2)
    record = make_record("w", target, trace_of(1), result, "tiled", range(3))
    assert record == TuningRecord(
        "w", target_key(target), VERSION, trace_of(1), "tiled", (0, 1, 2), (1e-3, 2e-3), None, "", 3.0
    )


def test_ordered_databases_answer_in_order() -> None:
    own, shipped = MemoryDatabase(), MemoryDatabase()
    shipped.add(record_of(1, 1e-3))
    shipped.add(record_of(2, 1e-3, workload="v"))
    both = OrderedDatabases([own, shipped])
    assert both.best("w", TARGET) == record_of(1, 1e-3)
    both.add(record_of(3, 2e-3))
    assert own.best("w", TARGET) == both.best("w", TARGET) == record_of(3, 2e-3)
    assert both.best("v", TARGET) == record_of(2, 1e-3, workload="v")
    assert len(both.measured("w", TARGET)) == len(both.records("w", TARGET)) == 2
    assert sorted(both.history("w", TARGET)) == [1e-3, 2e-3]
    assert shipped.records("w", TARGET) == [record_of(1, 1e-3)]
    with pytest.raises(OptionError):
        OrderedDatabases([])


def test_pruning() -> None:
    database = MemoryDatabase()
    for number, cost in enumerate([4e-3, 2e-3, None, 1e-3, 3e-3]):
        database.add(record_of(number, cost))
        database.add(record_of(number, cost, workload="v"))
    database.add(replace(record_of(9, 1e-3), version="0.0.1"))
    database.add(replace(record_of(9, 1e-3), target_key="elsewhere"))
    assert database.prune() == 1
    assert database.prune(targets=["elsewhere"]) == 1
    assert database.prune(keep=2) == 6
    assert database.history("w", TARGET) == database.history("v", TARGET) == [2e-3, 1e-3]
    database.remove(record_of(3, 1e-3))
    assert database.history("w", TARGET) == [2e-3]


def test_summary() -> None:
    database = MemoryDatabase()
    database.add(record_of(1, 1e-3, timestamp=5.0))
    database.add(record_of(2, timestamp=9.0))
    database.add(record_of(2, workload="v"))
    first, second = database.summary()
    assert (first.workload_key, first.trials, first.failed, first.best_seconds, first.timestamp) == ("w", 2, 1, 1e-3, 9)
    assert (second.trials, second.failed, second.best_seconds) == (1, 1, None)


# --- lines ---


numbers = st.floats(1e-9, 1e3)
records = st.builds(
    lambda numbers, sketch, values, costs, message: replace(
        record_of(0, 1.0),
        trace=tuple(Split("stage", "i", (number,)) for number in numbers),
        sketch=sketch,
        values=tuple(values),
        costs=tuple(costs),
        error=None if costs else ErrorKind.WRONG_ANSWER,
        message=message,
    ),
    st.lists(st.integers(1, 1 << 40), max_size=4),
    st.text(),
    st.lists(st.integers(-(1 << 63) + 1, (1 << 63) - 1), max_size=4),
    st.lists(numbers, max_size=4),
    st.text(),
)


@given(records)
def test_a_line_gives_its_record_back(record: TuningRecord) -> None:
    line = record_to_line(record)
    assert "\n" not in line
    assert record_from_line(line) == record


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=8), st.data()
)
def test_damaged_lines_are_refused(value: object, data: st.DataObject) -> None:
    fields = json.loads(record_to_line(record_of(1, 1e-3)))
    name = data.draw(st.sampled_from(sorted(fields)))
    with contextlib.suppress(RecordError):
        record_from_line(json.dumps({**fields, name: value}))
    line = record_to_line(record_of(1, 1e-3))
    cut = data.draw(st.integers(0, len(line) - 1))
    with pytest.raises(RecordError):
        record_from_line(line[:cut])


def test_export_and_import(tmp_path: Path) -> None:
    source, sink = MemoryDatabase(), MemoryDatabase()
    for number in range(5):
        source.add(record_of(number, 1e-3 if number else None))
    source.add(replace(record_of(7, 1e-3), target_key="elsewhere", version="9"))
    path = tmp_path / "records.jsonl"
    assert export_records(source, path) == 6
    assert import_records(sink, path).added == 6
    assert sink.scan() == source.scan()
    again = import_records(sink, path)
    assert again.broken == ()
    assert sink.scan() == source.scan()


def test_import_leaves_out_broken_lines(tmp_path: Path) -> None:
    good = record_to_line(record_of(1, 1e-3))
    damaged = [
        "{",
        "[1]",
        good[:-9],
        good.replace('"split"', '"exec"'),
        good.replace('"costs":[', '"costs":[-'),
        good.replace("0.001", "NaN"),
        '"' * 9,
        "[" * 100_000,
        good.replace('"format":1', '"format":2'),
    ]
    lines = [good, "", *damaged]
    path = tmp_path / "records.jsonl"
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    database = MemoryDatabase()
    report = import_records(database, path)
    assert report.added == 1
    assert len(report.broken) == 10
    assert report.broken[0].startswith("line 3: ")
    with pytest.raises(OptionError):
        import_records(database, tmp_path / "absent")


# --- files ---


def test_files_that_are_no_tuning_database(tmp_path: Path) -> None:
    text, other, newer = tmp_path / "text", tmp_path / "other", tmp_path / "newer"
    text.write_text("no database " * 100)
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    Database(newer).close()
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    for path in (text, other, newer, tmp_path, text / "below"):
        with pytest.raises(OptionError, match=path.name):
            Database(path)


def test_rows_that_are_no_records_are_left_out_and_named(tmp_path: Path) -> None:
    with Database(tmp_path / "t.db") as database:
        database.add(record_of(1, 1e-3))
        database.add(record_of(2, 2e-3))
        assert database.problems() == []
        with sqlite3.connect(tmp_path / "t.db") as connection:
            connection.execute("UPDATE records SET trace = '[[\"exec\"]]' WHERE id = 1")
        connection.close()
        assert database.records("w", TARGET) == [record_of(2, 2e-3)]
        assert database.best("w", TARGET) == record_of(2, 2e-3)
        (problem,) = database.problems()
        assert problem.startswith("record 1: ")


WRITER = """
import sys
from mcompile.tuning.records import Database
from tests.tuning.test_records import record_of
path, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with Database(path) as database:
    for number in range(first, first + count):
        database.add(record_of(number, 1e-3, timestamp=float(number)))
        print(number, flush=True)
"""


def writer(path: Path, first: int, count: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", WRITER, str(path), str(first), str(count)]
    return subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_killed_process_loses_no_record(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    process = writer(path, 0, 1_000_000)
    assert process.stdout is not None
    with process, process.stdout:
        said = [int(process.stdout.readline()) for _ in range(50)]
        process.kill()
        said += [int(line) for line in process.stdout if line.endswith("\n")]
    with Database(path) as database:
        assert database.problems() == []
        kept = [record.values[0] for record in database.records("w", TARGET)]
        assert said == list(range(len(said)))
        assert kept in (said, [*said, len(said)])  # one more at most: committed, and killed before it said so
        database.add(record_of(1_000_001, 1e-3))


def test_processes_share_a_database(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    processes = [writer(path, 100 * number, 100) for number in range(3)]  # they even make the file at the same time
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    with Database(path) as database:
        assert sorted(record.values[0] for record in database.records("w", TARGET)) == list(range(300))
