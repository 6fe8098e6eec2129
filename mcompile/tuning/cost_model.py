"""Learned costs: which of many candidates of a task are fast, told from their features.

A program's score is the sum over its stores. The label is best / cost of its task: 1 for the fastest known program, 0
for one that failed, so that one model serves all tasks.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mcompile.errors import OptionError
from mcompile.tuning.features import FEATURE_VERSION, Features

Floats = NDArray[np.float64]
FORMAT_VERSION = 1
_SHIPPED = Path(__file__).with_name("pretrained.json")


class CostModel(Protocol):
    """Predicts how good candidates are. Scores compare candidates of one task; greater is better."""

    def update(self, workload_key: str, features: Features, costs: Sequence[float]) -> None:
        """Learn from measured programs of a task: seconds of each, infinite for one that failed."""
        ...

    def predict(self, features: Features) -> Floats | None:
        """The score of each program; None while the model knows too little to say anything."""
        ...


@dataclass
class RandomModel:
    """Knows nothing: random scores."""

    seed: int = 0
    _random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def update(self, workload_key: str, features: Features, costs: Sequence[float]) -> None:
        """Learns nothing."""

    def predict(self, features: Features) -> Floats | None:
        return self._random.random(program_count(features))


class NoModel:
    """Never says anything: the search goes by its draft estimates alone."""

    def update(self, workload_key: str, features: Features, costs: Sequence[float]) -> None:
        """Learns nothing."""

    def predict(self, features: Features) -> Floats | None:
        return None


def program_count(features: Features) -> int:
    return int(features.program.max()) + 1 if len(features.program) else 0


def program_sums(values: NDArray[Any], program: NDArray[np.int64], count: int) -> Floats:
    """The sum of `values` (one a store) over each program."""
    return np.bincount(program, values, count).astype(np.float64)


@dataclass(frozen=True)
class BoostingOptions:
    """Constants of the trees. A fit of 2,048 programs takes about half a second."""

    rounds: int = 40
    depth: int = 6
    bins: int = 64
    rate: float = 0.2
    least_programs: int = 24  # known before the first fit
    growth: float = 0.3  # by how much the data must have grown for another fit
    most_programs: int = 8192  # that a fit sees
    most_prior_rounds: int = 400  # a longer history is only used until the first fit


@dataclass
class _Samples:
    """Programs of one task."""

    rows: list[NDArray[np.float32]] = field(default_factory=list)
    programs: list[NDArray[np.int64]] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)

    def add(self, features: Features, costs: Sequence[float]) -> None:
        self.rows.append(np.asarray(features.rows, np.float32))
        self.programs.append(np.asarray(features.program, np.int64) + len(self.costs))
        self.costs.extend(costs)

    @property
    def labels(self) -> Floats:
        costs = np.asarray(self.costs, np.float64)
        finite = np.isfinite(costs) & (costs > 0)
        if not finite.any():
            return np.zeros(len(costs))
        best = costs[finite].min()
        return np.where(finite, best / np.where(finite, costs, 1.0), 0.0)


class XGBoostModel:
    """Boosted trees on per-store features (Ansor, section 5.2): squared error weighted by the label.

    Fitted anew when the data has grown by a third or so, so that a long tuning spends little on fits. The result
    depends on the data and the order in which it came only.
    """

    def __init__(self, options: BoostingOptions | None = None, seed: int = 0) -> None:
        self.options = options or BoostingOptions()
        self.fits = 0
        self._seed = seed
        self._samples: dict[str, _Samples] = {}
        self._count = 0
        self._fitted_count = 0
        self._booster: Any = None
        self._prior: Any = None  # trees learned earlier, which fits go on from
        self._columns: int | None = None

    @property
    def sample_count(self) -> int:
        return self._count

    def update(self, workload_key: str, features: Features, costs: Sequence[float]) -> None:
        if not len(costs):
            return
        self._samples.setdefault(workload_key, _Samples()).add(features, costs)
        self._count += len(costs)

    def predict(self, features: Features) -> Floats | None:
        if self._count >= max(self.options.least_programs, self._fitted_count * (1 + self.options.growth)):
            self.fit()
        if self._booster is None:
            return None
        count = program_count(features)
        if self._columns is not None and features.rows.shape[1] != self._columns:
            return None  # a model of other features
        values = self._booster.inplace_predict(np.asarray(features.rows, np.float32))
        return program_sums(values, features.program, count)

    def fit(self) -> None:
        """Train on everything known."""
        xgboost = _import_xgboost()
        rows, program, labels = self._data()
        weights = np.maximum(labels, 0.05)
        stores = np.bincount(program, minlength=len(labels))
        curvature = np.asarray(weights * stores, np.float64)[program]

        def objective(predicted: NDArray[np.float32], data: object) -> tuple[Floats, Floats]:
            error = program_sums(predicted, program, len(labels)) - labels
            return (weights * error)[program], curvature

        options = self.options
        data = xgboost.QuantileDMatrix(rows, max_bin=options.bins, nthread=1)
        parameters = {
            "max_depth": options.depth,
            "max_bin": options.bins,
            "eta": options.rate,
            "gamma": 0.001,
            "min_child_weight": 0.0,
            "lambda": 0.1,
            "tree_method": "hist",
            "nthread": 1,  # the machine may be busy: threads that wait for one another lose more than they win
            "seed": self._seed,
            "base_score": 0.0,
            "disable_default_eval_metric": 1,
        }
        if self._columns != rows.shape[1]:
            self._prior = None
        self._booster = xgboost.train(parameters, data, options.rounds, obj=objective, xgb_model=self._prior)
        self._booster.set_param({"nthread": 1})
        self._columns = rows.shape[1]
        self._fitted_count = self._count
        self.fits += 1

    def _data(self) -> tuple[NDArray[np.float32], NDArray[np.int64], Floats]:
        """Rows, the program of each, and the label of each program, of all tasks."""
        rows: list[NDArray[np.float32]] = []
        programs: list[NDArray[np.int64]] = []
        labels: list[Floats] = []
        first = 0
        for key in sorted(self._samples):
            samples = self._samples[key]
            rows.extend(samples.rows)
            programs.extend(program + first for program in samples.programs)
            labels.append(samples.labels)
            first += len(samples.costs)
        return _thinned(np.concatenate(rows), np.concatenate(programs), np.concatenate(labels), self.options)

    def save(self, path: Path) -> None:
        """Write the trees as JSON. Raises OptionError if nothing was learned."""
        if self._booster is None:
            raise OptionError("cost model: nothing was learned yet")
        trees = json.loads(bytes(self._booster.save_raw("json")))
        data = {"format": FORMAT_VERSION, "features": FEATURE_VERSION, "columns": self._columns, "trees": trees}
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(data, separators=(",", ":")))
            part.replace(path)
        except OSError as error:
            raise OptionError(f"cost model {path}: cannot write it: {error.strerror or error}") from error

    def load(self, path: Path) -> None:
        """Read trees that `save` wrote: used as they are, later what fits go on from. Raises OptionError."""
        xgboost = _import_xgboost()
        try:
            data = json.loads(path.read_text())
            if data["format"] != FORMAT_VERSION:
                raise OptionError(f"cost model {path}: format {data['format']}, expected {FORMAT_VERSION}")
            if data["features"] != FEATURE_VERSION:
                raise OptionError(f"cost model {path}: features {data['features']}, expected {FEATURE_VERSION}")
            booster = xgboost.Booster({"nthread": 1})
            booster.load_model(bytearray(json.dumps(data["trees"]).encode()))
            columns = int(data["columns"])
        except (OSError, ValueError, KeyError, TypeError, xgboost.core.XGBoostError) as error:
            raise OptionError(f"cost model {path}: cannot read it: {error}") from error
        self._booster, self._columns = booster, columns
        self._prior = booster if booster.num_boosted_rounds() <= self.options.most_prior_rounds else None


def _import_xgboost() -> Any:
    """Raises OptionError where it is not installed."""
    try:
        import xgboost
    except ImportError as error:
        raise OptionError("tuning needs xgboost: pip install 'mcompile[tune]'") from error
    return xgboost


def shipped_model(seed: int = 0) -> XGBoostModel:
    """A model that has seen other networks' tasks; one that knows nothing if none is shipped for these features.

    Raises OptionError without xgboost.
    """
    _import_xgboost()
    model = XGBoostModel(seed=seed)
    with contextlib.suppress(OptionError):
        model.load(_SHIPPED)
    return model


def _thinned(
    rows: NDArray[np.float32], program: NDArray[np.int64], labels: Floats, options: BoostingOptions
) -> tuple[NDArray[np.float32], NDArray[np.int64], Floats]:
    """At most `most_programs` of the programs, evenly over all: what a fit costs stays bounded."""
    if len(labels) <= options.most_programs:
        return rows, program, labels
    kept = np.zeros(len(labels), bool)
    kept[np.linspace(0, len(labels) - 1, options.most_programs).astype(np.int64)] = True
    numbers = np.cumsum(kept) - 1
    chosen = kept[program]
    return rows[chosen], numbers[program[chosen]], labels[kept]


def pairwise_accuracy(scores: Floats, costs: Floats) -> float:
    """The share of pairs of programs that the scores put in the order of their costs (ties of costs aside)."""
    first, second = np.triu_indices(len(costs), 1)
    differ = costs[first] != costs[second]
    if not differ.any():
        return 1.0
    right = (scores[first] > scores[second]) == (costs[first] < costs[second])
    return float(right[differ].mean())


def recall_at(scores: Floats, costs: Floats, count: int) -> float:
    """The share of the `count` fastest programs that are among the `count` best scores."""
    count = min(count, len(costs))
    best = set(np.argsort(costs, kind="stable")[:count].tolist())
    return len(best & set(np.argsort(-scores, kind="stable")[:count].tolist())) / max(count, 1)
