"""Building and measuring: real programs, and planted ones that crash, hang, lie or eat memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mcompile.dtypes import DType
from mcompile.ir.tensor import compute, placeholder
from mcompile.schedule.constructed import construct
from mcompile.schedule.steps import ComputeInline
from mcompile.schedule.task import Task
from mcompile.tuning.child import Child, ChildDiedError, ChildTimeoutError
from mcompile.tuning.measure import (
    BuiltCandidate,
    DummyBuilder,
    DummyRunner,
    ErrorKind,
    LocalBuilder,
    LocalRunner,
    MeasureInput,
    MeasureResult,
    RunOptions,
    robust_seconds,
)
from mcompile.tuning.trial_data import Expected, Placed, index_limits, make_inputs, reference, sum_scales
from tests.schedule.programs import conv_task, make_task, matmul, softmax
from tests.tuning import planted

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def builder() -> Iterator[LocalBuilder]:
    with LocalBuilder(workers=2, timeout_seconds=6.0, build=planted.BUILD) as made:
        yield made


@pytest.fixture(scope="module")
def runner() -> Iterator[LocalRunner]:
    with LocalRunner(timeout_seconds=4.0) as made:
        yield made


def measure(builder: LocalBuilder, runner: LocalRunner, kinds: list[str]) -> list[MeasureResult]:
    return runner.run(builder.build([planted.plant(kind) for kind in kinds]))


# --- planted ---


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("segfault", ErrorKind.CRASH),
        ("loop", ErrorKind.RUN_TIMEOUT),
        ("wrong", ErrorKind.WRONG_ANSWER),
        ("idle", ErrorKind.WRONG_ANSWER),
        ("outside", ErrorKind.WRONG_ANSWER),
        ("memory", ErrorKind.OUT_OF_MEMORY),
        ("build failure", ErrorKind.BUILD_ERROR),
        ("build bug", ErrorKind.BUILD_ERROR),
        ("build crash", ErrorKind.BUILD_ERROR),
        ("build loop", ErrorKind.BUILD_TIMEOUT),
        ("build memory", ErrorKind.OUT_OF_MEMORY),
        ("no such stage", ErrorKind.ILLEGAL),
    ],
)
def test_what_goes_wrong_is_a_value_and_measuring_goes_on(
    builder: LocalBuilder, runner: LocalRunner, kind: str, error: ErrorKind
) -> None:
    before, bad, after = measure(builder, runner, ["good", kind, "good"])
    assert bad.error is error, bad.message
    assert bad.message
    assert not bad.costs
    assert bad.cost_seconds == float("inf")
    for good in (before, after):
        assert good.error is None, good.message
        assert good.cost_seconds > 0


def test_a_wrong_answer_says_how_much_is_wrong(builder: LocalBuilder, runner: LocalRunner) -> None:
    wrong, outside = measure(builder, runner, ["wrong", "outside"])
    assert "of the elements are wrong" in wrong.message
    assert "outside" in outside.message


# --- real programs ---


TASKS = {
    "conv": lambda: conv_task(1, 16, 14, 14, 24, 3, 1, 1),
    "matmul": lambda: make_task([matmul(20, 48, 30)], constants=("b",)),
    "softmax": lambda: make_task([softmax(10, 33)]),
}


@pytest.mark.parametrize("name", TASKS)
def test_constructed_programs_are_right_and_timed(builder: LocalBuilder, runner: LocalRunner, name: str) -> None:
    task = TASKS[name]()
    (result,) = runner.run(builder.build([MeasureInput(task, construct(task))]))
    assert result.error is None, result.message
    assert len(result.costs) >= 2  # on a busy machine; else 5
    assert result.timestamp > 0
    assert result.build_seconds > 0
    assert result.run_seconds > max(result.costs)


def test_many_candidates_come_back_in_order(builder: LocalBuilder) -> None:
    kinds = ["good", "build failure", "wrong"] * 4
    built = builder.build([planted.plant(kind) for kind in kinds])
    assert [candidate.error for candidate in built] == [None, ErrorKind.BUILD_ERROR, None] * 4
    assert [candidate.code is None for candidate in built] == [False, True, False] * 4


def test_a_loser_gets_one_run(builder: LocalBuilder, runner: LocalRunner) -> None:
    task = TASKS["conv"]()
    built = builder.build([MeasureInput(task, construct(task))])
    (alone,) = runner.run(built)
    (lost,) = runner.run(built, incumbent_seconds=alone.cost_seconds / 20)
    (won,) = runner.run(built, incumbent_seconds=alone.cost_seconds * 20)
    assert len(lost.costs) == 1
    assert lost.error is None
    assert len(won.costs) > 1


def test_finalists_are_timed_in_turns(builder: LocalBuilder, runner: LocalRunner) -> None:
    task = TASKS["matmul"]()
    built = builder.build([MeasureInput(task, construct(task))] * 2)
    first, second = runner.compare(built, rounds=7)
    assert len(first.costs) == len(second.costs) == 7
    with pytest.raises(ValueError, match="one task"):
        runner.compare([*built, BuiltCandidate(planted.plant("good"), built[0].code)])


def test_a_reference_is_computed_once(builder: LocalBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    built = builder.build([planted.plant(kind) for kind in ("good", "segfault", "good")])
    with LocalRunner() as runner:
        assert runner.run(built)[0].error is None
        (path,) = Path(runner._references.name).iterdir()
        made = path.stat().st_mtime_ns
        assert [result.error for result in runner.run(built)] == [None, ErrorKind.CRASH, None]
        assert path.stat().st_mtime_ns == made
    assert not path.exists()


def test_a_task_without_reference_has_errors(runner: LocalRunner) -> None:
    x = placeholder("x", (8,), DType.FLOAT32)
    broken = Task(make_task([compute("y", (8,), lambda i: x[i + 4])]).dag, {"x": (1,), "y": (1,)}, frozenset(),
                  planted.task().target)  # fmt: skip
    code = LocalBuilder(workers=1)
    with code:
        (built,) = code.build([planted.plant("good")])
    (result,) = runner.run([BuiltCandidate(MeasureInput(broken, ()), built.code)])
    assert result.error is ErrorKind.CRASH
    assert "reference" in result.message


# --- children ---


def answer(message: object) -> object:
    """What the child of the tests below does."""
    if message == "exit":
        os._exit(3)
    if message == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if message == "sleep":
        time.sleep(60)
    if message == "print":
        print("not an answer", flush=True)
    return message


ANSWER = "tests.tuning.test_measure:answer"


def test_a_child_answers_whatever_it_prints() -> None:
    with Child(ANSWER, 1 << 40) as child:
        assert child.request("print", 60.0) == "print"
        assert child.request({"a": np.int64(1)}, 60.0) == {"a": 1}


def test_a_child_that_ends_or_sleeps_is_told_from_one_that_answers() -> None:
    for message, text in (("exit", "status 3"), ("kill", "SIGKILL")):
        with Child(ANSWER, 1 << 40) as child:
            child.wait_ready()
            with pytest.raises(ChildDiedError, match=text) as caught:
                child.request(message, 60.0)
            assert caught.value.is_out_of_memory == (message == "kill")
            assert not child.is_alive
    with Child(ANSWER, 1 << 40) as child:
        child.wait_ready()
        with pytest.raises(ChildTimeoutError):
            child.request("sleep", 0.1)
        assert not child.is_alive


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for the signal")
def test_children_end_with_a_parent_that_is_killed() -> None:
    program = (
        "from mcompile.tuning.child import Child\n"
        f"child = Child({ANSWER!r}, 1 << 40); child.wait_ready(); child.send('sleep')\n"
        "print(child._process.pid, flush=True)\n"
        "import time; time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent, parent.stdout:
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _is_running(pid):
        time.sleep(0.05)
    assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- data ---


def test_inputs_depend_on_task_and_seed_only() -> None:
    task = TASKS["conv"]()
    first, again, other = make_inputs(task, 0), make_inputs(TASKS["conv"](), 0), make_inputs(task, 1)
    for name, array in first.items():
        np.testing.assert_array_equal(array, again[name])
        assert (array != other[name]).any()


def test_sums_of_products_are_as_large_as_their_terms() -> None:
    task = make_task([matmul(8, 9, 400)], constants=("b",))
    assert sum_scales(task) == {"b": 0.05}
    _, _, outputs = reference(task, 0)
    assert 0.1 < outputs["y"].std() < 1
    assert sum_scales(make_task([softmax(4, 9)])) == {}
    assert set(sum_scales(conv_task(1, 16, 14, 14, 24, 3, 1, 1))) == {"w"}


def test_indices_stay_in_range() -> None:
    table = placeholder("table", (5, 3), DType.FLOAT32)
    rows = placeholder("rows", (40,), DType.INT64)
    near = compute("near", (40,), lambda i: rows[i])
    task = make_task([compute("y", (40, 3), lambda i, j: table[near[i], j])])
    assert index_limits(task.dag) == {"rows": 5}
    values = make_inputs(task, 0)["rows"]
    assert set(values) == set(range(5))


def test_inputs_are_positive_where_others_give_no_numbers() -> None:
    from mcompile.ir.expr import Unary, UnaryOp

    x = placeholder("x", (50,), DType.FLOAT32)
    task = make_task([compute("y", (50,), lambda i: Unary(UnaryOp.LOG, x[i]))])
    positive, inputs, outputs = reference(task, 0)
    assert positive
    assert (inputs["x"].array > 0).all()
    assert np.isfinite(outputs["y"]).all()


def test_what_is_expected() -> None:
    x = placeholder("x", (4,), DType.FLOAT32)
    output = compute("y", (4,), lambda i: x[i] * 2.0)
    values = np.array([1.0, -3.0, np.nan, np.inf], np.float32)
    expected = Expected(output, values, True)
    assert expected.wrong_share(values) == 0
    assert expected.wrong_share(values + np.float32(1e-5)) == 0
    assert expected.wrong_share(np.array([1.1, -3.0, np.nan, np.inf], np.float32)) == 0.25
    assert expected.wrong_share(np.array([1.0, -3.0, 0.0, -np.inf], np.float32)) == 0.5


def test_guards_and_gaps_are_watched() -> None:
    placed = Placed((3, 2), DType.FLOAT32, (4, 1))
    assert placed.flat.size == 10
    placed.array[...] = 1
    assert placed.is_whole()
    placed.flat[2] = 0
    assert not placed.is_whole()
    placed.clear()
    placed._memory[-1] = 0
    assert not placed.is_whole()


# --- dummies, costs ---


def test_dummies_are_deterministic_and_know_errors() -> None:
    candidates = [MeasureInput(planted.task(), (ComputeInline(name),)) for name in "abc"]
    built = DummyBuilder().build(candidates)
    first, again = DummyRunner().run(built), DummyRunner().run(built)
    assert [result.costs for result in first] == [result.costs for result in again]
    assert len({result.costs for result in first}) == 3
    failing = DummyRunner(lambda candidate: ErrorKind.CRASH)
    assert [result.error for result in failing.run(built)] == [ErrorKind.CRASH] * 3
    assert failing.measured == candidates


def test_robust_seconds_ignores_interruptions() -> None:
    assert robust_seconds([]) == float("inf")
    assert robust_seconds([3.0]) == 3.0
    assert robust_seconds([1.0, 1.1, 1.2, 50.0, 60.0]) == 1.1


def test_options_say_how_often_to_run(builder: LocalBuilder) -> None:
    with LocalRunner(RunOptions(runs=(3, 3), stream_bytes=1 << 16)) as runner:
        (result,) = runner.run(builder.build([planted.plant("good")]))
    assert len(result.costs) == 3
