"""The form of the computes that schedules rely on: stages, reduce axes, index expressions."""

from __future__ import annotations

from typing import Any

import pytest

import mcompile.ops  # noqa: F401  (registers the ops)
from mcompile.dtypes import DType
from mcompile.ir.printer import print_expr
from mcompile.ir.tensor import Compute, ComputeDag, Placeholder, build_dag
from mcompile.ops.registry import lookup


def dag_of(name: str, *shapes: tuple[int, ...], dtype: DType = DType.FLOAT32, **attrs: Any) -> ComputeDag:
    op = lookup(name)
    assert op is not None
    inputs = [Placeholder(f"x{n}", shape, dtype) for n, shape in enumerate(shapes)]
    return build_dag(op.compute(inputs, op.canonical(22, attrs))[:1])


def stages(dag: ComputeDag) -> list[str]:
    return [compute.name for compute in dag.computes]


def stage(dag: ComputeDag, name: str) -> Compute:
    return next(compute for compute in dag.computes if compute.name == name)


def test_conv_pads_only_where_it_must() -> None:
    assert stages(dag_of("Conv", (1, 3, 8, 8), (4, 3, 3, 3))) == ["conv"]
    assert stages(dag_of("Conv", (1, 3, 8, 8), (4, 3, 3, 3), (4,), pads=[1, 1, 1, 1])) == ["pad", "conv", "conv_bias"]


def test_conv_reduces_over_the_kernel_then_the_channels() -> None:
    conv = stage(dag_of("Conv", (1, 3, 8, 8), (4, 3, 3, 3)), "conv")
    assert [axis.var.name for axis in conv.axes] == ["n", "oc", "oh", "ow"]
    assert [axis.var.name for axis in conv.reduce_axes] == ["kh", "kw", "ic"]


@pytest.mark.parametrize(
    ("channels", "weights", "group", "index"),
    [
        (6, (4, 6, 1, 1), 1, "ic"),
        (6, (4, 3, 1, 1), 2, "g * 3 + ic"),
        (6, (6, 1, 1, 1), 6, "oc"),
        (6, (12, 1, 1, 1), 6, "oc // 2"),
    ],
)
def test_the_channel_a_group_reads(channels: int, weights: tuple[int, ...], group: int, index: str) -> None:
    conv = stage(dag_of("Conv", (1, channels, 4, 4), weights, group=group), "conv")
    load: Any = conv.body.children[0].children[0]
    assert print_expr(load.indices[1]).replace("(", "").replace(")", "") == index


def test_conv_transpose_by_sub_pixels() -> None:
    assert stages(dag_of("ConvTranspose", (1, 2, 4, 4), (2, 3, 3, 3), pads=[2, 2, 2, 2])) == [
        "subkernels",
        "convtranspose",
    ]
    dag = dag_of("ConvTranspose", (1, 2, 4, 4), (2, 3, 4, 4), (3,), strides=[2, 2], pads=[1, 1, 1, 1])
    assert stages(dag) == ["pad", "subkernels", "convtranspose", "interleave", "convtranspose_bias"]
    assert stage(dag, "convtranspose").shape == (1, 3, 5, 2, 5, 2)
    assert [axis.var.name for axis in stage(dag, "convtranspose").axes] == ["n", "oc", "qh", "rh", "qw", "rw"]
    assert [axis.extent for axis in stage(dag, "convtranspose").reduce_axes] == [2, 2, 2]
    assert stage(dag, "subkernels").inputs == (dag.placeholders[1],)


def test_gemm_multiplies_by_nothing_that_is_1() -> None:
    assert stages(dag_of("Gemm", (2, 3), (3, 4))) == ["gemm"]
    dag = dag_of("Gemm", (2, 3), (3, 4), (4,))
    assert "1.0" not in print_expr(stage(dag, "gemm_result").body)
    assert stages(dag_of("Gemm", (2, 3), (3, 4), (4,), beta=0.0)) == ["gemm"]


def test_half_contractions_accumulate_in_float32() -> None:
    dag = dag_of("MatMul", (2, 3), (3, 4), dtype=DType.FLOAT16)
    assert stages(dag) == ["matmul", "matmul_result"]
    assert stage(dag, "matmul").dtype is DType.FLOAT32
    assert dag.outputs[0].dtype is DType.FLOAT16


def test_softmax_divides_once_a_row() -> None:
    assert stages(dag_of("Softmax", (2, 8))) == ["max", "exp", "sum", "scale", "softmax"]
