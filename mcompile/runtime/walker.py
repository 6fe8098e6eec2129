"""Compiles `walker.ll` for this process, and mirrors its structs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

import llvmlite.binding as llvm

from mcompile.errors import BuildError

MAX_THREADS = 256


class Slot(ctypes.Structure):
    """One thread's own cache line."""

    _fields_ = (
        ("jobs", ctypes.c_int32),  # given to it so far
        ("sleepers", ctypes.c_int32),  # 1 while it sleeps
        ("shares_core", ctypes.c_int32),  # with the thread it waits for
        ("_pad", ctypes.c_int32 * 13),
    )


class PoolState(ctypes.Structure):
    """What the pool's threads share."""

    _fields_ = (
        ("busy", ctypes.c_int64),
        ("_pad0", ctypes.c_int64 * 7),
        ("arrived", ctypes.c_int32),
        ("sleepers", ctypes.c_int32),
        ("_pad1", ctypes.c_int32 * 14),
        ("job", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("stop", ctypes.c_int64),
        ("workers", ctypes.c_int64),
        ("syscall", ctypes.c_int64),
        ("sched_yield", ctypes.c_int64),
        ("clock_gettime", ctypes.c_int64),
        ("futex", ctypes.c_int64),
        ("idle_spins", ctypes.c_int64),
        ("idle_yields", ctypes.c_int64),
        ("barrier_spins", ctypes.c_int64),
        ("barrier_yields", ctypes.c_int64),
        ("_pad2", ctypes.c_int64 * 4),
        ("slots", Slot * MAX_THREADS),
    )


class Job(ctypes.Structure):
    """One run of one table."""

    _fields_ = (
        ("records", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("bases", ctypes.c_int64),
        ("scratch", ctypes.c_int64),
        ("scratch_bytes", ctypes.c_int64),  # of each thread
        ("threads", ctypes.c_int64),
        ("max_args", ctypes.c_int64),
        ("times", ctypes.c_int64),  # count + 1 of them, in nanoseconds, the first unused; 0 for none
    )


_X86 = """
declare void @llvm.x86.sse2.pause()
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)
define internal void @relax() alwaysinline {
  call void @llvm.x86.sse2.pause()
  ret void
}
define internal i64 @set_float_control(i64 %control) {
  %old = alloca i32
  %new = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %old)
  %word = trunc i64 %control to i32
  store i32 %word, ptr %new
  call void @llvm.x86.sse.ldmxcsr(ptr %new)
  %before = load i32, ptr %old
  %result = zext i32 %before to i64
  ret i64 %result
}
"""
_AARCH64 = """
declare void @llvm.aarch64.hint(i32)
declare i64 @llvm.aarch64.get.fpcr()
declare void @llvm.aarch64.set.fpcr(i64)
define internal void @relax() alwaysinline {
  call void @llvm.aarch64.hint(i32 1)
  ret void
}
define internal i64 @set_float_control(i64 %control) {
  %before = call i64 @llvm.aarch64.get.fpcr()
  call void @llvm.aarch64.set.fpcr(i64 %control)
  ret i64 %before
}
"""


@dataclass(frozen=True)
class Machine:
    """What differs between architectures: intrinsics, the default floating-point control word, futex's number."""

    intrinsics: str
    float_control: int  # round to nearest, subnormals kept, no traps
    futex: int  # Linux


MACHINES = {"x86_64": Machine(_X86, 0x1F80, 202), "aarch64": Machine(_AARCH64, 0, 98)}


def machine_of(triple: str) -> Machine:
    """Raises BuildError for an architecture the runtime does not know."""
    architecture = triple.split("-")[0].replace("arm64", "aarch64")
    if architecture not in MACHINES:
        raise BuildError(f"no runtime for {triple}; expected one of {', '.join(MACHINES)}")
    return MACHINES[architecture]


def walker_text(triple: str) -> str:
    """The walker's LLVM IR for a machine."""
    machine = machine_of(triple)
    template = Template(Path(__file__).with_name("walker.ll").read_text(encoding="utf-8"))
    return template.substitute(
        triple=triple,
        intrinsics=machine.intrinsics,
        float_control=machine.float_control,
        max_threads=MAX_THREADS,
    )


@dataclass(frozen=True)
class Walker:
    """The compiled entry points. They release the GIL. `engine` keeps their code alive."""

    work: Callable[[int, int], None]
    run: Callable[[int, int], int]
    stop: Callable[[int], int]
    spin: Callable[[int], None]
    engine: Any


@cache
def compiled_walker() -> Walker:
    """Compiled on first use, then shared by the whole process.

    Unoptimised: that takes 10 ms instead of 40, and a call of the table 11 ns instead of 9.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(walker_text(llvm.get_process_triple()))
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=0)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    word = ctypes.c_int64

    def entry(name: str, result: Any, *parameters: Any) -> Any:
        return ctypes.CFUNCTYPE(result, *parameters)(engine.get_function_address(name))

    return Walker(
        entry("work", None, word, word),
        entry("run", word, word, word),
        entry("stop", word, word),
        entry("spin", None, word),
        engine,
    )
