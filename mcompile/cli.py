"""The command line: results on stdout, progress and notes on stderr; exit 0 done, 1 not acceptable, 2 bad input."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from mcompile import __version__
from mcompile.cli_db import db_app, existing_databases
from mcompile.cli_io import (
    AsJson,
    Dims,
    Exact,
    InputFile,
    Seed,
    Shapes,
    TargetName,
    Threads,
    Workers,
    note,
    parse_dims,
    parse_shapes,
    print_json,
    print_pairs,
    print_table,
    shown_progress,
)
from mcompile.cli_tune import tune_command
from mcompile.errors import McompileError, ModelError

app = typer.Typer(
    name="mcompile",
    help="Compile ONNX models to native code, run them, and compare them with onnxruntime.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cache_app = typer.Typer(help="The compiled models that sessions keep.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")
app.add_typer(db_app, name="db")
app.command("tune")(tune_command)

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX model.")]
Source = Annotated[Path, typer.Argument(metavar="MODEL|ARTIFACT", help="An ONNX model or a compiled .mcm artifact.")]


class Stage(StrEnum):
    GRAPH = "graph"
    GROUPS = "groups"
    TASKS = "tasks"
    TRACE = "trace"
    LOOPS = "loops"
    LLVM = "llvm"
    ASM = "asm"


@app.command("compile")
def compile_command(
    model: Model,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Artifact [default: MODEL.mcm].")] = None,
    target: TargetName = "cpu",
    threads: Threads = None,
    workers: Workers = None,
    exact: Exact = False,
    shape: Shapes = None,
    dim: Dims = None,
    db: Annotated[
        list[Path] | None, typer.Option("--db", metavar="F", help="Take schedules from a tuning database.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile MODEL into one .mcm file."""
    from mcompile import driver

    databases = existing_databases(db or ())
    shapes, dims = parse_shapes(shape), parse_dims(dim)
    options = driver.CompileOptions(target, threads, shapes, dims, workers, databases=databases, exact=exact)
    path = output or model.with_suffix(".mcm")
    with shown_progress() as progress:
        summary = driver.compile_file(model, path, options, progress)
    _note_host_ops(summary.host_ops)
    if as_json:
        return print_json(asdict(summary))
    print_pairs(
        {
            "artifact": str(path),
            "target": f"{summary.target}, {summary.threads} threads",
            "nodes": f"{summary.nodes_before} -> {summary.nodes_after}",
            "kernels": f"{summary.kernels} of {summary.tasks} tasks, {summary.calls} calls",
            "host ops": len(summary.host_ops) or "none",
            "segments": summary.segments,
            "size": f"{summary.size_bytes / 1e6:.1f} MB (code {summary.code_bytes / 1e6:.2f} MB)",
            "time": f"{summary.seconds:.1f} s",
        }
    )


@app.command()
def run(
    source: Source,
    input_file: InputFile = None,
    output: Annotated[Path | None, typer.Option("--output", metavar="Y.npz", help="Where outputs go.")] = None,
    seed: Seed = 0,
    threads: Threads = None,
    shape: Shapes = None,
    dim: Dims = None,
    as_json: AsJson = False,
) -> None:
    """Run once, on the arrays of --input or on random ones."""
    from mcompile import driver

    options = driver.CompileOptions("cpu", threads, parse_shapes(shape), parse_dims(dim))
    with shown_progress() as progress:
        result = driver.run_once(source, options, input_file, output, seed, progress)
    rows = [_statistics(name, array) for name, array in result.items()]
    if as_json:
        return print_json({"outputs": rows, "file": str(output) if output else None})
    print_table(tuple(rows[0]) if rows else (), [_cells(row) for row in rows])


@app.command()
def compare(
    source: Source,
    threads: Threads = None,
    repeat: Annotated[int, typer.Option("--repeat", min=0, help="Least timed runs of each; 0: accuracy only.")] = 40,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Size of every input's open first dim.")] = None,
    input_file: InputFile = None,
    seed: Seed = 0,
    atol: Annotated[float | None, typer.Option(help="Absolute tolerance [default: 1e-4 of the channel's max].")] = None,
    rtol: Annotated[float, typer.Option(help="Relative tolerance.")] = 1e-3,
    reference: Annotated[Path | None, typer.Option(help="The ONNX model of an ARTIFACT.")] = None,
    localise: Annotated[bool, typer.Option(help="Look for the first value that differs.")] = True,
    target: TargetName = "cpu",
    workers: Workers = None,
    exact: Exact = False,
    shape: Shapes = None,
    dim: Dims = None,
    as_json: AsJson = False,
) -> None:
    """Accuracy and latency against onnxruntime. Exit 0 if the outputs agree, else 1."""
    from mcompile import driver
    from mcompile.compare import comparison
    from mcompile.compare.accuracy import Tolerance

    shapes, dims = parse_shapes(shape), parse_dims(dim)
    compiling = driver.CompileOptions(target, threads, shapes, dims, workers, batch, exact=exact)
    options = comparison.CompareOptions(compiling, repeat, Tolerance(rtol, atol), input_file, seed, reference, localise)
    with shown_progress() as progress:
        result = comparison.compare(source, options, progress)
    if as_json:
        print_json(result.to_json())
    else:
        _print_comparison(result.to_json())
    if not result.ok:
        raise typer.Exit(1)


