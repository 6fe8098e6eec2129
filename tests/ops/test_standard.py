"""Corners of the ONNX standard that implementations are known to get wrong, with the values it asks for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mcompile.ops  # noqa: F401  (registers the ops)
from mcompile.errors import ModelError
from mcompile.ops.registry import OpDef, Unsupported, lookup
from mcompile.ops.sampling import numbers, sample, series
from tests.ops.test_registry import canonical_attrs, interpreted

NAN = float("nan")


def run(name: str, *inputs: Any, opset: int = 0, **attrs: Any) -> np.ndarray[Any, Any]:
    op = op_named(name)
    drawn = sample(*inputs, opset=opset, **attrs)
    return interpreted(op, drawn.inputs, canonical_attrs(op, drawn))[0]


def op_named(name: str) -> OpDef:
    op = lookup(name)
    assert op is not None
    return op


def test_softmax_before_opset_13_flattens_from_axis_1() -> None:
    x = series(2, 3, 4) / 10
    e = np.exp(x - x.max(axis=(1, 2), keepdims=True))
    np.testing.assert_allclose(run("Softmax", x, opset=11), e / e.sum(axis=(1, 2), keepdims=True), rtol=1e-5)


def test_hardmax_before_opset_13_marks_one_element_of_the_flattened_rest() -> None:
    assert run("Hardmax", series(2, 3, 4), opset=11).sum() == 2


def test_average_pool_with_ceil_mode_divides_by_the_cells_inside() -> None:
    result = run("AveragePool", series(1, 1, 4, 4, start=1), kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1, opset=19)
    np.testing.assert_allclose(result, [[[[6, 7.5], [12, 13.5]]]])


def test_conv_transpose_output_padding_adds_rows() -> None:
    w = np.ones((1, 1, 3, 3), np.float32)
    result = run("ConvTranspose", series(1, 1, 3, 3), w, strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1])
    assert result.shape == (1, 1, 6, 6)


def test_axes_attribute_of_older_reductions() -> None:
    x = series(2, 3, 4, start=-12)
    np.testing.assert_array_equal(run("ReduceL1", x, axes=[1], keepdims=0, opset=13), np.abs(x).sum(axis=1))


@pytest.mark.parametrize(
    ("name", "inputs", "expected"),
    [
        ("Relu", ([NAN, -1, 0.5, 9],), [NAN, 0, 0.5, 9]),
        ("Clip", ([NAN, -1, 0.5, 9], 0, 6), [NAN, 0, 0.5, 6]),
        ("Max", ([NAN, 1, 2], [1, NAN, 3]), [NAN, NAN, 3]),
        ("Min", ([NAN, 1, 2], [1, NAN, 3]), [NAN, NAN, 2]),
        ("ReduceMax", ([[NAN, 1, 2], [2, NAN, 1], [1, 2, NAN]],), [[NAN]]),
        ("GlobalMaxPool", ([[[1, NAN, 2]]],), [[[NAN]]]),
        ("LeakyRelu", ([NAN, -100],), [NAN, -1]),
        ("Round", ([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 2.6],), [0, 2, 2, -0.0, -2, -2, 3]),
        ("Mish", ([-np.inf, 100],), [NAN, 100]),
        ("Softplus", ([-200, 0, 200],), [0, np.log(2), 200]),
        ("ReduceLogSumExp", ([1000, 1000],), [1000 + np.log(2)]),
        ("ReduceLogSumExp", ([-np.inf, -np.inf],), [-np.inf]),
    ],
)
def test_nan_ties_and_overflow(name: str, inputs: tuple[Any, ...], expected: list[Any]) -> None:
    arrays = [np.asarray(value, np.float32) for value in inputs]
    np.testing.assert_allclose(run(name, *arrays), np.asarray(expected, np.float32), rtol=1e-6)


def test_cumsum_exclusive_and_reverse() -> None:
    result = run("CumSum", series(2, 4, start=1), axis=np.asarray(1), exclusive=1, reverse=1)
    np.testing.assert_array_equal(result, [[9, 7, 4, 0], [21, 15, 8, 0]])


def test_integer_division_truncates_and_mod_takes_the_sign_the_standard_says() -> None:
    a, b = np.array([-7, 7, -7, 7], np.int32), np.array([2, -2, -2, 2], np.int32)
    np.testing.assert_array_equal(run("Div", a, b), [-3, -3, 3, 3])
    np.testing.assert_array_equal(run("Mod", a, b), [1, -1, -1, 1])
    np.testing.assert_array_equal(run("Mod", a, b, fmod=1), [-1, 1, -1, 1])


def test_shift_by_all_bits_and_more() -> None:
    x = np.array([-1, 5, -128], np.int8)
    np.testing.assert_array_equal(run("BitShift", x, np.array([9, 9, 1], np.int8), direction="RIGHT"), [-1, 0, -64])
    np.testing.assert_array_equal(run("BitShift", x, np.array([8, -1, 1], np.int8), direction="LEFT"), [0, 0, 0])


def test_pow_keeps_the_base_type_and_integer_powers_are_exact() -> None:
    result = run("Pow", np.array([3, -2], np.int64), np.array([39, 63], np.int64))
    np.testing.assert_array_equal(result, [3**39, -(2**63)])
    assert run("Pow", np.array([2], np.int32), np.array([0.5], np.float32)).dtype == np.int32


def test_variance_is_two_pass() -> None:
    x = numbers(1, 64) + np.float32(4096)
    expected = (x - x.mean(dtype=np.float64)) / x.std(dtype=np.float64)
    np.testing.assert_allclose(run("LayerNormalization", x, np.ones(64, np.float32), epsilon=0.0), expected, atol=2e-3)


@pytest.mark.parametrize(
    ("name", "inputs", "attrs", "message"),
    [
        ("Dropout", (numbers(2),), {"training_mode": np.array(True)}, "random"),
        ("BatchNormalization", (numbers(2, 3), *[numbers(3)] * 4), {"training_mode": 1}, "training mode"),
        ("Cast", (numbers(2),), {"to": 8}, "no native form"),
        ("Cast", (numbers(2),), {}, "missing: to"),
    ],
)
def test_what_has_no_native_form_says_so(name: str, inputs: tuple[Any, ...], attrs: Any, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        run(name, *inputs, **attrs)


@pytest.mark.parametrize(
    ("name", "inputs", "attrs", "message"),
    [
        ("Add", (numbers(2, 3), numbers(4)), {}, "do not broadcast"),
        ("MatMul", (numbers(2, 3), numbers(4, 2)), {}, "inner dims differ"),
        ("MatMul", (numbers(), numbers(4, 2)), {}, "at least one dim"),
        ("Gemm", (numbers(2, 3), numbers(2, 3)), {"transA": 1, "transB": 1}, "inner dims differ"),
        ("Gemm", (numbers(2, 3, 4), numbers(4, 2)), {}, "two matrices"),
        ("Einsum", (numbers(2, 3), numbers(4, 2)), {"equation": "ij,jk->ik"}, "dim 'j' is 3 and 4"),
        ("Einsum", (numbers(2, 3),), {"equation": "ij,jk->ik"}, "2 terms, got 1"),
        ("Einsum", (numbers(2, 3),), {"equation": "ij->ijk"}, "in no term"),
        ("Einsum", (numbers(2, 3),), {"equation": "i->i"}, "does not fit an input of 2 dims"),
        ("ReduceSum", (numbers(2, 3),), {"axes": np.array([2])}, "out of range"),
        ("Softmax", (numbers(2, 3),), {"axis": 2}, "out of range"),
        ("Clip", (numbers(2), numbers(2)), {}, "must be a scalar"),
        ("GroupNormalization", (numbers(1, 5, 2), numbers(5), numbers(5)), {"num_groups": 2}, "do not split"),
    ],
)
def test_what_does_not_fit_is_a_model_error(name: str, inputs: tuple[Any, ...], attrs: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        run(name, *inputs, **attrs)
