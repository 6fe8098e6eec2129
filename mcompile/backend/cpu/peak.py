"""What this machine can do at most: fused multiply-adds and reading from memory, measured by two tiny kernels."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import llvmlite.binding as llvm
import numpy as np

from mcompile.target import Target

_FMA_ROUNDS = 250_000  # about a millisecond: short enough to go uninterrupted on a busy machine
_MOST_BYTES = 512 << 20  # of the array that is read; else twice the last cache
_FMA_TRIES, _READ_TRIES = 60, 5
_STREAMS = 8  # vectors read in one round of the loop


@dataclass(frozen=True)
class Peak:
    """Of all the threads that were measured together."""

    flops_per_second: float
    bytes_per_second: float


def measure_peak(target: Target, threads: int = 1) -> Peak:
    """The best of a few tries with `threads` threads at once; takes about half a second."""
    engine = _build(target)
    fma, read = (_function(engine, name) for name in ("peak_fma", "peak_read"))
    lanes, accumulators = target.lanes(4), _accumulators(target)
    places = [_aligned(lanes * 4) for _ in range(threads)]
    seconds = _best(fma, [(place.ctypes.data, _FMA_ROUNDS) for place in places], _FMA_TRIES)
    flops = 2.0 * threads * _FMA_ROUNDS * accumulators * lanes / seconds
    size = min(_MOST_BYTES, max(64 << 20, 2 * target.l3_bytes)) // threads
    data = [_aligned(size) for _ in range(threads)]
    rounds = size // (target.vector_bytes * _STREAMS)
    seconds = _best(read, [(array.ctypes.data, rounds) for array in data], _READ_TRIES)
    return Peak(flops, threads * size / seconds)


def _accumulators(target: Target) -> int:
    """Independent chains: enough to hide the latency, few enough to stay in registers."""
    return 20 if target.vector_registers >= 32 else 10


def _fma_text(target: Target) -> str:
    lanes, count = target.lanes(4), _accumulators(target)
    vector = f"<{lanes} x float>"
    phis = [f"  %a{i} = phi {vector} [ %x, %entry ], [ %b{i}, %loop ]" for i in range(count)]
    fmas = [
        f"  %b{i} = call {vector} @llvm.fma.v{lanes}f32({vector} %x, {vector} %x, {vector} %a{i})" for i in range(count)
    ]
    sums = [f"  %s{i + 1} = fadd {vector} %s{i}, %b{i + 1}" for i in range(count - 1)]
    return "\n".join(
        [
            f"declare {vector} @llvm.fma.v{lanes}f32({vector}, {vector}, {vector})",
            "define void @peak_fma(ptr %p, i64 %n) {",
            f"entry:\n  %x = load {vector}, ptr %p, align 64\n  br label %loop",
            "loop:\n  %k = phi i64 [ 0, %entry ], [ %k1, %loop ]",
            *phis,
            *fmas,
            "  %k1 = add i64 %k, 1\n  %more = icmp slt i64 %k1, %n\n  br i1 %more, label %loop, label %exit",
            f"exit:\n  %s0 = fadd {vector} %b0, %x",
            *sums,
            f"  store {vector} %s{count - 1}, ptr %p, align 64\n  ret void\n}}",
        ]
    )


def _read_text(target: Target) -> str:
    lanes = target.lanes(4)
    vector = f"<{lanes} x i32>"
    phis = [f"  %a{i} = phi {vector} [ zeroinitializer, %entry ], [ %b{i}, %loop ]" for i in range(_STREAMS)]
    loads = [
        f"  %q{i} = getelementptr {vector}, ptr %p, i64 %j{i}\n  %v{i} = load {vector}, ptr %q{i}, align 64\n"
        f"  %b{i} = xor {vector} %a{i}, %v{i}"
        for i in range(_STREAMS)
    ]
    places = [f"  %j{i} = add i64 %j, {i}" for i in range(_STREAMS)]
    sums = [f"  %s{i + 1} = xor {vector} %s{i}, %b{i + 1}" for i in range(_STREAMS - 1)]
    return "\n".join(
        [
            "define void @peak_read(ptr %p, i64 %n) {",
            "entry:\n  br label %loop",
            "loop:\n  %k = phi i64 [ 0, %entry ], [ %k1, %loop ]",
            *phis,
            f"  %j = mul i64 %k, {_STREAMS}",
            *places,
            *loads,
            "  %k1 = add i64 %k, 1\n  %more = icmp slt i64 %k1, %n\n  br i1 %more, label %loop, label %exit",
            f"exit:\n  %s0 = xor {vector} %b0, zeroinitializer",
            *sums,
            f"  store {vector} %s{_STREAMS - 1}, ptr %p, align 64\n  ret void\n}}",
        ]
    )


def _build(target: Target) -> llvm.ExecutionEngine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    header = f'target triple = "{target.triple}"\n'
    module = llvm.parse_assembly(header + _fma_text(target) + "\n" + _read_text(target))
    module.verify()
    machine = llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.feature_string, opt=2
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


def _function(engine: llvm.ExecutionEngine, name: str) -> Callable[[int, int], None]:
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
    return prototype(engine.get_function_address(name))


def _aligned(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    memory = np.ones(size + 64, np.uint8)  # ones: a page of zeros may not be there at all
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def _best(function: Callable[[int, int], None], arguments: Sequence[tuple[int, int]], tries: int) -> float:
    """Seconds that all calls, one a thread, took together: the best of a few tries."""
    best = float("inf")
    for _ in range(tries):
        workers = [threading.Thread(target=function, args=pair) for pair in arguments[1:]]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        function(*arguments[0])
        for worker in workers:
            worker.join()
        best = min(best, time.perf_counter() - start)
    return best
