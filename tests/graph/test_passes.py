"""Each graph pass on small graphs: the ops before and after, and equal results."""

from __future__ import annotations

from math import pi, sqrt

import numpy as np
import pytest

from mcompile.dtypes import DType
from mcompile.graph.passes.canonicalize import canonicalize
from mcompile.graph.passes.eliminate_common_subexpressions import eliminate_common_subexpressions
from mcompile.graph.passes.eliminate_dead import eliminate_dead
from mcompile.graph.passes.eliminate_identity import eliminate_identity
from mcompile.graph.passes.fold_affine import fold_affine
from mcompile.graph.passes.fold_constants import fold_constants
from mcompile.graph.passes.fold_pad import fold_pad
from mcompile.graph.passes.merge_matmuls import merge_matmuls
from mcompile.graph.passes.merge_movement import merge_movement
from mcompile.graph.passes.recognize_activations import recognize_activations
from mcompile.graph.passes.recognize_normalization import recognize_normalization
from tests.graph.graphs import Builder, changed, ops, unchanged


def _int64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


# --- eliminate_dead ---


def test_dead_nodes_and_constants_go() -> None:
    b = Builder()
    x, c = b.input(3), b.weights(3)
    y = b.op("Relu", x)
    b.op("Add", b.op("Neg", x), c)
    new = changed(eliminate_dead, b.done(y))
    assert ops(new) == {"Relu": 1}
    assert not new.constants
    unchanged(eliminate_dead, new)


def test_a_node_with_one_used_output_stays() -> None:
    b = Builder()
    part = b.op("Split", b.input(4, 2), axis=0, num_outputs=2)
    unchanged(eliminate_dead, b.done(b.outputs_of(part)[1]))


# --- fold_constants ---


def test_known_nodes_are_evaluated() -> None:
    b = Builder()
    x, w = b.input(2, 3), b.weights(4, 3)
    y = b.op("MatMul", x, b.op("Transpose", w, perm=(1, 0)))
    new = changed(fold_constants, b.done(y))
    assert ops(new) == {"MatMul": 1}


def test_chains_fold_at_once_and_outputs_stay_nodes() -> None:
    b = Builder()
    x, c = b.input(3), b.weights(3)
    chain = b.op("Exp", b.op("Neg", c))
    new = changed(fold_constants, b.done(b.op("Add", x, chain), b.op("Abs", c)))
    assert ops(new) == {"Add": 1, "Abs": 1}


def test_results_that_blow_up_are_not_folded() -> None:
    b = Builder()
    x, c = b.input(1), b.weights(1)
    big = b.op("Expand", c, shape=_int64(1 << 23))
    unchanged(fold_constants, b.done(b.op("Add", x, big)))


# --- eliminate_identity ---


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("Identity", {}),
        ("Dropout", {}),
        ("Cast", {"to": 1}),
        ("Reshape", {"shape": _int64(2, 3)}),
        ("Transpose", {"perm": (0, 1)}),
        ("Expand", {"shape": _int64(2, 1)}),
        ("Tile", {"repeats": _int64(1, 1)}),
        ("Pad", {"pads": _int64(0, 0, 0, 0)}),
        ("Slice", {"starts": _int64(0), "ends": _int64(99), "axes": _int64(1), "steps": _int64(1)}),
        ("Concat", {"axis": 1}),
        ("Sum", {}),
    ],
)
def test_nodes_that_copy_go(op: str, attrs: dict[str, object]) -> None:
    b = Builder()
    x = b.input(2, 3)
    new = changed(eliminate_identity, b.done(b.op("Relu", b.op(op, x, **attrs))))
    assert ops(new) == {"Relu": 1}


@pytest.mark.parametrize(("op", "number"), [("Add", 0), ("Sub", 0), ("Mul", 1), ("Div", 1)])
def test_neutral_elements_go(op: str, number: float) -> None:
    b = Builder()
    x = b.input(2, 3)
    new = changed(eliminate_identity, b.done(b.op("Relu", b.op(op, x, b.constant([number])))))
    assert ops(new) == {"Relu": 1}


def test_what_broadcasts_or_moves_stays() -> None:
    b = Builder()
    x = b.input(3)
    y = b.op("Mul", x, b.constant(np.ones((1, 1))))
    z = b.op("Reshape", x, shape=_int64(1, 3))
    w = b.op("Sub", b.constant([0, 0, 0]), x)
    square = b.input(2, 2)
    t = b.op("Transpose", square, perm=(1, 0))
    r = b.op("Slice", square, starts=_int64(-1), ends=_int64(-99), axes=_int64(0), steps=_int64(-1))
    unchanged(eliminate_identity, b.done(y, z, w, t, r))


