"""Candidates that misbehave as their trace's first step says, and the build function that makes their code."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import numpy as np

from mcompile.backend.cpu.llvm import object_code
from mcompile.dtypes import DType
from mcompile.errors import BuildError
from mcompile.ir.tensor import placeholder
from mcompile.runtime.plan import Kernel
from mcompile.schedule.constructed import construct
from mcompile.schedule.steps import ComputeInline
from mcompile.schedule.task import Task
from mcompile.tuning.build_child import build_code
from mcompile.tuning.trial import CandidateCode, MeasureInput
from tests.schedule.programs import make_task, relu

BUILD = "tests.tuning.planted:build"
SIZE = 64

_KERNEL = """
target triple = "{triple}"
define void @candidate(ptr %buffers, ptr %scratch, i64 %begin, i64 %end) {{
  %x = load ptr, ptr %buffers
  %y.p = getelementptr ptr, ptr %buffers, i64 1
  %y = load ptr, ptr %y.p
{body}
  ret void
}}
"""
_COPY = f"  call void @llvm.memcpy.inline.p0.p0.i64(ptr %y, ptr %x, i64 {4 * SIZE}, i1 false)"
_BODIES = {
    "segfault": "  store volatile i32 0, ptr inttoptr (i64 16 to ptr)",
    "loop": "  br label %again\nagain:\n  br label %again\nnever:",
    "wrong": _COPY,
    "idle": "",
    "outside": f"  %z = getelementptr float, ptr %y, i64 {SIZE}\n  store float 0.0, ptr %z",
}


def task() -> Task:
    """64 numbers, each replaced by 0 if below."""
    return make_task([relu(placeholder("x", (SIZE,), DType.FLOAT32))], threads=1)


def plant(kind: str, of: Task | None = None) -> MeasureInput:
    """A candidate that does what `kind` says; "good" is the constructed schedule."""
    of = of or task()
    trace = construct(of)
    return MeasureInput(of, trace if kind == "good" else (ComputeInline(kind), *trace))


def build(task: Task, trace: tuple[object, ...]) -> CandidateCode:
    """What `build_code` does, but for planted traces."""
    first = trace[0] if trace else None
    kind = first.stage if isinstance(first, ComputeInline) else ""
    if kind in _BODIES:
        text = _KERNEL.format(triple=task.target.triple, body=_BODIES[kind])
        kernel = Kernel("candidate", task.target.triple, object_code(text, task.target), 1, 0)
        return CandidateCode((kernel,), (("x", "relu"),), {}, ())
    match kind:
        case "memory":
            code = build_code(task, trace[1:])
            return replace(code, kernels=tuple(replace(kernel, scratch_bytes=1 << 45) for kernel in code.kernels))
        case "build failure":
            raise BuildError("planted")
        case "build bug":
            raise ZeroDivisionError("planted")
        case "build crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "build loop":
            while True:
                pass
        case "build memory":
            np.ones(1 << 42, np.uint8)
    return build_code(task, trace)
