"""Searches replayed on recorded measurements."""

import numpy as np
import pytest

from benchmarks.tuning import Recorded, RecordedSketch, accuracy, replay, variants
from mcompile.tuning.measure import ErrorKind, MeasureInput
from tests.tuning import toys


def recorded(size, weight):
    task = toys.toy_task(size, (weight,))
    sketch = toys.ToySketch(task.task)
    rows = np.unique(np.random.default_rng(size).integers(1, toys.LIMIT + 1, (150, 2)), axis=0)
    costs = {}
    for row in rows.tolist():
        trace = sketch.instantiate(row)
        cost = toys.toy_cost(MeasureInput(task.task, trace))
        costs[trace] = np.inf if isinstance(cost, ErrorKind) else cost
    return Recorded(task, (sketch,), {0: rows}, costs)


@pytest.fixture(scope="module")
def table():
    return [recorded(8, 3.0), recorded(16, 1.0)]


def test_a_replay_is_deterministic_and_gets_better(table):
    first, second = (replay(table, variants(1)["full"], False, 80) for _ in range(2))
    assert first == second
    assert first == sorted(first, reverse=True)
    assert 1.0 <= first[-1] < 1.2


@pytest.mark.parametrize("name", list(variants(0)))
def test_every_variant_measures_recorded_points_only(table, name):
    assert replay(table, variants(0)[name], False, 40)[-1] >= 1.0


def test_a_recorded_sketch_moves_among_its_points(table):
    sketch = RecordedSketch(table[0].sketches[0], table[0].points[0])
    random = np.random.default_rng(0)
    values = sketch.sample(random, 20)
    moved = (
        sketch.mutate(random, values),
        sketch.crossover(random, values, values[::-1]),
        sketch.neighbours(values[0]),
    )
    assert all(sketch.legal(rows).all() for rows in moved)
    assert not sketch.legal(np.array([[999, 999]])).any()


def test_accuracy_is_told_for_seen_and_unseen_tasks(table):
    result = accuracy([*table, recorded(24, 1.0)])
    assert 0.5 < result["seen_pairwise"] <= 1.0
    assert 0.5 < result["unseen_pairwise"] <= 1.0
