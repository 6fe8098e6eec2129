"""What a user sees while tuning and afterwards."""

import math

import pytest
from rich.console import Console

from mcompile.tuning.measure import DummyRunner, ErrorKind
from mcompile.tuning.report import report_html, write_report
from mcompile.tuning.tune import Budget, RoundEnded
from mcompile.tuning.view import LineView, LiveView, milliseconds, sparkline, time_left
from tests.tuning import toys


def failing_sometimes(candidate):
    return ErrorKind.CRASH if candidate.trace[0].factors[1] == 3 else toys.toy_cost(candidate)


@pytest.fixture(scope="module")
def run():
    """(report, events) of two tasks, one of which fails now and then."""
    events = []
    tasks = [toys.toy_task(8, (2.0, 0.0), "heavy"), toys.toy_task(16, (1.0, 3.0), "light")]
    report, _ = toys.run_toys(tasks, trials=60, callbacks=[events.append], runner=DummyRunner(failing_sometimes))
    return report, events


def test_the_live_table_names_tasks_models_trials_and_failures(run):
    report, events = run
    console = Console(width=160, record=True, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    view = LiveView(["first", "second"], Budget(trials=60), console)
    with view:
        for event in events:
            view(event)
    console.print(view.render(report.progress))
    text = console.export_text()
    assert all(word in text for word in ("heavy", "light", "first", "second", "60 trials", "0 trials left", "untuned"))
    console.file.close()


def test_without_a_terminal_there_are_lines_now_and_then(run):
    lines = []
    view = LineView(["first", "second"], Budget(trials=60), lines.append)
    for event in run[1]:
        view(event)
    assert len(lines) == 1  # all of it took less than five seconds
    assert "first" in lines[0]
    assert "trials left" in lines[0]


def test_the_page_stands_alone_and_holds_what_happened(run, tmp_path):
    report, _ = run
    path = tmp_path / "report.html"
    write_report(path, report, ["first", "<second>"], ["first: twice as fast"])
    page = path.read_text()
    assert page.count("<svg") == 2
    assert all(word in page for word in ("heavy", "light", "&lt;second&gt;", "twice as fast", "60 trials", "crash"))
    assert "<script" not in page
    assert "<link" not in page
    assert page == report_html(report, ["first", "<second>"], ["first: twice as fast"], "mcompile tune")


def test_a_page_can_be_made_of_nothing():
    report, _ = toys.run_toys(trials=5, runner=DummyRunner(lambda candidate: ErrorKind.CRASH))
    assert "crash" in report_html(report, ["model"], [], "title")


def test_words_for_numbers(run):
    progress = next(event.progress for event in run[1] if isinstance(event, RoundEnded))
    assert milliseconds(1.5e-3) == "1.500 ms"
    assert milliseconds(math.inf) == "?"
    assert time_left(progress, Budget(seconds=1e6)).endswith("s left")
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert sparkline([math.inf, 1.0]) == ""
