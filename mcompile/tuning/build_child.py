"""What a building child does: lower a candidate and generate its code."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace

from mcompile.backend.cpu.build import build_kernel
from mcompile.errors import McompileError, ScheduleError
from mcompile.schedule.lower import lower
from mcompile.schedule.steps import Trace
from mcompile.schedule.task import Task
from mcompile.tuning.child import named_function
from mcompile.tuning.trial import CandidateCode, ErrorKind

_GARBAGE_EVERY = 16  # builds: collecting while building takes a fifth of its time


@dataclass(frozen=True)
class BuildRequest:
    """`task` is None where the child has been sent it before. `build`: as `build_code`, by name."""

    key: str
    task: Task | None
    trace: Trace
    build: str


@dataclass(frozen=True)
class BuildAnswer:
    code: CandidateCode | None
    error: ErrorKind | None
    message: str
    seconds: float


def build_code(task: Task, trace: Trace) -> CandidateCode:
    """Raises ScheduleError, BuildError."""
    lowered = lower(task, trace, "candidate")
    return CandidateCode(
        kernels=tuple(replace(build_kernel(func, task.target), source="") for func in lowered.funcs),
        params=tuple(tuple(buffer.name for buffer in func.params) for func in lowered.funcs),
        scratch={buffer.name: buffer.size_bytes for buffer in lowered.scratch},
        preparations=lowered.preparations,
    )


_tasks: dict[str, Task] = {}
_builds = 0


def answer(request: BuildRequest) -> BuildAnswer:
    """Build one candidate; what goes wrong is in the answer."""
    global _builds
    if _builds % _GARBAGE_EVERY == 0:
        gc.collect()
        gc.disable()
    _builds += 1
    start = time.perf_counter()
    code, error, message = _build(request)
    return BuildAnswer(code, error, message, time.perf_counter() - start)


def _build(request: BuildRequest) -> tuple[CandidateCode | None, ErrorKind | None, str]:
    if request.task is not None:
        _tasks[request.key] = request.task
    try:
        return named_function(request.build)(_tasks[request.key], request.trace), None, ""
    except ScheduleError as error:
        return None, ErrorKind.ILLEGAL, str(error)
    except MemoryError as error:
        return None, ErrorKind.OUT_OF_MEMORY, str(error)
    except McompileError as error:
        return None, ErrorKind.BUILD_ERROR, str(error)
    except Exception as error:  # whatever a candidate provokes must not end the tuning
        return None, ErrorKind.BUILD_ERROR, f"{type(error).__name__}: {error}"
