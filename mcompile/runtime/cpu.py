"""The CPU as a device for single kernels: what measuring and tests need."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import numpy as np

from mcompile.runtime.loader import LoadedCode
from mcompile.runtime.memory import Array, address, aligned_empty, round_up
from mcompile.runtime.plan import Argument, Kernel, KernelCall, NativeSegment, Space
from mcompile.runtime.pool import check_threads, process_pool
from mcompile.runtime.table import Bases, build_table
from mcompile.runtime.walker import Job


class LoadedKernels:
    """Kernels run one after the other, each on its own buffers (parameters in order), in parallel where they are.

    A kernel may stand there more than once. `code`: where it has been loaded already.
    """

    def __init__(
        self,
        kernels: Sequence[Kernel],
        buffers: Sequence[Sequence[Array]],
        threads: int = 1,
        code: LoadedCode | None = None,
    ) -> None:
        self._code = code or LoadedCode(tuple({kernel.name: kernel for kernel in kernels}.values()))
        self._buffers = [list(arrays) for arrays in buffers]
        flat = [array for arrays in self._buffers for array in arrays]
        calls, first = [], 0
        for kernel, arrays in zip(kernels, self._buffers, strict=True):
            args = tuple(Argument(Space.INPUT, 0, first + i) for i in range(len(arrays)))
            calls.append(KernelCall(kernel.name, args))
            first += len(arrays)
        by_name = {kernel.name: kernel for kernel in kernels}
        table = build_table(NativeSegment(tuple(calls)), by_name, self._code.addresses, Bases(len(flat), 0))
        scratch = max((round_up(kernel.scratch_bytes) for kernel in kernels), default=0)
        self._scratch = aligned_empty(scratch * check_threads(threads))
        self._bases = (ctypes.c_int64 * (2 + len(flat)))(0, 0, *map(address, flat))
        self._table = table
        self._job = Job(
            address(table.records),
            len(table.records),
            ctypes.addressof(self._bases),
            address(self._scratch),
            scratch,
            threads if table.has_parallel else 1,
            table.max_args,
            0,
        )
        self._pool = process_pool()

    def run(self) -> None:
        self._pool.run(self._job)

    def time(self, repeat: int) -> list[float]:
        """Seconds of each of `repeat` runs, call from Python (about 1 us) included."""
        seconds = []
        for _ in range(repeat):
            start = time.perf_counter()
            self.run()
            seconds.append(time.perf_counter() - start)
        return seconds

    def profile(self) -> list[float]:
        """Seconds of each kernel in one run."""
        times = np.zeros(self._job.count + 1, np.int64)
        self._job.times = address(times)
        try:
            self.run()
        finally:
            self._job.times = 0
        return [float(value) * 1e-9 for value in times[1:]]


def run_kernel(kernel: Kernel, buffers: Sequence[Array], threads: int = 1) -> None:
    """Run one kernel once; results are in the buffers."""
    LoadedKernels([kernel], [buffers], threads).run()
