"""Models tuned for real, with few trials: records, resume, and what is compiled in the end."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import onnx
import pytest

import mcompile
from mcompile import cli, tuner
from mcompile.cli_tune import parse_objective, parse_seconds
from mcompile.driver import CompileOptions, compile_model
from mcompile.errors import OptionError
from mcompile.runtime import InferenceSession
from mcompile.tuning.records import Database, MemoryDatabase, target_key, trace_text
from mcompile.tuning.task_scheduler import GeomeanSpeedup, LatencyRequirement
from mcompile.tuning.tune import TrialEnded
from tests.conftest import convolution_model

ONE_THREAD = CompileOptions(threads=1, workers=1)


def feeds_of(artifact):
    random = np.random.default_rng(1)
    return {port.name: random.standard_normal(port.type.dims).astype(np.float32) for port in artifact.plan.inputs}


def outputs_of(artifact):
    return InferenceSession(artifact, threads=1).run(None, feeds_of(artifact))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A small network tuned by 40 trials; (result, database path, traces measured)."""
    path = tmp_path_factory.mktemp("tuned") / "tuning.db"
    events = []
    with Database(path) as database:
        request = tuner.TuneRequest(ONE_THREAD, database=database)
        result = mcompile.tune(convolution_model((2, 3, 8, 8)), trials=40, callbacks=[events.append], request=request)
    return result, path, [event for event in events if isinstance(event, TrialEnded)]


def test_most_trials_succeed_and_each_is_recorded(tuned):
    result, path, trials = tuned
    assert len(trials) == result.report.progress.trials == 40
    assert result.report.success_share >= 0.7
    with Database(path) as database:
        assert sum(row.trials for row in database.summary()) == 40


