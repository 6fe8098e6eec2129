"""Sketches: families of schedules of one task. What is open is a row of integers: tile sizes and choices.

A sketch is a list of parts, each of which writes the steps of some stages for given decisions. Written once with
`Size`s in place of tile sizes, the same steps give legality, features and estimates of whole populations of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from mcompile.schedule.constructed.builder import TraceBuilder
from mcompile.schedule.steps import Trace, Variant
from mcompile.schedule.task import Task

if TYPE_CHECKING:
    from mcompile.tuning.features import Features, Population

Matrix = NDArray[np.int64]
_EXACT_SHARE = 0.7  # of sampled factors that divide
_TILE_WEIGHT, _CHOICE_WEIGHT = 3.0, 1.0  # how often a decision is mutated


@dataclass(frozen=True)
class TileSizes:
    """Factors of a split into `parts` loops, outermost first; the outermost loop has what is left of `extent`.

    Factors need not divide the extent. The product of the last `inner` factors is at most `max_innermost`.
    """

    axis: str
    extent: int
    parts: int
    max_innermost: int = 64
    inner: int = 1

    @property
    def name(self) -> str:
        return self.axis

    @property
    def columns(self) -> int:
        return self.parts - 1

    def sample(self, rng: np.random.Generator, n: int) -> Matrix:
        result = np.ones((n, self.columns), np.int64)
        left = np.full(n, self.extent, np.int64)
        room = np.minimum(left, self.max_innermost)
        for column in rng.permutation(self.columns):
            is_inner = column >= self.columns - self.inner
            cap = np.minimum(left, room) if is_inner else left
            factor = _sample_factors(rng, left, cap)
            result[:, column] = factor
            left = -(-left // factor)
            room = np.maximum(1, room // factor) if is_inner else room
        return result

    def legal(self, values: Matrix) -> NDArray[np.bool_]:
        inner = values[:, self.columns - self.inner :].prod(axis=1)
        fits = (values.prod(axis=1) <= self.extent) & (inner <= self.max_innermost)
        return np.asarray((values >= 1).all(axis=1) & fits)

    def mutate(self, rng: np.random.Generator, values: Matrix) -> Matrix:
        """Of each row: a factor drawn anew, changed a little, or a divisor of it moved to another level."""
        n = len(values)
        result = values.copy()
        rows = np.arange(n)
        column = rng.integers(0, self.columns, n)
        old = result[rows, column]
        others = values.prod(axis=1) // old
        cap = np.maximum(1, self.extent // others)
        cap = np.where(column >= self.columns - self.inner, np.minimum(cap, self.max_innermost), cap)
        kind = rng.random(n)
        step = old + rng.integers(1, 3, n) * rng.choice(np.array([-1, 1]), n)
        scale = np.where(rng.random(n) < 0.5, old * 2, (old + 1) // 2)
        drawn = _sample_factors(rng, -(-self.extent // others), cap)
        new = np.where(kind < 0.35, drawn, np.where(kind < 0.65, step, np.where(kind < 0.8, scale, old)))
        result[rows, column] = np.clip(new, 1, cap)
        if self.columns > 1:
            self._move(rng, result, np.flatnonzero(kind >= 0.8))
        return result

    def _move(self, rng: np.random.Generator, values: Matrix, rows: NDArray[np.int64]) -> None:
        source = rng.integers(0, self.columns, len(rows))
        target = (source + rng.integers(1, self.columns, len(rows))) % self.columns
        divisor = rng.choice(np.array([2, 2, 3, 5, 7]), len(rows))
        fits = values[rows, source] % divisor == 0
        values[rows[fits], source[fits]] //= divisor[fits]
        values[rows[fits], target[fits]] *= divisor[fits]


@dataclass(frozen=True)
class Choice:
    """One of `options`, by its index. A choice that does not change the loops is not `structural`."""

    name: str
    options: tuple[Any, ...]
    structural: bool = True

    @property
    def columns(self) -> int:
        return 1

    def sample(self, rng: np.random.Generator, n: int) -> Matrix:
        return rng.integers(0, len(self.options), (n, 1))

    def legal(self, values: Matrix) -> NDArray[np.bool_]:
        return np.asarray(((values >= 0) & (values < len(self.options))).all(axis=1))

    def mutate(self, rng: np.random.Generator, values: Matrix) -> Matrix:
        count = len(self.options)
        return (values + rng.integers(1, max(2, count), values.shape)) % count


Decision = TileSizes | Choice


@dataclass(frozen=True)
class Size:
    """A tile size that is not known yet: a product of columns of the decisions and a constant."""

    columns: tuple[int, ...]
    factor: int = 1

    def __mul__(self, other: Size | int) -> Size:
        if isinstance(other, Size):
            return Size((*self.columns, *other.columns), self.factor * other.factor)
        return Size(self.columns, self.factor * other)

    __rmul__ = __mul__

    def __ge__(self, other: int) -> bool:
        return True

    def evaluate(self, values: Matrix) -> Matrix:
        return cast(Matrix, values[:, list(self.columns)].prod(axis=1) * self.factor)


Values = Mapping[str, Any]  # decision name -> factors of a TileSizes (ints or Sizes), or the option of a Choice


class Part(Protocol):
    """The steps of some stages, given its decisions. `write` must not branch on a tile size."""

    @property
    def decisions(self) -> tuple[Decision, ...]: ...

    def write(self, builder: TraceBuilder, values: Values) -> None: ...


@dataclass(frozen=True)
class Sketch:
    """Parts, written in order; `values` are the parts' decisions one after the other.

    With `variant`, the parts are of the dag of that name (`mcompile.schedule.variants`), that of `written`.
    """

    task: Task
    name: str
    parts: tuple[Part, ...]
    variant: str = ""
    written: Task | None = None
    reference: tuple[int, ...] = ()  # a row that is certainly bearable
    _populations: dict[tuple[int, ...], Population] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(decision for part in self.parts for decision in part.decisions)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First column of each decision, then the number of columns."""
        starts = [0]
        for decision in self.decisions:
            starts.append(starts[-1] + decision.columns)
        return tuple(starts)

    @property
    def columns(self) -> int:
        return self.starts[-1]

    # --- one schedule ---

    def instantiate(self, values: Sequence[int]) -> Trace:
        """The trace of one row. Raises ScheduleError if a step is illegal."""
        trace = self._write(self._concrete(values)).trace
        return (Variant(self.variant), *trace) if self.variant else trace

    def _write(self, values: Values) -> TraceBuilder:
        builder = TraceBuilder(self.written or self.task)
        for part in self.parts:
            part.write(builder, values)
        return builder

    def _concrete(self, values: Sequence[int]) -> Values:
        found: dict[str, Any] = {}
        for decision, start in zip(self.decisions, self.starts, strict=False):
            if isinstance(decision, Choice):
                found[decision.name] = decision.options[int(values[start])]
            else:
                found[decision.name] = tuple(int(v) for v in values[start : start + decision.columns])
        return found

    # --- populations: a row each ---

    def sample(self, rng: np.random.Generator, n: int) -> Matrix:
        """Random rows; most, but not all, are legal."""
        parts = [decision.sample(rng, n) for decision in self.decisions]
        return np.concatenate(parts, axis=1) if parts else np.zeros((n, 0), np.int64)

    def sample_legal(self, rng: np.random.Generator, n: int, tries: int = 20) -> Matrix:
        """Up to `n` legal random rows."""
        found = np.zeros((0, self.columns), np.int64)
        for _ in range(tries):
            drawn = self.sample(rng, max(16, 2 * (n - len(found))))
            found = np.concatenate([found, drawn[self.legal(drawn)]])
            if len(found) >= n:
                break
        return found[:n]

    def mutate(self, rng: np.random.Generator, values: Matrix) -> Matrix:
        """Each row with one decision changed."""
        result = np.array(values, np.int64)
        open_ones = [i for i, d in enumerate(self.decisions) if isinstance(d, TileSizes) or len(d.options) > 1]
        if not open_ones or not len(result):
            return result
        weights = np.array(
            [_TILE_WEIGHT if isinstance(self.decisions[i], TileSizes) else _CHOICE_WEIGHT for i in open_ones]
        )
        chosen = rng.choice(np.array(open_ones), len(result), p=weights / weights.sum())
        for index in open_ones:
            rows = np.flatnonzero(chosen == index)
            if len(rows):
                columns = slice(self.starts[index], self.starts[index + 1])
                result[rows, columns] = self.decisions[index].mutate(rng, result[rows, columns])
        return result

    def crossover(self, rng: np.random.Generator, a: Matrix, b: Matrix) -> Matrix:
        """Rows whose decisions come from either parent."""
        take = rng.random((len(a), len(self.decisions))) < 0.5
        widths = [decision.columns for decision in self.decisions]
        return np.where(np.repeat(take, widths, axis=1), a, b)

    def neighbours(self, values: Sequence[int]) -> Matrix:
        """The legal rows one small step away from `values`: a factor a little larger or smaller, another option."""
        base = np.asarray(values, np.int64)
        rows: list[NDArray[np.int64]] = []
        for decision, start in zip(self.decisions, self.starts, strict=False):
            for column in range(start, start + decision.columns):
                old = int(base[column])
                near = range(len(decision.options)) if isinstance(decision, Choice) else _near(decision.extent, old)
                for value in near:
                    if value != old:
                        row = base.copy()
                        row[column] = value
                        rows.append(row)
        if not rows:
            return np.zeros((0, self.columns), np.int64)
        matrix = np.stack(rows)
        return matrix[self.legal(matrix)]

    def legal(self, values: Matrix) -> NDArray[np.bool_]:
        """Rows that can be built: factors in range, code and local buffers not too large."""
        result = np.ones(len(values), np.bool_)
        for index, decision in enumerate(self.decisions):
            result &= decision.legal(values[:, self.starts[index] : self.starts[index + 1]])
        rows = np.flatnonzero(result)
        for population, group in self._groups(values[rows]):
            result[rows[group]] = population.legal(values[rows[group]])
        return result

    def features(self, values: Matrix) -> Features:
        """A row for each store of each program."""
        from mcompile.tuning.features import join_features

        found = [(group, population.features(values[group])) for population, group in self._groups(values)]
        return join_features(found)

    def draft_seconds(self, values: Matrix) -> NDArray[np.float64]:
        """A cheap estimate of each program's time."""
        result = np.full(len(values), np.inf)
        for population, group in self._groups(values):
            result[group] = population.draft_seconds(values[group])
        return result

    def _groups(self, values: Matrix) -> list[tuple[Population, NDArray[np.int64]]]:
        """Rows with equal structural choices, and what is known of those."""
        columns = [
            start
            for decision, start in zip(self.decisions, self.starts, strict=False)
            if isinstance(decision, Choice) and decision.structural
        ]
        if not len(values):
            return []
        key = np.zeros(len(values), np.int64)
        for column in columns:
            key = key * 64 + values[:, column]
        order = np.argsort(key, kind="stable")
        starts = np.flatnonzero(np.diff(key[order], prepend=key[order[0]] - 1))
        groups = np.split(order, starts[1:])
        return [(self._population(tuple(int(v) for v in values[rows[0], columns])), rows) for rows in groups]

    def _population(self, chosen: tuple[int, ...]) -> Population:
        if chosen not in self._populations:
            from mcompile.tuning.features import Population

            self._populations[chosen] = Population(self._write(self._symbolic(chosen)), self._flags(), self.reference)
        return self._populations[chosen]

    def _symbolic(self, chosen: tuple[int, ...]) -> Values:
        found: dict[str, Any] = {}
        structural = iter(chosen)
        for decision, start in zip(self.decisions, self.starts, strict=False):
            if isinstance(decision, Choice):
                found[decision.name] = decision.options[next(structural) if decision.structural else 0]
            else:
                found[decision.name] = tuple(Size((start + level,)) for level in range(decision.columns))
        return found

    def _flags(self) -> tuple[int, ...]:
        """Columns of the choices that are not structural."""
        return tuple(
            start
            for decision, start in zip(self.decisions, self.starts, strict=False)
            if isinstance(decision, Choice) and not decision.structural
        )


