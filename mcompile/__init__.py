"""mcompile: compile ONNX models to native code, run them, and compare them with onnxruntime.

`InferenceSession` and `SessionOptions` are onnxruntime's in shape; `compile` makes an artifact ahead of time. All are
loaded on first use: importing `mcompile.runtime` must not bring in the compiler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcompile.driver import CompileOptions
    from mcompile.driver import compile_model as compile
    from mcompile.runtime import (
        ExecutionMode,
        GraphOptimizationLevel,
        IOBinding,
        OrtValue,
        RunOptions,
        SessionOptions,
        get_available_providers,
        get_device,
    )
    from mcompile.session import InferenceSession
    from mcompile.tuner import tune

__version__ = "0.1.0"
_RUNTIME = (
    "ExecutionMode",
    "GraphOptimizationLevel",
    "IOBinding",
    "OrtValue",
    "RunOptions",
    "SessionOptions",
    "get_available_providers",
    "get_device",
)
_HOMES = {
    "CompileOptions": ("mcompile.driver", "CompileOptions"),
    "compile": ("mcompile.driver", "compile_model"),
    "tune": ("mcompile.tuner", "tune"),
    "InferenceSession": ("mcompile.session", "InferenceSession"),
    **{name: ("mcompile.runtime", name) for name in _RUNTIME},
}
__all__ = [
    "CompileOptions",
    "ExecutionMode",
    "GraphOptimizationLevel",
    "IOBinding",
    "InferenceSession",
    "OrtValue",
    "RunOptions",
    "SessionOptions",
    "__version__",
    "compile",
    "get_available_providers",
    "get_device",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
