"""python -m benchmarks.tuning models|scratch|record|accuracy|pretrain|ablate ... [--threads N] [--json]

models: tunes each model for --time, and prints untuned, tuned, and the sum of its kernels' bounds.
scratch: search from nothing (no database, no trained model, no constructed seed) on four layers, for --time each.
accuracy: how well the cost model orders programs, of tasks it has seen and of others.
record: measures random programs of a model's tasks, without a seed, into --db.
pretrain: writes a cost model that has learned what was recorded; `-o mcompile/tuning/pretrained.json` ships it.
ablate: replays searches on what `record` measured, over several seeds: each variant's latency after quarters of the
trials, relative to the best that was recorded, with the spread over seeds; deterministic. --live tunes for real.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.kernels import Layer, conv, matmul, row_wise
from benchmarks.zoo_models import benchmark_models
from mcompile import tuner
from mcompile.backend.cpu.peak import measure_peak
from mcompile.cli_tune import parse_seconds
from mcompile.driver import CompileOptions, plan_program
from mcompile.schedule.analysis import dag_flops
from mcompile.schedule.constructed import construct
from mcompile.schedule.steps import Trace
from mcompile.schedule.task import Task
from mcompile.target import parse_target
from mcompile.tuning.cost_model import BoostingOptions, NoModel, XGBoostModel, pairwise_accuracy, recall_at
from mcompile.tuning.measure import DummyBuilder, DummyRunner, ErrorKind, LocalBuilder, LocalRunner, MeasureInput
from mcompile.tuning.records import Database, MemoryDatabase, TuningDatabase, target_key
from mcompile.tuning.search import EvolutionarySearch, EvolutionOptions, RandomSearch
from mcompile.tuning.sketch import Matrix, Sketch
from mcompile.tuning.space import SketchSpace, SpaceGenerator, TemplateSpace
from mcompile.tuning.task_scheduler import Forward, GradientScheduler, RoundRobin
from mcompile.tuning.tune import Budget, TuneOptions, TuneTask, tune

LAYERS: tuple[Callable[[], Layer], ...] = (
    lambda: conv(64, 56, 64, 3),
    lambda: matmul(128, 768, 768),
    lambda: conv(144, 56, 144, 3, group=144),
    lambda: row_wise("Softmax", 1536, 128),
)


# --- whole models ---


def tune_model(name: str, seconds: float, threads: int) -> dict[str, Any]:
    """One row of `models`."""
    (model,) = benchmark_models([name])
    compiling = CompileOptions(threads=threads, dims=model.dims)
    with MemoryDatabase() as database:
        result = tuner.tune(model.path, seconds, request=tuner.TuneRequest(compiling, database=database))
    report, (outcome,) = result.report, result.models
    bounds = sum(task.weights[0] * task.bound_seconds for task in report.progress.tasks)
    untuned, tuned = report.untuned_latencies[0], report.progress.latencies[0]
    race = outcome.race
    return {
        "model": name,
        "threads": threads,
        "untuned_ms": race.theirs.median_ms if race else None,
        "tuned_ms": race.ours.median_ms if race and outcome.is_tuned else None,
        "speedup": race.speedup if race and outcome.is_tuned else 1.0,
        "interval": [race.speedup_low, race.speedup_high] if race else None,
        "untuned_tasks_ms": untuned * 1e3,
        "tuned_tasks_ms": tuned * 1e3,
        "bounds_ms": bounds * 1e3,
        "gap_closed": (untuned - tuned) / max(untuned - bounds, 1e-9),
        "trials": report.progress.trials,
        "trials_per_second": report.progress.trials / report.progress.seconds,
        "success_share": report.success_share,
        "proposing_share": report.proposing_seconds / report.progress.seconds,
    }


# --- from nothing ---


def main_task(source: Any, threads: int) -> Task:
    """The task with most arithmetic."""
    program = plan_program(source, CompileOptions(threads=threads))
    return max((job.task for job in program.jobs), key=dag_flops)


def search_from_nothing(layer: Layer, seconds: float, threads: int, seed: int) -> dict[str, Any]:
    """The best found against the constructed schedule, both timed in turns."""
    task = main_task(layer.model, threads)
    peak = measure_peak(parse_target("cpu"), threads)
    options = TuneOptions(
        Budget(seconds), seed, space=SketchSpace(seeded=False), model=XGBoostModel(seed=seed), peak=peak
    )
    with LocalBuilder() as builder, LocalRunner() as runner, MemoryDatabase() as database:
        report = tune([TuneTask(layer.name, task)], options, database, builder, runner)
        best = report.best.get(task.workload_key)
        traces = [construct(task), *([best[0]] if best else [])]
        costs = [each.cost_seconds for each in runner.compare(builder.build([MeasureInput(task, t) for t in traces]))]
    found = costs[-1] if best else float("inf")
    return {
        "layer": layer.name,
        "constructed_us": costs[0] * 1e6,
        "found_us": found * 1e6,
        "of_constructed": costs[0] / found,
        "of_peak": dag_flops(task) / found / peak.flops_per_second,
        "trials": report.progress.trials,
        "success_share": report.success_share,
    }


# --- the cost model ---


def tasks_of_model(name: str, threads: int) -> list[TuneTask]:
    (model,) = benchmark_models([name])
    return tuner.tasks_of([plan_program(model.path, CompileOptions(threads=threads, dims=model.dims))])


def record(name: str, database: TuningDatabase, programs: int, threads: int, seed: int) -> int:
    """Measure `programs` random programs of each task of a model; how many trials."""
    tasks = tasks_of_model(name, threads)
    options = TuneOptions(
        Budget(trials=programs * len(tasks)),
        seed,
        round_trials=16,
        space=SketchSpace(seeded=False),
        strategy=RandomSearch(),
        scheduler=RoundRobin(),
        model=NoModel(),
    )
    with LocalBuilder() as builder, LocalRunner() as runner:
        return tune(tasks, options, database, builder, runner).progress.trials


@dataclass(frozen=True)
class Recorded:
    """What was measured of one task: for each of its sketches the points, and the cost of each program."""

    task: TuneTask
    sketches: tuple[Sketch, ...]
    points: Mapping[int, Matrix]  # by the sketch's number
    costs: Mapping[Trace, float]

    def samples(self) -> tuple[list[tuple[int, Matrix]], NDArray[np.float64]]:
        groups = sorted(self.points.items())
        traces = [self.sketches[number].instantiate(row) for number, rows in groups for row in rows.tolist()]
        return groups, np.array([self.costs[trace] for trace in traces])


def read_recorded(tasks: Sequence[TuneTask], database: TuningDatabase, least: int = 10) -> list[Recorded]:
    """The tasks of which at least so many programs ran."""
    space, found = SketchSpace(seeded=False), []
    for task in tasks:
        sketches = space.generate(task.task)
        numbers = {sketch.name: number for number, sketch in enumerate(sketches)}
        rows: dict[int, list[tuple[int, ...]]] = {}
        costs: dict[Trace, float] = {}
        for each in database.records(task.task.workload_key, target_key(task.task.target)):
            number = numbers.get(each.sketch)
            if number is not None and each.trace == sketches[number].instantiate(each.values):
                rows.setdefault(number, []).append(each.values)
                costs[each.trace] = each.cost_seconds
        if sum(np.isfinite(list(costs.values()))) >= least:
            found.append(Recorded(task, sketches, {n: np.array(r, np.int64) for n, r in rows.items()}, costs))
    return found


def accuracy(recorded: Sequence[Recorded], seed: int = 0) -> dict[str, float]:
    """Pairwise accuracy and recall@30 on held-out programs of seen tasks, and on held-out tasks."""
    random = np.random.default_rng(seed)
    unseen = set(random.permutation(len(recorded))[: max(1, len(recorded) // 5)].tolist())
    model = XGBoostModel(seed=seed)
    tests: list[tuple[bool, Any, NDArray[np.float64]]] = []
    for index, each in enumerate(recorded):
        groups, costs = each.samples()
        start = 0
        for number, rows in groups:
            own = costs[start : start + len(rows)]
            start += len(rows)
            held = random.random(len(rows)) < (1.0 if index in unseen else 0.3)
            sketch = each.sketches[number]
            if (~held).any():
                model.update(each.task.task.workload_key, sketch.features(rows[~held]), own[~held].tolist())
            tests.append((index in unseen, (index, sketch, rows[held]), own[held]))
    scores: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for index in range(len(recorded)):
        mine = [(is_unseen, facts, costs) for is_unseen, facts, costs in tests if facts[0] == index and len(costs)]
        predicted = [model.predict(sketch.features(rows)) for _, (_, sketch, rows), _ in mine]
        if not mine or any(each is None for each in predicted):
            continue
        score, cost = np.concatenate([p for p in predicted if p is not None]), np.concatenate([c for *_, c in mine])
        ran = np.isfinite(cost)
        if ran.sum() > 5:
            pair = pairwise_accuracy(score[ran], cost[ran]), recall_at(score[ran], cost[ran], 30)
            scores[mine[0][0]].append(pair)
    return {
        f"{kind}_{name}": float(np.mean([pair[column] for pair in scores[flag]])) if scores[flag] else float("nan")
        for flag, kind in ((False, "seen"), (True, "unseen"))
        for column, name in ((0, "pairwise"), (1, "recall30"))
    }


def pretrain(recorded: Sequence[Recorded], path: Path) -> int:
    """Save a model of all that was recorded; of how many programs."""
    model = XGBoostModel(BoostingOptions(rounds=60, depth=5))
    for each in recorded:
        groups, costs = each.samples()
        start = 0
        for number, rows in groups:
            own = costs[start : start + len(rows)]
            start += len(rows)
            ran = np.isfinite(own)  # why others failed may be this machine's fault
            if ran.any():
                features = each.sketches[number].features(rows[ran])
                model.update(each.task.task.workload_key, features, own[ran].tolist())
    model.fit()
    model.save(path)
    return model.sample_count


# --- ablations ---


class RecordedSketch:
    """A sketch of which only the measured points exist; what lies near a point is what differs in the fewest values."""

    def __init__(self, sketch: Sketch, rows: Matrix) -> None:
        self._sketch, self._rows = sketch, rows
        self.name, self.columns = sketch.name, sketch.columns
        self.decisions: tuple[Any, ...] = ()
        self.starts = (0,)
        self.instantiate, self.features = sketch.instantiate, sketch.features
        self.draft_seconds = sketch.draft_seconds

    def sample(self, random: np.random.Generator, n: int) -> Matrix:
        return self._rows[random.integers(0, len(self._rows), n)]

    sample_legal = sample

    def legal(self, values: Matrix) -> NDArray[np.bool_]:
        known = {tuple(row) for row in self._rows.tolist()}
        return np.array([tuple(row) in known for row in values.tolist()], np.bool_)

    def _distances(self, values: Matrix) -> NDArray[np.float64]:
        logs, own = np.log2(1.0 + values), np.log2(1.0 + self._rows)
        return np.asarray(np.abs(logs[:, None, :] - own[None]).sum(axis=2))

    def mutate(self, random: np.random.Generator, values: Matrix) -> Matrix:
        near = np.argsort(self._distances(values), axis=1, kind="stable")[:, 1:9]
        picks = random.integers(0, near.shape[1], len(values)) if near.shape[1] else np.zeros(len(values), np.int64)
        return np.asarray(self._rows[near[np.arange(len(values)), picks]]) if near.shape[1] else values

    def crossover(self, random: np.random.Generator, a: Matrix, b: Matrix) -> Matrix:
        children = np.where(random.random(a.shape) < 0.5, a, b)
        return np.asarray(self._rows[self._distances(children).argmin(axis=1)])

    def neighbours(self, values: Sequence[int]) -> Matrix:
        nearest = np.argsort(self._distances(np.array([values])), axis=1, kind="stable")[0, 1:9]
        return np.asarray(self._rows[nearest])


@dataclass(frozen=True)
class RecordedSpace:
    recorded: Mapping[str, Recorded]
    limited: bool = False  # only the sketch of which most was measured

    def generate(self, task: Task) -> tuple[Any, ...]:
        each = self.recorded[task.workload_key]
        numbers = sorted(each.points, key=lambda number: -len(each.points[number]))
        chosen = numbers[:1] if self.limited else sorted(numbers)
        return tuple(RecordedSketch(each.sketches[number], each.points[number]) for number in chosen)

    def seed(self, task: Task) -> None:
        return None


def variants(seed: int) -> dict[str, TuneOptions]:
    """What is left out in each."""
    full = TuneOptions(seed=seed, round_trials=4, model=XGBoostModel(seed=seed))
    return {
        "full": full,
        "no cost model": replace(full, model=NoModel()),
        "random": replace(full, model=NoModel(), strategy=RandomSearch()),
        "no evolution": replace(full, strategy=EvolutionarySearch(EvolutionOptions(generations=0, local_share=0.0))),
        "round robin": replace(full, scheduler=RoundRobin()),
        "ansor's forward guess": replace(full, scheduler=GradientScheduler(forward=Forward.ANSOR)),
    }


def replay(recorded: Sequence[Recorded], options: TuneOptions, limited: bool, trials: int) -> list[float]:
    """The model's latency after 1, 2, ... quarters of the trials, relative to the best that was recorded."""
    by_key = {each.task.task.workload_key: each for each in recorded}
    costs = {key: each.costs for key, each in by_key.items()}

    def cost(candidate: MeasureInput) -> float | ErrorKind:
        seconds = costs[candidate.task.workload_key][candidate.trace]
        return seconds if np.isfinite(seconds) else ErrorKind.CRASH

    space: Any = RecordedSpace(by_key, limited)
    options = replace(options, budget=Budget(trials=trials), space=space)
    with MemoryDatabase() as database:
        report = tune([each.task for each in recorded], options, database, DummyBuilder(), DummyRunner(cost))
    best = sum(each.task.weights[0] * min(each.costs.values()) for each in recorded)
    curve = report.curve
    marks = [trials * quarter // 4 for quarter in (1, 2, 3, 4)]
    return [min((p.latencies[0] for p in curve if p.trials <= mark), default=float("inf")) / best for mark in marks]


def ablate(recorded: Sequence[Recorded], seeds: int, trials: int) -> list[dict[str, Any]]:
    rows = []
    for name in [*variants(0), "limited space"]:
        curves = [
            replay(
                recorded, variants(seed)[name if name != "limited space" else "full"], name == "limited space", trials
            )
            for seed in range(seeds)
        ]
        figures = {"median": np.median(curves, axis=0), "least": np.min(curves, axis=0), "most": np.max(curves, axis=0)}
        finite = {key: [x if np.isfinite(x) else None for x in row.tolist()] for key, row in figures.items()}
        rows.append({"variant": name, "trials": trials, **finite})
    return rows


def ablate_live(name: str, seconds: float, threads: int, seed: int) -> list[dict[str, Any]]:
    """Real runs, each from an empty database; the sum of the tasks' times at the end."""
    tasks = tasks_of_model(name, threads)
    peak = measure_peak(parse_target("cpu"), threads)
    rows = []
    spaces: dict[str, SpaceGenerator] = {
        "limited space": TemplateSpace(),
        "no constructed seed": SketchSpace(seeded=False),
    }
    for label in [*variants(seed), *spaces]:
        base = variants(seed).get(label, variants(seed)["full"])
        space = spaces.get(label, SketchSpace())
        options = replace(base, budget=Budget(seconds), peak=peak, space=space, round_trials=12)
        with LocalBuilder() as builder, LocalRunner() as runner, MemoryDatabase() as database:
            report = tune(tasks, options, database, builder, runner)
        curve = [asdict(point) for point in report.curve]
        rows.append({"variant": label, "latency_ms": report.progress.latencies[0] * 1e3, "curve": curve})
    return rows


# --- the command ---


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("action", choices=["models", "scratch", "record", "accuracy", "pretrain", "ablate"])
    parser.add_argument("models", nargs="*", default=["mobilenet_v2"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--time", default="5m")
    parser.add_argument("--db", type=Path, help="what `record` measured")
    parser.add_argument("--programs", type=int, default=200, help="of each task")
    parser.add_argument("--trials", type=int, default=600, help="of a replay")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, default=Path("pretrained.json"))
    parser.add_argument("--live", action="store_true")
    options = parser.parse_args(argv)
    for row in _rows(options):
        print(json.dumps(row), flush=True)
    return 0


def _rows(options: argparse.Namespace) -> Any:
    seconds, threads = parse_seconds(options.time), options.threads
    if options.action == "models":
        yield from (tune_model(name, seconds, threads) for name in options.models)
        return
    if options.action == "scratch":
        yield from (search_from_nothing(make(), seconds, threads, 0) for make in LAYERS)
        return
    if options.live:
        yield from (row for name in options.models for row in ablate_live(name, seconds, threads, 0))
        return
    path = options.db or Path(tempfile.gettempdir()) / "mcompile-recorded.db"
    with Database(path) as database:
        if options.action == "record":
            yield from (
                {"model": m, "trials": record(m, database, options.programs, threads, 0)} for m in options.models
            )
            return
        tasks = [task for name in options.models for task in tasks_of_model(name, threads)]
        recorded = read_recorded(list({task.task.workload_key: task for task in tasks}.values()), database)
        if not recorded:
            raise SystemExit(f"{path} holds too few programs of {', '.join(options.models)}: `record` them first")
        if options.action == "accuracy":
            yield {"tasks": len(recorded), **accuracy(recorded)}
        elif options.action == "pretrain":
            yield {"tasks": len(recorded), "programs": pretrain(recorded, options.output)}
        else:
            yield from ablate(recorded, options.seeds, options.trials)


if __name__ == "__main__":
    sys.exit(main())
