"""CUDA C -> cubin by NVRTC (from the wheel nvidia-cuda-nvrtc, or a CUDA toolkit); no GPU is needed."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

from mcompile.errors import BuildError


def build_cubin(source: str, arch: str, name: str = "kernel") -> bytes:
    """Compile for `arch` (`sm_80`, `sm_90`, ...). Raises BuildError with the compiler's log and the source."""
    library = _nvrtc()
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None)
    try:
        options = [f"-arch={arch}".encode(), b"--std=c++17"]
        status = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if status:
            raise BuildError(
                f"{name}: NVRTC rejects the kernel", source=source, log=_text(library, program, "ProgramLog")
            )
        return _bytes(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    return _bytes(library, program, what).rstrip(b"\0").decode(errors="replace")


def is_available() -> bool:
    """Whether an NVRTC library can be loaded."""
    return _find() is not None


@cache
def _nvrtc() -> ctypes.CDLL:
    library = _find()
    if library is None:
        raise BuildError("no NVRTC library found; install the extra: pip install 'mcompile[gpu]'")
    return library


@cache
def _find() -> ctypes.CDLL | None:
    for path in _candidates():
        try:
            for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so*")) if "/" in path else []:
                ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)  # NVRTC opens it later by name
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def _candidates() -> list[str]:
    wheels = [str(p) for root in sys.path for p in sorted(Path(root or ".").glob("nvidia/*/lib/libnvrtc.so.*"))]
    return [
        *(p for p in wheels if "builtins" not in p and ".alt." not in p),
        "libnvrtc.so.13",
        "libnvrtc.so.12",
        "libnvrtc.so",
    ]
