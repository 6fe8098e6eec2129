"""mcompile: compile ONNX models to native code, run them, and compare them with onnxruntime.

`InferenceSession` and `SessionOptions` are onnxruntime's in shape; `compile` makes an artifact ahead of time. All are
loaded on first use: importing `mcompile.runtime` must not bring in the compiler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcompile.driver import CompileOptions, InferenceSession, compile
    from mcompile.runtime.options import SessionOptions

__version__ = "0.1.0"
__all__ = ["CompileOptions", "InferenceSession", "SessionOptions", "__version__", "compile"]

_HOMES = {
    "CompileOptions": "mcompile.driver",
    "InferenceSession": "mcompile.driver",
    "SessionOptions": "mcompile.runtime.options",
    "compile": "mcompile.driver",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
