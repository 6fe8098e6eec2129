"""The whole story: one readable function per command. The only module that sees every room."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import onnx
from numpy.typing import NDArray

from mcompile import config
from mcompile.backend.cpu.build import assembly
from mcompile.backend.cpu.peak import Peak, measure_peak
from mcompile.build_pool import BuildJob, BuiltTask, build_task, build_tasks
from mcompile.errors import ArtifactError, OptionError
from mcompile.feeds import random_feeds, read_feeds, write_outputs
from mcompile.frontend import ImportedModel, import_model
from mcompile.frontend.batch import bind_batch
from mcompile.frontend.submodel import index_limits
from mcompile.graph.fusion import Group, fuse
from mcompile.graph.layout import Layouts, assign_layouts
from mcompile.graph.partition import Partition, partition_graph
from mcompile.graph.pipeline import optimize
from mcompile.graph.printer import print_graph
from mcompile.ir.printer import print_dag, print_func
from mcompile.link import kernel_names, link
from mcompile.runtime import Artifact, InferenceSession, load, open_cache, save
from mcompile.runtime.artifact import is_artifact
from mcompile.runtime.plan import NativeSegment
from mcompile.runtime.profile import Profile
from mcompile.schedule.steps import print_trace
from mcompile.target import Target, available_cores, parse_target

if TYPE_CHECKING:
    from mcompile.tuning.records import TuningDatabase

Array = NDArray[Any]
Source: TypeAlias = "str | Path | bytes | onnx.ModelProto"
Progress = Callable[[str], None]


def _silent(text: str) -> None:
    """Shows no progress."""


@dataclass(frozen=True)
class CompileOptions:
    """How to compile. `shapes` gives input shapes by name, `dims` sizes of named dims, `batch` every first dim.

    `threads`: what schedules are made for (default: the cores available). `workers`: processes that build kernels
    (default: likewise); how many makes no difference to the result. `databases`: where tuned schedules are looked for.
    `exact`: no algorithm whose rounding differs from the direct sum's by more than its order (no Winograd).
    """

    target: str = "cpu"
    threads: int | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    workers: int | None = None
    batch: int | None = None
    databases: tuple[TuningDatabase, ...] = ()
    exact: bool = False

    @property
    def resolved_threads(self) -> int:
        return self.threads if self.threads is not None else available_cores()

    @property
    def resolved_workers(self) -> int:
        return self.workers or config.load().workers or available_cores()


@dataclass(frozen=True)
class Program:
    """A model between import and code: everything that `inspect` shows."""

    imported: ImportedModel
    target: Target
    layouts: Layouts
    groups: tuple[Group, ...]
    partition: Partition

    @property
    def jobs(self) -> tuple[BuildJob, ...]:
        """A job for each distinct task, in order of first use."""
        named = zip(kernel_names(self.partition), self.partition.tasks(), strict=True)
        return tuple(BuildJob(name, weighted.task) for name, weighted in named)


# --- compile ---


def compile_model(source: Source, options: CompileOptions | None = None, progress: Progress = _silent) -> Artifact:
    """An artifact of an ONNX model (a path, bytes or a ModelProto).

    Raises ModelError listing every problem of the model, OptionError for options that do not fit it, BuildError.
    """
    options = options or CompileOptions()
    program = plan_program(source, options, progress)
    jobs = tuned_jobs(program, options.databases)
    built = build_tasks(
        jobs, options.resolved_workers, lambda done: progress(f"building kernels: {done} of {len(jobs)} tasks")
    )
    progress("packing constants")
    return link_program(program, {job.task.workload_key: task for job, task in zip(jobs, built, strict=True)})


def tuned_jobs(program: Program, databases: Sequence[TuningDatabase]) -> tuple[BuildJob, ...]:
    """The program's jobs, with the trace of the best record of the first database that has one."""
    if not databases:
        return program.jobs
    from mcompile.tuning.records import OrderedDatabases, target_key

    database, key = OrderedDatabases(databases), target_key(program.target)
    records = [database.best(job.task.workload_key, key) for job in program.jobs]
    return tuple(
        replace(job, trace=record.trace if record is not None else None)
        for job, record in zip(program.jobs, records, strict=True)
    )


def link_program(program: Program, built: Mapping[str, BuiltTask]) -> Artifact:
    """The artifact of a program whose tasks are `built` (by workload key)."""
    return link(program.imported, program.partition, built, program.target, _summary_of(program))


def plan_program(source: Source, options: CompileOptions, progress: Progress = _silent) -> Program:
    """Everything before scheduling: import, graph passes, layout, fusion, tasks."""
    target = replace(parse_target(options.target, options.threads), exact=options.exact)
    if target.kind != "cpu":
        raise OptionError(f"--target {options.target}: models cannot be compiled for a GPU yet; expected a CPU target")
    progress("reading the model")
    imported = _import(source, options)
    progress("optimising the graph")
    graph = optimize(imported.graph, target)
    layouts = assign_layouts(graph, target)
    groups = fuse(layouts)
    return Program(imported, target, layouts, groups, partition_graph(layouts, groups, target))


