"""What import_model gives: static shapes, canonical ops, folded shape arithmetic, weights, bodies, host ops."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from mcompile.dtypes import DType, TensorType
from mcompile.errors import ModelError, OptionError
from mcompile.frontend import ImportedModel, import_model
from mcompile.frontend.wire import skeleton
from mcompile.graph.infer import HOST_MODEL
from mcompile.graph.interpret import evaluate_graph
from mcompile.graph.verify import verify_graph
from tests.frontend.models import FLOAT, INT64, Array, array, info, int64, model, node


def _ops(imported: ImportedModel) -> Counter[str]:
    return Counter(entry.op for entry in imported.graph.nodes.values())


def _check(proto: onnx.ModelProto, feeds: dict[str, Array]) -> ImportedModel:
    """Import and compare with onnx's reference."""
    imported = import_model(proto)
    verify_graph(imported.graph)
    expected = ReferenceEvaluator(proto).run(None, dict(feeds))
    results = evaluate_graph(imported.graph, {name: feeds[name] for name in imported.graph.inputs})
    for output, reference in zip(imported.graph.outputs, expected, strict=True):
        np.testing.assert_allclose(results[output], reference, rtol=1e-5, atol=1e-6)
    return imported


# --- shapes ---


def test_named_dims_are_bound_and_kept_in_the_signature() -> None:
    proto = model([node("Relu", ["x"], ["y"])], [info("x", ["batch", 3])], [info("y", ["batch", 3])])
    imported = import_model(proto, dims={"batch": 2})
    assert imported.inputs[0].type == TensorType((2, 3), DType.FLOAT32)
    assert imported.inputs[0].declared_shape == ("batch", 3)
    assert imported.outputs[0].type.shape == (2, 3)
    assert import_model(proto, shapes={"x": (5, 3)}).outputs[0].type.shape == (5, 3)


def test_a_shape_binds_the_same_dim_of_other_inputs() -> None:
    inputs = [info("a", ["n", 3]), info("b", ["n", 1])]
    proto = model([node("Add", ["a", "b"], ["y"])], inputs, [info("y", None)])
    assert import_model(proto, shapes={"a": (4, 3)}).graph.types["b"].shape == (4, 1)


def test_open_dims_are_all_listed() -> None:
    inputs = [info("a", ["n", None]), info("b", ["n", "m"]), info("c", None)]
    proto = model([node("Sum", ["a", "b", "c"], ["y"])], inputs, [info("y", None)])
    with pytest.raises(ModelError, match="open dims") as caught:
        import_model(proto)
    text = str(caught.value)
    assert len(caught.value.problems) == 3
    assert "--shape a=1,1" in text
    assert "--dim n=1 --dim m=1" in text
    assert "--shape c=" in text


@pytest.mark.parametrize(
    ("shapes", "dims", "message"),
    [
        ({"x": (2, 4)}, {}, "declares"),
        ({"x": (2,)}, {}, "expected 2 dims"),
        ({"nope": (2,)}, {}, "no such input"),
        ({}, {"nope": 1}, "no such dim"),
        ({}, {"n": -1}, ">= 0"),
        ({"x": (2, 3)}, {"n": 3}, "elsewhere"),
    ],
)
def test_options_that_do_not_fit(shapes: dict[str, tuple[int, ...]], dims: dict[str, int], message: str) -> None:
    proto = model([node("Relu", ["x"], ["y"])], [info("x", ["n", 3])], [info("y", None)])
    with pytest.raises(OptionError, match=message):
        import_model(proto, shapes=shapes, dims=dims)


def test_shape_arithmetic_vanishes() -> None:
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["n"]),
        node("Unsqueeze", ["n", "axes"], ["n1"]),
        node("Concat", ["n1", "rest"], ["target"], axis=0),
        node("Reshape", ["x", "target"], ["y"]),
    ]
    constants = {"zero": np.array(0, np.int64), "axes": int64(0), "rest": int64(-1)}
    imported = _check(model(nodes, [info("x", [2, 3, 4])], [info("y", [2, 12])], constants), {"x": array(2, 3, 4)})
    assert _ops(imported) == {"Reshape": 1}
    assert imported.node_count == 5


