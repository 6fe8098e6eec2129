"""What the commands share: options, their parsing, printing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from mcompile.errors import OptionError

T = TypeVar("T")
Progress = Callable[[str], None]

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
TargetName = Annotated[str, typer.Option("--target", help="cpu (this machine), x86-64-v2, -v3, -v4, aarch64.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads [default: the cores available].")]
Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Processes that build kernels.")]
Exact = Annotated[bool, typer.Option("--exact", help="No algorithm that rounds otherwise than the direct sums.")]
Shapes = Annotated[list[str] | None, typer.Option("--shape", metavar="INPUT=1,3,224,224", help="An input's shape.")]
Dims = Annotated[list[str] | None, typer.Option("--dim", metavar="NAME=N", help="The size of an open dim.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of inputs that are made up.")]
InputFile = Annotated[Path | None, typer.Option("--input", metavar="X.npz", help="Inputs by name.")]


# --- parsing ---


def parse_shapes(texts: Sequence[str] | None) -> dict[str, tuple[int, ...]]:
    return _parse_pairs("--shape", texts, lambda text: tuple(_size(part) for part in text.split(",") if part.strip()))


def parse_dims(texts: Sequence[str] | None) -> dict[str, int]:
    return _parse_pairs("--dim", texts, _size)


def _parse_pairs(option: str, texts: Sequence[str] | None, parse: Callable[[str], T]) -> dict[str, T]:
    """NAME=VALUE pairs; a name may hold "=" itself, a value may not."""
    pairs: dict[str, T] = {}
    for text in texts or ():
        name, equals, value = text.rpartition("=")
        if not equals or not name:
            raise OptionError(f"{option} {text}: expected NAME=VALUE")
        try:
            pairs[name] = parse(value)
        except ValueError as error:
            raise OptionError(f"{option} {text}: {error}") from error
    return pairs


def _size(text: str) -> int:
    try:
        size = int(text)
    except ValueError:
        raise ValueError(f"expected a number, got {text.strip()!r}") from None
    if size < 0:
        raise ValueError(f"expected a size >= 0, got {size}")
    return size


# --- printing ---


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """A function that shows what is being done: one changing line on a terminal, nothing elsewhere."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield lambda text: status.update(text)


def note(text: str) -> None:
    print(text, file=sys.stderr)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def print_pairs(pairs: Mapping[str, object]) -> None:
    width = max(map(len, pairs))
    for name, value in pairs.items():
        print(f"{name:<{width}}  {value}")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not sys.stdout.isatty():
        print("\n".join("\t".join(row) for row in [header, *rows]))
        return
    table = Table(box=None, pad_edge=False)
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)