def _import(source: Source, options: CompileOptions) -> ImportedModel:
    shapes, dims = dict(options.shapes), dict(options.dims)
    if options.batch is not None:
        binding = bind_batch(source, options.batch)
        shapes, dims = {**binding.shapes, **shapes}, {**binding.dims, **dims}
    return import_model(source, shapes=shapes, dims=dims)


def _summary_of(program: Program) -> dict[str, Any]:
    """What the manifest keeps of the compile; nothing in it differs between two compiles of one model."""
    return {
        "nodes_before": program.imported.node_count,
        "nodes_after": len(program.layouts.graph.nodes),
        "tasks": len(program.groups),
        "distinct_tasks": len(program.partition.tasks()),
        "host_ops": [asdict(host_op) for host_op in program.imported.host_ops],
        "external_files": [path.name for path in program.imported.external_files],
    }


@dataclass(frozen=True)
class CompileSummary:
    """What `mcompile compile` reports."""

    model: str
    artifact: str
    target: str
    threads: int
    nodes_before: int
    nodes_after: int
    tasks: int
    kernels: int
    calls: int
    host_ops: list[str]
    segments: int
    seconds: float
    size_bytes: int
    code_bytes: int
    constants_bytes: int
    arena_bytes: int


def compile_file(model: Path, output: Path, options: CompileOptions, progress: Progress = _silent) -> CompileSummary:
    """Compile `model` into the file `output`."""
    start = time.perf_counter()
    if output.exists() and model.exists() and output.samefile(model):
        raise OptionError(f"cannot write {output}: it is the model")
    artifact = compile_model(model, options, progress)
    save_artifact(artifact, output)
    plan, summary = artifact.plan, artifact.manifest.summary
    native = [segment for segment in plan.segments if isinstance(segment, NativeSegment)]
    return CompileSummary(
        model=str(model),
        artifact=str(output),
        target=artifact.manifest.cpu,
        threads=artifact.manifest.threads,
        nodes_before=summary["nodes_before"],
        nodes_after=summary["nodes_after"],
        tasks=summary["tasks"],
        kernels=len(artifact.kernels),
        calls=sum(len(segment.calls) for segment in native),
        host_ops=[f"{each['op']} ({each['node']}): {each['reason']}" for each in summary["host_ops"]],
        segments=len(plan.segments),
        seconds=time.perf_counter() - start,
        size_bytes=output.stat().st_size,
        code_bytes=sum(len(kernel.code) for kernel in artifact.kernels),
        constants_bytes=plan.constants_bytes,
        arena_bytes=plan.arena_bytes,
    )


def save_artifact(artifact: Artifact, path: Path) -> None:
    """Write the file. Raises OptionError if that is not possible."""
    try:
        save(artifact, path)
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror or error}") from error


def is_artifact_file(path: Path) -> bool:
    """Whether a file begins as an artifact does. Raises OptionError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return is_artifact(file.read(4))
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror or error}") from error


def load_or_compile(source: Path, options: CompileOptions, progress: Progress = _silent) -> Artifact:
    """The artifact of a file that is one, or of the ONNX model that it is."""
    return load(source) if is_artifact_file(source) else compile_model(source, options, progress)


# --- run ---


def run_once(
    source: Path,
    options: CompileOptions,
    inputs: Path | None,
    output: Path | None,
    seed: int,
    progress: Progress = _silent,
) -> dict[str, Array]:
    """The outputs by name for the arrays of `inputs` (.npz), or for random ones; also written to `output` (.npz)."""
    artifact = load_or_compile(source, options, progress)
    session = InferenceSession(artifact, threads=options.threads)
    feeds = make_feeds(source, artifact, inputs, seed)
    names = [signature.name for signature in artifact.plan.outputs]
    outputs = dict(zip(names, session.run(None, feeds), strict=True))
    if output is not None:
        write_outputs(output, outputs)
    return outputs


def make_feeds(source: Path, artifact: Artifact, inputs: Path | None, seed: int) -> dict[str, Array]:
    """Input arrays from a file, or random ones; where `source` is an ONNX model, table indices stay in range."""
    if inputs is not None:
        return read_feeds(inputs, artifact.plan.inputs)
    limits = {} if is_artifact_file(source) else index_limits(onnx.load(source, load_external_data=False))
    return random_feeds(artifact.plan.inputs, seed, limits)


# --- inspect ---


def inspect_stage(model: Path, options: CompileOptions, stage: str, task: int | None = None) -> str:
    """The program's text at a stage: graph, groups, tasks, trace, loops, llvm or asm."""
    program = plan_program(model, options)
    if stage == "graph":
        return print_graph(program.layouts.graph)
    if stage == "groups":
        return "\n".join(_group_lines(program))
    jobs = program.jobs
    if task is not None and task >= len(jobs):
        raise OptionError(f"--task {task}: the model has {len(jobs)} distinct tasks, 0 to {len(jobs) - 1}")
    chosen = range(len(jobs)) if task is None else [task]
    weights = [weighted.weight for weighted in program.partition.tasks()]
    return "\n\n".join(
        f"# task {n}: {jobs[n].name}, runs {weights[n]} times\n{_task_text(jobs[n], stage)}" for n in chosen
    )


