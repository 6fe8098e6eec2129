"""Databases of tuning records: SQLite files that many processes may use at once, and lists of them.

A query answers from records of the present version and the given target only. Every record is committed before `add`
returns, so a process that is killed loses none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from mcompile import config
from mcompile.errors import OptionError
from mcompile.tuning.record import (
    VERSION,
    RecordError,
    TuningRecord,
    make_record,
    parse_trace,
    record_from_fields,
    record_from_line,
    record_to_line,
    target_key,
    trace_text,
)

__all__ = [
    "VERSION",
    "Database",
    "MemoryDatabase",
    "OrderedDatabases",
    "RecordError",
    "TuningDatabase",
    "TuningRecord",
    "default_path",
    "export_records",
    "import_records",
    "make_record",
    "parse_trace",
    "target_key",
    "trace_text",
]


class TuningDatabase(Protocol):
    """Keeps records. Queries answer from the present version only."""

    def add(self, record: TuningRecord) -> None:
        """Keep a record; it is safe when this returns. A later record of the same program replaces an earlier one."""
        ...

    def best(self, workload_key: str, target_key: str) -> TuningRecord | None:
        """The fastest program without an error."""
        ...

    def records(self, workload_key: str, target_key: str) -> list[TuningRecord]:
        """In the order in which the programs were first measured."""
        ...

    def measured(self, workload_key: str, target_key: str) -> set[str]:
        """`trace_text` of each program, failed ones too."""
        ...

    def history(self, workload_key: str, target_key: str) -> list[float]:
        """The cost of each trial in order, infinity where it failed."""
        ...


def default_path() -> Path:
    """Where records are kept unless the user says otherwise."""
    return config.load().cache / "tuning.db"


_APPLICATION_ID = 0x6D637472  # tells our files from other programs'
_SCHEMA_VERSION = 1
_BUSY_SECONDS = 30.0
_SCHEMA = """
CREATE TABLE records (
    id INTEGER PRIMARY KEY,
    workload TEXT NOT NULL, target TEXT NOT NULL, version TEXT NOT NULL, program BLOB NOT NULL,
    trace TEXT NOT NULL, sketch TEXT NOT NULL, decisions TEXT NOT NULL,
    costs TEXT NOT NULL, cost REAL, error TEXT, message TEXT NOT NULL, timestamp REAL NOT NULL,
    UNIQUE (workload, target, version, program)
);
CREATE INDEX by_cost ON records (workload, target, version, cost);
"""
_COLUMNS = "workload, target, version, trace, sketch, decisions, costs, error, message, timestamp"
_INSERT = """
INSERT INTO records
    (workload, target, version, program, trace, sketch, decisions, costs, cost, error, message, timestamp)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (workload, target, version, program) DO UPDATE SET
    sketch = excluded.sketch, decisions = excluded.decisions, costs = excluded.costs, cost = excluded.cost,
    error = excluded.error, message = excluded.message, timestamp = excluded.timestamp
