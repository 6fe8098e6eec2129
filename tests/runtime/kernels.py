"""Tiny kernels written as LLVM IR, and plans of them, so that the runtime is tested without the compiler."""

from __future__ import annotations

from functools import cache

import llvmlite.binding as llvm
import numpy as np

from mcompile.dtypes import DType, TensorType
from mcompile.runtime import Artifact, Manifest
from mcompile.runtime.plan import (
    Argument,
    ExecutionPlan,
    Kernel,
    KernelCall,
    NativeSegment,
    Signature,
    Space,
)

# for i in [begin * block, end * block): {body}; %x, %y are parameters 0 and 1 (float*), %i the index
_LOOP = """
target triple = "{triple}"
{globals}
define void @{name}(ptr %buffers, ptr %scratch, i64 %begin, i64 %end) {{
entry:
  %x = load ptr, ptr %buffers
  %y.p = getelementptr ptr, ptr %buffers, i64 {last}
  %y = load ptr, ptr %y.p
  %first = mul i64 %begin, {block}
  %limit = mul i64 %end, {block}
  br label %look
look:
  %i = phi i64 [ %first, %entry ], [ %next, %body ]
  %more = icmp slt i64 %i, %limit
  br i1 %more, label %body, label %done
body:
  %xi.p = getelementptr float, ptr %x, i64 %i
  %yi.p = getelementptr float, ptr %y, i64 %i
  %xi = load float, ptr %xi.p
{body}
  %next = add i64 %i, 1
  br label %look
done:
  ret void
}}
"""
_COPY = "  store float %xi, ptr %yi.p"
_TABLE = """  %k = and i64 %i, 3
  %c.p = getelementptr [4 x float], ptr @table, i64 0, i64 %k
  %c = load float, ptr %c.p
  %sum = fadd float %xi, %c
  store float %sum, ptr %yi.p"""
_ACCUMULATE = """  %old = load float, ptr %yi.p
  %sum = fadd float %xi, %old
  store float %sum, ptr %yi.p"""
_SCRATCH = """  store float %xi, ptr %scratch
  %back = load volatile float, ptr %scratch
  %sum = fadd float %back, 1.0
  store float %sum, ptr %yi.p"""


@cache
def _target_machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(opt=2, reloc="pic")


@cache
def assemble(text: str) -> bytes:
    module = llvm.parse_assembly(text)
    module.verify()
    return bytes(_target_machine().emit_object(module))


def loop_kernel(
    name: str,
    body: str,
    extent: int,
    block: int,
    *,
    last: int = 1,
    globals_: str = "",
    scratch: int = 0,
    flops: int = 0,
) -> Kernel:
    text = _LOOP.format(
        triple=llvm.get_process_triple(), name=name, body=body, block=block, last=last, globals=globals_
    )
    return Kernel(name, "cpu", assemble(text), extent, scratch, flops, 8 * extent * block)


def copy(extent: int, block: int, name: str = "copy") -> Kernel:
    """y = x"""
    return loop_kernel(name, _COPY, extent, block)


def add_table(extent: int, block: int, name: str = "add_table") -> Kernel:
    """y[i] = x[i] + (1, 2, 3, 4)[i % 4]: the numbers lie in the object's own constants."""
    table = "@table = internal constant [4 x float] [float 1.0, float 2.0, float 3.0, float 4.0]"
    return loop_kernel(name, _TABLE, extent, block, globals_=table, flops=extent * block)


def accumulate(extent: int, block: int, name: str = "accumulate") -> Kernel:
    """y += x"""
    return loop_kernel(name, _ACCUMULATE, extent, block)


def through_scratch(extent: int, block: int, name: str = "through_scratch") -> Kernel:
    """y = x + 1, by way of the thread's scratch."""
    return loop_kernel(name, _SCRATCH, extent, block, scratch=64)


def place(space: Space, offset: int = 0, index: int = 0, step: int = 0) -> Argument:
    return Argument(space, offset, index, step)


IN = place(Space.INPUT)
OUT = place(Space.OUTPUT)


def arena(offset: int, step: int = 0) -> Argument:
    return place(Space.ARENA, offset, 0, step)


def signature(name: str, *shape: int, dtype: DType = DType.FLOAT32) -> Signature:
    return Signature(name, TensorType(shape, dtype), shape)


def host_manifest() -> Manifest:
    features = tuple(sorted(name for name, on in llvm.get_host_cpu_features().items() if on))
    return Manifest("0.1.0", llvm.get_process_triple(), llvm.get_host_cpu_name(), features, 2)


def make_artifact(
    kernels: tuple[Kernel, ...],
    calls: tuple[object, ...],
    inputs: tuple[Signature, ...],
    outputs: tuple[Signature, ...],
    *,
    arena_bytes: int = 0,
    constants: np.ndarray | None = None,
) -> Artifact:
    data = np.zeros(0, np.uint8) if constants is None else constants.view(np.uint8).reshape(-1)
    plan = ExecutionPlan(inputs, outputs, (NativeSegment(calls),), arena_bytes, data.nbytes)  # type: ignore[arg-type]
    return Artifact(host_manifest(), plan, kernels, data)


def chain_artifact(length: int = 4, extent: int = 16, block: int = 64) -> Artifact:
    """y = x + length * (1, 2, 3, 4, 1, ...), by parallel and serial calls through the arena."""
    size = extent * block * 4
    kernels = (
        add_table(extent, block, "parallel"),
        add_table(1, extent * block, "serial"),
        copy(1, extent * block, "copy"),
    )
    calls: list[KernelCall] = []
    source = IN
    for i in range(length):
        target = arena((i % 2) * size)
        calls.append(KernelCall(("parallel", "serial", "serial")[i % 3], (source, target), f"node{i}"))
        source = target
    calls.append(KernelCall("copy", (source, OUT), "last"))
    shape = (extent, block)
    return make_artifact(
        kernels, tuple(calls), (signature("x", *shape),), (signature("y", *shape),), arena_bytes=2 * size
    )


def chain_answer(x: np.ndarray, length: int = 4) -> np.ndarray:
    y = x.copy().reshape(-1)
    for _ in range(length):
        y = y + np.tile(np.array([1, 2, 3, 4], np.float32), y.size // 4)
    return y.reshape(x.shape)
