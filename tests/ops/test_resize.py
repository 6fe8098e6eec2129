"""Resize: cheap indices for the common cases, and onnxruntime's rounding of near ties."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import mcompile.ops  # noqa: F401  (registers the ops)
from mcompile.dtypes import DType
from mcompile.errors import ModelError
from mcompile.ir.evaluate import evaluate
from mcompile.ir.expr import Load, Select, walk
from mcompile.ir.printer import print_expr
from mcompile.ir.simplify import simplify
from mcompile.ir.tensor import Compute, build_dag, placeholder
from mcompile.ops.registry import Array, Unsupported, lookup


def compute_of(shape: tuple[int, ...], **attrs: Any) -> Compute:
    op = lookup("Resize")
    assert op is not None
    return op.compute([placeholder("x", shape, DType.FLOAT32)], op.canonical(19, attrs))[0]


def resized(x: Array, **attrs: Any) -> Array:
    output = compute_of(x.shape, **attrs)
    return evaluate(build_dag([output]), {"x": x})[output.name]


def runtime_resized(x: Array, scales: Array, **attrs: Any) -> Array:
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], **attrs)
    graph = helper.make_graph(
        [node],
        "test",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(scales, "scales")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    result: Array = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    return result


@pytest.mark.parametrize(("mode", "nearest"), [("asymmetric", "floor"), ("half_pixel", "round_prefer_floor")])
def test_doubling_halves_the_index(mode: str, nearest: str) -> None:
    scales = np.array([1, 1, 2, 2], np.float32)
    output = compute_of((1, 8, 5, 7), scales=scales, coordinate_transformation_mode=mode, nearest_mode=nearest)
    ranges = {axis.var: (0, axis.extent - 1) for axis in output.axes}
    body = simplify(output.body, ranges)
    assert isinstance(body, Load)
    assert [print_expr(index) for index in body.indices[2:]] == ["i2 // 2", "i3 // 2"]


@pytest.mark.parametrize("scale", [0.3, 0.6, 0.7, 1.3, 2.2, 2.6])
@pytest.mark.parametrize("nearest", ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"])
@pytest.mark.parametrize("mode", ["half_pixel", "asymmetric"])
def test_nearest_rounds_as_onnxruntime(mode: str, nearest: str, scale: float) -> None:
    x = np.arange(37, dtype=np.float32).reshape(1, 1, 1, 37)
    scales = np.array([1, 1, 1, scale], np.float32)
    attrs = {"mode": "nearest", "nearest_mode": nearest, "coordinate_transformation_mode": mode}
    np.testing.assert_array_equal(resized(x, scales=scales, **attrs), runtime_resized(x, scales, **attrs))


def test_no_clamp_where_the_index_stays_inside() -> None:
    output = compute_of((1, 1, 4, 4), scales=np.array([1, 1, 3, 3], np.float32))
    assert not any(isinstance(node, Select) for node in walk(output.body))


def test_unchanged_dims_are_not_touched() -> None:
    output = compute_of((2, 3, 4, 4), sizes=np.array([2, 3, 8, 4]), mode="linear")
    loads = [node for node in walk(output.body) if isinstance(node, Load)]
    assert len(loads) == 2
    assert all(load.indices[3] is output.axes[3].var for load in loads)


def test_strong_antialias_is_unsupported() -> None:
    with pytest.raises(Unsupported):
        compute_of((1, 1, 64, 64), scales=np.array([1, 1, 0.1, 0.1], np.float32), mode="cubic", antialias=1)


@pytest.mark.parametrize(
    "attrs",
    [
        {},
        {"scales": np.array([1, 1], np.float32)},
        {"scales": np.array([1, 1, 0, 1], np.float32)},
        {"sizes": np.array([1, 1, 2])},
        {"sizes": np.array([1, 1, 2, 2]), "mode": "quadratic"},
        {"sizes": np.array([1, 1, 2, 2]), "nearest_mode": "up"},
        {"sizes": np.array([1, 1, 2, 2]), "coordinate_transformation_mode": "middle"},
        {"sizes": np.array([1, 1, 2, 2]), "coordinate_transformation_mode": "tf_crop_and_resize"},
        {"sizes": np.array([1, 1, 2, 2]), "keep_aspect_ratio_policy": "shrink"},
    ],
)
def test_malformed_use(attrs: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        compute_of((1, 1, 4, 4), **attrs)