# --- weights ---


def test_initializers_listed_as_inputs_are_constants() -> None:
    proto = model(
        [node("MatMul", ["x", "w"], ["y"])],
        [info("x", [2, 3]), info("w", [3, 4])],
        [info("y", [2, 4])],
        {"w": array(3, 4)},
        ir_version=3,
        opset=8,
    )
    imported = _check(proto, {"x": array(2, 3)})
    assert imported.graph.inputs == ("x",)
    assert "w" in imported.graph.constants


def test_weights_made_by_nodes() -> None:
    nodes = [
        node("Constant", [], ["w"], value=numpy_helper.from_array(array(600, 4))),
        node("ConstantOfShape", ["s"], ["b"], value=numpy_helper.from_array(np.array([2], np.float32))),
        node("Gemm", ["x", "w", "b"], ["y"]),
    ]
    imported = _check(model(nodes, [info("x", [2, 600])], [info("y", [2, 4])], {"s": int64(4)}), {"x": array(2, 600)})
    assert _ops(imported) == {"Gemm": 1}


@pytest.mark.parametrize("attribute", ["value_float", "value_floats", "value_int", "value_ints"])
def test_constant_attributes(attribute: str) -> None:
    value = {"value_float": 2.0, "value_floats": [1.0, 2.0], "value_int": 3, "value_ints": [3, 4]}[attribute]
    nodes = [node("Constant", [], ["c"], **{attribute: value}), node("Add", ["x", "c"], ["y"])]
    dtype = FLOAT if "float" in attribute else INT64
    x = np.array([1, 2], np.float32 if dtype == FLOAT else np.int64)
    _check(model(nodes, [info("x", [2], dtype)], [info("y", [2], dtype)]), {"x": x})


def test_large_weights_stay_in_the_file(tmp_path: Path) -> None:
    weights = array(300, 400)
    proto = model([node("MatMul", ["x", "w"], ["y"])], [info("x", [2, 300])], [info("y", [2, 400])], {"w": weights})
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    assert len(skeleton(memoryview(path.read_bytes()))) < 1000
    constant = import_model(path).graph.constants["w"]
    np.testing.assert_array_equal(constant, weights)
    assert not constant.flags.owndata
    assert not constant.flags.writeable


def test_all_sources_agree(tmp_path: Path) -> None:
    proto = model([node("MatMul", ["x", "w"], ["y"])], [info("x", [2, 30])], [info("y", None)], {"w": array(30, 40)})
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    for source in (path, str(path), path.read_bytes(), proto):
        imported = import_model(source)
        np.testing.assert_array_equal(imported.graph.constants["w"], array(30, 40))


def test_external_data(tmp_path: Path) -> None:
    weights = {"w": array(300, 40), "v": array(40, 50, seed=1)}
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("MatMul", ["h", "v"], ["y"])]
    proto = model(nodes, [info("x", [2, 300])], [info("y", [2, 50])], weights)
    path = tmp_path / "m.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    imported = import_model(path)
    assert [file.name for file in imported.external_files] == ["weights.bin"]
    for name, value in weights.items():
        np.testing.assert_array_equal(imported.graph.constants[name], value)


# --- nodes ---


def test_names_are_made_unique() -> None:
    nodes = [node("Relu", ["x"], ["a"], name="n"), node("Neg", ["a"], ["b"], name="n"), node("Abs", ["b"], ["y"])]
    imported = _check(model(nodes, [info("x", [3])], [info("y", [3])]), {"x": array(3)})
    assert sorted(imported.graph.nodes) == ["n", "n.1", "y"]


def test_nodes_out_of_order_are_sorted() -> None:
    nodes = [node("Relu", ["a"], ["y"]), node("Neg", ["x"], ["a"])]
    imported = import_model(model(nodes, [info("x", [3])], [info("y", [3])]))
    assert [entry.op for entry in imported.graph.topological()] == ["Neg", "Relu"]


