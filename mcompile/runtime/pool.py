"""The process's thread pool: Python threads parked in compiled code, where they hold no lock of Python's.

Between jobs a worker stays awake for a while, then sleeps in the kernel. One job at a time has the workers; a job that
comes meanwhile runs on its caller alone. A forked child starts with no workers; at exit the workers are sent home.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from contextlib import suppress
from functools import cache

import llvmlite.binding as llvm

from mcompile import config
from mcompile.errors import OptionError
from mcompile.runtime.memory import address, aligned_empty
from mcompile.runtime.walker import MAX_THREADS, Job, PoolState, Walker, compiled_walker, machine_of

# Who waits first spins, which wakes fastest, then offers its core to others again and again (the other thread may be
# waiting for it), then sleeps.
SPIN_SECONDS = 20e-6
YIELD_SECONDS = 0.5e-6  # what an offer takes when nobody wants the core
BARRIER_SECONDS = 1e-3  # until a thread that waits for another within a job sleeps
_CALIBRATION_PAUSES = 1000
_EXIT_SECONDS = 1.0  # that exit waits for a job of another thread and for the workers' end


class Pool:
    """Runs jobs. `state_address` and `walker.run` are what a caller in a hurry needs."""

    def __init__(self, idle_seconds: float) -> None:
        self.walker: Walker = compiled_walker()
        self._memory = aligned_empty(ctypes.sizeof(PoolState))
        self.state_address = address(self._memory)
        self.state = PoolState.from_address(self.state_address)
        self.workers = 0
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._idle_seconds = idle_seconds
        self._pause_seconds = _measure_pause(self.walker)
        self._closed = False
        self._reset()

    def ensure(self, threads: int) -> None:
        """See to it that jobs of so many threads find workers. Cheap when they are there already."""
        if self.workers >= threads - 1 or self._closed or not sys.platform.startswith("linux"):
            return
        with self._lock:
            while self.workers < threads - 1:
                self.workers += 1
                thread = threading.Thread(
                    target=self.walker.work,
                    args=(self.state_address, self.workers),
                    name=f"mcompile-{self.workers}",
                    daemon=True,
                )
                thread.start()
                self._threads.append(thread)
                self.state.workers = self.workers
                self._caller_core = -1

    def spread(self) -> None:
        """Keep workers off the core that the caller is on: left alone, a kernel often puts both on one.

        Cheap while the caller stays where it is. Each worker is bound to a core of its own, next to the caller's.
        """
        core = self._current_core()
        if core != self._caller_core:
            self._caller_core = core
            self._bind_workers(core)

    def _bind_workers(self, core: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        if core not in cores or len(cores) < 2:
            return
        after = cores.index(core) + 1
        others = [*cores[after:], *cores[: after - 1]]
        for position, thread in enumerate(self._threads):
            if thread.native_id is not None:
                with suppress(OSError):  # a core taken away meanwhile, or a worker gone home
                    os.sched_setaffinity(thread.native_id, {others[position % len(others)]})

    def run(self, job: Job) -> int:
        """Run a job to its end; returns the number of threads it had."""
        self.ensure(job.threads)
        if self.workers:
            self.spread()
        return self.walker.run(self.state_address, ctypes.addressof(job))

    def close(self) -> None:
        """Send the workers home; later jobs run on their callers alone. Gives up after a second of waiting."""
        self._closed = True
        if self._threads and self._stop_workers():
            for thread in self._threads:
                thread.join(_EXIT_SECONDS)

    def _stop_workers(self) -> bool:
        deadline = time.monotonic() + _EXIT_SECONDS
        while not self.walker.stop(self.state_address):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def _reset(self) -> None:
        """As in a process without workers: at the start, and in a forked child."""
        self._memory[:] = 0
        self._threads = []
        self._lock = threading.Lock()
        self.workers = 0
        self._caller_core = -1  # where the workers were placed around
        libc = ctypes.CDLL(None)
        self._current_core = libc.sched_getcpu if sys.platform.startswith("linux") else _no_core
        self.state.syscall = _function_address(libc.syscall)
        self.state.sched_yield = _function_address(libc.sched_yield)
        self.state.clock_gettime = _function_address(libc.clock_gettime)
        self.state.futex = machine_of(llvm.get_process_triple()).futex
        self.state.idle_spins, self.state.idle_yields = self._patience(self._idle_seconds)
        self.state.barrier_spins, self.state.barrier_yields = self._patience(BARRIER_SECONDS)

    def _patience(self, seconds: float) -> tuple[int, int]:
        """Spins and yields that take so long on an idle machine."""
        spinning = min(seconds, SPIN_SECONDS)
        return int(spinning / self._pause_seconds), int((seconds - spinning) / YIELD_SECONDS)


def _measure_pause(walker: Walker) -> float:
    """Seconds that one pause takes: 10 ns on one processor, 70 on another."""
    best = 1.0
    for _ in range(3):
        start = time.perf_counter()
        walker.spin(_CALIBRATION_PAUSES)
        best = min(best, time.perf_counter() - start)
    return best / _CALIBRATION_PAUSES


def _no_core() -> int:
    return -1


def _function_address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


_making = threading.Lock()


@cache
def _shared_pool() -> Pool:
    pool = Pool(config.load().spin_us * 1e-6)
    atexit.register(pool.close)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=pool._reset)
    return pool


def _renew_making() -> None:
    """In a forked child: the lock may have been held by a thread that is not there any more."""
    global _making
    _making = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_making)


def process_pool() -> Pool:
    """The process's pool, made on first use. MCOMPILE_SPIN_US sets how long its idle workers stay awake."""
    with _making:
        return _shared_pool()


def check_threads(threads: int) -> int:
    """Raises OptionError unless a pool can have so many."""
    if type(threads) is not int or not 1 <= threads <= MAX_THREADS:
        raise OptionError(f"threads: expected a number from 1 to {MAX_THREADS}, got {threads!r}")
    return threads
