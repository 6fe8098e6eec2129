"""`mcompile db`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from typer.testing import CliRunner, Result

from mcompile import driver
from mcompile.cli import app
from mcompile.errors import OptionError
from mcompile.schedule.constructed import construct
from mcompile.tuning.records import Database, TuningRecord, default_path, make_record
from mcompile.tuning.trial import MeasureResult
from tests.tuning.test_records import TARGET, record_of


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["db", *map(str, arguments)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Database(tmp_path / "t.db") as database:
        for number, cost in enumerate([3e-3, 1e-3, None]):
            database.add(record_of(number, cost))
        database.add(replace(record_of(1, 1e-3), version="0.0.1"))
    return tmp_path / "t.db"


def test_list(path: Path) -> None:
    text = call("list", "--db", path)
    assert text.exit_code == 0, text.output
    assert "1 ms" in text.stdout
    assert "(not used)" in text.stdout
    rows = json.loads(call("list", "--db", path, "--json").stdout)
    assert [(row["target_key"], row["trials"], row["failed"]) for row in rows] == [(TARGET, 1, 0), (TARGET, 3, 1)]


def test_export_then_import(path: Path, tmp_path: Path) -> None:
    lines, other = tmp_path / "out.jsonl", tmp_path / "other.db"
    assert json.loads(call("export", lines, "--db", path, "--json").stdout)["exported"] == 4
    assert json.loads(call("import", lines, "--db", other, "--json").stdout) == {"added": 4, "known": 0, "broken": 0}
    lines.write_text("broken\n")
    result = call("import", lines, "--db", other)
    assert result.exit_code == 1
    assert "line 1" in result.stderr


def test_prune(path: Path) -> None:
    assert json.loads(call("prune", "--db", path, "--keep", 1, "--json").stdout) == {"removed": 3}
    with Database(path) as database:
        assert database.scan() == [record_of(1, 1e-3)]


def test_a_database_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCOMPILE_CACHE", str(tmp_path))
    assert default_path() == tmp_path / "tuning.db"
    for command in (["list"], ["prune"], ["check"], ["export", tmp_path / "x"]):
        result = call(*command)
        assert isinstance(result.exception, OptionError)
    assert not default_path().exists()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    made = helper.make_model(
        helper.make_graph(
            [helper.make_node("Relu", ["x"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 8])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 8])],
        )
    )
    onnx.save(made, tmp_path / "relu.onnx")
    return tmp_path / "relu.onnx"


def best_of(model: Path) -> TuningRecord:
    """A record of the constructed program, with a wrong time."""
    (job,) = driver.plan_program(model, driver.CompileOptions(threads=1)).jobs
    return make_record(
        job.task.workload_key, job.task.target, construct(job.task), MeasureResult((1.0,), timestamp=1.0)
    )


def test_check_runs_the_best_records_again(path: Path, model: Path) -> None:
    assert call("check", "--db", path).exit_code == 0
    with Database(path) as database:
        database.add(best_of(model))
    result = call("check", model, "--threads", 1, "--db", path, "--json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["records"]
    assert row["error"] is None
    assert row["measured_seconds"] < row["recorded_seconds"] == 1.0


def test_check_finds_and_removes_what_fails(path: Path, model: Path) -> None:
    bad = replace(best_of(model), trace=record_of(1).trace)
    with Database(path) as database:
        database.add(bad)
    result = call("check", model, "--threads", 1, "--db", path, "--remove")
    assert result.exit_code == 1
    assert "FAILED: illegal" in result.stdout
    with Database(path) as database:
        assert database.best(bad.workload_key, bad.target_key) is None