def test_absent_inputs_and_outputs() -> None:
    nodes = [
        node("Clip", ["x", "", "six"], ["c"]),
        node("MaxPool", ["c"], ["p", ""], kernel_shape=[2, 2]),
        node("Dropout", ["p"], ["y"]),
    ]
    proto = model(nodes, [info("x", [1, 2, 4, 4])], [info("y", [1, 2, 3, 3])], {"six": np.array(6, np.float32)})
    imported = _check(proto, {"x": array(1, 2, 4, 4) * 9})
    clip = imported.graph.producer("c")
    assert clip is not None
    assert clip.inputs == ("x",)
    assert clip.attrs["max"] == 6


@pytest.mark.parametrize("opset", [7, 9, 11, 12])
def test_older_forms_become_canonical(opset: int) -> None:
    nodes = [node("Unsqueeze", ["x"], ["u"], axes=[0]), node("Softmax", ["u"], ["y"], axis=2)]
    imported = _check(model(nodes, [info("x", [3, 4])], [info("y", [1, 3, 4])], opset=opset), {"x": array(3, 4)})
    assert list(imported.graph.nodes["u"].attrs["axes"]) == [0]


def test_outputs_that_no_node_computes_get_an_identity() -> None:
    nodes = [node("Relu", ["x"], ["r"])]
    outputs = [info("r", [3]), info("x", [3]), info("c", [2])]
    imported = _check(model(nodes, [info("x", [3])], outputs, {"c": array(2)}), {"x": array(3)})
    assert all(output in imported.graph.producers for output in imported.graph.outputs)
    assert [signature.name for signature in imported.outputs] == ["r", "x", "c"]


# --- bodies ---


@pytest.mark.parametrize("condition", [True, False])
def test_a_known_if_is_inlined(condition: bool) -> None:
    then = helper.make_graph([node("Mul", ["x", "k"], ["t"])], "then", [], [info("t", [3])])
    other = helper.make_graph(
        [node("Add", ["x", "v"], ["t"])], "else", [], [info("t", [3])], [numpy_helper.from_array(array(3), "v")]
    )
    nodes = [node("If", ["c"], ["r"], then_branch=then, else_branch=other), node("Neg", ["r"], ["y"])]
    constants = {"c": np.array(condition), "k": array(3, seed=2)}
    imported = _check(model(nodes, [info("x", [3])], [info("y", [3])], constants), {"x": array(3)})
    assert _ops(imported) == {"Mul" if condition else "Add": 1, "Neg": 1}


def test_model_functions_are_inlined() -> None:
    body = helper.make_function(
        "local",
        "Twice",
        ["a"],
        ["b"],
        [node("Add", ["a", "a"], ["s"]), node("Relu", ["s"], ["b"])],
        [helper.make_opsetid("", 17)],
    )
    nodes = [node("Twice", ["x"], ["h"], domain="local"), node("Twice", ["h"], ["y"], domain="local")]
    proto = model(nodes, [info("x", [3])], [info("y", [3])], functions=[body], domains={"local": 1})
    assert _ops(_check(proto, {"x": array(3)})) == {"Add": 2, "Relu": 2}


def test_operators_with_a_function_body_are_inlined() -> None:
    nodes = [node("Attention", ["q", "k", "v"], ["y"])]
    inputs = [info(name, [1, 2, 4, 8]) for name in "qkv"]
    imported = import_model(model(nodes, inputs, [info("y", [1, 2, 4, 8])], opset=23, ir_version=10))
    assert not imported.host_ops
    assert _ops(imported)["MatMul"] == 2
    feeds = {name: array(1, 2, 4, 8, seed=seed) for seed, name in enumerate("qkv")}
    scores = feeds["q"] @ feeds["k"].transpose(0, 1, 3, 2) / np.sqrt(8)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    result = evaluate_graph(imported.graph, feeds)[imported.graph.outputs[0]]
    np.testing.assert_allclose(result, weights @ feeds["v"], rtol=1e-4, atol=1e-5)