@app.command()
def inspect(
    model: Model,
    stage: Annotated[Stage, typer.Option(help="Which form to print.")] = Stage.GRAPH,
    task: Annotated[int | None, typer.Option("--task", min=0, help="Only this task.")] = None,
    target: TargetName = "cpu",
    threads: Threads = None,
    shape: Shapes = None,
    dim: Dims = None,
    as_json: AsJson = False,
) -> None:
    """Print one form of the program between ONNX and machine code."""
    from mcompile import driver

    options = driver.CompileOptions(target, threads, parse_shapes(shape), parse_dims(dim))
    text = driver.inspect_stage(model, options, stage.value, task)
    if as_json:
        return print_json({"stage": stage.value, "task": task, "text": text})
    print(text)


@app.command()
def profile(
    source: Source,
    threads: Threads = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Runs; each kernel's median counts.")] = 20,
    top: Annotated[int, typer.Option("--top", min=1, help="Rows of the table.")] = 30,
    input_file: InputFile = None,
    seed: Seed = 0,
    shape: Shapes = None,
    dim: Dims = None,
    as_json: AsJson = False,
) -> None:
    """Time, FLOP/s and share of the measured peak of each kernel call."""
    from mcompile import driver

    options = driver.CompileOptions("cpu", threads, parse_shapes(shape), parse_dims(dim))
    with shown_progress() as progress:
        result = driver.profile(source, options, input_file, repeat, seed, progress)
    if as_json:
        return print_json(result.to_json())
    rows = sorted(result.calls, key=lambda call: -call.milliseconds)[:top]
    cells = [
        (call.node, call.kernel, f"{call.milliseconds:.3f}", f"{call.share:.1%}", f"{call.gflops:.1f}",
         f"{call.peak_share:.0%}", f"{call.gbytes:.1f}")
        for call in rows
    ]  # fmt: skip
    print_table(("nodes", "kernel", "ms", "of run", "GFLOP/s", "of peak", "GB/s"), cells)
    print_pairs(
        {
            "kernels": f"{result.kernels_ms:.3f} ms",
            "run": f"{result.run_ms:.3f} ms (median of {repeat})",
            "measured peak": f"{result.peak_gflops:.1f} GFLOP/s with {result.threads} threads",
        }
    )


@cache_app.command("list")
def cache_list(as_json: AsJson = False) -> None:
    """List the compiled models, newest first."""
    from mcompile import driver

    entries = driver.list_cache()
    if as_json:
        return print_json([asdict(entry) for entry in entries])
    cells = [(entry.key[:16], entry.model, f"{entry.size_bytes / 1e6:.1f} MB", entry.used) for entry in entries]
    print_table(("key", "model", "size", "last used"), cells)


@cache_app.command("clear")
def cache_clear(as_json: AsJson = False) -> None:
    """Remove all compiled models."""
    from mcompile import driver

    freed = driver.clear_cache()
    if as_json:
        return print_json({"freed_bytes": freed})
    print(f"freed {freed / 1e6:.1f} MB")


def _show_version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True)] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """The console script. Errors that mcompile raises on purpose end in a message, never in a traceback."""
    try:
        app()
    except McompileError as error:
        _report(error, as_json="--json" in sys.argv)
        sys.exit(2)
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


# --- printing ---


def _note_host_ops(host_ops: Sequence[str]) -> None:
    if host_ops:
        note("note: run by Python, not native code (slow):\n" + "\n".join(f"  - {host_op}" for host_op in host_ops))


def _statistics(name: str, array: Any) -> dict[str, Any]:
    """What `run` prints of an output."""
    wide = array.astype(float)
    figures = {"min": wide.min(), "mean": wide.mean(), "max": wide.max()} if array.size else {}
    plain = {key: float(value) for key, value in figures.items()}
    return {"output": name, "dtype": str(array.dtype), "shape": list(array.shape), **plain}


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{value:.6g}" if isinstance(value, float) else str(value) for value in row.values())


def _print_comparison(result: Mapping[str, Any]) -> None:
    columns = ("name", "max_abs_error", "max_scaled_error", "outside_share", "required_atol", "required_rtol")
    cells = [
        (output["name"], *(f"{output[column]:.2e}" for column in columns[1:]), _verdict(output))
        for output in result["outputs"]
    ]
    header = ("output", "max |a-b|", "/ max |b|", "outside", "atol to pass", "rtol to pass", "")
    print_table(header, cells)
    pairs: dict[str, object] = {"model": result["model"], "threads": result["threads"]}
    if result["latency"]:
        for engine, latency in result["latency"].items():
            pairs[engine] = (
                f"{latency['median_ms']:.3f} ms (p99 {latency['p99_ms']:.3f}, "
                f"blocks {latency['low_ms']:.3f} to {latency['high_ms']:.3f}, {latency['runs']} runs)"
            )
        low, high = result["speedup_interval"]
        pairs["speedup"] = f"{result['speedup']:.2f} (95 % interval {low:.2f} to {high:.2f})"
    if result["compile_seconds"] is not None:
        pairs["compiled in"] = f"{result['compile_seconds']:.1f} s"
    pairs["host ops"] = _counted(host_op.split()[0] for host_op in result["host_ops"]) or "none"
    pairs["peak memory"] = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in result["peak_bytes"].items())
    first = result["first_difference"]
    if first is not None:
        alone = "also when compiled alone" if first["alone"] else "only together with its neighbours"
        pairs["first difference"] = f"{first['value']} of node {first['node']} ({first['op']}), {alone}"
    print_pairs(pairs)
    print("PASSED" if result["ok"] else "FAILED")


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


def _verdict(output: Mapping[str, Any]) -> str:
    return output["problem"] or ("PASSED" if output["ok"] else "FAILED")


def _report(error: McompileError, as_json: bool) -> None:
    if as_json:
        problems = list(error.problems) if isinstance(error, ModelError) else []
        print_json({"error": {"kind": type(error).__name__, "message": str(error), "problems": problems}})
    note(f"error: {error}")


if __name__ == "__main__":
    main()
