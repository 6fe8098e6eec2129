"""GPU schedules: the interpreter agrees with the dag, and NVRTC compiles what is printed. No GPU is needed."""

from __future__ import annotations

import pytest

from mcompile.backend.cuda.build import build_cubin, is_available
from mcompile.backend.cuda.emit import emit_cuda, launch_dims, shared_bytes
from mcompile.errors import BuildError
from mcompile.ir.expr import maximum
from mcompile.ir.tensor import Compute, compute, placeholder
from mcompile.schedule.constructed import construct
from mcompile.schedule.lower import LoweredTask
from mcompile.schedule.task import Task
from tests.schedule.programs import F32, check, make_task, matmul, softmax

needs_nvrtc = pytest.mark.skipif(not is_available(), reason="no NVRTC library: pip install 'mcompile[gpu]'")


def fused_matmul(m: int, n: int, k: int, batch: int = 1) -> Compute:
    y, bias = matmul(m, n, k, batch), placeholder("bias", (n,), F32)
    return compute("out", y.shape, lambda h, i, j: maximum(y[h, i, j] + bias[j], 0.0), axis_names=("h", "m", "n"))


def gpu_task(output: Compute) -> Task:
    return make_task([output], target="cuda:sm_80")


@pytest.mark.parametrize("shape", [(64, 64, 16), (70, 33, 19), (5, 66, 8, 2)])
def test_matmul_interpreted(shape: tuple[int, ...]) -> None:
    task = gpu_task(fused_matmul(*shape))
    lowered = check(task, construct(task))
    assert shared_bytes(lowered.funcs[0]) > 0


def test_softmax_interpreted() -> None:
    task = gpu_task(softmax(3, 300))
    check(task, construct(task))


def lowered_samples() -> list[LoweredTask]:
    tasks = [gpu_task(fused_matmul(70, 33, 19, 2)), gpu_task(softmax(3, 300))]
    return [check(task, construct(task)) for task in tasks]


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_nvrtc_compiles(arch: str) -> None:
    for lowered in lowered_samples():
        for func in lowered.funcs:
            grid, block = launch_dims(func)
            assert min(grid) >= 1
            assert 1 <= block[0] * block[1] * block[2] <= 1024
            assert build_cubin(emit_cuda(func), arch)[:4] == b"\x7fELF"


@needs_nvrtc
def test_a_broken_kernel_reports_its_log() -> None:
    with pytest.raises(BuildError) as caught:
        build_cubin("this is no CUDA", "sm_80")
    assert "error" in caught.value.log
    assert caught.value.source == "this is no CUDA"
