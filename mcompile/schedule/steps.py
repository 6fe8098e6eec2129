"""Schedule steps: frozen records of one transformation each, JSON in and out. A Trace is a tuple of them.

Stages are named as the dag's computes; iterators as the stage's axes. Splitting `i` gives `i.0`, `i.1`, ...; fusing
`i` and `j` gives `i@j`. Each docstring shows the loops before -> after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from mcompile.errors import ScheduleError


@dataclass(frozen=True)
class Step:
    """Base of all steps."""

    kind: ClassVar[str]


@dataclass(frozen=True)
class Variant(Step):
    """Schedule another dag for the same task (`mcompile.schedule.variants`); the first step of a trace, if any."""

    kind = "variant"
    name: str


@dataclass(frozen=True)
class Split(Step):
    """`for i` -> `for i.0, for i.1 in factors[0], for i.2 in factors[1], ...`; factors need not divide the extent.

    What is left over runs in a copy of the inner loops with the remaining extent.
    """

    kind = "split"
    stage: str
    iterator: str
    factors: tuple[int, ...]


@dataclass(frozen=True)
class Fuse(Step):
    """`for i, for j` -> `for i@j`"""

    kind = "fuse"
    stage: str
    iterators: tuple[str, ...]


@dataclass(frozen=True)
class Reorder(Step):
    """The stage's loops, outermost first; names every one."""

    kind = "reorder"
    stage: str
    iterators: tuple[str, ...]


@dataclass(frozen=True)
class ComputeAt(Step):
    """Compute what `target` needs of `stage` inside target's loop `iterator`, into a LOCAL (or SHARED) buffer."""

    kind = "compute_at"
    stage: str
    target: str
    iterator: str
    scope: str = "local"


@dataclass(frozen=True)
class ComputeInline(Step):
    """Replace every load of `stage` by its expression."""

    kind = "compute_inline"
    stage: str


@dataclass(frozen=True)
class CacheWrite(Step):
    """`y[i] = body` -> `y_acc[i] = body; y[i] = y_acc[i]`: the stage `y_acc` is new, to be placed by compute_at."""

    kind = "cache_write"
    stage: str


@dataclass(frozen=True)
class CacheRead(Step):
    """`reader` loads `tensor` through the new stage `tensor_cache[i] = tensor[i]`."""

    kind = "cache_read"
    tensor: str
    reader: str


@dataclass(frozen=True)
class Rfactor(Step):
    """`y = reduce_k x[k]` -> `y_rf[v] = reduce_k0 x[k0 * factor + v]; y = reduce_v y_rf[v]`"""

    kind = "rfactor"
    stage: str
    axis: str
    factor: int


@dataclass(frozen=True)
class Vectorize(Step):
    """`for i` -> all iterations at once, as one vector."""

    kind = "vectorize"
    stage: str
    iterator: str


@dataclass(frozen=True)
class Unroll(Step):
    """`for i` -> its body repeated."""

    kind = "unroll"
    stage: str
    iterator: str


@dataclass(frozen=True)
class Parallel(Step):
    """`for i` -> its iterations on all threads; the outermost loop of a root stage."""

    kind = "parallel"
    stage: str
    iterator: str


@dataclass(frozen=True)
class Bind(Step):
    """`for i` -> a GPU thread dimension: `blockIdx.x`, `threadIdx.y`, ..."""

    kind = "bind"
    stage: str
    iterator: str
    thread: str


@dataclass(frozen=True)
class LayoutRewrite(Step):
    """Store a constant in another order: dim d is cut in tiles of `tiles[d]` (0: uncut; the last one zero-filled).

    `order` lists (dim, part), outermost first; part 0 is the tile's number (or the whole dim), 1 the place in it.
    W[n, k], tiles (32, 0), order ((0, 0), (1, 0), (0, 1)) -> W'[n // 32, k, n % 32].
    """

    kind = "layout_rewrite"
    tensor: str
    tiles: tuple[int, ...]
    order: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Prefetch(Step):
    """While `stage`, placed inside `target`, reduces: fetch what the next iteration of target's loop reads of `tensor`.

    `tensor` is a constant stored by layout_rewrite so that each iteration of `loop` reads a tile of its own. The tile's
    cache lines are spread evenly over all reduction steps of the loops inside `loop`.
    """

    kind = "prefetch"
    stage: str
    tensor: str
    target: str
    loop: str


Trace = tuple[Step, ...]

_STEPS: dict[str, type[Step]] = {
    step.kind: step
    for step in (
        Split, Fuse, Reorder, ComputeAt, ComputeInline, CacheWrite, CacheRead, Rfactor,
        Vectorize, Unroll, Parallel, Bind, LayoutRewrite, Prefetch, Variant,
    )
}  # fmt: skip


def trace_to_json(trace: Trace) -> list[list[Any]]:
    """Each step as `[kind, field, field, ...]`."""
    return [[step.kind, *(_plain(getattr(step, field.name)) for field in fields(step))] for step in trace]


def trace_from_json(data: Any) -> Trace:
    """Inverse of `trace_to_json`. Raises ScheduleError on anything else."""
    if not isinstance(data, list):
        raise ScheduleError(f"trace: expected a list of steps, got {type(data).__name__}")
    return tuple(_step_from_json(entry) for entry in data)


def _step_from_json(entry: Any) -> Step:
    if not isinstance(entry, list) or not entry or not isinstance(entry[0], str) or entry[0] not in _STEPS:
        raise ScheduleError(f"trace: expected [kind, ...] with a known kind, got {entry!r}")
    step = _STEPS[entry[0]]
    names = fields(step)
    if len(entry) - 1 != len(names):
        raise ScheduleError(f"trace: {entry[0]} takes {len(names)} fields, got {len(entry) - 1}")
    values = [_checked(field.type, value) for field, value in zip(names, entry[1:], strict=True)]
    return step(*values)


_FIELD_TYPES: Mapping[str, Any] = {
    "str": lambda v: isinstance(v, str),
    "int": lambda v: type(v) is int,
    "tuple[str, ...]": lambda v: isinstance(v, tuple) and all(isinstance(x, str) for x in v),
    "tuple[int, ...]": lambda v: isinstance(v, tuple) and all(type(x) is int for x in v),
    "tuple[tuple[int, int], ...]": lambda v: (
        isinstance(v, tuple) and all(isinstance(x, tuple) and len(x) == 2 and all(type(y) is int for y in x) for x in v)
    ),
}


def _checked(type_: Any, value: Any) -> Any:
    value = _tuples(value)
    if not _FIELD_TYPES[str(type_)](value):
        raise ScheduleError(f"trace: expected {type_}, got {value!r}")
    return value


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def print_trace(trace: Trace) -> str:
    """The trace as Python text, a step a line."""
    return "\n".join(repr(step) for step in trace)
