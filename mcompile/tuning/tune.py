"""The tuning loop: rounds of trials, each for the task where it is expected to help most.

    report = tune(tasks, options, database)

A round: the scheduler chooses a task, the strategy proposes points of its sketches, they are replayed, built, and run
one after the other, and each result is in the database before the next trial runs. What the database holds already is
never measured again. A candidate's failure is a value; nothing that a candidate does ends the tuning.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from mcompile.backend.cpu.peak import Peak
from mcompile.errors import McompileError, OptionError
from mcompile.schedule.analysis import dag_flops, moved_bytes
from mcompile.schedule.steps import Trace
from mcompile.schedule.task import Task
from mcompile.tuning.cost_model import CostModel, shipped_model
from mcompile.tuning.measure import Builder, BuiltCandidate, ErrorKind, MeasureInput, MeasureResult, Runner
from mcompile.tuning.records import TuningDatabase, TuningRecord, make_record, target_key
from mcompile.tuning.search import EvolutionarySearch, Measured, Point, SearchStrategy
from mcompile.tuning.sketch import Sketch
from mcompile.tuning.space import SeededSpace, SketchSpace, SpaceGenerator, variants_of
from mcompile.tuning.task_scheduler import (
    GradientScheduler,
    Objective,
    TaskScheduler,
    TaskState,
    model_latencies,
    total_latency,
)

_FRUITLESS_ROUNDS = 3  # in a row without a new candidate: the task's space counts as used up
_FINALISTS, _COMPARISONS = 3, 3
_RESERVED_SHARE = 0.08  # of the time, for the finalists
_CACHE_SPEED = 8.0  # of the last cache, times the speed of memory
_GROUP_RATIO = 1.618  # tasks whose FLOP counts are so near may be alike


@dataclass(frozen=True)
class TuneTask:
    """A task to tune. `weights`: how often a run of each model calls it."""

    name: str
    task: Task
    weights: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class Budget:
    """Where tuning ends: seconds, trials, or what comes first."""

    seconds: float | None = None
    trials: int | None = None


@dataclass(frozen=True)
class TuneOptions:
    """How to tune. Each role is replaceable by any object with the methods of its protocol.

    `peak` bounds the tasks' times; without it they are bounded by nothing. `clock` gives seconds.
    """

    budget: Budget = field(default_factory=lambda: Budget(300.0))
    seed: int = 0
    round_trials: int = 12
    objective: Objective = total_latency
    space: SpaceGenerator = field(default_factory=SketchSpace)
    strategy: SearchStrategy = field(default_factory=EvolutionarySearch)
    scheduler: TaskScheduler = field(default_factory=GradientScheduler)
    model: CostModel = field(default_factory=shipped_model)
    peak: Peak | None = None
    clock: Callable[[], float] = time.monotonic


# --- events ---


@dataclass(frozen=True)
class TaskProgress:
    """One task as it stands. Seconds are infinite while nothing ran; `gain`: what the scheduler expects of a round."""

    name: str
    workload_key: str
    weights: tuple[float, ...]
    flops: float
    bound_seconds: float
    untuned_seconds: float
    best_seconds: float
    trials: int
    rounds: int
    failures: dict[str, int]
    gain: float
    source: str  # the sketch of the best candidate

    @property
    def bound_share(self) -> float:
        """Which part of the possible speed it reaches."""
        return self.bound_seconds / self.best_seconds if math.isfinite(self.best_seconds) else 0.0


@dataclass(frozen=True)
class Progress:
    """The tuning as it stands. `latencies`: each model's, as the sum of its tasks' times."""

    seconds: float
    trials: int
    share: float  # of the budget
    latencies: tuple[float, ...]
    tasks: tuple[TaskProgress, ...]
    current: str = ""


@dataclass(frozen=True)
class TrialEnded:
    """After each trial; its record is in the database."""

    task: TuneTask
    trace: Trace
    result: MeasureResult


@dataclass(frozen=True)
class RoundEnded:
    progress: Progress


Callback = Callable[[TrialEnded | RoundEnded], None]


@dataclass(frozen=True)
class CurvePoint:
    """Estimated latencies of the models after so many trials and seconds."""

    seconds: float
    trials: int
    latencies: tuple[float, ...]


@dataclass(frozen=True)
class TuneReport:
    """What tuning has done. `best`: the trace of each task (by workload key) that won, with its seconds."""

    progress: Progress
    curve: tuple[CurvePoint, ...]
    untuned_latencies: tuple[float, ...]
    best: dict[str, tuple[Trace, float]]
    resumed_trials: int
    proposing_seconds: float
    building_seconds: float
    running_seconds: float
    ended: str  # "time", "trials", "nothing left" or "interrupted"

    @property
    def success_share(self) -> float:
        """Of the trials, those that ran."""
        failed = sum(sum(task.failures.values()) for task in self.progress.tasks)
        return 1.0 - failed / self.progress.trials if self.progress.trials else 1.0


@runtime_checkable
class ComparingRunner(Protocol):
    """A runner that can time candidates of one task in turns."""

    def compare(self, built: Sequence[BuiltCandidate], rounds: int = 20) -> list[MeasureResult]: ...


def tune(
    tasks: Sequence[TuneTask],
    options: TuneOptions,
    database: TuningDatabase,
    builder: Builder,
    runner: Runner,
    callbacks: Sequence[Callback] = (),
) -> TuneReport:
    """Tune until the budget is used, nothing is left to gain, or the user interrupts. Raises OptionError."""
    _check(tasks, options)
    return _Tuning(tasks, options, database, builder, runner, callbacks).run()


def _check(tasks: Sequence[TuneTask], options: TuneOptions) -> None:
    budget = options.budget
    if budget.seconds is None and budget.trials is None:
        raise OptionError("tune: expected a budget of seconds or of trials")
    if any(value is not None and value <= 0 for value in (budget.seconds, budget.trials)):
        raise OptionError(f"tune: expected a budget > 0, got {budget}")
    if options.round_trials < 1:
        raise OptionError(f"tune: expected at least one trial a round, got {options.round_trials}")
    if len({len(task.weights) for task in tasks}) > 1:
        raise OptionError("tune: every task needs a weight for each model")


# --- one task ---


@dataclass(frozen=True)
class _Candidate:
    trace: Trace
    sketch: str  # its name
    point: Point | None  # None if the space does not have that sketch any more
    values: tuple[int, ...]


@dataclass
class _TaskRun:
    """A task while it is being tuned."""

    item: TuneTask
    target_key: str
    bound_seconds: float
    group: str
    flops: float
    sketches: tuple[Sketch, ...] | None = None  # made when first needed
    measured: Measured = field(default_factory=Measured)
    costs: dict[Trace, float] = field(default_factory=dict)  # of everything measured, now or earlier
    candidates: dict[Trace, _Candidate] = field(default_factory=dict)
    records: Sequence[TuningRecord] = ()  # of earlier tunings
    history: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    trials: int = 0
    untuned_seconds: float = math.inf
    untuned: Trace | None = None
    fruitless: int = 0

    @property
    def task(self) -> Task:
        return self.item.task

    @property
    def best(self) -> tuple[Trace, float] | None:
        ran = [(cost, number) for number, cost in enumerate(self.costs.values()) if math.isfinite(cost)]
        if not ran:
            return None
        cost, number = min(ran)
        return list(self.costs)[number], cost

    @property
    def best_seconds(self) -> float:
        return min(self.costs.values(), default=math.inf)

    @property
    def state(self) -> TaskState:
        return TaskState(
            self.item.weights,
            tuple(self.history),
            self.flops,
            self.bound_seconds,
            self.group,
            self.fruitless >= _FRUITLESS_ROUNDS,
        )

    def learn(self, candidate: _Candidate, cost: float) -> None:
        self.costs[candidate.trace] = cost
        self.candidates.setdefault(candidate.trace, candidate)

    def end_round(self) -> None:
        self.history.append(self.best_seconds)

    def progress(self, gain: float) -> TaskProgress:
        best = self.best
        return TaskProgress(
            self.item.name,
            self.task.workload_key,
            self.item.weights,
            self.flops,
            self.bound_seconds,
            self.untuned_seconds,
            self.best_seconds,
            self.trials,
            len(self.history),
            dict(self.failures),
            gain,
            self.candidates[best[0]].sketch if best is not None else "",
        )


def similarity_group(task: Task) -> str:
    """Tasks of one group compute the same things on sizes that are alike."""
    flops = dag_flops(task)
    size = int(math.log(flops, _GROUP_RATIO)) if flops > 1 else 0
    return "+".join(sorted({compute.name.split("_")[0] for compute in task.dag.computes})) + f"/{size}"


def bound_seconds(task: Task, peak: Peak | None) -> float:
    """What the machine cannot beat: all arithmetic at its FMA peak, all arguments moved at its speed.

    The arithmetic is that of the variant which has least.
    Arguments that fit the last cache a few times are taken to be there, where they move much faster than in memory.
    """
    if peak is None:
        return 0.0
    size = moved_bytes(task)
    speed = peak.bytes_per_second * (_CACHE_SPEED if size <= task.target.l3_bytes / 8 else 1.0)
    flops = min(dag_flops(variant) for variant in (task, *variants_of(task).values()))
    return max(flops / peak.flops_per_second, size / speed)


# --- the loop ---


class _Tuning:
    def __init__(
        self,
        tasks: Sequence[TuneTask],
        options: TuneOptions,
        database: TuningDatabase,
        builder: Builder,
        runner: Runner,
        callbacks: Sequence[Callback],
    ) -> None:
        self.options = options
        self.database = database
        self.builder = builder
        self.runner = runner
        self.callbacks = callbacks
        self.random = np.random.default_rng(options.seed)
        self.start = options.clock()
        self.runs = [self._new_run(task) for task in tasks]
        self.trials = 0
        self.resumed_trials = 0
        self.curve: list[CurvePoint] = []
        self.proposing_seconds = self.building_seconds = self.running_seconds = 0.0

    def _new_run(self, item: TuneTask) -> _TaskRun:
        key = target_key(item.task.target)
        bound = bound_seconds(item.task, self.options.peak)
        return _TaskRun(item, key, bound, similarity_group(item.task), dag_flops(item.task))

    def run(self) -> TuneReport:
        ended = "interrupted"
        try:
            self._resume()
            self._measure_untuned()
            ended = self._search()
            self._compare_finalists()
        except KeyboardInterrupt:
            ended = "interrupted"
        return self._report(ended)

    @property
    def seconds(self) -> float:
        return self.options.clock() - self.start

    @property
    def budget_share(self) -> float:
        budget = self.options.budget
        by_time = self.seconds / (budget.seconds * (1 - _RESERVED_SHARE)) if budget.seconds is not None else 0.0
        by_trials = self.trials / budget.trials if budget.trials is not None else 0.0
        return max(by_time, by_trials)

    def _is_used_up(self) -> str:
        """Which budget is used up; empty while none is."""
        budget = self.options.budget
        if budget.trials is not None and self.trials >= budget.trials:
            return "trials"
        return "time" if self.budget_share >= 1.0 else ""

    # --- what is known already ---

    def _resume(self) -> None:
        """Take over what the database holds: nothing of it is measured again, histories go on, the model learns."""
        for run in self.runs:
            records = self.database.records(run.task.workload_key, run.target_key)
            if not records:
                continue
            untuned = self._untuned_candidate(run)
            for number, record in enumerate(records, 1):
                run.learn(_Candidate(record.trace, record.sketch, None, record.values), record.cost_seconds)
                if untuned is not None and record.trace == untuned.trace:
                    run.untuned_seconds = min(run.untuned_seconds, record.cost_seconds)
                if number == 1 or (number - 1) % self.options.round_trials == 0:
                    run.end_round()
            if (len(records) - 1) % self.options.round_trials:
                run.end_round()
            self.resumed_trials += len(records)
            run.records = records

    def _learn_points(self, run: _TaskRun, sketches: Sequence[Sketch]) -> None:
        """The seed, and records of sketches that the space still has: measured points, which teach the model."""
        numbers = {sketch.name: number for number, sketch in enumerate(sketches)}
        points: dict[Point, float] = {}
        for record in run.records:
            number = numbers.get(record.sketch)
            if number is not None and len(record.values) == sketches[number].columns:
                points[(number, tuple(record.values))] = record.cost_seconds
        seed = self._seed_point(run)
        if seed is not None and seed.point is not None and seed.trace in run.costs:
            points[seed.point] = run.costs[seed.trace]
        run.measured.costs.update(points)
        self._teach(run, points)

    def _teach(self, run: _TaskRun, points: dict[Point, float]) -> None:
        sketches = self._sketches(run)
        for number, sketch in enumerate(sketches):
            own = [(values, cost) for (sketch_number, values), cost in points.items() if sketch_number == number]
            if own:
                matrix = np.array([values for values, _ in own], np.int64).reshape(len(own), -1)
                features = sketch.features(matrix)
                self.options.model.update(run.task.workload_key, features, [cost for _, cost in own])

    def _sketches(self, run: _TaskRun) -> tuple[Sketch, ...]:
        """The task's sketches; none if its space cannot be made, which a user's rule may cause."""
        if run.sketches is None:
            try:
                run.sketches = tuple(self.options.space.generate(run.task))
            except McompileError as error:
                run.sketches = ()
                run.failures[f"no space: {error}"] += 1
            self._learn_points(run, run.sketches)
        return run.sketches

    # --- the untuned schedules ---

    def _untuned_candidate(self, run: _TaskRun) -> _Candidate | None:
        """The space's seed. None if it has none, or cannot be made, which a user's rule may cause."""
        if isinstance(self.options.space, SeededSpace):
            trace = self.options.space.seed_trace(run.task)
            return _Candidate(trace, "constructed", None, ()) if trace is not None else None
        return self._seed_point(run)

    def _seed_point(self, run: _TaskRun) -> _Candidate | None:
        """Likewise, as a point of a sketch."""
        sketches = self._sketches(run)
        found = self.options.space.seed(run.task) if sketches else None
        if found is None:
            return None
        point = (found[0], tuple(int(value) for value in found[1]))
        return _Candidate(sketches[found[0]].instantiate(point[1]), sketches[found[0]].name, point, point[1])

    def _measure_untuned(self) -> None:
        """The constructed schedule of each task comes first: nothing that ends slower than it can win."""
        waiting: list[tuple[_TaskRun, _Candidate]] = []
        for run in self.runs:
            candidate = self._untuned_candidate(run)
            if candidate is None:
                continue
            run.untuned = candidate.trace
            if candidate.trace not in run.costs:
                waiting.append((run, candidate))
        size = max(self.options.round_trials, 1)
        for first in range(0, len(waiting), size):
            if self._is_used_up():
                return
            chunk = waiting[first : first + size][: self._trials_left()]
            built = self._build([MeasureInput(run.task, candidate.trace) for run, candidate in chunk])
            for (run, candidate), code in zip(chunk, built, strict=True):
                result = self._run(run, candidate, code, None)
                run.untuned_seconds = result.cost_seconds
                run.end_round()
        self._end_round("")

    def _trials_left(self) -> int:
        budget = self.options.budget
        return self.options.round_trials if budget.trials is None else max(0, budget.trials - self.trials)

    # --- rounds ---

    def _search(self) -> str:
        while True:
            used = self._is_used_up()
            if used:
                return used
            states = [run.state for run in self.runs]
            chosen = self.options.scheduler.choose(states, self.options.objective, self.random)
            if chosen is None:
                return "nothing left"
            self._round(self.runs[chosen])
            self._end_round(self.runs[chosen].item.name)

    def _round(self, run: _TaskRun) -> None:
        start = self.options.clock()
        candidates = self._candidates(run)
        self.proposing_seconds += self.options.clock() - start
        if not candidates:
            run.fruitless += 1
            run.end_round()
            return
        run.fruitless = 0
        built = self._build([MeasureInput(run.task, candidate.trace) for candidate in candidates])
        points: dict[Point, float] = {}
        for candidate, code in zip(candidates, built, strict=True):
            incumbent = run.best_seconds
            result = self._run(run, candidate, code, incumbent if math.isfinite(incumbent) else None)
            if candidate.point is not None:
                points[candidate.point] = result.cost_seconds
        run.end_round()
        start = self.options.clock()
        self._teach(run, points)
        self.proposing_seconds += self.options.clock() - start

    def _candidates(self, run: _TaskRun) -> list[_Candidate]:
        """New programs of the task: points that give a program measured before are not measured again."""
        sketches = self._sketches(run)
        if not sketches:
            return []
        run.measured.progress = self.budget_share
        wanted = min(self.options.round_trials, self._trials_left())
        points = self.options.strategy.propose(sketches, self.options.model, run.measured, self.random, wanted + 4)
        found: dict[Trace, _Candidate] = {}
        for number, values in points:
            if len(found) >= wanted:
                break
            try:
                trace = sketches[number].instantiate(values)
            except McompileError as error:
                run.measured.costs[number, values] = math.inf
                run.failures[f"{ErrorKind.ILLEGAL}: {type(error).__name__}"] += 1
                continue
            if trace in run.costs:
                run.measured.costs[number, values] = run.costs[trace]
            elif trace in found:
                continue
            else:
                found[trace] = _Candidate(trace, sketches[number].name, (number, values), values)
        return list(found.values())

    def _build(self, inputs: Sequence[MeasureInput]) -> list[BuiltCandidate]:
        start = self.options.clock()
        built = self.builder.build(inputs)
        self.building_seconds += self.options.clock() - start
        return built

    def _run(
        self, run: _TaskRun, candidate: _Candidate, built: BuiltCandidate, incumbent: float | None
    ) -> MeasureResult:
        """One trial; its record is committed when this returns."""
        start = self.options.clock()
        result = self.runner.run([built], incumbent)[0]
        self.running_seconds += self.options.clock() - start
        run.learn(candidate, result.cost_seconds)
        self._record(run, candidate.trace, result)
        if candidate.point is not None:
            run.measured.costs[candidate.point] = result.cost_seconds
        if result.error is not None:
            run.failures[result.error] += 1
        run.trials += 1
        self.trials += 1
        self._tell(TrialEnded(run.item, candidate.trace, result))
        return result

    # --- the end ---

    def _compare_finalists(self) -> None:
        """The fastest candidates of each improved task and its untuned schedule are timed again, in turns.

        A candidate that was only lucky once loses here; so does one that is not faster than the untuned schedule.
        """
        if not isinstance(self.runner, ComparingRunner):
            return
        budget = self.options.budget
        order = sorted(self.runs, key=lambda run: -self._seconds_saved(run))
        for run in order:
            if self._seconds_saved(run) <= 0.0:
                break
            if budget.seconds is not None and self.seconds >= budget.seconds:
                break
            self._compare(run)
        self._end_round("finalists")

    def _seconds_saved(self, run: _TaskRun) -> float:
        if run.untuned is None or not math.isfinite(run.untuned_seconds):
            return 0.0
        return (run.untuned_seconds - run.best_seconds) * max(run.item.weights, default=0.0)

    def _compare(self, run: _TaskRun) -> None:
        """Times are replaced by those of the comparison, until the fastest is one that was compared."""
        assert run.untuned is not None
        compared: set[Trace] = set()
        for _ in range(_COMPARISONS):
            winner = run.best
            if winner is None or winner[0] in compared:
                return
            ranked = sorted((cost, number) for number, cost in enumerate(run.costs.values()) if math.isfinite(cost))
            traces = list(run.costs)
            finalists = [run.untuned, *(traces[number] for _, number in ranked[:_FINALISTS])]
            results = self._timed_in_turns(run, list(dict.fromkeys(finalists)))
            if not results:
                return
            for trace, result in results.items():
                run.costs[trace] = result.cost_seconds
                self._record(run, trace, result)
            compared |= set(results)
            run.untuned_seconds = run.costs[run.untuned]

    def _timed_in_turns(self, run: _TaskRun, traces: Sequence[Trace]) -> dict[Trace, MeasureResult]:
        """Empty if one of them cannot be timed."""
        assert isinstance(self.runner, ComparingRunner)
        built = self._build([MeasureInput(run.task, trace) for trace in traces])
        if len(built) < 2 or any(code.error is not None for code in built):
            return {}
        start = self.options.clock()
        results = self.runner.compare(built)
        self.running_seconds += self.options.clock() - start
        if any(result.error is not None for result in results):
            return {}
        return dict(zip(traces, results, strict=True))

    def _record(self, run: _TaskRun, trace: Trace, result: MeasureResult) -> None:
        known = run.candidates[trace]
        key, target = run.task.workload_key, run.task.target
        self.database.add(make_record(key, target, trace, result, known.sketch, known.values))

    def _end_round(self, current: str) -> None:
        progress = self._progress(current)
        if self.trials:
            self.curve.append(CurvePoint(progress.seconds, progress.trials, progress.latencies))
        self._tell(RoundEnded(progress))

    def _progress(self, current: str) -> Progress:
        states = [run.state for run in self.runs]
        gains = self.options.scheduler.gains(states, self.options.objective)
        tasks = tuple(run.progress(gain) for run, gain in zip(self.runs, gains, strict=True))
        latencies = model_latencies(states, [run.best_seconds for run in self.runs])
        return Progress(self.seconds, self.trials, min(1.0, self.budget_share), latencies, tasks, current)

    def _tell(self, event: TrialEnded | RoundEnded) -> None:
        for callback in self.callbacks:
            callback(event)

    def _report(self, ended: str) -> TuneReport:
        states = [run.state for run in self.runs]
        return TuneReport(
            self._progress(""),
            tuple(self.curve),
            model_latencies(states, [run.untuned_seconds for run in self.runs]),
            {run.task.workload_key: run.best for run in self.runs if run.best is not None},
            self.resumed_trials,
            self.proposing_seconds,
            self.building_seconds,
            self.running_seconds,
            ended,
        )
