"""A record of one measured program, its keys, and its form as a line of JSON."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from mcompile import __version__
from mcompile.errors import McompileError, ScheduleError
from mcompile.schedule.steps import Trace, trace_from_json, trace_to_json
from mcompile.target import Target
from mcompile.tuning.trial import ErrorKind, MeasureResult, robust_seconds

_GENERATION = 1  # raised when lowering or code generation change so much that old costs say little
VERSION = f"{__version__}+{_GENERATION}"
_LINE_FORMAT = 1
_KINDS = {kind.value for kind in ErrorKind}


class RecordError(McompileError):
    """A line or row that is no record."""


@dataclass(frozen=True)
class TuningRecord:
    """`sketch` and `values` say which point of a space the trace is ("" and () if none). `costs` as MeasureResult's."""

    workload_key: str
    target_key: str
    version: str
    trace: Trace
    sketch: str
    values: tuple[int, ...]
    costs: tuple[float, ...]
    error: ErrorKind | None
    message: str
    timestamp: float

    @property
    def cost_seconds(self) -> float:
        """Infinity for an error."""
        return math.inf if self.error is not None else robust_seconds(self.costs)


def make_record(
    workload_key: str, target: Target, trace: Trace, result: MeasureResult, sketch: str = "", values: Any = ()
) -> TuningRecord:
    """The record of a trial under the present version. `values`: any sequence of integers."""
    return TuningRecord(
        workload_key=workload_key,
        target_key=target_key(target),
        version=VERSION,
        trace=trace,
        sketch=sketch,
        values=tuple(int(value) for value in values),
        costs=tuple(result.costs),
        error=result.error,
        message=result.message,
        timestamp=result.timestamp,
    )


def target_key(target: Target) -> str:
    """Equal for targets on which a program costs the same: processor, its features and caches, threads."""
    digest = hashlib.sha256(repr(astuple(target)).encode()).hexdigest()[:12]
    return f"{target.cpu}-{target.threads}t-{digest}"


def trace_text(trace: Trace) -> str:
    """The program as compact JSON; equal for equal programs."""
    return json.dumps(trace_to_json(trace), separators=(",", ":"))


def parse_trace(text: str) -> Trace:
    """Inverse of `trace_text`. Raises RecordError."""
    try:
        return trace_from_json(json.loads(text))
    except (ValueError, RecursionError, ScheduleError) as error:
        raise RecordError(f"trace: {error}") from error


def record_to_line(record: TuningRecord) -> str:
    """One line of JSON."""
    return json.dumps(
        {
            "format": _LINE_FORMAT,
            "workload": record.workload_key,
            "target": record.target_key,
            "version": record.version,
            "trace": trace_to_json(record.trace),
            "sketch": record.sketch,
            "values": list(record.values),
            "costs": list(record.costs),
            "error": record.error.value if record.error is not None else None,
            "message": record.message,
            "timestamp": record.timestamp,
        },
        separators=(",", ":"),
        allow_nan=False,
    )


def record_from_line(line: str) -> TuningRecord:
    """Raises RecordError for anything that `record_to_line` does not write."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"no JSON: {error}") from error
    if not isinstance(data, dict):
        raise RecordError(f"expected an object, got {type(data).__name__}")
    if data.get("format") != _LINE_FORMAT:
        raise RecordError(f"format: expected {_LINE_FORMAT}, got {data.get('format')!r}")
    return record_from_fields(data)


def record_from_fields(data: Mapping[str, Any]) -> TuningRecord:
    """From the fields of a line, checked one by one. Raises RecordError."""
    try:
        trace = trace_from_json(data.get("trace"))
    except (ScheduleError, RecursionError) as reason:
        raise RecordError(str(reason)) from reason
    costs, error = _numbers(data, "costs"), data.get("error")
    if error is not None and not (isinstance(error, str) and error in _KINDS):
        raise RecordError(f"error: unknown kind {error!r}")
    if any(cost <= 0 for cost in costs) or bool(costs) == (error is not None):
        raise RecordError("costs: expected positive seconds, or none and an error")
    values = data.get("values")
    if not isinstance(values, list) or any(type(value) is not int or abs(value) >= 1 << 63 for value in values):
        raise RecordError(f"values: expected integers, got {values!r}")
    return TuningRecord(
        workload_key=_text(data, "workload"),
        target_key=_text(data, "target"),
        version=_text(data, "version"),
        trace=trace,
        sketch=_text(data, "sketch"),
        values=tuple(values),
        costs=costs,
        error=ErrorKind(error) if error is not None else None,
        message=_text(data, "message"),
        timestamp=_number(data.get("timestamp"), "timestamp"),
    )


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str):
        raise RecordError(f"{name}: expected text, got {value!r}")
    return value


def _numbers(data: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = data.get(name)
    if not isinstance(values, list):
        raise RecordError(f"{name}: expected a list, got {values!r}")
    return tuple(_number(value, name) for value in values)


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise RecordError(f"{name}: expected a finite number, got {value!r}")
    return float(value)