def _sample_factors(rng: np.random.Generator, extent: Matrix, cap: Matrix) -> Matrix:
    """A factor in [1, cap] for each row: mostly a divisor of the extent, else any, evenly by logarithm."""
    extent, cap = np.broadcast_arrays(extent, cap)
    free = np.floor(np.exp(rng.random(len(cap)) * np.log(cap + 1.0))).astype(np.int64)
    result = np.clip(free, 1, cap)
    exact = rng.random(len(cap)) < _EXACT_SHARE
    pick = rng.random(len(cap))
    for value in np.unique(extent[exact]):
        divisors = np.array([d for d in range(1, int(value) + 1) if value % d == 0] if value <= 4096 else [1, 2, 4, 8])
        rows = np.flatnonzero(exact & (extent == value))
        count = np.searchsorted(divisors, cap[rows], side="right")
        result[rows] = divisors[(pick[rows] * count).astype(np.int64)]
    return np.asarray(result)


def _near(extent: int, value: int) -> list[int]:
    divisors = [d for d in range(1, extent + 1) if extent % d == 0] if extent <= 65536 else []
    below, above = [d for d in divisors if d < value][-1:], [d for d in divisors if d > value][:1]
    near = {value - 2, value - 1, value + 1, value + 2, value * 2, value // 2, extent, 1, *below, *above}
    return sorted(v for v in near if 1 <= v <= extent)
