"""python -m benchmarks.zoo [--threads 1 2] [--models NAME ...] [--group zoo|light] [--repeat N] [--json | --markdown]

Every model against onnxruntime, untuned: outputs compared, latency measured in alternating blocks, each engine in a
process of its own. Prints a table (or JSON lines), then the geometric mean and the worst ratio of each group.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.zoo_models import BenchmarkModel, benchmark_models, find_zoo
from mcompile.compare.comparison import CompareOptions, compare
from mcompile.driver import CompileOptions
from mcompile.errors import McompileError

_COLUMNS = "{:<22} {:>2} {:>10} {:>10} {:>6} {:>13} {:>9} {:>8}  {}"


def measure(model: BenchmarkModel, threads: int, repeat: int) -> dict[str, Any]:
    """One row: the Comparison's JSON, or the error."""
    options = CompareOptions(CompileOptions(threads=threads, dims=model.dims), repeat=repeat, localise=False)
    row: dict[str, Any] = {"model": model.name, "group": model.group, "threads": threads}
    try:
        return {**compare(model.path, options).to_json(), **row}
    except McompileError as error:
        return {**row, "ok": False, "error": str(error), "speedup": None}


def format_row(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['model']:<22} {row['threads']:>2} {row['error'].splitlines()[0]}"
    low, high = row["speedup_interval"]
    return _COLUMNS.format(
        row["model"],
        row["threads"],
        f"{row['mcompile_ms']:.3f}",
        f"{row['onnxruntime_ms']:.3f}",
        f"{row['speedup']:.2f}",
        f"{low:.2f} .. {high:.2f}",
        f"{row['max_scaled_error']:.1e}",
        f"{row['compile_seconds']:.1f}",
        "ok" if row["ok"] else "FAILED",
    )


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geometric mean and worst speedup of each group and thread count."""
    summary = []
    for group, threads in sorted({(row["group"], row["threads"]) for row in rows}, reverse=True):
        members = [row for row in rows if (row["group"], row["threads"]) == (group, threads)]
        done = [row for row in members if row["speedup"]]
        entry: dict[str, Any] = {"group": group, "threads": threads, "models": len(members)}
        entry["not_ok"] = [row["model"] for row in members if not row["ok"]]
        if done:
            worst = min(done, key=lambda row: float(row["speedup"]))
            entry["geomean"] = float(np.exp(np.mean([np.log(row["speedup"]) for row in done])))
            entry |= {"worst": worst["speedup"], "worst_model": worst["model"]}
            entry["compile_seconds_max"] = max(row["compile_seconds"] for row in done)
        summary.append(entry)
    return summary


def format_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A line a model: milliseconds of both engines and the ratio, for each number of threads."""
    counts = sorted({row["threads"] for row in rows})
    by_place = {(row["model"], row["threads"]): row for row in rows}
    names = list(dict.fromkeys(row["model"] for row in rows))
    heads = [f"{engine}, {count} T" for count in counts for engine in ("mcompile ms", "onnxruntime ms", "ratio")]
    lines = ["| model | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for name in names:
        cells = [cell for count in counts for cell in _cells(by_place[name, count])]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for entry in summarise(rows):
        if "geomean" in entry:
            worst = f"worst {entry['worst']:.2f} ({entry['worst_model']})"
            group = f"{entry['group']}, {entry['threads']} threads"
            lines.append(f"\n{group}: geometric mean **{entry['geomean']:.2f}**, {worst}, {entry['models']} models.")
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> tuple[str, str, str]:
    if not row["speedup"]:
        return "-", "-", "-"
    return f"{row['mcompile_ms']:.2f}", f"{row['onnxruntime_ms']:.2f}", f"{row['speedup']:.2f}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__.split("\n\n")[1])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", nargs="+", help="only these (default: all)")
    parser.add_argument("--group", choices=["zoo", "light"], help="only this group")
    parser.add_argument("--repeat", type=int, default=40, help="least timed runs of each engine (default: 40)")
    parser.add_argument("--json", action="store_true", help="JSON lines, the summary last")
    parser.add_argument("--markdown", action="store_true", help="end with the table that README shows")
    options = parser.parse_args(argv)
    if find_zoo() is None:
        print("no zoo on this machine (MCOMPILE_ZOO): only the light models are measured", file=sys.stderr)
    models = benchmark_models(options.models, options.group)
    if not options.json:
        print(f"# {platform.processor() or platform.machine()}, Python {platform.python_version()}")
        print(_COLUMNS.format("model", "T", "mcompile", "ort ms", "ratio", "95 %", "error", "compile", ""))
    rows = []
    for model in models:
        for threads in options.threads:
            rows.append(measure(model, threads, options.repeat))
            print(json.dumps(rows[-1]) if options.json else format_row(rows[-1]), flush=True)
    for entry in summarise(rows):
        print(json.dumps(entry) if options.json else _format_summary(entry))
    if options.markdown:
        print(f"\n{format_markdown(rows)}")
    return 0 if all(row["ok"] for row in rows) else 1


def _format_summary(entry: dict[str, Any]) -> str:
    text = f"{entry['group']}, {entry['threads']} threads: {entry['models']} models"
    if "geomean" in entry:
        text += f", geomean {entry['geomean']:.3f}, worst {entry['worst']:.2f} ({entry['worst_model']})"
    return text + (f", not ok: {', '.join(entry['not_ok'])}" if entry["not_ok"] else "")


if __name__ == "__main__":
    sys.exit(main())
