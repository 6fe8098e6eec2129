"""Convolution and pooling with drawn attributes against onnxruntime, and what they refuse."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import mcompile.ops  # noqa: F401  (registers the ops)
from mcompile.dtypes import DType
from mcompile.errors import ModelError
from mcompile.ir.tensor import Placeholder
from mcompile.ops.registry import OpDef, Sample, lookup
from mcompile.ops.sampling import numbers, sample
from tests.ops.test_registry import assert_same, canonical_attrs, interpreted, onnxruntime_results

CHECKS = settings(max_examples=60, deadline=None, derandomize=True)


def op_named(name: str) -> OpDef:
    op = lookup(name)
    assert op is not None
    return op


@st.composite
def spatial_attrs(draw: st.DrawFn, rank: int, dilated: bool = True) -> dict[str, Any]:
    attrs: dict[str, Any] = {"strides": [draw(st.integers(1, 3)) for _ in range(rank)]}
    if draw(st.booleans()):
        attrs["auto_pad"] = draw(st.sampled_from(["SAME_UPPER", "SAME_LOWER", "VALID"]))
    else:
        attrs["pads"] = [draw(st.integers(0, 1)) for _ in range(2 * rank)]
        if dilated:
            attrs["dilations"] = [draw(st.integers(1, 2)) for _ in range(rank)]
    return attrs


@st.composite
def conv_samples(draw: st.DrawFn) -> Sample:
    rank = draw(st.integers(1, 3))
    group, ic, oc = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    sizes = [draw(st.integers(5, 7)) for _ in range(rank)]
    kernel = [draw(st.integers(1, 3)) for _ in range(rank)]
    bias = numbers(group * oc) if draw(st.booleans()) else None
    attrs = draw(spatial_attrs(rank))
    return sample(numbers(1, group * ic, *sizes), numbers(group * oc, ic, *kernel, seed=1), bias, group=group, **attrs)


@st.composite
def conv_transpose_samples(draw: st.DrawFn) -> Sample:
    rank = draw(st.integers(1, 2))
    group, ic, oc = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    sizes = [draw(st.integers(2, 4)) for _ in range(rank)]
    kernel = [draw(st.integers(2, 4)) for _ in range(rank)]
    attrs = draw(spatial_attrs(rank))
    if "auto_pad" not in attrs:
        attrs["output_padding"] = [draw(st.integers(0, stride - 1)) for stride in attrs["strides"]]
    return sample(numbers(2, group * ic, *sizes), numbers(group * ic, oc, *kernel, seed=1), group=group, **attrs)


@st.composite
def pool_samples(draw: st.DrawFn, dilated: bool = True) -> Sample:
    rank = draw(st.integers(1, 3))
    sizes = [draw(st.integers(5, 7)) for _ in range(rank)]
    kernel = [draw(st.integers(2, 3)) for _ in range(rank)]
    attrs = draw(spatial_attrs(rank, dilated))
    if "auto_pad" not in attrs:
        attrs["ceil_mode"] = draw(st.integers(0, 1))
    return sample(numbers(1, 2, *sizes), kernel_shape=kernel, **attrs)


def check(name: str, drawn: Sample, outputs: int = 1) -> None:
    op = op_named(name)
    actual = interpreted(op, drawn.inputs, canonical_attrs(op, drawn))
    assert_same(actual, onnxruntime_results(op, drawn, outputs))


@CHECKS
@given(conv_samples())
def test_conv(drawn: Sample) -> None:
    check("Conv", drawn)


@CHECKS
@given(conv_transpose_samples())
def test_conv_transpose(drawn: Sample) -> None:
    check("ConvTranspose", drawn)


@CHECKS
@given(pool_samples())
def test_max_pool(drawn: Sample) -> None:
    check("MaxPool", drawn, outputs=2)


@CHECKS
@given(pool_samples(), st.booleans())
def test_average_pool(drawn: Sample, include_pad: bool) -> None:
    check("AveragePool", Sample(drawn.inputs, {**drawn.attrs, "count_include_pad": int(include_pad)}))


@CHECKS
@given(pool_samples(), st.integers(1, 3))
def test_lp_pool(drawn: Sample, p: int) -> None:
    check("LpPool", Sample(drawn.inputs, {**drawn.attrs, "p": p}))


@pytest.mark.parametrize(
    ("name", "shapes", "attrs", "message"),
    [
        ("Conv", [(1, 3, 4, 4), (2, 2, 3, 3)], {}, "3 input channels, but 1 groups of 2"),
        ("Conv", [(1, 2, 4, 4), (3, 1, 3, 3)], {"group": 2}, "do not split into 2 groups"),
        ("Conv", [(1, 2, 4, 4), (3, 2, 5, 5)], {}, "does not fit spatial dims"),
        ("Conv", [(1, 2, 4, 4), (3, 2, 3)], {}, "weights of as many dims"),
        ("Conv", [(1, 2, 4, 4), (3, 2, 3, 3)], {"pads": [1, 1]}, "pads: expected 4 values"),
        ("ConvTranspose", [(1, 2, 4, 4), (2, 3, 2, 2)], {"pads": [3, 3, 3, 3]}, "leave nothing"),
        ("MaxPool", [(1, 2, 4, 4)], {"kernel_shape": [2]}, "expected 2 dims"),
    ],
)
def test_what_does_not_fit_is_a_model_error(
    name: str, shapes: list[tuple[int, ...]], attrs: dict[str, Any], message: str
) -> None:
    op = op_named(name)
    inputs = [Placeholder(f"x{n}", shape, DType.FLOAT32) for n, shape in enumerate(shapes)]
    with pytest.raises(ModelError, match=message):
        op.compute(inputs, op.canonical(22, attrs))
