"""A toy space, whose programs cost what a formula says: the loop, the search and the scheduler in seconds."""

import numpy as np

from mcompile.schedule.steps import Split
from mcompile.tuning.measure import DummyBuilder, DummyRunner, ErrorKind
from mcompile.tuning.records import MemoryDatabase
from mcompile.tuning.tune import Budget, TuneOptions, TuneTask, tune
from tests.schedule import programs

LIMIT = 32


class ToyFeatures:
    """As mcompile.tuning.features.Features: one store a program."""

    def __init__(self, rows):
        self.rows = np.asarray(rows, np.float32)
        self.program = np.arange(len(rows))


class ToySketch:
    """Points (a, b) with 1 <= a, b <= 32. The draft estimate says nothing."""

    columns = 2
    decisions = ()
    starts = (0,)

    def __init__(self, task, name="toy", limit=LIMIT):
        self.task, self.name, self.limit = task, name, limit

    def instantiate(self, values):
        return (Split(self.name, "i", tuple(int(value) for value in values)),)

    def sample(self, random, n):
        return random.integers(1, self.limit + 1, (n, 2))

    sample_legal = sample

    def legal(self, values):
        return ((values >= 1) & (values <= self.limit)).all(axis=1)

    def features(self, values):
        return ToyFeatures(np.stack([values[:, 0], values[:, 1], values.sum(axis=1)], axis=1))

    def draft_seconds(self, values):
        return np.full(len(values), 1e-3)

    def mutate(self, random, values):
        return values + random.integers(-2, 3, values.shape)

    def crossover(self, random, a, b):
        return np.stack([a[:, 0], b[:, 1]], axis=1)

    def neighbours(self, values):
        near = np.asarray(values) + np.array([[1, 0], [-1, 0], [0, 1], [0, -1]])
        return near[self.legal(near)]


class ToySpace:
    """One sketch a task; the seed is its worst corner."""

    def __init__(self, seeded=True, limit=LIMIT):
        self.seeded, self.limit = seeded, limit

    def generate(self, task):
        return (ToySketch(task, limit=self.limit),)

    def seed(self, task):
        return (0, (1, 1)) if self.seeded else None


def toy_cost(candidate):
    """From 1 ms at (24, 12) up; wrong where a = 7."""
    a, b = candidate.trace[0].factors
    if a == 7:
        return ErrorKind.WRONG_ANSWER
    return 1e-3 * (1.0 + 0.002 * (a - 24) ** 2 + 0.004 * (b - 12) ** 2)


def toy_task(size=8, weights=(1.0,), name=None):
    return TuneTask(name or f"relu{size}", relu_task(size), weights)


def relu_task(size):
    x = programs.placeholder("x", (size,), programs.F32)
    return programs.plain_task([programs.relu(x)])


def run_toys(tasks=None, trials=64, database=None, runner=None, builder=None, callbacks=(), **options):
    options = {"space": ToySpace(), "budget": Budget(trials=trials)} | options
    runner = runner or DummyRunner(toy_cost)
    report = tune(
        tasks or [toy_task()],
        TuneOptions(**options),
        MemoryDatabase() if database is None else database,
        builder or DummyBuilder(),
        runner,
        callbacks,
    )
    return report, runner


def best_seconds(report):
    (value,) = report.best.values()
    return value[1]
