"""What a batch is made of."""

import numpy as np
import pytest

from mcompile.tuning.cost_model import NoModel
from mcompile.tuning.search import EvolutionarySearch, EvolutionOptions, Measured, RandomSearch
from tests.tuning import toys


class Oracle:
    """Knows that points near (24, 12) are fast."""

    def update(self, workload_key, features, costs):
        pass

    def predict(self, features):
        rows = features.rows.astype(float)
        return 1.0 / (1.0 + 0.002 * (rows[:, 0] - 24) ** 2 + 0.004 * (rows[:, 1] - 12) ** 2)


def sketches(count=1, **facts):
    return [toys.ToySketch(None, f"toy{number}", **facts) for number in range(count)]


def propose(strategy, model=None, measured=None, count=8, seed=0, of=None):
    random = np.random.default_rng(seed)
    return strategy.propose(of or sketches(), model or NoModel(), measured or Measured(), random, count)


@pytest.mark.parametrize("strategy", [RandomSearch(), EvolutionarySearch()])
def test_a_batch_holds_legal_new_points_once(strategy):
    measured = Measured({(0, (a, b)): 1e-3 for a in range(1, 33) for b in range(1, 31)})
    points = propose(strategy, measured=measured, count=20)
    assert len(points) == len(set(points))
    assert 8 < len(points) <= 20
    assert all(values[1] > 30 for _, values in points)


@pytest.mark.parametrize("strategy", [RandomSearch(), EvolutionarySearch()])
def test_a_used_up_space_gives_nothing(strategy):
    measured = Measured({(0, (a, b)): 1e-3 for a in (1, 2) for b in (1, 2)})
    assert propose(strategy, measured=measured, of=sketches(limit=2)) == []
    assert propose(strategy, of=[toys.ToySketch(None, limit=1)]) == [(0, (1, 1))]


@pytest.mark.parametrize("strategy", [RandomSearch(), EvolutionarySearch()])
def test_no_sketch_gives_nothing(strategy):
    assert strategy.propose([], NoModel(), Measured(), np.random.default_rng(0), 8) == []


@pytest.mark.parametrize("strategy", [RandomSearch(), EvolutionarySearch()])
def test_choices_come_from_the_seed(strategy):
    assert propose(strategy, seed=1) == propose(strategy, seed=1) != propose(strategy, seed=2)


def test_evolution_finds_what_the_model_thinks_best():
    of = sketches(limit=200)
    measured = Measured({(0, (n, n)): 1e-3 for n in range(150, 200)})
    points = propose(EvolutionarySearch(EvolutionOptions(local_share=0.0, epsilon=0.0)), Oracle(), measured, 8, 0, of)
    near = [values for _, values in points if abs(values[0] - 24) + abs(values[1] - 12) < 12]
    assert len(near) >= 6


def test_part_of_a_batch_lies_beside_the_best_point_and_late_more_of_it():
    def beside(progress):
        measured = Measured({(0, (24, 12)): 1e-3, (0, (1, 1)): 2e-3}, progress)
        points = propose(EvolutionarySearch(), measured=measured, count=10)
        return sum(abs(a - 24) + abs(b - 12) == 1 or a + b == 3 for _, (a, b) in points)

    assert 2 <= beside(0.1) <= beside(0.9)


def test_a_batch_is_diverse():
    options = EvolutionOptions(local_share=0.0, epsilon=0.0, diversity=10.0)
    points = propose(EvolutionarySearch(options), Oracle())
    assert len({values[0] for _, values in points}) >= 7


def test_sketches_that_were_not_tried_get_part_of_a_batch():
    class Favours(Oracle):
        def predict(self, features):
            return features.rows[:, 0].astype(float)

    measured = Measured({(0, (30, n)): 1e-3 for n in range(1, 10)})
    points = propose(EvolutionarySearch(), Favours(), measured, 16, of=sketches(3))
    numbers = [number for number, _ in points]
    assert numbers.count(0) < 16
    assert {1, 2} & set(numbers)


def test_the_draft_estimate_decides_while_the_model_knows_nothing():
    class Drafted(toys.ToySketch):
        def draft_seconds(self, values):
            return 1e-3 + 1e-4 * np.abs(values - np.array([5, 29])).sum(axis=1)

    points = propose(EvolutionarySearch(EvolutionOptions(epsilon=0.0)), of=[Drafted(None)])
    distances = [abs(a - 5) + abs(b - 29) for _, (a, b) in points]
    assert np.median(distances) <= 8
