"""The tuning loop with a runner that computes costs by a formula."""

import math

import pytest

from mcompile.errors import OptionError
from mcompile.schedule.steps import Split
from mcompile.tuning.cost_model import NoModel, RandomModel
from mcompile.tuning.measure import DummyBuilder, DummyRunner, ErrorKind, MeasureResult
from mcompile.tuning.records import Database, MemoryDatabase, target_key
from mcompile.tuning.search import RandomSearch
from mcompile.tuning.task_scheduler import RoundRobin
from mcompile.tuning.tune import Budget, RoundEnded, TrialEnded, TuneOptions, tune
from tests.tuning import toys


def test_the_search_gets_near_the_optimum():
    report, _ = toys.run_toys(trials=96)
    assert toys.best_seconds(report) < 1.02e-3
    assert report.untuned_latencies[0] > 2e-3
    assert report.ended == "trials"
    assert report.progress.trials == 96


def test_equal_seeds_give_equal_runs_and_others_do_not():
    def measured(seed):
        _, runner = toys.run_toys(seed=seed)
        return [candidate.trace for candidate in runner.measured]

    assert measured(1) == measured(1)
    assert measured(1) != measured(2)


def test_nothing_is_measured_twice():
    _, runner = toys.run_toys(trials=200)
    assert len({candidate.trace for candidate in runner.measured}) == len(runner.measured) == 200


def test_the_untuned_schedule_is_measured_first():
    _, runner = toys.run_toys([toys.toy_task(8), toys.toy_task(16)], trials=8)
    assert [candidate.trace[0].factors for candidate in runner.measured[:2]] == [(1, 1), (1, 1)]
    assert len({candidate.task.workload_key for candidate in runner.measured[:2]}) == 2


def test_a_resumed_tuning_repeats_nothing_and_keeps_its_history(tmp_path):
    with Database(tmp_path / "tuning.db") as database:
        first, before = toys.run_toys(trials=50, database=database)
    with Database(tmp_path / "tuning.db") as database:
        second, after = toys.run_toys(trials=50, database=database, seed=1)
    assert not {c.trace for c in before.measured} & {c.trace for c in after.measured}
    assert second.resumed_trials == 50
    assert second.progress.tasks[0].rounds > first.progress.tasks[0].rounds
    assert second.untuned_latencies == first.untuned_latencies
    assert toys.best_seconds(second) <= toys.best_seconds(first)


def test_every_trial_is_recorded_before_the_next_one_runs():
    class Checking(DummyRunner):
        def run(self, built, incumbent_seconds=None):
            task = built[0].input.task
            assert len(database.records(task.workload_key, target_key(task.target))) == len(self.measured)
            return super().run(built, incumbent_seconds)

    database = MemoryDatabase()
    toys.run_toys(trials=30, database=database, runner=Checking(toys.toy_cost))


def test_an_interrupt_keeps_all_and_ends_the_run():
    class Interrupting(DummyRunner):
        def run(self, built, incumbent_seconds=None):
            if len(self.measured) == 21:
                raise KeyboardInterrupt
            return super().run(built, incumbent_seconds)

    database = MemoryDatabase()
    report, runner = toys.run_toys(database=database, runner=Interrupting(toys.toy_cost))
    assert report.ended == "interrupted"
    assert report.progress.trials == 21
    key = toys.toy_task().task.workload_key
    assert len(database.records(key, target_key(runner.measured[0].task.target))) == 21


def test_failed_trials_are_counted_by_reason_and_never_win():
    def cost(candidate):
        return ErrorKind.CRASH if candidate.trace[0].factors[0] % 2 else toys.toy_cost(candidate)

    report, _runner = toys.run_toys(trials=60, runner=DummyRunner(cost))
    assert report.progress.tasks[0].failures["crash"] > 1
    assert 0 < report.success_share < 1
    ((trace, _),) = report.best.values()
    assert trace[0].factors[0] % 2 == 0


def test_a_task_of_which_nothing_runs_ends_the_tuning_without_an_error():
    report, runner = toys.run_toys(trials=500, runner=DummyRunner(lambda candidate: ErrorKind.BUILD_ERROR))
    assert report.ended == "nothing left"
    assert report.best == {}
    assert len(runner.measured) < 40


def test_a_space_that_is_used_up_is_left_alone():
    report, runner = toys.run_toys(trials=500, space=toys.ToySpace(limit=4))
    assert report.ended == "nothing left"
    assert len(runner.measured) == 16


def test_a_space_that_cannot_be_made_is_counted_and_the_others_are_tuned():
    class Partial(toys.ToySpace):
        def generate(self, task):
            if task.workload_key == broken.task.workload_key:
                raise OptionError("no sketch")
            return super().generate(task)

    broken, sound = toys.toy_task(8), toys.toy_task(16)
    report, _ = toys.run_toys([broken, sound], trials=24, space=Partial())
    assert set(report.best) == {sound.task.workload_key}
    assert any("no sketch" in reason for reason in report.progress.tasks[0].failures)


def test_without_a_seed_the_search_starts_from_nothing():
    report, runner = toys.run_toys(trials=96, space=toys.ToySpace(seeded=False))
    assert runner.measured[0].trace != (Split("toy", "i", (1, 1)),)
    assert math.isinf(report.untuned_latencies[0])
    assert toys.best_seconds(report) < 1.05e-3