WHERE excluded.timestamp >= timestamp
"""
_SPARE = 20  # of the fastest, should one be unreadable
_OF_TASK = "workload = ? AND target = ? AND version = ?"


class Database:
    """An SQLite file, made if it is not there; safe for threads and for several processes at once."""

    def __init__(self, path: str | Path, version: str = VERSION) -> None:
        self.path = path
        self._version = version
        self._lock = threading.Lock()
        try:
            if path != ":memory:":
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, _BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            _open(self._connection, str(path))
        except (OSError, sqlite3.Error) as error:
            raise OptionError(f"tuning database {path}: {error}") from error

    def add(self, record: TuningRecord) -> None:
        self.add_all([record])

    def add_all(self, records: Iterable[TuningRecord]) -> int:
        """As `add` for each, in one transaction; how many changed anything."""
        with self._transaction() as connection:
            before = connection.total_changes
            connection.executemany(_INSERT, map(_row, records))
            return connection.total_changes - before

    def best(self, workload_key: str, target_key: str) -> TuningRecord | None:
        where = f"{_OF_TASK} AND cost IS NOT NULL ORDER BY cost, id LIMIT {_SPARE}"
        found = self._select(where, (workload_key, target_key, self._version))
        return found[0] if found else None

    def records(self, workload_key: str, target_key: str) -> list[TuningRecord]:
        return self._select(f"{_OF_TASK} ORDER BY id", (workload_key, target_key, self._version))

    def measured(self, workload_key: str, target_key: str) -> set[str]:
        query = f"SELECT trace FROM records WHERE {_OF_TASK}"
        return {trace for (trace,) in self._rows(query, (workload_key, target_key, self._version))}

    def history(self, workload_key: str, target_key: str) -> list[float]:
        query = f"SELECT cost FROM records WHERE {_OF_TASK} ORDER BY id"
        rows = self._rows(query, (workload_key, target_key, self._version))
        return [float("inf") if cost is None else cost for (cost,) in rows]

    def scan(self) -> list[TuningRecord]:
        """All records, of every version and target, in order."""
        return self._select("1 ORDER BY id", ())

    def summary(self) -> list[WorkloadSummary]:
        """What there is of each workload, by version and target."""
        query = (
            "SELECT workload, target, version, COUNT(*), SUM(error IS NOT NULL), MIN(cost), MAX(timestamp) "
            "FROM records GROUP BY workload, target, version ORDER BY version, target, MIN(id)"
        )
        return [WorkloadSummary(*row) for row in self._rows(query, ())]

    def remove(self, record: TuningRecord) -> None:
        """Forget a program."""
        with self._transaction() as connection:
            connection.execute(
                f"DELETE FROM records WHERE {_OF_TASK} AND program = ?",
                (record.workload_key, record.target_key, record.version, _digest(trace_text(record.trace))),
            )

    def prune(self, keep: int | None = None, other_versions: bool = True, targets: Sequence[str] = ()) -> int:
        """Forget records: those of other versions, of `targets`, and all but the `keep` fastest of each workload.

        Tuning may measure again what is forgotten. How many went.
        """
        with self._transaction() as connection:
            before = connection.total_changes
            if other_versions:
                connection.execute("DELETE FROM records WHERE version != ?", (self._version,))
            connection.executemany("DELETE FROM records WHERE target = ?", [(target,) for target in targets])
            if keep is not None:
                rank = "ROW_NUMBER() OVER (PARTITION BY workload, target, version ORDER BY cost IS NULL, cost, id)"
                connection.execute(
                    f"DELETE FROM records WHERE cost IS NULL OR id IN "
                    f"(SELECT id FROM (SELECT id, {rank} AS rank FROM records) WHERE rank > ?)",
                    (keep,),
                )
            removed = connection.total_changes - before
        with self._lock:
            self._connection.execute("VACUUM")
        return removed

    def problems(self) -> list[str]:
        """What SQLite finds wrong with the file, and the rows that are no records."""
        found = [text for (text,) in self._rows("PRAGMA integrity_check", ()) if text != "ok"]
        for number, *row in self._rows(f"SELECT id, {_COLUMNS} FROM records", ()):
            try:
                _record(row)
            except RecordError as error:
                found.append(f"record {number}: {error}")
        return found

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _select(self, where: str, values: Sequence[object]) -> list[TuningRecord]:
        """The records; rows that are none are left out (`problems` tells)."""
        found = []
        for row in self._rows(f"SELECT {_COLUMNS} FROM records WHERE {where}", values):
            with contextlib.suppress(RecordError):
                found.append(_record(row))
        return found

    def _rows(self, query: str, values: Sequence[object]) -> list[Any]:
        try:
            with self._lock:
                return self._connection.execute(query, tuple(values)).fetchall()
        except sqlite3.Error as error:
            raise OptionError(f"tuning database {self.path}: {error}") from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    yield self._connection
                except BaseException:
                    self._connection.execute("ROLLBACK")
                    raise
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                raise OptionError(f"tuning database {self.path}: {error}") from error


@dataclass(frozen=True)
class WorkloadSummary:
    """`best_seconds` is None where every trial failed; `timestamp` is the last trial's."""

    workload_key: str
    target_key: str
    version: str
    trials: int
    failed: int
    best_seconds: float | None
    timestamp: float


