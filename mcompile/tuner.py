"""`mcompile tune`: models in, their tasks tuned, the better of the tuned and the untuned build out.

What a kernel costs alone and what it costs inside a model differ a little. So at the end each model is built both ways,
profiled in turns, composed of whichever kernels are faster there, and raced against the untuned build.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from mcompile.backend.cpu.peak import Peak, measure_peak
from mcompile.build_pool import BuildJob, BuiltTask, build_tasks
from mcompile.compare.latency import Race, summarise
from mcompile.driver import CompileOptions, Program, Source, link_program, plan_program
from mcompile.errors import OptionError
from mcompile.feeds import random_feeds
from mcompile.runtime import InferenceSession
from mcompile.runtime.artifact import Artifact
from mcompile.schedule.steps import Trace
from mcompile.target import parse_target
from mcompile.tuning.cost_model import XGBoostModel
from mcompile.tuning.measure import LocalBuilder, LocalRunner
from mcompile.tuning.records import Database, TuningDatabase, default_path
from mcompile.tuning.tune import Budget, Callback, TuneOptions, TuneReport, TuneTask
from mcompile.tuning.tune import tune as tune_tasks

Array = NDArray[Any]
Progress = Callable[[str], None]

_PROFILE_BLOCKS, _PROFILE_RUNS = 8, 4
_RACE_BLOCKS, _BLOCK_SECONDS = 10, 0.15
_MOST_BLOCK_RUNS = 50


@dataclass(frozen=True)
class TunedModel:
    """A model at the end. `race`: the tuned build (ours) against the untuned one; None where they are the same."""

    name: str
    artifact: Artifact
    race: Race | None
    is_tuned: bool
    tuned_tasks: int
    tasks: int


@dataclass(frozen=True)
class TuneResult:
    """What tuning models gave. `seconds`: all of it, builds and races included."""

    report: TuneReport
    models: tuple[TunedModel, ...]
    peak: Peak
    seconds: float

    def to_json(self) -> dict[str, Any]:
        report, progress = self.report, self.report.progress
        return {
            "seconds": self.seconds,
            "trials": progress.trials,
            "known_trials": report.resumed_trials,
            "success_share": report.success_share,
            "ended": report.ended,
            "search_seconds": progress.seconds,
            "proposing_seconds": report.proposing_seconds,
            "building_seconds": report.building_seconds,
            "running_seconds": report.running_seconds,
            "peak": asdict(self.peak),
            "models": [
                {
                    "name": model.name,
                    "is_tuned": model.is_tuned,
                    "tuned_tasks": model.tuned_tasks,
                    "tasks": model.tasks,
                    "untuned_tasks_seconds": _finite(untuned),
                    "tuned_tasks_seconds": _finite(tuned),
                    "race": asdict(model.race) if model.race is not None else None,
                }
                for model, untuned, tuned in zip(self.models, report.untuned_latencies, progress.latencies, strict=True)
            ],
            "tasks": [
                {
                    **asdict(task),
                    "untuned_seconds": _finite(task.untuned_seconds),
                    "best_seconds": _finite(task.best_seconds),
                }
                for task in progress.tasks
            ],
            "curve": [
                {"seconds": point.seconds, "trials": point.trials, "latencies": [*map(_finite, point.latencies)]}
                for point in report.curve
            ],
        }


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class TuneRequest:
    """What to tune and how. `options.peak` is measured if it is None; `model_path` needs an XGBoostModel."""

    compile: CompileOptions = field(default_factory=CompileOptions)
    options: TuneOptions = field(default_factory=TuneOptions)
    database: TuningDatabase | None = None  # default: the cache's
    model_path: Path | None = None  # where the cost model's trees are kept from one tuning to the next
    callbacks: tuple[Callback, ...] = ()


def tune(
    models: Source | Sequence[Source],
    seconds: float | None = None,
    trials: int | None = None,
    callbacks: Sequence[Callback] = (),
    request: TuneRequest | None = None,
) -> TuneResult:
    """Tune one model or several together; 5 minutes unless `seconds` or `trials` say otherwise.

    Raises ModelError, OptionError, BuildError.
    """
    request = request or TuneRequest()
    if seconds is not None or trials is not None:
        request = replace(request, options=replace(request.options, budget=Budget(seconds, trials)))
    sources: Sequence[Source] = models if isinstance(models, list | tuple) else [models]
    names = [_name_of(source, number) for number, source in enumerate(sources)]
    return tune_models(sources, names, replace(request, callbacks=(*request.callbacks, *callbacks)))


def tune_models(
    sources: Sequence[Source], names: Sequence[str], request: TuneRequest, progress: Progress = lambda text: None
) -> TuneResult:
    """See `tune`; `names` are shown."""
    if not sources:
        raise OptionError("tune: expected at least one model")
    start = time.perf_counter()
    programs = [plan_program(source, request.compile, progress) for source in sources]
    for name, program in zip(names, programs, strict=True):
        if shapes := _bound_shapes(program):
            progress(f"{name} is tuned for {shapes}")
    progress("measuring the machine's peak")
    options = request.options
    peak = options.peak or measure_peak(parse_target("cpu"), request.compile.resolved_threads)
    database = request.database if request.database is not None else Database(default_path())
    _load_model(request)
    progress("")
    with LocalBuilder(request.compile.resolved_workers) as builder, LocalRunner() as runner:
        tasks = tasks_of(programs)
        report = tune_tasks(tasks, replace(options, peak=peak), database, builder, runner, request.callbacks)
    _save_model(request)
    traces = {key: trace for key, (trace, _) in report.best.items()}
    results = [
        _Finish(name, program, traces, request.compile, progress).run()
        for name, program in zip(names, programs, strict=True)
    ]
    return TuneResult(report, tuple(results), peak, time.perf_counter() - start)


def _bound_shapes(program: Program) -> str:
    """The inputs whose shapes the model leaves open, as they were bound; empty if there are none."""
    return ", ".join(
        f"{port.name}: {'x'.join(map(str, port.type.dims))}"
        for port in program.imported.inputs
        if any(not isinstance(dim, int) for dim in port.declared_shape)
    )


def _load_model(request: TuneRequest) -> None:
    """A file that is none, or of other features, is as good as no file: it is written anew."""
    model, path = request.options.model, request.model_path
    if isinstance(model, XGBoostModel) and path is not None and path.exists():
        with suppress(OptionError):
            model.load(path)


def _save_model(request: TuneRequest) -> None:
    model, path = request.options.model, request.model_path
    if isinstance(model, XGBoostModel) and path is not None and model.fits:
        model.save(path)


def tasks_of(programs: Sequence[Program]) -> list[TuneTask]:
    """The distinct tasks of all programs; equal ones are tuned once, with a weight for each program."""
    weights: dict[str, list[float]] = {}
    jobs: dict[str, BuildJob] = {}
    for number, program in enumerate(programs):
        for job, weighted in zip(program.jobs, program.partition.tasks(), strict=True):
            key = job.task.workload_key
            jobs.setdefault(key, job)
            weights.setdefault(key, [0.0] * len(programs))[number] += weighted.weight
    return [TuneTask(job.name, job.task, tuple(weights[key])) for key, job in jobs.items()]


def _name_of(source: Source, number: int) -> str:
    return getattr(source, "stem", None) or (
        source.rsplit("/", 1)[-1] if isinstance(source, str) else f"model {number}"
    )


# --- the end of a model ---


@dataclass(frozen=True)
class _Finish:
    """Builds a model both ways, and decides."""

    name: str
    program: Program
    traces: Mapping[str, Trace]
    options: CompileOptions
    progress: Progress

    def run(self) -> TunedModel:
        untuned, tuned = self.build()
        changed = {key for key in untuned if tuned[key].trace != untuned[key].trace}
        base = link_program(self.program, untuned)
        if not changed:
            return TunedModel(self.name, base, None, False, 0, len(untuned))
        self.progress(f"{self.name}: comparing with the untuned build")
        feeds = random_feeds(base.plan.inputs, 0)
        sessions = [self.session(base), self.session(link_program(self.program, tuned))]
        better = self.faster_inside(sessions, feeds, untuned, tuned, changed)
        mixed = {key: tuned[key] if key in better else untuned[key] for key in untuned}
        artifact = link_program(self.program, mixed)
        race = _race(self.session(artifact), sessions[0], feeds)
        if race.speedup <= 1.0 or not better:
            return TunedModel(self.name, base, race, False, 0, len(untuned))
        return TunedModel(self.name, artifact, race, True, len(better), len(untuned))

    def build(self) -> tuple[dict[str, BuiltTask], dict[str, BuiltTask]]:
        """All tasks untuned and tuned (by workload key), each distinct program once."""
        jobs = self.program.jobs
        tuned_jobs = [
            replace(job, trace=self.traces[job.task.workload_key])
            for job in jobs
            if job.task.workload_key in self.traces
        ]
        self.progress(f"{self.name}: building kernels")
        built = build_tasks([*jobs, *tuned_jobs], self.options.resolved_workers)
        untuned = {job.task.workload_key: task for job, task in zip(jobs, built, strict=False)}
        tuned = {job.task.workload_key: task for job, task in zip(tuned_jobs, built[len(jobs) :], strict=True)}
        return untuned, {**untuned, **tuned}

    def session(self, artifact: Artifact) -> InferenceSession:
        return InferenceSession(artifact, threads=self.options.resolved_threads)

    def faster_inside(
        self,
        sessions: Sequence[InferenceSession],
        feeds: Mapping[str, Array],
        untuned: Mapping[str, BuiltTask],
        tuned: Mapping[str, BuiltTask],
        changed: set[str],
    ) -> set[str]:
        """The tasks whose tuned kernels take less time inside the model, profiled in turns."""
        owners = [_owner_of_kernels(built) for built in (untuned, tuned)]
        seconds: list[dict[str, list[float]]] = [{}, {}]
        for block in range(_PROFILE_BLOCKS):
            for side in (0, 1) if block % 2 == 0 else (1, 0):
                for key, value in _seconds_by_task(sessions[side], feeds, owners[side]).items():
                    seconds[side].setdefault(key, []).append(value)
        least = [{key: min(values) for key, values in each.items()} for each in seconds]
        return {key for key in changed if least[1].get(key, math.inf) < least[0].get(key, 0.0)}


def _owner_of_kernels(built: Mapping[str, BuiltTask]) -> dict[str, str]:
    return {kernel.name: key for key, task in built.items() for kernel in task.kernels}


def _seconds_by_task(
    session: InferenceSession, feeds: Mapping[str, Array], owners: Mapping[str, str]
) -> dict[str, float]:
    found: dict[str, float] = {}
    for call in session.profile(feeds, _PROFILE_RUNS).calls:
        key = owners.get(call.kernel)
        if key is not None:
            found[key] = found.get(key, 0.0) + call.min_seconds  # other programs only ever add to it
    return found


def _race(ours: InferenceSession, theirs: InferenceSession, feeds: Mapping[str, Array]) -> Race:
    """Both timed in alternating blocks."""
    sides = (ours, theirs)
    first = max(_timed(side, feeds, 2)[-1] for side in sides)
    runs = max(3, min(_MOST_BLOCK_RUNS, round(_BLOCK_SECONDS / max(first, 1e-6))))
    seconds: tuple[list[list[float]], list[list[float]]] = ([], [])
    for block in range(_RACE_BLOCKS):
        for side in (0, 1) if block % 2 == 0 else (1, 0):
            seconds[side].append(_timed(sides[side], feeds, runs + 1)[1:])
    return summarise(seconds[0], seconds[1])


def _timed(session: InferenceSession, feeds: Mapping[str, Array], runs: int) -> list[float]:
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        session.run(None, dict(feeds))
        seconds.append(time.perf_counter() - start)
    return seconds
