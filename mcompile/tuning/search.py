"""Search: which points of a task's sketches to measure next.

`EvolutionarySearch` drafts with the sketches' cheap estimate, evolves what it kept by mutation and crossover under the
cost model, and takes a batch of the best, of some near the best measured one, and of a few at random. All choices come
from the generator that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mcompile.tuning.cost_model import CostModel, Floats
from mcompile.tuning.sketch import Choice, Matrix, Sketch

Values = tuple[int, ...]
Point = tuple[int, Values]  # number of a sketch, and values of its decisions
_RANDOM_TRIES = 8


@dataclass
class Measured:
    """A task's known points: seconds, infinite for a failed one. `progress`: the share of the budget that is used."""

    costs: dict[Point, float] = field(default_factory=dict)
    progress: float = 0.0

    def best(self, count: int) -> list[tuple[float, Point]]:
        """The fastest points that ran."""
        ran = [(cost, point) for point, cost in self.costs.items() if math.isfinite(cost)]
        return sorted(ran)[:count]


class SearchStrategy(Protocol):
    """Proposes points to measure."""

    def propose(
        self, sketches: Sequence[Sketch], model: CostModel, measured: Measured, random: np.random.Generator, count: int
    ) -> list[Point]:
        """Up to `count` legal points that were not measured, the most wanted first; none if there are no more."""
        ...


class RandomSearch:
    """Any legal point."""

    def propose(
        self, sketches: Sequence[Sketch], model: CostModel, measured: Measured, random: np.random.Generator, count: int
    ) -> list[Point]:
        fresh: dict[Point, None] = {}
        share = 2 * count // max(len(sketches), 1) + 2
        for _ in range(_RANDOM_TRIES):
            for number, sketch in enumerate(sketches):
                drawn = [(number, row) for row in _rows(sketch.sample_legal(random, share))]
                fresh.update((point, None) for point in drawn if point not in measured.costs)
            if len(fresh) >= count:
                break
        points = list(fresh)
        return [points[index] for index in random.permutation(len(points))[:count]]


@dataclass(frozen=True)
class EvolutionOptions:
    """Sizes are small: a round of trials takes a second, and proposing it must take little of that."""

    drafted: int = 512  # random points that the cheap estimate looks at
    population: int = 128
    generations: int = 3
    mutation: float = 0.85  # of the children, the others are crossed
    kept_arms: int = 2  # structures of the fastest points
    new_arms: int = 2  # structures not measured yet; twice as many while nothing was measured, later half as many
    explored: int = 32  # measured points of a task after which half as many new structures are looked at
    explored_share: float = 0.15  # of a batch: the best points of new structures
    epsilon: float = 0.05  # of a batch: points at random
    local_share: float = 0.3  # of a batch: neighbours of the best points
    late_local_share: float = 0.7  # likewise when `late` of the budget is used
    late: float = 0.7
    diversity: float = 0.05  # what a decision's value that the batch has not yet tried adds to a score
    trust: float = 16.0  # measured points of a task at which the model counts as much as the draft


Arm = tuple[int, Values]  # number of a sketch, and its structural choices


@dataclass
class _Population:
    """Points of one arm with their scores."""

    values: Matrix
    scores: Floats

    def best(self, count: int) -> _Population:
        order = np.argsort(-self.scores, kind="stable")[:count]
        return _Population(self.values[order], self.scores[order])


class EvolutionarySearch:
    """Draft, verify by the model, evolve, descend.

    Points of one sketch with the same structural choices are an arm: what they have in common is computed once, so a
    round looks at a few arms only: those of the fastest points, and some that were not tried yet.
    """

    def __init__(self, options: EvolutionOptions | None = None) -> None:
        self.options = options or EvolutionOptions()

    def propose(
        self, sketches: Sequence[Sketch], model: CostModel, measured: Measured, random: np.random.Generator, count: int
    ) -> list[Point]:
        if not sketches:
            return []
        options = self.options
        run = _Round(options, sketches, model, measured, random)
        kept, new = run.choose_arms()
        drafted = {arm: run.draft(arm, len(kept) + len(new)) for arm in (*kept, *new)}
        evolved = run.evolve(drafted)
        late = measured.progress >= options.late
        near = run.neighbours(3 if late else 2)
        local = round((options.late_local_share if late else options.local_share) * count) if near else 0
        explored = max(1, round(options.explored_share * count)) if kept and not late else 0
        chosen: dict[Point, None] = {}
        _take(chosen, _ranked(near), local)
        _take(chosen, run.fresh({arm: evolved[arm] for arm in new if arm in evolved}), len(chosen) + explored)
        if count_random := int(random.binomial(count, options.epsilon)):
            _take(chosen, run.at_random([*kept, *new]), len(chosen) + count_random)
        _take(chosen, run.diverse(run.fresh(evolved), count), count)
        _take(chosen, [*_ranked(near), *run.fresh(drafted)], count)
        if not chosen:
            _take(chosen, run.at_random(), count)
        return list(chosen)


