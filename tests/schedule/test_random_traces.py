"""Random tasks under random legal traces, and under constructed schedules, give the dag's values; natively too.

The seeded cases are drawn by MCOMPILE_SEED; --full draws many.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcompile.schedule.constructed import construct
from mcompile.schedule.steps import Trace, print_trace, trace_from_json, trace_to_json
from mcompile.schedule.task import Task
from mcompile.target import parse_target
from tests.conftest import sample_seed
from tests.schedule.programs import Runner, check, native_targets, run_interpreted, run_natively
from tests.schedule.random_traces import random_task, random_trace

CASES, FULL_CASES = 40, 3000
NATIVE_CASES, FULL_NATIVE_CASES = 12, 300
WINOGRAD_ERROR = 2e-5  # it rounds otherwise than the sum that it replaces

derandomized = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = metafunc.config.getoption("full")
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", range(FULL_CASES if full else CASES))
    if "native_case" in metafunc.fixturenames:
        metafunc.parametrize("native_case", range(FULL_NATIVE_CASES if full else NATIVE_CASES))


@st.composite
def scheduled_tasks(draw: st.DrawFn) -> tuple[Task, Trace]:
    def choose(options):  # type: ignore[no-untyped-def]
        return draw(st.sampled_from(options))

    task = random_task(choose)
    return task, random_trace(task, choose)


@derandomized
@given(scheduled_tasks())
def test_traces_keep_the_value(scheduled: tuple[Task, Trace]) -> None:
    task, trace = scheduled
    check(task, trace)


def test_seeded_traces_keep_the_value(case: int) -> None:
    check_case(case, run_interpreted)


@pytest.mark.parametrize("target", native_targets())
def test_native_code_keeps_the_value(native_case: int, target: str) -> None:
    check_case(native_case, run_natively(parse_target(target, threads=2)))


def check_case(case: int, run: Runner) -> None:
    choose = random.Random(f"{sample_seed()}/{case}").choice
    task = random_task(choose)
    trace = random_trace(task, choose)
    print(print_trace(trace))
    assert trace_from_json(trace_to_json(trace)) == trace
    check(task, trace, run)


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    return random_task(lambda options: draw(st.sampled_from(options)))


@derandomized
@given(tasks())
def test_constructed_schedules_keep_the_value(task: Task) -> None:
    check(task, construct(task), scaled_error=WINOGRAD_ERROR)


def test_constructed_gpu_schedules_keep_the_value(native_case: int) -> None:
    task = random_task(random.Random(f"{sample_seed()}/gpu/{native_case}").choice, "cuda:sm_80")
    if any(stage.shape == () for stage in task.dag.computes):
        pytest.skip("a result without dims has no GPU schedule")
    check(task, construct(task))


@pytest.mark.parametrize("target", native_targets())
def test_constructed_native_code_keeps_the_value(native_case: int, target: str) -> None:
    """The schedule is made for the target, so that AVX2's narrower vectors and fewer registers are met too."""
    task = random_task(random.Random(f"{sample_seed()}/constructed/{native_case}").choice, target)
    check(task, construct(task), run_natively(task.target), scaled_error=WINOGRAD_ERROR)


def test_most_proposed_steps_survive() -> None:
    """Else the tests above would test next to nothing."""
    kinds: list[str] = []
    for case in range(30):
        choose = random.Random(f"survival/{case}").choice
        kinds.extend(step.kind for step in random_trace(random_task(choose), choose))
    assert len(kinds) > 5 * 30
    assert set(kinds) >= {"split", "fuse", "reorder", "compute_at", "compute_inline", "cache_write", "cache_read"}
    assert set(kinds) >= {"rfactor", "vectorize", "unroll", "parallel", "layout_rewrite"}