def test_outputs_keep_a_node_of_their_own() -> None:
    b = Builder()
    x = b.input(3)
    y = b.op("Relu", x)
    graph = b.done(b.op("Identity", x), y, b.op("Identity", y))
    unchanged(eliminate_identity, graph)
    b = Builder()
    new = changed(eliminate_identity, b.done(b.op("Identity", b.op("Relu", b.input(3)))))
    assert ops(new) == {"Relu": 1}


# --- eliminate_common_subexpressions ---


def test_equal_nodes_merge() -> None:
    b = Builder()
    x = b.input(3)
    y = b.op("Add", b.op("Exp", b.op("Neg", x)), b.op("Exp", b.op("Neg", x)))
    new = changed(eliminate_common_subexpressions, b.done(y))
    assert ops(new) == {"Neg": 1, "Exp": 1, "Add": 1}
    unchanged(eliminate_common_subexpressions, new)


def test_other_attributes_keep_nodes_apart() -> None:
    b = Builder()
    x = b.input(3)
    y = b.op("Add", b.op("Elu", x, alpha=1.0), b.op("Elu", x, alpha=2.0))
    unchanged(eliminate_common_subexpressions, b.done(y))


def test_equal_constants_merge_by_bytes() -> None:
    b = Builder()
    x, w = b.input(300), b.weights(300)
    same, zero, minus_zero = b.constant(b.graph.constants[w]), b.constant([0.0]), b.constant([-0.0])
    y = b.op("Add", b.op("Mul", x, w), b.op("Mul", x, same))
    z = b.op("Div", b.op("Div", x, zero), minus_zero)
    new = changed(eliminate_common_subexpressions, b.done(y, z))
    assert ops(new) == {"Mul": 1, "Add": 1, "Div": 2}
    assert not new.users.get(same)
    assert new.users[minus_zero]


# --- canonicalize ---


@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize(
    ("alpha", "beta", "with_c"), [(1.0, 1.0, True), (0.5, 2.0, True), (2.0, 1.0, False), (1.0, 0.0, True)]
)
def test_gemm(trans_a: int, trans_b: int, alpha: float, beta: float, with_c: bool) -> None:
    b = Builder()
    x = b.input(*((3, 2) if trans_a else (2, 3)))
    w = b.weights(*((4, 3) if trans_b else (3, 4)))
    operands = (x, w, b.weights(4)) if with_c else (x, w)
    graph = b.done(b.op("Gemm", *operands, transA=trans_a, transB=trans_b, alpha=alpha, beta=beta))
    new = changed(canonicalize, graph)
    assert ops(new)["Gemm"] == 0
    assert ops(new)["Add"] == (with_c and beta != 0)
    assert ops(new)["Mul"] == 0


def test_gemm_of_computed_matrices() -> None:
    b = Builder()
    x, w, c = b.input(2, 3), b.input(4, 3), b.input(4)
    new = changed(canonicalize, b.done(b.op("Gemm", x, w, c, transB=1, alpha=0.5, beta=0.25)))
    assert ops(new) == {"Transpose": 1, "MatMul": 1, "Mul": 2, "Add": 1}


@pytest.mark.parametrize(
    ("op", "attrs"),
    [("Flatten", {"axis": 2}), ("Squeeze", {"axes": _int64(1)}), ("Unsqueeze", {"axes": _int64(0, 4)})],
)
def test_reshapes_are_written_one_way(op: str, attrs: dict[str, object]) -> None:
    b = Builder()
    new = changed(canonicalize, b.done(b.op(op, b.input(2, 1, 3), **attrs)))
    assert ops(new) == {"Reshape": 1}
    unchanged(canonicalize, new)


def test_division_by_powers_of_two() -> None:
    b = Builder()
    x = b.input(3)
    y = b.op("Div", b.op("Div", x, b.constant(8.0)), b.constant(3.0))
    new = changed(canonicalize, b.done(y), rtol=0)
    assert ops(new) == {"Mul": 1, "Div": 1}


