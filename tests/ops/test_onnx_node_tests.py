"""The node tests that the onnx package ships, op by op: the interpreted computes against the outputs they expect."""

from __future__ import annotations

import warnings
from collections import defaultdict
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.backend.test.case.node import collect_testcases

import mcompile.ops  # noqa: F401  (registers the ops)
from mcompile.dtypes import DType
from mcompile.ir.evaluate import evaluate
from mcompile.ir.tensor import Placeholder, build_dag
from mcompile.ops.registry import OpDef, Unsupported, registered

# Tests that the computes need not pass: name -> why.
EXCLUDED: dict[str, str] = {}


@cache
def cases_by_op() -> dict[str, list[Any]]:
    """The cases of one node each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases(None)
    by_op = defaultdict(list)
    for case in cases:
        if len(case.model.graph.node) == 1:
            by_op[case.model.graph.node[0].op_type].append(case)
    return by_op


@pytest.mark.parametrize("op", [op for op in registered() if not op.domain], ids=lambda op: op.name)
def test_node_tests_pass(op: OpDef) -> None:
    problems = {}
    for case in cases_by_op()[op.name]:
        problem = problem_of(op, case)
        if problem and case.name not in EXCLUDED:
            problems[case.name] = problem
    assert problems == {}


def problem_of(op: OpDef, case: Any) -> str:
    """What is wrong; empty if the case passes or has no native form."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for inputs, expected in case.data_sets:
                compare(run_node(op, case.model, inputs), expected, case)
    except Unsupported:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:600]
    return ""


def run_node(op: OpDef, model: onnx.ModelProto, feeds: list[Any]) -> list[Any]:
    """The values of the node's outputs. Raises Unsupported, also for a dtype that has no DType."""
    node, opset = model.graph.node[0], model.opset_import[0].version
    values = dict(zip([value.name for value in model.graph.input], feeds, strict=True))
    inputs = [array_of(values[name]) if name else None for name in node.input]
    operands = {name: inputs[place] for place, name in op.operands.items() if place < len(inputs)}
    attributes = {item.name: attribute_value(item) for item in node.attribute}
    attrs = op.canonical(opset, attributes, {name: value for name, value in operands.items() if value is not None})
    kept = [None if place in op.operands else array for place, array in enumerate(inputs)]
    placeholders = [
        None if array is None else Placeholder(f"x{place}", array.shape, DType.from_numpy(array.dtype))
        for place, array in enumerate(kept)
    ]
    dag = build_dag(op.compute(placeholders, attrs))
    used = {placeholder.name for placeholder in dag.placeholders}
    results = evaluate(dag, {f"x{place}": a for place, a in enumerate(kept) if a is not None and f"x{place}" in used})
    names = list(node.output)
    if len(names) > len(dag.outputs):
        raise Unsupported("an output that the op does not compute")
    by_name = {name: results[output.name] for name, output in zip(names, dag.outputs, strict=False)}
    return [by_name[value.name] for value in model.graph.output]


def array_of(value: Any) -> np.ndarray[Any, Any]:
    array = numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)
    try:
        DType.from_numpy(array.dtype)
    except ValueError as error:
        raise Unsupported(str(error)) from error
    return array


def attribute_value(item: onnx.AttributeProto) -> Any:
    value = helper.get_attribute_value(item)
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return value.decode() if isinstance(value, bytes) else value


def compare(actual: list[Any], expected: list[Any], case: Any) -> None:
    for a, b in zip(actual, map(array_of, expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if DType.from_numpy(b.dtype).is_float:
            np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), case.rtol, max(case.atol, 1e-6))
        else:
            np.testing.assert_array_equal(a, b)