def test_the_artifact_computes_the_same_as_the_untuned_one(tuned):
    (model,) = tuned[0].models
    untuned = compile_model(convolution_model((2, 3, 8, 8)), ONE_THREAD)
    for ours, theirs in zip(outputs_of(model.artifact), outputs_of(untuned), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_no_task_ends_slower_than_untuned(tuned):
    assert all(task.best_seconds <= task.untuned_seconds for task in tuned[0].report.progress.tasks)
    assert tuned[0].report.progress.latencies[0] <= tuned[0].report.untuned_latencies[0]


def test_a_second_run_repeats_nothing_and_serves_another_model_with_the_same_tasks(tuned):
    _, path, before = tuned
    events = []
    with Database(path) as database:
        request = tuner.TuneRequest(ONE_THREAD, database=database)
        other = convolution_model((2, 3, 8, 8))
        other.graph.name = "another"
        result = mcompile.tune(other, trials=10, callbacks=[events.append], request=request)
    known = {(event.task.task.workload_key, event.trace) for event in before}
    trials = [event for event in events if isinstance(event, TrialEnded)]
    assert len(trials) == 10
    assert not known & {(event.task.task.workload_key, event.trace) for event in trials}
    assert result.report.resumed_trials == 40


def test_compiling_with_the_database_uses_the_best_records_and_only_those_of_the_target(tuned):
    from mcompile.driver import plan_program, tuned_jobs

    _, path, _ = tuned
    with Database(path) as database:
        program = plan_program(convolution_model((2, 3, 8, 8)), ONE_THREAD)
        key = target_key(program.target)
        for job in tuned_jobs(program, (MemoryDatabase(), database)):
            assert job.trace == database.best(job.task.workload_key, key).trace
        two = plan_program(convolution_model((2, 3, 8, 8)), CompileOptions(threads=2))
        assert all(job.trace is None for job in tuned_jobs(two, (database,)))
        artifact = compile_model(convolution_model((2, 3, 8, 8)), CompileOptions(threads=1, databases=(database,)))
        again = compile_model(convolution_model((2, 3, 8, 8)), CompileOptions(threads=1, databases=(database,)))
    assert [kernel.code for kernel in artifact.kernels] == [kernel.code for kernel in again.kernels]
    untuned = compile_model(convolution_model((2, 3, 8, 8)), ONE_THREAD)
    for ours, theirs in zip(outputs_of(artifact), outputs_of(untuned), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_tasks_that_models_share_are_tuned_once():
    from mcompile.driver import plan_program

    program = plan_program(convolution_model((2, 3, 8, 8)), ONE_THREAD)
    alone, together = tuner.tasks_of([program]), tuner.tasks_of([program, program])
    assert len(alone) == len(together)
    assert all(task.weights == (one.weights[0],) * 2 for one, task in zip(alone, together, strict=True))


def test_a_killed_tuning_loses_nothing_and_repeats_nothing(small_model, tmp_path):
    path = tmp_path / "tuning.db"
    command = [sys.executable, "-m", "mcompile.cli", "tune", str(small_model), "--trials", "5000", "--threads", "1"]
    child = subprocess.Popen([*command, "--db", str(path)], stderr=subprocess.PIPE, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while count(path) < 12:
            assert time.monotonic() < deadline
            assert child.poll() is None, child.stderr.read()
            time.sleep(0.05)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stderr.close()
    with Database(path) as database:
        before = {trace_text(record.trace) for record in database.scan()}
        events = []
        request = tuner.TuneRequest(CompileOptions(threads=1), database=database)
        result = mcompile.tune(onnx.load(small_model), trials=6, callbacks=[events.append], request=request)
        after = {trace_text(record.trace) for record in database.scan()}
    assert result.report.resumed_trials >= 12
    measured = [trace_text(event.trace) for event in events if isinstance(event, TrialEnded)]
    assert len(measured) == 6
    assert after - before <= set(measured)
    assert before <= after


def count(path):
    if not path.exists():
        return 0
    try:
        with Database(path) as database:
            return sum(row.trials for row in database.summary())
    except OptionError:  # being made
        return 0


# --- the command ---


@pytest.fixture
def command(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["mcompile", *map(str, arguments)])
        with pytest.raises(SystemExit) as raised:
            cli.main()
        captured = capsys.readouterr()
        return raised.value.code or 0, captured.out, captured.err

    return run


def test_the_command_writes_an_artifact_and_a_report(command, small_model, tmp_path):
    paths = {name: tmp_path / name for name in ("tuning.db", "out.mcm", "report.html")}
    status, out, err = command(
        "tune", small_model, "--trials", 14, "--threads", 1, "--db", paths["tuning.db"], "-o", paths["out.mcm"],
        "--report", paths["report.html"],
    )  # fmt: skip
    assert status == 0, err
    assert "14 (" in out
    assert "trials" in err
    page = paths["report.html"].read_text()
    assert page.count("<svg") == 2
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    status, out, _ = command("run", paths["out.mcm"], "--json")
    assert (status, json.loads(out)["outputs"][0]["shape"]) == (0, [2, 5])
    status, out, _ = command("compile", small_model, "--db", paths["tuning.db"], "--threads", 1, "--json")
    assert status == 0
    status, out, _ = command("tune", small_model, "--trials", 1, "--threads", 1, "--db", paths["tuning.db"], "--json")
    result = json.loads(out)
    assert (result["known_trials"], result["trials"]) == (14, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--time", "soon"], "--time"),
        (["--objective", "speed"], "--objective"),
        (["--objective", "required:1ms,2ms"], "1 latencies"),
        (["--dim", "x"], "NAME=VALUE"),
    ],
)
def test_bad_options_end_in_a_message(command, small_model, tmp_path, arguments, message):
    status, _, err = command("tune", small_model, "--db", tmp_path / "tuning.db", *arguments)
    assert status == 2
    assert message in err


def test_open_dims_must_be_given_and_are_named(command, open_model, tmp_path):
    status, _, err = command("tune", open_model, "--trials", 1, "--db", tmp_path / "tuning.db")
    assert status == 2
    assert "batch" in err
    arguments = ("--trials", 1, "--dim", "batch=2", "--threads", 1)
    status, _, err = command("tune", open_model, "--db", tmp_path / "tuning.db", *arguments)
    assert status == 0
    assert "open is tuned for x: 2x3x8x8" in err


def test_options_are_read():
    assert [parse_seconds(text) for text in ("90", "90s", "1.5m", "1h", "20ms")] == [90, 90, 90, 3600, 0.02]
    assert parse_objective("geomean", 2) == GeomeanSpeedup((1.0, 1.0))
    assert parse_objective("required:1ms,2ms", 2) == LatencyRequirement((0.001, 0.002))
    assert parse_objective("latency", 1)([1.0, 2.0]) == 3.0
