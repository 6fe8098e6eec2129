"""Object code comes in fast, and what LLVM would end the process for is refused before."""

from __future__ import annotations

import dataclasses
import time

import llvmlite.binding as llvm
import numpy as np
import pytest

from mcompile.errors import ArtifactError
from mcompile.runtime.cpu import LoadedKernels, run_kernel
from mcompile.runtime.loader import LoadedCode
from tests.runtime.kernels import add_table, assemble, copy


def test_a_hundred_kernels_load_at_once() -> None:
    kernels = [add_table(4, 4, f"kernel{i}") for i in range(100)]
    LoadedCode(kernels[:1])
    start = time.perf_counter()
    code = LoadedCode(kernels)
    assert time.perf_counter() - start < 0.25  # about 10 ms on an idle machine
    assert len(set(code.addresses.values())) == 100


@pytest.mark.parametrize("code", [b"", b"\x7fELF", b"nonsense" * 40, bytes(500)])
def test_garbage_is_refused(code: bytes) -> None:
    with pytest.raises(ArtifactError, match="kernel copy: its object code is no ELF object"):
        LoadedCode([dataclasses.replace(copy(1, 1), code=code)])


def test_truncated_code_is_refused() -> None:
    kernel = add_table(1, 4)
    for size in range(0, len(kernel.code), 50):
        with pytest.raises(ArtifactError, match=r"no ELF object|no function"):
            LoadedCode([dataclasses.replace(kernel, code=kernel.code[:size])])


def test_undefined_symbols_are_named() -> None:
    text = f"""
target triple = "{llvm.get_process_triple()}"
declare void @elsewhere()
define void @f(ptr %b, ptr %s, i64 %i, i64 %j) {{
  call void @elsewhere()
  ret void
}}"""
    with pytest.raises(ArtifactError, match="kernel f: its object code needs elsewhere"):
        LoadedCode([dataclasses.replace(copy(1, 1), name="f", code=assemble(text))])


def test_a_missing_function_is_named() -> None:
    with pytest.raises(ArtifactError, match="kernel g: its object code defines no function of that name"):
        LoadedCode([dataclasses.replace(copy(1, 1), name="g")])


def test_another_machines_code_is_refused() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly('target triple = "riscv64-unknown-linux-gnu"\ndefine void @f() {\n  ret void\n}')
    code = llvm.Target.from_triple("riscv64-unknown-linux-gnu").create_target_machine().emit_object(module)
    with pytest.raises(ArtifactError, match="for another machine"):
        LoadedCode([dataclasses.replace(copy(1, 1), name="f", code=bytes(code))])


def test_single_kernels_can_be_run_and_timed() -> None:
    x, y, z = np.ones(64, np.float32), np.zeros(64, np.float32), np.zeros(64, np.float32)
    kernels = LoadedKernels([copy(4, 16), add_table(4, 16)], [[x, y], [y, z]], threads=2)
    assert len(kernels.time(3)) == 3
    assert np.array_equal(z, np.tile(np.array([2, 3, 4, 5], np.float32), 16))
    assert all(seconds > 0 for seconds in kernels.profile())
    run_kernel(copy(1, 64), [z, y])
    assert np.array_equal(y, z)
