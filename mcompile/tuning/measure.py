"""Measuring: candidates are built by a Builder, then run by a Runner, both in processes of their own."""

from mcompile.tuning.dummy import DummyBuilder, DummyRunner
from mcompile.tuning.local_builder import LocalBuilder
from mcompile.tuning.local_runner import LocalRunner
from mcompile.tuning.run_child import RunOptions
from mcompile.tuning.trial import (
    Builder,
    BuiltCandidate,
    CandidateCode,
    ErrorKind,
    MeasureInput,
    MeasureResult,
    Runner,
    robust_seconds,
)

__all__ = [
    "Builder",
    "BuiltCandidate",
    "CandidateCode",
    "DummyBuilder",
    "DummyRunner",
    "ErrorKind",
    "LocalBuilder",
    "LocalRunner",
    "MeasureInput",
    "MeasureResult",
    "RunOptions",
    "Runner",
    "robust_seconds",
]