def _group_lines(program: Program) -> Iterator[str]:
    nodes = program.layouts.graph.nodes
    for number, group in enumerate(program.groups):
        ops = " + ".join(nodes[name].op for name in group.nodes)
        yield f"{number}: {group.kind.value} {ops}  # {', '.join(group.nodes)} -> {', '.join(group.outputs)}"
    views = sorted(program.layouts.views)
    yield f"views (no kernel): {', '.join(views) or 'none'}"


def _task_text(job: BuildJob, stage: str) -> str:
    if stage == "tasks":
        strides = "\n".join(f"strides {name}: {values}" for name, values in sorted(job.task.strides.items()))
        return f"{print_dag(job.task.dag)}\n{strides}\nconstants: {', '.join(sorted(job.task.constants)) or 'none'}"
    built = build_task(job)
    match stage:
        case "trace":
            return print_trace(built.trace)
        case "loops":
            return "\n".join(print_func(func) for func in built.lowered.funcs)
        case "llvm":
            return "\n".join(kernel.source for kernel in built.kernels)
        case "asm":
            return "\n".join(assembly(func, job.task.target) for func in built.lowered.funcs)
    raise OptionError(f"--stage {stage}: unknown stage")


# --- profile ---


@dataclass(frozen=True)
class ProfileRow:
    """One kernel call. `share` is of the kernels' time, `peak_share` of the measured FMA peak."""

    node: str
    kernel: str
    milliseconds: float
    share: float
    flops: int
    gflops: float
    peak_share: float
    gbytes: float


@dataclass(frozen=True)
class ProfileReport:
    threads: int
    run_ms: float
    kernels_ms: float
    peak_gflops: float
    peak_gbytes: float
    calls: tuple[ProfileRow, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def profile(
    source: Path, options: CompileOptions, inputs: Path | None, repeat: int, seed: int, progress: Progress = _silent
) -> ProfileReport:
    """Where the time of a run goes, against what this machine can do."""
    artifact = load_or_compile(source, options, progress)
    progress("measuring the machine's peak")
    threads = options.resolved_threads
    peak = measure_peak(parse_target("cpu"), threads)
    progress("profiling")
    return profile_artifact(artifact, make_feeds(source, artifact, inputs, seed), repeat, threads, peak)


def profile_artifact(
    artifact: Artifact, feeds: Mapping[str, Array], repeat: int, threads: int, peak: Peak
) -> ProfileReport:
    """Time each kernel call of `artifact`; `peak` is what shares are of."""
    session = InferenceSession(artifact, threads=threads)
    return _report(session.profile(feeds, repeat), peak)


def _report(timings: Profile, peak: Peak) -> ProfileReport:
    total = timings.kernel_seconds or 1.0
    rows = [
        ProfileRow(
            call.node,
            call.kernel,
            call.seconds * 1e3,
            call.seconds / total,
            call.flops,
            call.flops_per_second / 1e9,
            call.flops_per_second / peak.flops_per_second,
            call.bytes_per_second / 1e9,
        )
        for call in timings.calls
    ]
    return ProfileReport(
        timings.threads,
        timings.seconds * 1e3,
        timings.kernel_seconds * 1e3,
        peak.flops_per_second / 1e9,
        peak.bytes_per_second / 1e9,
        tuple(rows),
    )


# --- cache ---


@dataclass(frozen=True)
class CachedModel:
    """A compiled model that a session has kept; `used` is when it was last loaded (UTC, ISO 8601)."""

    key: str
    model: str
    size_bytes: int
    used: str


def list_cache() -> list[CachedModel]:
    """The most recently used first."""
    return [
        CachedModel(
            entry.key,
            _model_name(entry.path),
            entry.size_bytes,
            datetime.fromtimestamp(entry.used_seconds, UTC).isoformat(timespec="seconds"),
        )
        for entry in open_cache().entries()
    ]


def clear_cache() -> int:
    """Remove all; the bytes set free."""
    return open_cache().clear()


def _model_name(path: Path) -> str:
    try:
        return load(path).manifest.model.graph_name
    except ArtifactError as error:
        return f"unreadable: {error}"