def test_time_ends_a_tuning():
    now = [0.0]

    def clock():
        now[0] += 0.01
        return now[0]

    report, _ = toys.run_toys(budget=Budget(seconds=10.0), clock=clock)
    assert report.ended == "time"
    assert report.progress.seconds < 11.0


def test_the_curve_only_falls_and_ends_at_the_best():
    report, _ = toys.run_toys([toys.toy_task(8, (2.0,)), toys.toy_task(16, (1.0,))], trials=80)
    latencies = [point.latencies[0] for point in report.curve]
    assert latencies == sorted(latencies, reverse=True)
    assert latencies[-1] == pytest.approx(sum(w * s for w, (_, s) in zip((2, 1), report.best.values(), strict=True)))


def test_finalists_are_timed_in_turns_and_a_lucky_one_loses():
    lucky, good = (20, 12), (24, 12)

    class Noisy(DummyRunner):
        def compare(self, built, rounds=20):
            self.compared = [candidate.input.trace for candidate in built]
            return [MeasureResult((toys.toy_cost(each.input),) * 3, timestamp=1e9) for each in built]

    def noisy(candidate):
        return 0.5e-3 if candidate.trace[0].factors == lucky else toys.toy_cost(candidate)

    database = MemoryDatabase()
    report, runner = toys.run_toys(trials=400, runner=Noisy(noisy), database=database)
    assert lucky in {candidate.trace[0].factors for candidate in runner.measured}
    ((trace, _seconds),) = report.best.values()
    assert trace[0].factors == good
    task = toys.toy_task().task
    assert database.best(task.workload_key, target_key(task.target)).trace == trace


def test_a_tuned_schedule_that_is_no_faster_when_compared_loses_to_the_untuned_one():
    class Fair(DummyRunner):
        def compare(self, built, rounds=20):
            return [MeasureResult((1e-3 + 1e-6 * n,), timestamp=1e9) for n, _ in enumerate(built)]

    report, _ = toys.run_toys(trials=12, runner=Fair(toys.toy_cost))
    ((trace, _),) = report.best.values()
    assert trace[0].factors == (1, 1)


@pytest.mark.parametrize("budget", [Budget(), Budget(trials=0), Budget(seconds=-1.0)])
def test_a_budget_must_be_there(budget):
    with pytest.raises(OptionError, match="budget"):
        tune([toys.toy_task()], TuneOptions(budget=budget), MemoryDatabase(), DummyBuilder(), DummyRunner())


def test_fewer_trials_than_tasks_is_no_error():
    _report, runner = toys.run_toys([toys.toy_task(8), toys.toy_task(16), toys.toy_task(24)], trials=2)
    assert len(runner.measured) == 2


# --- every role by a plain class of the user's ---


def test_a_users_cost_model_is_asked():
    class Knows:
        def __init__(self):
            self.costs = []

        def update(self, workload_key, features, costs):
            self.costs.extend(costs)

        def predict(self, features):
            rows = features.rows.astype(float)
            return 1.0 / (1.0 + 0.002 * (rows[:, 0] - 24) ** 2 + 0.004 * (rows[:, 1] - 12) ** 2)

    model = Knows()
    report, _ = toys.run_toys(trials=32, model=model)
    assert len(model.costs) >= 31
    assert toys.best_seconds(report) < 1.01e-3


def test_a_users_strategy_objective_scheduler_and_callback_are_used():
    events, values = [], []

    class Diagonal:
        def propose(self, sketches, model, measured, random, count):
            return [(0, (n, n)) for n in range(2, 33) if (0, (n, n)) not in measured.costs][:count]

    class Last(RoundRobin):
        def choose(self, states, objective, random):
            return len(states) - 1 if states[-1].rounds < 4 else None

    def objective(latencies):
        values.append(latencies)
        return max(latencies)

    report, runner = toys.run_toys(
        [toys.toy_task(8), toys.toy_task(16)],
        strategy=Diagonal(),
        scheduler=Last(),
        objective=objective,
        callbacks=[events.append],
    )
    assert report.ended == "nothing left"
    assert all(a == b for a, b in (candidate.trace[0].factors for candidate in runner.measured))
    assert sum(isinstance(event, TrialEnded) for event in events) == len(runner.measured) == 2 + 31
    assert sum(isinstance(event, RoundEnded) for event in events) >= 4


def test_a_users_builder_and_runner_are_used():
    class Builder:
        def build(self, inputs):
            self.count = getattr(self, "count", 0) + len(inputs)
            return DummyBuilder().build(inputs)

    class Runner:
        def run(self, built, incumbent_seconds=None):
            return [MeasureResult((2e-3,)) for _ in built]

    builder = Builder()
    report, _ = toys.run_toys(trials=10, builder=builder, runner=Runner())
    assert builder.count == 10
    assert toys.best_seconds(report) == 2e-3


@pytest.mark.parametrize("model", [NoModel(), RandomModel()])
def test_other_models_work(model):
    assert toys.best_seconds(toys.run_toys(trials=64, model=model)[0]) < 1.5e-3


def test_evolution_with_a_model_beats_random_search():
    def mean_best(**roles):
        runs = [toys.run_toys(trials=40, seed=seed, space=toys.ToySpace(limit=500), **roles)[0] for seed in range(5)]
        return sum(map(toys.best_seconds, runs)) / 5

    assert mean_best() < mean_best(strategy=RandomSearch(), model=NoModel())
