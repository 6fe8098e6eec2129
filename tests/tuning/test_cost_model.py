"""The learned model: what it learns, when it is fitted, what it keeps on disk."""

import json

import numpy as np
import pytest

from mcompile.errors import OptionError
from mcompile.tuning.cost_model import (
    BoostingOptions,
    NoModel,
    RandomModel,
    XGBoostModel,
    pairwise_accuracy,
    recall_at,
    shipped_model,
)
from mcompile.tuning.features import FEATURE_NAMES, Features


def programs(count, seed=0, stores=2, scale=1.0):
    """Features of random programs, and costs: the sum over a program's stores of its first two columns."""
    random = np.random.default_rng(seed)
    rows = random.random((count * stores, 6)).astype(np.float32)
    program = np.repeat(np.arange(count), stores)
    costs = np.bincount(program, rows[:, 0] + 0.5 * rows[:, 1] ** 2, count) * scale
    return Features(rows, program), costs


@pytest.fixture(scope="module")
def trained():
    model = XGBoostModel()
    for task in range(3):
        features, costs = programs(150, task, scale=10.0**task)
        model.update(f"task {task}", features, costs.tolist())
    model.fit()
    return model


def test_it_orders_programs_of_tasks_it_has_not_seen(trained):
    features, costs = programs(200, 9, scale=1e-3)
    scores = trained.predict(features)
    assert pairwise_accuracy(scores, costs) > 0.85
    assert recall_at(scores, costs, 30) > 0.5


def test_a_programs_score_is_the_sum_over_its_stores(trained):
    features, _ = programs(10, 5)
    separate = Features(features.rows, np.arange(len(features.rows)))
    scores = trained.predict(features)
    np.testing.assert_allclose(scores, trained.predict(separate).reshape(10, 2).sum(axis=1), rtol=1e-5)


def test_failed_programs_count_as_the_slowest():
    features, costs = programs(200)
    costs[features.rows[::2, 2] > 0.5] = np.inf
    model = XGBoostModel()
    model.update("task", features, costs.tolist())
    scores = model.predict(features)
    assert scores[np.isinf(costs)].mean() < scores[np.isfinite(costs)].mean() - 0.1


def test_all_failed_is_no_error():
    features, _ = programs(50)
    model = XGBoostModel()
    model.update("task", features, [np.inf] * 50)
    assert np.abs(model.predict(features)).max() < 1e-3


def test_it_says_nothing_until_it_knows_enough():
    model = XGBoostModel()
    features, costs = programs(8)
    model.update("task", features, costs.tolist())
    assert model.predict(features) is None


def test_it_is_fitted_again_only_when_the_data_has_grown():
    model = XGBoostModel(BoostingOptions(rounds=3))
    fits = []
    for seed in range(40):
        features, costs = programs(8, seed)
        model.update("task", features, costs.tolist())
        model.predict(features)
        fits.append(model.fits)
    assert fits[-1] < 16
    assert fits[2] == 1


def test_a_fit_sees_a_bounded_number_of_programs():
    model = XGBoostModel(BoostingOptions(rounds=3, most_programs=50))
    features, costs = programs(200)
    model.update("task", features, costs.tolist())
    rows, program, labels = model._data()
    assert (len(rows), len(labels)) == (100, 50)
    np.testing.assert_array_equal(np.bincount(program), 2)


def test_equal_data_gives_equal_scores():
    features, costs = programs(100)
    scores = []
    for _ in range(2):
        model = XGBoostModel(seed=3)
        model.update("task", features, costs.tolist())
        scores.append(model.predict(features))
    np.testing.assert_array_equal(*scores)


def test_a_saved_model_predicts_the_same_and_learns_on(trained, tmp_path):
    features, costs = programs(200, 9)
    expected = trained.predict(features)
    trained.save(tmp_path / "model.json")
    loaded = XGBoostModel()
    loaded.load(tmp_path / "model.json")
    np.testing.assert_allclose(loaded.predict(features), expected, rtol=1e-6)
    few, few_costs = programs(30, 11)
    loaded.update("new", few, few_costs.tolist())
    assert loaded.fits == 0
    scores = loaded.predict(features)
    assert loaded.fits == 1
    alone = XGBoostModel()
    alone.update("new", few, few_costs.tolist())
    assert pairwise_accuracy(scores, costs) > pairwise_accuracy(alone.predict(features), costs)


def test_a_model_of_other_features_is_not_used(trained, tmp_path):
    trained.save(tmp_path / "model.json")
    loaded = XGBoostModel()
    loaded.load(tmp_path / "model.json")
    random = np.random.default_rng(0)
    for _ in range(3):
        other = Features(random.random((40, 7)).astype(np.float32), np.arange(40))
        if not loaded.fits:
            assert loaded.predict(other) is None
        loaded.update("task", other, (1.0 + random.random(40)).tolist())
        assert loaded.predict(other) is not None


@pytest.mark.parametrize("change", [{"format": 99}, {"features": -1}, {"trees": {}}, {"columns": None}])
def test_a_damaged_or_foreign_file_is_an_error(trained, tmp_path, change):
    path = tmp_path / "model.json"
    trained.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(OptionError, match="cost model"):
        XGBoostModel().load(path)


def test_other_unreadable_files_are_errors(tmp_path):
    (tmp_path / "text").write_text("no json")
    for name in ("text", "missing"):
        with pytest.raises(OptionError, match="cannot read"):
            XGBoostModel().load(tmp_path / name)
    with pytest.raises(OptionError, match="nothing was learned"):
        XGBoostModel().save(tmp_path / "empty.json")


def test_models_that_know_nothing():
    features, _costs = programs(5)
    assert NoModel().predict(features) is None
    assert len(set(RandomModel(1).predict(features))) == 5


def test_measures_of_a_models_order():
    costs = np.array([1.0, 2.0, 3.0, np.inf])
    assert pairwise_accuracy(-np.arange(4.0), costs) == 1.0
    assert pairwise_accuracy(np.arange(4.0), costs) == 0.0
    assert recall_at(np.array([4.0, 1.0, 3.0, 0.0]), costs, 2) == 0.5


def test_the_shipped_model_is_of_the_present_features():
    """If not: `python -m benchmarks.tuning record` and `pretrain` make another."""
    model = shipped_model()
    features = Features(np.zeros((2, len(FEATURE_NAMES)), np.float32), np.arange(2))
    assert model.predict(features).shape == (2,)