def test_scan_becomes_a_body() -> None:
    body = helper.make_graph(
        [node("Mul", ["s", "k"], ["m"]), node("Add", ["m", "v"], ["s2"]), node("Add", ["s2", "z"], ["o"])],
        "step",
        [info("s", [3]), info("v", [3])],
        [info("s2", [3]), info("o", [3])],
    )
    nodes = [node("Scan", ["s0", "xs"], ["s1", "ys"], body=body, num_scan_inputs=1)]
    inputs = [info("s0", [3]), info("xs", [4, 3]), info("z", [3])]
    proto = model(nodes, inputs, [info("s1", [3]), info("ys", [4, 3])], {"k": array(3)})
    imported = import_model(proto)
    assert not imported.host_ops
    feeds = {"s0": array(3, seed=1), "xs": array(4, 3, seed=2), "z": array(3, seed=3)}
    state, stacked = feeds["s0"], []
    for x in feeds["xs"]:
        state = state * array(3) + x
        stacked.append(state + feeds["z"])
    results = evaluate_graph(imported.graph, feeds)
    np.testing.assert_allclose(results[imported.graph.outputs[0]], state, rtol=1e-5)
    np.testing.assert_allclose(results[imported.graph.outputs[1]], np.stack(stacked), rtol=1e-5)


# --- host ops ---


def test_ops_without_native_form_run_on_the_host() -> None:
    nodes = [node("Det", ["x"], ["d"]), node("Neg", ["d"], ["y"])]
    imported = import_model(model(nodes, [info("x", [2, 3, 3])], [info("y", [2])]))
    assert [host.op for host in imported.host_ops] == ["Det"]
    assert "native" in imported.host_ops[0].reason
    host = next(entry for entry in imported.graph.nodes.values() if entry.op == "Det")
    x = array(2, 3, 3)
    proto = onnx.load_from_string(host.attrs[HOST_MODEL])
    (result,) = ReferenceEvaluator(proto).run(None, {proto.graph.input[0].name: x})
    np.testing.assert_allclose(result, np.linalg.det(x), rtol=1e-5)


def test_an_unknown_operand_makes_a_host_op() -> None:
    proto = model(
        [node("Tile", ["x", "r"], ["t"]), node("ReduceMax", ["t"], ["y"], keepdims=0)],
        [info("x", [3]), info("r", [1], INT64)],
        [info("y", [])],
    )
    with pytest.raises(ModelError, match=r"Tile.*repeats.*not as a host op"):
        import_model(proto)


def test_known_nodes_are_evaluated_whatever_they_are() -> None:
    nodes = [node("NonZero", ["c"], ["i"]), node("Reshape", ["i", "flat"], ["f"]), node("Gather", ["x", "f"], ["y"])]
    constants = {"c": np.array([0, 1, 0, 1], np.float32), "flat": int64(-1)}
    imported = _check(model(nodes, [info("x", [4, 2])], [info("y", [2, 2])], constants), {"x": array(4, 2)})
    assert _ops(imported) == {"Gather": 1}


def test_random_nodes_are_not_evaluated_at_import() -> None:
    proto = model([node("RandomNormal", [], ["y"], shape=[2, 2])], [], [info("y", [2, 2])])
    imported = import_model(proto)
    assert "y" not in imported.graph.constants


def test_int32_bfloat16_weights() -> None:
    tensor = helper.make_tensor("w", TensorProto.BFLOAT16, [2], [1.5, -2.0])
    proto = model(
        [node("Cast", ["w"], ["f"], to=FLOAT), node("Mul", ["x", "f"], ["y"])], [info("x", [2])], [info("y", [2])]
    )
    proto.graph.initializer.append(tensor)
    imported = import_model(proto)
    result = evaluate_graph(imported.graph, {"x": np.ones(2, np.float32)})
    np.testing.assert_array_equal(result[imported.graph.outputs[0]], [1.5, -2.0])
