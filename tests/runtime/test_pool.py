"""The pool and the walker: shares, barriers, loops, concurrency, fork and exit."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import threading
import time
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcompile.errors import OptionError
from mcompile.runtime import InferenceSession
from mcompile.runtime import pool as pool_module
from mcompile.runtime.cpu import LoadedKernels, run_kernel
from mcompile.runtime.plan import KernelCall, Repeat, Space
from mcompile.runtime.pool import check_threads, process_pool
from mcompile.runtime.walker import MAX_THREADS, PoolState, walker_text
from tests.runtime.kernels import (
    IN,
    OUT,
    accumulate,
    add_table,
    arena,
    chain_answer,
    chain_artifact,
    copy,
    loop_kernel,
    make_artifact,
    place,
    signature,
    through_scratch,
)

THREADS = pytest.mark.parametrize("threads", [1, 2, 3])


def _input(rows: int = 16, columns: int = 64) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)


@THREADS
@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_serial_and_parallel_calls_are_ordered(threads: int, length: int) -> None:
    session = InferenceSession(chain_artifact(length), threads=threads)
    x = _input()
    for _ in range(20):
        assert np.array_equal(session.run(None, {"x": x})[0], chain_answer(x, length))


@THREADS
@pytest.mark.parametrize("extent", [0, 1, 2, 3, 5, 64])
def test_shares_cover_the_extent_once(threads: int, extent: int) -> None:
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    run_kernel(accumulate(extent, 1), [x, y], threads)
    assert np.array_equal(y[:extent], x[:extent])
    assert not y[extent:].any()


@THREADS
def test_every_thread_has_scratch_of_its_own(threads: int) -> None:
    x, y = np.arange(4096, dtype=np.float32), np.zeros(4096, np.float32)
    kernels = LoadedKernels([through_scratch(64, 64)], [[x, y]], threads)
    for _ in range(50):
        y[:] = 0
        kernels.run()
        assert np.array_equal(y, x + 1)


def _repeat_artifact(count: int, extent: int) -> object:
    """y = sum over t of x[t], x read backwards; both calls of the loop depend on each other."""
    block = 32
    size = extent * block * 4
    kernels = (copy(extent, block), accumulate(extent, block))
    zero = place(Space.CONSTANTS)
    loop = Repeat(
        count,
        (
            KernelCall("copy", (place(Space.INPUT, size * (count - 1), 0, -size), arena(0))),
            KernelCall("accumulate", (arena(0), arena(size))),
        ),
    )
    calls = (KernelCall("copy", (zero, arena(size))), loop, KernelCall("copy", (arena(size), OUT)))
    return make_artifact(
        kernels,
        calls,
        (signature("x", count, extent, block),),
        (signature("y", extent, block),),
        arena_bytes=2 * size,
        constants=np.zeros(size, np.uint8),
    )


@THREADS
@pytest.mark.parametrize("extent", [1, 7])
@pytest.mark.parametrize("count", [1, 2, 1000])
def test_repeat_steps_its_arguments(threads: int, extent: int, count: int) -> None:
    session = InferenceSession(_repeat_artifact(count, extent), threads=threads)  # type: ignore[arg-type]
    x = np.random.default_rng(1).integers(-8, 8, (count, extent, 32)).astype(np.float32)
    assert np.array_equal(session.run(None, {"x": x})[0], x.sum(0))


def test_empty_repeats_run_nothing() -> None:
    call = KernelCall("accumulate", (IN, OUT))
    calls = (KernelCall("copy", (IN, OUT)), Repeat(0, (call,)), Repeat(5, ()), call)
    artifact = make_artifact((copy(1, 8), accumulate(1, 8)), calls, (signature("x", 8),), (signature("y", 8),))
    x = np.ones(8, np.float32)
    assert np.array_equal(InferenceSession(artifact).run(None, {"x": x})[0], 2 * x)


def test_no_segment_with_only_serial_calls_wakes_the_workers() -> None:
    session = InferenceSession(chain_artifact(1, extent=1), threads=3)
    before = [slot.jobs for slot in process_pool().state.slots[:4]]
    session.run(None, {"x": _input(1)})
    assert [slot.jobs for slot in process_pool().state.slots[:4]] == before


def test_sleeping_workers_are_woken() -> None:
    session = InferenceSession(chain_artifact(), threads=3)
    x = _input()
    for _ in range(5):
        time.sleep(0.02)
        assert np.array_equal(session.run(None, {"x": x})[0], chain_answer(x))


def test_idle_workers_sleep() -> None:
    session = InferenceSession(chain_artifact(), threads=2)
    session.run(None, {"x": _input()})
    time.sleep(0.05)
    start = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - start < 0.1


@pytest.mark.parametrize("threads", [1, 2])
def test_concurrent_runs_from_python_threads(threads: int) -> None:
    """Of one session and of several; whoever finds the pool busy runs alone."""
    shared = InferenceSession(chain_artifact(5), threads=threads)
    wrong: list[int] = []

    def work(seed: int) -> None:
        session = shared if seed % 2 else InferenceSession(chain_artifact(5), threads=threads)
        x = np.random.default_rng(seed).standard_normal((16, 64)).astype(np.float32)
        expected = chain_answer(x, 5)
        for _ in range(200):
            if not np.array_equal(session.run(None, {"x": x})[0], expected):
                wrong.append(seed)

    callers = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not any(caller.is_alive() for caller in callers)
    assert not wrong


def test_a_busy_pool_leaves_the_caller_alone() -> None:
    pool = process_pool()
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    kernels = LoadedKernels([copy(4, 16)], [[x, y]], 2)
    assert pool.run(kernels._job) == 2
    pool.state.busy = 1
    try:
        assert pool.run(kernels._job) == 1
    finally:
        pool.state.busy = 0
    assert np.array_equal(x, y)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_starts_its_own_workers() -> None:
    session = InferenceSession(chain_artifact(), threads=2)
    x = _input()
    session.run(None, {"x": x})
    child = os.fork()
    if child == 0:
        good = process_pool().workers == 0
        good = good and np.array_equal(session.run(None, {"x": x})[0], chain_answer(x))
        os._exit(0 if good and process_pool().workers == 1 else 1)
    deadline = time.monotonic() + 30
    finished, status = 0, 0
    while not finished and time.monotonic() < deadline:
        finished, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not finished:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert finished
    assert os.waitstatus_to_exitcode(status) == 0
    assert np.array_equal(session.run(None, {"x": x})[0], chain_answer(x))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_while_the_pool_is_being_made_leaves_a_free_lock() -> None:
    with pool_module._making:
        child = os.fork()
        if child == 0:
            os._exit(int(pool_module._making.locked()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


_EXITING = """
import sys, threading, time
sys.path.insert(0, {root!r})
import numpy as np
from mcompile.runtime import InferenceSession
from tests.runtime.kernels import chain_artifact
session = InferenceSession(chain_artifact(), threads=3)
x = np.zeros((16, 64), np.float32)
session.run(None, {{"x": x}})
def forever():
    while True:
        session.run(None, {{"x": x}})
