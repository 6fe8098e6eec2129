"""Loads and runs kernels in a test's own process."""

from __future__ import annotations

import ctypes
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from mcompile.backend.cpu.build import build_kernel
from mcompile.ir.stmt import PrimFunc
from mcompile.runtime.plan import Kernel
from mcompile.target import Target, parse_target

_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


class Loaded:
    """A kernel's code in memory."""

    def __init__(self, kernel: Kernel) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(kernel.code))
        self._engine.finalize_object()
        self.kernel = kernel
        self._function = _SIGNATURE(self._engine.get_function_address(kernel.name))
        self._scratch = aligned(np.zeros(max(kernel.scratch_bytes, 1), np.uint8))

    def bind(self, *arrays: np.ndarray[Any, Any]) -> Any:
        """A call without arguments that runs the whole kernel on `arrays`."""
        addresses = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
        extent, scratch = self.kernel.parallel_extent, self._scratch.ctypes.data

        def call() -> None:
            assert all(array.ctypes.data == address for array, address in zip(arrays, addresses, strict=True))
            self._function(addresses, scratch, 0, extent)

        return call

    def run_range(self, arrays: list[np.ndarray[Any, Any]], begin: int, end: int) -> None:
        """Some iterations of the parallel loop."""
        addresses = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
        self._function(addresses, self._scratch.ctypes.data, begin, end)

    def __call__(self, *arrays: np.ndarray[Any, Any]) -> None:
        self.bind(*arrays)()


def aligned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy at an address that is a multiple of 64."""
    memory = np.zeros(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    result = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    result[...] = array
    return result


def run(func: PrimFunc, target: Target, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    """Build `func` and run it on its parameters' memory."""
    Loaded(build_kernel(func, target))(*(arrays[param.name] for param in func.params))


def runnable_targets() -> list[Target]:
    """This machine, and the levels of x86 below it."""
    host = parse_target("cpu", threads=1)
    levels = [parse_target(name, threads=1) for name in ("x86-64-v3", "x86-64-v2")]
    return [host, *(level for level in levels if set(level.features) <= set(host.features))]