class _Round:
    """One call of propose."""

    def __init__(
        self,
        options: EvolutionOptions,
        sketches: Sequence[Sketch],
        model: CostModel,
        measured: Measured,
        random: np.random.Generator,
    ) -> None:
        self.options = options
        self.sketches = sketches
        self.model = model
        self.measured = measured
        self.random = random
        self.columns = [_structural_columns(sketch) for sketch in sketches]
        self.scale = min((cost for cost in measured.costs.values()), default=math.inf)

    # --- arms ---

    def arm_of(self, point: Point) -> Arm:
        number, values = point
        return number, tuple(values[column] for column in self.columns[number])

    def choose_arms(self) -> tuple[list[Arm], list[Arm]]:
        """Arms of the fastest points, and arms of which nothing was measured."""
        known: dict[Arm, float] = {}
        for point, cost in self.measured.costs.items():
            arm = self.arm_of(point)
            known[arm] = min(cost, known.get(arm, math.inf))
        ran = sorted((cost, arm) for arm, cost in known.items() if math.isfinite(cost))
        kept = [arm for _, arm in ran[: self.options.kept_arms]]
        wanted = self.options.new_arms * (1 if kept else 2)
        if kept and len(self.measured.costs) >= self.options.explored:
            wanted = (wanted + 1) // 2
        new: list[Arm] = []
        order = [int(number) for _ in range(4) for number in self.random.permutation(len(self.sketches))]
        for number in order:
            row = self.sketches[number].sample(self.random, 1)[0].tolist()
            arm = self.arm_of((number, tuple(row)))
            if arm not in known and arm not in new:
                new.append(arm)
            if len(new) == wanted:
                break
        if not kept and not new:
            kept = list(known)[:wanted]
        return kept, new

    def in_arm(self, arm: Arm, values: Matrix) -> Matrix:
        """Rows with the arm's structural choices, the legal ones."""
        number, structure = arm
        values = values.copy()
        values[:, self.columns[number]] = structure
        values = np.unique(values, axis=0)
        return values[self.sketches[number].legal(values)]

    def draft(self, arm: Arm, arms: int) -> _Population:
        """The better part of a random sample, by the cheap estimate, and the best measured points."""
        sketch = self.sketches[arm[0]]
        values = self.in_arm(arm, sketch.sample(self.random, self.options.drafted // arms))
        self.random.shuffle(values)
        seconds = sketch.draft_seconds(values)
        best = values[np.argsort(seconds, kind="stable")[: max(4, self.options.population // arms)]]
        return self.scored(arm, np.unique(np.concatenate([best, self.measured_in(arm)]), axis=0))

    def scored(self, arm: Arm, values: Matrix) -> _Population:
        """Scores by the draft estimate and by the model, which counts the more the more is known of the task."""
        if not len(values):
            return _Population(values, np.zeros(0))
        sketch = self.sketches[arm[0]]
        seconds = np.maximum(sketch.draft_seconds(values), 1e-9)
        if not math.isfinite(self.scale):
            self.scale = float(seconds.min())
        draft = np.minimum(self.scale / seconds, 2.0)
        predicted = self.model.predict(sketch.features(values))
        if predicted is None:
            return _Population(values, draft)
        known = len(self.measured.costs)
        weight = 0.95 * (known + 4.0) / (known + 4.0 + self.options.trust)
        return _Population(values, weight * predicted + (1.0 - weight) * draft)

    # --- evolution ---

    def evolve(self, population: dict[Arm, _Population]) -> dict[Arm, _Population]:
        """The best of some generations, measured ones among them."""
        population = {arm: each for arm, each in population.items() if len(each.values)}
        for _ in range(self.options.generations if population else 0):
            for arm, children in self.children(population).items():
                population[arm] = _merged(population[arm], self.scored(arm, children))
            population = self.shrunk(population)
        return population

    def measured_in(self, arm: Arm) -> Matrix:
        """The best measured points of an arm."""
        count = max(4, self.options.population // 8)
        own = [values for _, (number, values) in self.measured.best(count) if self.arm_of((number, values)) == arm]
        return np.array(own, np.int64).reshape(len(own), self.sketches[arm[0]].columns)

    def children(self, population: dict[Arm, _Population]) -> dict[Arm, Matrix]:
        """New legal points: parents are drawn by rank over all arms."""
        order = sorted(
            ((-score, arm, row) for arm, each in population.items() for row, score in enumerate(each.scores)),
            key=lambda entry: entry[0],
        )
        weights = 1.0 / (np.arange(len(order)) + 4.0)
        picks = self.random.choice(len(order), self.options.population, p=weights / weights.sum())
        parents: dict[Arm, list[int]] = {}
        for pick in picks:
            _, arm, row = order[pick]
            parents.setdefault(arm, []).append(row)
        result = {}
        for arm, rows in parents.items():
            values, sketch = population[arm].values, self.sketches[arm[0]]
            chosen = values[rows]
            mates = values[self.random.integers(0, len(values), len(chosen))]
            crossed = sketch.crossover(self.random, chosen, mates)
            mutated = sketch.mutate(self.random, chosen)
            is_mutated = self.random.random(len(chosen)) < self.options.mutation
            result[arm] = self.in_arm(arm, np.where(is_mutated[:, None], mutated, crossed))
        return result

    def shrunk(self, population: dict[Arm, _Population]) -> dict[Arm, _Population]:
        """The best points over all arms, and at least a few of each."""
        scores = np.sort(np.concatenate([each.scores for each in population.values()]))[::-1]
        limit = scores[min(len(scores), self.options.population) - 1]
        least = max(4, self.options.population // (4 * len(population)))
        return {arm: each.best(max(least, int((each.scores >= limit).sum()))) for arm, each in population.items()}

    # --- batches ---

    def unmeasured(self, arm: Arm, population: _Population) -> _Population:
        rows = [row for row, v in enumerate(_rows(population.values)) if (arm[0], v) not in self.measured.costs]
        return _Population(population.values[rows], population.scores[rows])

    def fresh(self, population: dict[Arm, _Population]) -> list[Point]:
        """The points that were not measured, best first."""
        return _ranked({arm: self.unmeasured(arm, each) for arm, each in population.items()})

    def neighbours(self, count: int) -> dict[Arm, _Population]:
        """What lies one step from the `count` best measured points, in their arms."""
        found: dict[Arm, list[Matrix]] = {}
        for _, (number, values) in self.measured.best(count):
            arm = self.arm_of((number, values))
            near = self.sketches[number].neighbours(values)
            inside = (near[:, self.columns[number]] == np.array(arm[1], np.int64)).all(axis=1)
            found.setdefault(arm, []).append(near[inside])
        result = {}
        for arm, matrices in found.items():
            rows = np.unique(np.concatenate(matrices), axis=0)
            result[arm] = self.unmeasured(arm, self.scored(arm, rows))
        return result

    def at_random(self, arms: Sequence[Arm] = ()) -> list[Point]:
        """Any legal points that were not measured: of one of the arms, or if there is none of one sketch."""
        if arms:
            arm = arms[int(self.random.integers(0, len(arms)))]
            number, rows = arm[0], self.in_arm(arm, self.sketches[arm[0]].sample(self.random, 16))
        else:
            number = int(self.random.integers(0, len(self.sketches)))
            rows = self.sketches[number].sample_legal(self.random, 16)
        points = [(number, row) for row in _rows(self.random.permutation(rows))]
        return [point for point in points if point not in self.measured.costs]

    def diverse(self, ranked: list[Point], count: int) -> list[Point]:
        """Of the best ones, greedily: a value of a decision that the batch has not got yet is worth a little score."""
        candidates = ranked[: 6 * count]
        facts = [_facts(point) for point in candidates]
        seen: set[tuple[int, int, int]] = set()
        chosen: list[Point] = []
        left = list(range(len(candidates)))

        def worth(index: int) -> float:
            new = len(facts[index] - seen) / max(len(facts[index]), 1)
            return self.options.diversity * new - 0.01 * index

        while left and len(chosen) < count:
            best = max(left, key=worth)
            left.remove(best)
            chosen.append(candidates[best])
            seen |= facts[best]
        return chosen


def _structural_columns(sketch: Sketch) -> list[int]:
    return [
        start
        for decision, start in zip(sketch.decisions, sketch.starts, strict=False)
        if isinstance(decision, Choice) and decision.structural
    ]


def _facts(point: Point) -> set[tuple[int, int, int]]:
    number, values = point
    return {(number, column, value) for column, value in enumerate(values)}


def _rows(values: Matrix) -> list[Values]:
    return [tuple(row) for row in values.tolist()]


def _merged(a: _Population, b: _Population) -> _Population:
    """Both, equal points once."""
    values = np.concatenate([a.values, b.values])
    scores = np.concatenate([a.scores, b.scores])
    _, first = np.unique(values, axis=0, return_index=True)
    rows: NDArray[np.int64] = np.sort(first)
    return _Population(values[rows], scores[rows])


def _ranked(population: dict[Arm, _Population]) -> list[Point]:
    """All points, best score first; equal ones in the order in which chance made them."""
    scored = [
        (-float(score), arm[0], row)
        for arm, each in population.items()
        for row, score in zip(_rows(each.values), each.scores, strict=True)
    ]
    return [(number, row) for _, number, row in sorted(scored, key=lambda entry: entry[0])]


def _take(chosen: dict[Point, None], points: Iterable[Point], limit: int) -> None:
    """Add points until there are `limit`."""
    for point in points:
        if len(chosen) >= limit:
            return
        chosen.setdefault(point, None)