def test_expand_before_a_broadcast() -> None:
    b = Builder()
    x, y = b.input(2, 3), b.input(3)
    new = changed([canonicalize, eliminate_dead], b.done(b.op("Add", x, b.op("Expand", y, shape=_int64(2, 3)))))
    assert ops(new) == {"Add": 1}
    b = Builder()
    x = b.input(3)
    unchanged(canonicalize, b.done(b.op("Add", x, b.op("Expand", b.input(1), shape=_int64(2, 3)))))


# --- merge_movement ---


def test_transposes_merge_and_cancel() -> None:
    b = Builder()
    x = b.input(2, 3, 4)
    y = b.op("Transpose", b.op("Transpose", x, perm=(1, 2, 0)), perm=(2, 0, 1))
    z = b.op("Transpose", b.op("Transpose", x, perm=(1, 2, 0)), perm=(1, 0, 2))
    new = changed([merge_movement, eliminate_identity, eliminate_dead], b.done(b.op("Relu", y), b.op("Relu", z)))
    assert ops(new) == {"Transpose": 1, "Relu": 2}


def test_transposes_of_ones_and_chains_of_reshapes() -> None:
    b = Builder()
    x = b.input(1, 6, 1)
    y = b.op("Reshape", b.op("Transpose", x, perm=(1, 0, 2)), shape=_int64(2, 3))
    new = changed([merge_movement, eliminate_dead], b.done(y))
    assert ops(new) == {"Reshape": 1}


def test_split_and_concat_cancel() -> None:
    b = Builder()
    x = b.input(4, 6)
    parts = b.outputs_of(b.op("Split", x, axis=-1, split=_int64(2, 4)))
    joined = b.op("Concat", *parts, axis=1)
    again = b.outputs_of(
        b.op("Split", b.op("Concat", b.input(2, 3), b.input(5, 3), axis=0), axis=0, split=_int64(2, 5))
    )
    outputs = [b.op("Relu", value) for value in (joined, *again)]
    new = changed([merge_movement, eliminate_identity, eliminate_dead], b.done(*outputs))
    assert ops(new) == {"Relu": 3}


def test_split_and_concat_in_another_order_stay() -> None:
    b = Builder()
    parts = b.outputs_of(b.op("Split", b.input(4, 6), axis=1, num_outputs=2))
    unchanged(merge_movement, b.done(b.op("Concat", *reversed(parts), axis=1)))


# --- fold_affine ---


def _batch_norm(b: Builder, x: str, channels: int) -> str:
    variance = b.constant(np.abs(b.graph.constants[b.weights(channels)]) + 0.1)
    statistics = [b.weights(channels) for _ in range(3)]
    return b.op("BatchNormalization", x, *statistics, variance, epsilon=0.01)


