"""Every sample of every registered op: its computes, interpreted, against onnx's reference and the op's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import mcompile.ops  # noqa: F401  (registers the ops)
from mcompile.dtypes import DType, TensorType
from mcompile.ir.evaluate import evaluate
from mcompile.ir.expr import Binary, BinaryOp, Cast, Expr, Load, Reduce, ReduceOp, walk
from mcompile.ir.tensor import Compute, ComputeDag, Placeholder, build_dag
from mcompile.ops.registry import Array, OpDef, OpKind, Sample, registered

NEWEST = onnx.defs.onnx_opset_version()

Departure = tuple[Callable[[Sample], bool], str]
_FLATTENED: Departure = (lambda s: 0 < s.opset < 13, "reduces one axis even before opset 13")
# Where onnx's reference implementation departs from the standard: op -> (which samples, why).
REFERENCE_DEPARTS: dict[str, Departure] = {
    "BatchNormalization": (lambda s: 0 < s.opset < 14, "normalizes by the batch's statistics before opset 14"),
    "ConvTranspose": (
        lambda s: "group" in s.attrs or ("output_shape" in s.attrs and "auto_pad" not in s.attrs),
        "fails on groups of several channels, and on output_shape",
    ),
    "Dropout": (lambda s: 0 < s.opset < 10, "returns a boolean mask"),
    "GatherElements": (lambda _: True, "its torch-like check refuses smaller indices"),
    "GlobalLpPool": (lambda _: True, "has none"),
    "GridSample": (
        lambda s: 0 < s.opset < 20 or (s.attrs["mode"], s.attrs["padding_mode"]) == ("cubic", "border"),
        "knows the newest names only; clamps positions, not elements, for cubic",
    ),
    "GlobalMaxPool": (lambda s: rank(s) != 4, "reduces two dims of any shape"),
    "Hardmax": _FLATTENED,
    "LRN": (lambda _: True, "mixes up batch and channels"),
    "LayerNormalization": (lambda s: first(s).dtype == np.float16, "returns statistics in the dtype of X"),
    "LogSoftmax": (
        lambda s: 0 < s.opset < 13 or bool(abs(first(s)).max() > 50),
        "reduces one axis even before opset 13; takes the log of a softmax that underflows",
    ),
    "MaxPool": (
        lambda s: s.attrs.get("auto_pad") == "SAME_LOWER" or "strides" not in s.attrs,
        "its indices with stride 1 and its shape for SAME_LOWER are wrong",
    ),
    "Mean": (lambda s: len(s.inputs) > 2, "adds in place, into the first input's shape"),
    "OneHot": (
        lambda s: any(value is not None and value.ndim == 1 for value in s.inputs[1:2]),
        "takes a scalar depth only",
    ),
    "ReduceLogSumExp": (lambda s: rank(s) == 0, "fails on scalars"),
    "ReduceSumSquare": (lambda s: first(s).dtype == np.int32, "returns int64"),
    "Resize": (lambda s: s.opset == 10, "has no Resize of opset 10"),
    "Scatter": (lambda _: True, "has none"),
    "Softmax": _FLATTENED,
    "Softsign": (lambda s: rank(s) == 0, "fails on scalars"),
}

# Likewise onnxruntime.
RUNTIME_DEPARTS: dict[str, Departure] = {
    "ArgMax": (lambda s: bool(np.isnan(first(s)).any()), "skips NaN"),
    "ArgMin": (lambda s: bool(np.isnan(first(s)).any()), "skips NaN"),
    "Dropout": (lambda s: 0 < s.opset < 10, "returns a mask of zeros"),
    "Resize": (
        lambda s: s.attrs.get("coordinate_transformation_mode") == "align_corners" and "scales" in s.attrs,
        "takes the rounded size for the standard's length_resized",
    ),
}


def first(sample: Sample) -> Array:
    return np.asarray(sample.inputs[0])


def rank(sample: Sample) -> int:
    return first(sample).ndim


TOLERANCES = {
    DType.BFLOAT16: (2e-2, 2e-2),
    DType.FLOAT16: (4e-3, 4e-3),
    DType.FLOAT32: (2e-5, 2e-6),
    DType.FLOAT64: (1e-6, 1e-7),
}


@cache
def samples_of(op: OpDef) -> tuple[Sample, ...]:
    return tuple(op.samples())


def cases() -> Iterator[Any]:
    for op in registered():
        for number, sample in enumerate(samples_of(op)):
            yield pytest.param(op, sample, id=f"{op.name}-{number}")


ALL_CASES = list(cases())
ONNX_CASES = [case for case in ALL_CASES if case.values[0].domain == ""]


def opset_of(sample: Sample) -> int:
    return sample.opset or NEWEST


def canonical_attrs(op: OpDef, sample: Sample) -> dict[str, Any]:
    return op.canonical(opset_of(sample), sample.attrs)


def dag_of(op: OpDef, inputs: Sequence[Array | None], attrs: dict[str, Any]) -> ComputeDag:
    placeholders = [
        None if array is None else Placeholder(f"x{position}", array.shape, DType.from_numpy(array.dtype))
        for position, array in enumerate(map(as_array, inputs))
    ]
    return build_dag(op.compute(placeholders, attrs))


def as_array(value: Any) -> Array | None:
    return None if value is None else np.asarray(value)


def interpreted(op: OpDef, inputs: Sequence[Array | None], attrs: dict[str, Any]) -> list[Array]:
    dag = dag_of(op, inputs, attrs)
    names = {placeholder.name for placeholder in dag.placeholders}
    present = {f"x{position}": np.asarray(value) for position, value in enumerate(inputs) if value is not None}
    arrays = {name: array for name, array in present.items() if name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = evaluate(dag, arrays)
    return [values[output.name] for output in dag.outputs]


# --- the same sample as a one-node ONNX model ---


def one_node_model(op: OpDef, sample: Sample, outputs: int) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """The model and its feeds; operands that the opset has as inputs are initializers."""
    schema = onnx.defs.get_schema(op.name, opset_of(sample))
    positions = {name: position for position, name in op.operands.items()}
    attributes = {name: value for name, value in sample.attrs.items() if name in schema.attributes}
    operands = {name: value for name, value in sample.attrs.items() if name not in schema.attributes}
    arrays = {position: np.asarray(value) for position, value in enumerate(sample.inputs) if value is not None}
    initializers = {positions[name]: np.asarray(value) for name, value in operands.items() if value is not None}
    last = max([*arrays, *initializers], default=-1)
    names = [f"x{position}" if position in arrays or position in initializers else "" for position in range(last + 1)]
    outputs = min(outputs, schema.max_output)
    node = helper.make_node(op.name, names, [f"y{position}" for position in range(outputs)], name="node")
    kind = onnx.defs.OpSchema.AttrType.TENSOR
    tensors = {name for name, declared in schema.attributes.items() if declared.type == kind}
    given = {name: value for name, value in attributes.items() if value is not None}
    node.attribute.extend(attribute(name, value, name in tensors) for name, value in given.items())
    graph = helper.make_graph(
        [node],
        "sample",
        [value_info(f"x{position}", array) for position, array in arrays.items()],
        [onnx.ValueInfoProto(name=f"y{position}") for position in range(outputs)],
        [numpy_helper.from_array(array, f"x{position}") for position, array in initializers.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset_of(sample))])
    return model, {f"x{position}": array for position, array in arrays.items()}


def attribute(name: str, value: Any, is_tensor: bool) -> onnx.AttributeProto:
    if is_tensor:
        return helper.make_attribute(name, numpy_helper.from_array(np.asarray(value)))
    return helper.make_attribute(name, value.tolist() if isinstance(value, np.ndarray | np.generic) else value)


def value_info(name: str, array: Array) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def onnx_reference(op: OpDef, sample: Sample, outputs: int) -> list[Array]:
    model, feeds = one_node_model(op, sample, outputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [np.asarray(result) for result in ReferenceEvaluator(model).run(None, feeds)]


def onnxruntime_results(op: OpDef, sample: Sample, outputs: int) -> list[Array]:
    """Skips what onnxruntime has no kernel for."""
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    if any(value is not None and np.asarray(value).dtype.kind == "V" for value in sample.inputs):
        pytest.skip("onnxruntime takes no bfloat16 arrays")
    model, feeds = one_node_model(op, sample, outputs)
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its many exception classes are not exported
        pytest.skip(f"onnxruntime does not take it: {error}")
    return list(session.run(None, feeds))


def assert_same(actual: Sequence[Array], expected: Sequence[Array]) -> None:
    assert len(actual) >= len(expected)
    for a, b in zip(actual, expected, strict=False):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if DType.from_numpy(b.dtype).is_float:
            rtol, atol = TOLERANCES[DType.from_numpy(b.dtype)]
            scale = np.abs(b[np.isfinite(b)], dtype=np.float64).max(initial=1)
            np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol, atol * scale)
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("op", "sample"), ONNX_CASES)
def test_compute_agrees_with_onnx_reference(op: OpDef, sample: Sample) -> None:
    actual = interpreted(op, sample.inputs, canonical_attrs(op, sample))
    departs, why = REFERENCE_DEPARTS.get(op.name, (lambda _: False, ""))
    if departs(sample):
        pytest.skip(why)
    assert_same(actual, onnx_reference(op, sample, len(actual)))


@pytest.mark.parametrize(("op", "sample"), ONNX_CASES)
def test_compute_agrees_with_onnxruntime(op: OpDef, sample: Sample) -> None:
    actual = interpreted(op, sample.inputs, canonical_attrs(op, sample))
    departs, why = RUNTIME_DEPARTS.get(op.name, (lambda _: False, ""))
    if departs(sample):
        pytest.skip(why)
    assert_same(actual, onnxruntime_results(op, sample, len(actual)))


@pytest.mark.parametrize(("op", "sample"), [case for case in ALL_CASES if case.values[0].reference is not None])
def test_compute_agrees_with_own_reference(op: OpDef, sample: Sample) -> None:
    assert op.reference is not None
    attrs = canonical_attrs(op, sample)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = op.reference([as_array(value) for value in sample.inputs], attrs)
    assert_same(interpreted(op, sample.inputs, attrs), expected)


@pytest.mark.parametrize(("op", "sample"), ALL_CASES)
def test_inferred_types_are_those_of_the_values(op: OpDef, sample: Sample) -> None:
    attrs = canonical_attrs(op, sample)
    arrays = [as_array(value) for value in sample.inputs]
    types = [None if array is None else TensorType(array.shape, DType.from_numpy(array.dtype)) for array in arrays]
    values = interpreted(op, sample.inputs, attrs)
    assert op.infer(types, attrs) == tuple(TensorType(v.shape, DType.from_numpy(v.dtype)) for v in values)


@pytest.mark.parametrize(("op", "sample"), [case for case in ALL_CASES if case.values[0].scalars])
def test_known_scalars_folded_into_attributes(op: OpDef, sample: Sample) -> None:
    attrs, inputs = canonical_attrs(op, sample), [as_array(value) for value in sample.inputs]
    for position, name in op.scalars.items():
        array = inputs[position] if position < len(inputs) else None
        if array is not None and array.size == 1 and array.ndim <= rank(sample):
            attrs[name], inputs[position] = array.item(), None
    assert_same(interpreted(op, inputs, attrs), interpreted(op, sample.inputs, canonical_attrs(op, sample)))


@pytest.mark.parametrize("op", registered(), ids=lambda op: op.name)
def test_declared_kind_holds(op: OpDef) -> None:
    dags = [dag_of(op, sample.inputs, canonical_attrs(op, sample)) for sample in samples_of(op)]
    assert dags, "an op needs samples"
    computes = [compute for dag in dags for compute in dag.computes]
    match op.kind:
        case OpKind.ELEMENTWISE:
            assert all(loads_own_element(compute) for compute in computes)
        case OpKind.BROADCAST | OpKind.INJECTIVE:
            assert not any(isinstance(compute.body, Reduce) for compute in computes)
        case OpKind.REDUCTION:
            assert any(isinstance(compute.body, Reduce) for compute in computes)
        case OpKind.ANCHOR:
            assert any(is_contraction(compute) for compute in computes)


def loads_own_element(compute: Compute) -> bool:
    own = tuple(axis.var for axis in compute.axes)
    loads = [node for node in walk(compute.body) if isinstance(node, Load)]
    return not isinstance(compute.body, Reduce) and all(
        load.indices == own or all(extent == 1 for extent in load.source.shape) for load in loads
    )


def is_contraction(compute: Compute) -> bool:
    """A sum of products of two loads, each cast at most: what the schedules look for."""
    match compute.body:
        case Reduce(ReduceOp.SUM, Binary(BinaryOp.MUL, a, b), _):
            return is_load(a) and is_load(b)
    return False


def is_load(expr: Expr) -> bool:
    return isinstance(expr.x if isinstance(expr, Cast) else expr, Load)