class MemoryDatabase(Database):
    """Records of this process only."""

    def __init__(self, version: str = VERSION) -> None:
        super().__init__(":memory:", version)


class OrderedDatabases:
    """Several databases as one: the first that knows a workload's best answers; new records go to the first."""

    def __init__(self, databases: Sequence[TuningDatabase]) -> None:
        if not databases:
            raise OptionError("databases: expected at least one")
        self._databases = tuple(databases)

    def add(self, record: TuningRecord) -> None:
        self._databases[0].add(record)

    def best(self, workload_key: str, target_key: str) -> TuningRecord | None:
        found = (database.best(workload_key, target_key) for database in self._databases)
        return next((record for record in found if record is not None), None)

    def records(self, workload_key: str, target_key: str) -> list[TuningRecord]:
        """Each program once, as the first database that has it says."""
        by_program: dict[str, TuningRecord] = {}
        for database in self._databases:
            for record in database.records(workload_key, target_key):
                by_program.setdefault(trace_text(record.trace), record)
        return list(by_program.values())

    def measured(self, workload_key: str, target_key: str) -> set[str]:
        return {text for database in self._databases for text in database.measured(workload_key, target_key)}

    def history(self, workload_key: str, target_key: str) -> list[float]:
        return [record.cost_seconds for record in self.records(workload_key, target_key)]


# --- lines of JSON ---


@dataclass(frozen=True)
class ImportReport:
    """`broken` says of each line that is no record why. `known` had been there already, at least as new."""

    added: int
    known: int
    broken: tuple[str, ...]


def export_records(database: Database, path: Path) -> int:
    """Write all records, a line each; how many. The file is whole or not changed."""
    records = database.scan()
    text = "".join(record_to_line(record) + "\n" for record in records)
    partial = path.with_name(path.name + ".part")
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # a device or a pipe must not become a file
            path.write_text(text)
        else:
            partial.write_text(text)
            partial.replace(path)
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror or error}") from error
    return len(records)


def import_records(database: Database, path: Path) -> ImportReport:
    """Add the records of a file. Lines that are none are left out. Raises OptionError if the file cannot be read."""
    records: list[TuningRecord] = []
    broken: list[str] = []
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                try:
                    if line.strip():
                        records.append(record_from_line(line))
                except RecordError as error:
                    broken.append(f"line {number}: {error}")
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror or error}") from error
    added = database.add_all(records)
    return ImportReport(added, len(records) - added, tuple(broken))


# --- SQLite ---


def _open(connection: sqlite3.Connection, path: str) -> None:
    """Check the file, or make it. Raises sqlite3.Error, OptionError."""
    _wait_for(lambda: connection.execute("PRAGMA journal_mode = WAL"))
    connection.execute("PRAGMA synchronous = NORMAL")  # safe from a killed process; a power cut may cost the last ones
    connection.execute("BEGIN IMMEDIATE")
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if not tables and not application:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        elif application != _APPLICATION_ID:
            raise OptionError(f"{path}: not a tuning database")
        elif version != _SCHEMA_VERSION:
            raise OptionError(f"{path}: a tuning database of format {version}; this mcompile reads {_SCHEMA_VERSION}")
    finally:
        connection.execute("COMMIT")


def _wait_for(change: Any) -> None:
    """Changing the journal's mode does not wait for other processes by itself."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            change()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _row(record: TuningRecord) -> tuple[object, ...]:
    text = trace_text(record.trace)
    return (
        record.workload_key,
        record.target_key,
        record.version,
        _digest(text),
        text,
        record.sketch,
        json.dumps(record.values),
        json.dumps(record.costs),
        None if record.error is not None else record.cost_seconds,
        record.error.value if record.error is not None else None,
        record.message,
        record.timestamp,
    )


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]


def _record(row: Sequence[Any]) -> TuningRecord:
    """Raises RecordError."""
    names = ("workload", "target", "version", "trace", "sketch", "values", "costs", "error", "message", "timestamp")
    fields = dict(zip(names, row, strict=True))
    try:
        for name in ("trace", "values", "costs"):
            fields[name] = json.loads(fields[name])
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"no JSON: {error}") from error
    return record_from_fields(fields)