for _ in range({daemons}):
    threading.Thread(target=forever, daemon=True).start()
time.sleep({seconds})
print("end")
"""


@pytest.mark.parametrize(("daemons", "seconds"), [(0, 0.0), (0, 0.05), (2, 0.05)])
def test_exit_does_not_hang(daemons: int, seconds: float) -> None:
    """With workers spinning, asleep, and with daemon threads in mid-run."""
    root = os.fspath(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    program = _EXITING.format(root=root, daemons=daemons, seconds=seconds)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


_FLUSH = """
target triple = "{triple}"
declare void @llvm.x86.sse.ldmxcsr(ptr)
declare void @llvm.x86.sse.stmxcsr(ptr)
define void @set(i32 %control) {{
  %p = alloca i32
  store i32 %control, ptr %p
  call void @llvm.x86.sse.ldmxcsr(ptr %p)
  ret void
}}
define i32 @get() {{
  %p = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %p)
  %control = load i32, ptr %p
  ret i32 %control
}}
"""
_SCALE = """  %v = load volatile float, ptr %xi.p
  %r = fmul float %v, 0.5
  store float %r, ptr %yi.p"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="sets the control register of x86")
def test_kernels_keep_subnormals_and_the_callers_control_word_stays() -> None:
    engine = llvm.create_mcjit_compiler(
        llvm.parse_assembly(_FLUSH.format(triple=llvm.get_process_triple())),
        llvm.Target.from_default_triple().create_target_machine(),
    )
    engine.finalize_object()
    set_control = ctypes.CFUNCTYPE(None, ctypes.c_uint32)(engine.get_function_address("set"))
    get_control = ctypes.CFUNCTYPE(ctypes.c_uint32)(engine.get_function_address("get"))
    x, y = np.full(64, 1e-40, np.float32), np.zeros(64, np.float32)
    kernels = LoadedKernels([loop_kernel("scale", _SCALE, 4, 16)], [[x, y]], 2)
    usual = get_control()
    flushing = 0x1F80 | 0x8040
    set_control(flushing)
    try:
        kernels.run()
        after = get_control()
    finally:
        set_control(usual)
    assert after == flushing
    assert (y.view(np.uint32) == x.view(np.uint32) // 2).all()


def test_the_walker_is_generated_for_aarch64() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(walker_text("aarch64-unknown-linux-gnu"))
    module.verify()
    machine = llvm.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(features="+neon", opt=0)
    assert machine.emit_object(module)[:4] == b"\x7fELF"


def test_structs_lie_where_the_walker_thinks() -> None:
    """Cache lines of their own for what different threads write."""
    offsets = {name: getattr(PoolState, name).offset for name in ("busy", "arrived", "job", "slots")}
    assert offsets == {"busy": 0, "arrived": 64, "job": 128, "slots": 256}
    assert ctypes.sizeof(PoolState) == 256 + 64 * MAX_THREADS


@pytest.mark.parametrize("threads", [0, -1, MAX_THREADS + 1, 1.5, True])
def test_bad_thread_counts_are_refused(threads: int) -> None:
    with pytest.raises(OptionError, match="threads: expected a number from 1 to 256"):
        check_threads(threads)


_ROWS, _ROW = 6, 8  # slots of the arena, floats in each
_STEP_KERNELS = (
    copy(1, _ROW, "copy.1"),
    copy(4, _ROW // 4, "copy.n"),
    accumulate(1, _ROW, "accumulate.1"),
    accumulate(_ROW, 1, "accumulate.n"),
    add_table(2, _ROW // 2, "add_table.n"),
)
_SLOT = st.integers(0, _ROWS - 1)
_STEP = st.tuples(st.sampled_from([kernel.name for kernel in _STEP_KERNELS]), _SLOT, _SLOT, st.integers(0, 1))
_TABLE = st.lists(st.one_of(_STEP, st.tuples(st.integers(0, 3), st.lists(_STEP, min_size=1, max_size=4))), max_size=12)


def _call(kernel: str, source: int, target: int, step: int) -> KernelCall:
    """In iteration t: from slot source + t * step to slot target (the arena has room behind its slots)."""
    return KernelCall(kernel, (arena(source * _ROW * 4, step * _ROW * 4), arena(target * _ROW * 4)))


def _simulate(table: list[Any], memory: np.ndarray) -> None:
    def apply(kernel: str, source: int, target: int) -> None:
        x = memory[source].copy()
        if kernel.startswith("accumulate"):
            x += memory[target]
        elif kernel.startswith("add_table"):
            x += np.tile(np.array([1, 2, 3, 4], np.float32), 2)
        memory[target] = x

    for item in table:
        count, steps = item if isinstance(item[1], list) else (1, [item])
        for t in range(count):
            for kernel, source, target, step in steps:
                apply(kernel, source + (t * step if count > 1 else 0), target)


@settings(max_examples=60, deadline=None)
@given(_TABLE, st.sampled_from([1, 2, 3]))
def test_any_table_gives_what_its_calls_in_order_give(table: list[Any], threads: int) -> None:
    size = (_ROWS + 4) * _ROW
    calls = (
        KernelCall("in", (IN, arena(0))),
        *(
            Repeat(item[0], tuple(_call(*step) for step in item[1])) if isinstance(item[1], list) else _call(*item)
            for item in table
        ),
        KernelCall("out", (arena(0), OUT)),
    )
    kernels = (*_STEP_KERNELS, copy(1, size, "in"), copy(1, size, "out"))
    shape = (_ROWS + 4, _ROW)
    artifact = make_artifact(kernels, calls, (signature("x", *shape),), (signature("y", *shape),), arena_bytes=4 * size)
    memory = np.random.default_rng(0).integers(-4, 5, shape).astype(np.float32)
    result = InferenceSession(artifact, threads=threads).run(None, {"x": memory})[0]
    _simulate(table, memory)
    assert np.array_equal(result, memory)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_workers_stay_off_the_callers_core(monkeypatch):
    pool = process_pool()
    pool.ensure(2)
    worker = next(thread for thread in threading.enumerate() if thread.name == "mcompile-1")
    for core in sorted(os.sched_getaffinity(0))[:2]:
        monkeypatch.setattr(pool, "_current_core", lambda core=core: core)
        pool.spread()
        bound = os.sched_getaffinity(worker.native_id)
        assert len(bound) == 1
        assert bound.isdisjoint({core})