_FOLD = [fold_affine, eliminate_dead] * 3


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_batch_norm_after_convolutions(op: str, group: int, bias: bool) -> None:
    b = Builder()
    x = b.input(2, 4, 5, 5)
    w = b.weights(6, 4 // group, 3, 3) if op == "Conv" else b.weights(4, 6 // group, 3, 3)
    y = b.op(op, x, w, *([b.weights(6)] if bias else []), group=group)
    new = changed(_FOLD, b.done(b.op("Relu", _batch_norm(b, y, 6))))
    assert ops(new) == {op: 1, "Relu": 1}


def test_batch_norm_elsewhere_is_a_product_and_a_sum() -> None:
    b = Builder()
    new = changed(_FOLD, b.done(_batch_norm(b, b.op("Relu", b.input(2, 3, 4, 4)), 3)))
    assert ops(new) == {"Relu": 1, "Mul": 1, "Add": 1}


def test_batch_norm_after_matmul() -> None:
    b = Builder()
    y = b.op("Add", b.op("MatMul", b.input(2, 3), b.weights(3, 5)), b.weights(5))
    new = changed(_FOLD, b.done(_batch_norm(b, y, 5)))
    assert ops(new) == {"MatMul": 1, "Add": 2}


def test_scales_written_out() -> None:
    b = Builder()
    y = b.op("Conv", b.input(1, 2, 5, 5), b.weights(3, 2, 1, 1))
    y = b.op("Add", b.op("Mul", b.weights(3, 1, 1), y), b.constant(2.0))
    new = changed(_FOLD, b.done(y))
    assert ops(new) == {"Conv": 1}


def test_scales_that_may_not_be_folded() -> None:
    b = Builder()
    x = b.input(1, 2, 5, 5)
    shared = b.op("Conv", x, b.weights(3, 2, 1, 1))
    one, two = b.op("Mul", shared, b.weights(3, 1, 1)), b.op("Relu", shared)
    per_pixel = b.op("Mul", b.op("Conv", x, b.weights(3, 2, 1, 1)), b.weights(5, 5))
    broadcast = b.op("Add", b.op("Conv", x, b.weights(3, 2, 5, 5)), b.weights(2, 3, 1, 1))
    unchanged(fold_affine, b.done(one, two, per_pixel, broadcast))


# --- fold_pad ---


def test_zero_pads_go_into_convolutions() -> None:
    b = Builder()
    padded = b.op("Pad", b.input(1, 2, 5, 5), pads=_int64(0, 0, 1, 0, 0, 0, 2, 1))
    new = changed([fold_pad, eliminate_dead], b.done(b.op("Conv", padded, b.weights(3, 2, 3, 3), pads=(0, 1, 0, 0))))
    assert ops(new) == {"Conv": 1}
    (conv,) = new.nodes.values()
    assert conv.attrs["pads"] == (1, 1, 2, 1)


@pytest.mark.parametrize(
    "attrs",
    [
        {"pads": _int64(0, 1, 0, 0, 0, 0, 0, 0)},
        {"pads": _int64(0, 0, 1, 1, 0, 0, 1, 1), "constant_value": 1.0},
        {"pads": _int64(0, 0, 1, 1, 0, 0, 1, 1), "mode": "reflect"},
        {"pads": _int64(0, 0, -1, 0, 0, 0, 0, 0)},
    ],
)
def test_other_pads_stay(attrs: dict[str, object]) -> None:
    b = Builder()
    padded = b.op("Pad", b.input(1, 2, 5, 5), **attrs)
    channels = b.graph.types[padded].dims[1]
    unchanged(fold_pad, b.done(b.op("Conv", padded, b.weights(3, channels, 3, 3))))


# --- recognize_activations ---


def _gelu(b: Builder, x: str, form: int) -> str:
    scaled = b.op("Div", x, b.constant(sqrt(2))) if form % 2 else b.op("Mul", b.constant(1 / sqrt(2)), x)
    gate = b.op("Add", b.op("Erf", scaled), b.constant([1.0]))
    half = b.constant(0.5)
    return [
        lambda: b.op("Mul", b.op("Mul", x, gate), half),
        lambda: b.op("Mul", b.op("Mul", half, x), gate),
        lambda: b.op("Mul", x, b.op("Mul", gate, half)),
    ][form // 2]()


@pytest.mark.parametrize("form", range(6))
def test_gelu(form: int) -> None:
    b = Builder()
    new = changed([recognize_activations, eliminate_dead], b.done(_gelu(b, b.input(2, 3), form)))
    assert ops(new) == {"Gelu": 1}


@pytest.mark.parametrize("form", range(3))
def test_gelu_by_tanh(form: int) -> None:
    b = Builder()
    x = b.input(2, 3)
    if form == 0:
        cube = b.op("Pow", x, exponent=3.0)
    elif form == 1:
        cube = b.op("Mul", b.op("Mul", x, x), x)
    else:
        cube = b.op("Mul", x, b.op("Mul", x, x))
    inner = b.op("Add", x, b.op("Mul", b.constant(0.044715), cube))
    gate = b.op("Add", b.constant(1.0), b.op("Tanh", b.op("Mul", b.constant(sqrt(2 / pi)), inner)))
    new = changed([recognize_activations, eliminate_dead], b.done(b.op("Mul", b.op("Mul", b.constant(0.5), x), gate)))
    assert ops(new) == {"Gelu": 1}


def test_gates() -> None:
    b = Builder()
    x = b.input(2, 3)
    swish = b.op("Mul", b.op("Sigmoid", x), x)
    quick = b.op("Mul", x, b.op("Sigmoid", b.op("Mul", x, b.constant(1.702))))
    mish = b.op("Mul", x, b.op("Tanh", b.op("Softplus", x)))
    relu = b.op("Clip", x, min=0.0)
    new = changed([recognize_activations, eliminate_dead], b.done(swish, quick, mish, relu))
    assert ops(new) == {"Swish": 2, "Mish": 1, "Relu": 1}


def test_hard_gates() -> None:
    b = Builder()
    x = b.input(2, 3)
    clip = b.op("Clip", b.op("Add", x, b.constant(3.0)), min=0.0, max=6.0)
    gate = b.op("Div", clip, b.constant(6.0))
    one = b.op("Mul", x, gate)
    two = b.op("Div", b.op("Mul", x, clip), b.constant(6.0))
    new = changed([recognize_activations, recognize_activations, eliminate_dead], b.done(one, two, gate))
    assert ops(new) == {"HardSwish": 2, "HardSigmoid": 1}


def test_a_bound_near_zero_is_no_relu() -> None:
    b = Builder()
    unchanged(recognize_activations, b.done(b.op("Clip", b.input(3), min=1e-12)))


def test_softmax() -> None:
    b = Builder()
    x = b.input(2, 3, 4)
    exp = b.op("Exp", b.op("Sub", x, b.op("ReduceMax", x, axes=_int64(1))))
    new = changed(
        [recognize_activations, eliminate_dead], b.done(b.op("Div", exp, b.op("ReduceSum", exp, axes=_int64(1))))
    )
    assert ops(new) == {"Softmax": 1}


# --- recognize_normalization ---


@pytest.mark.parametrize("form", ["pow", "mul", "reciprocal"])
@pytest.mark.parametrize("axes", [(-1,), (1, 2)])
def test_layer_norm(form: str, axes: tuple[int, ...]) -> None:
    b = Builder()
    x = b.input(2, 3, 4)
    shape = (4,) if len(axes) == 1 else (3, 4)
    d = b.op("Sub", x, b.op("ReduceMean", x, axes=_int64(*axes)))
    square = b.op("Pow", d, exponent=2.0) if form == "pow" else b.op("Mul", d, d)
    root = b.op("Sqrt", b.op("Add", b.op("ReduceMean", square, axes=_int64(*axes)), b.constant(1e-5)))
    normal = b.op("Mul", d, b.op("Reciprocal", root)) if form == "reciprocal" else b.op("Div", d, root)
    y = b.op("Add", b.op("Mul", normal, b.weights(*shape)), b.weights(*shape))
    new = changed([recognize_normalization, eliminate_dead], b.done(y))
    assert ops(new) == {"LayerNormalization": 1}


def test_rms_norm() -> None:
    b = Builder()
    x = b.input(2, 3, 4)
    root = b.op("Sqrt", b.op("Add", b.op("ReduceMean", b.op("Mul", x, x), axes=_int64(-1)), b.constant(1e-5)))
    new = changed([recognize_normalization, eliminate_dead], b.done(b.op("Mul", b.op("Div", x, root), b.weights(4))))
    assert ops(new) == {"RMSNormalization": 1}


def test_a_mean_over_other_dims_is_no_layer_norm() -> None:
    b = Builder()
    x = b.input(2, 3, 4)
    d = b.op("Sub", x, b.op("ReduceMean", x, axes=_int64(1)))
    root = b.op("Sqrt", b.op("Add", b.op("ReduceMean", b.op("Mul", d, d), axes=_int64(1)), b.constant(1e-5)))
    unchanged(recognize_normalization, b.done(b.op("Div", d, root)))


# --- merge_matmuls ---


@pytest.mark.parametrize("bias", [True, False])
def test_products_of_one_operand_merge(bias: bool) -> None:
    b = Builder()
    x = b.op("Relu", b.input(2, 5, 8))
    outputs = []
    for columns in (4, 6, 8):
        y = b.op("MatMul", x, b.weights(8, columns))
        outputs.append(b.op("Neg", b.op("Add", y, b.weights(columns)) if bias else y))
    new = changed(merge_matmuls, b.done(*outputs))
    assert ops(new) == {"Relu": 1, "MatMul": 1, "Split": 1, "Neg": 3} | ({"Add": 1} if bias else {})


def test_wide_and_computed_products_stay() -> None:
    b = Builder()
    x = b.input(2, 8)
    wide = [b.op("Neg", b.op("MatMul", x, b.weights(8, 2000))) for _ in range(2)]
    computed = b.op("Neg", b.op("MatMul", x, b.input(8, 4)))
    unchanged(merge_matmuls, b.done(*wide, computed, b.op("Neg", b.op("MatMul", x, b.weights(8, 4)))))


def test_integer_gemm_stays() -> None:
    b = Builder()
    x, w = b.input(2, 3, dtype=DType.INT32), b.constant(np.ones((3, 4)), DType.INT32)
    unchanged(canonicalize, b.done(b.op("Gemm", x, w)))
