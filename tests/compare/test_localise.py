import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from mcompile.compare.accuracy import Tolerance
from mcompile.compare.localise import Localiser
from mcompile.frontend import submodel


def run_reference(model, feeds):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(feeds))


def run_with_fault(op, replacement):
    """An engine that computes `replacement` where the model says `op`."""

    def run(model, feeds):
        wrong = onnx.ModelProto()
        wrong.CopyFrom(model)
        for node in wrong.graph.node:
            node.op_type = replacement if node.op_type == op else node.op_type
        return run_reference(wrong, feeds)

    return run


@pytest.fixture
def model():
    """Two branches of a few nodes each; the names are in topological order of neither branch alone."""
    nodes = [
        helper.make_node("Abs", ["x"], ["a0"], name="a0"),
        helper.make_node("Neg", ["x"], ["b0"], name="b0"),
        helper.make_node("Sigmoid", ["a0"], ["a1"], name="a1"),
        helper.make_node("Exp", ["b0"], ["b1"], name="b1"),
        helper.make_node("Sqrt", ["a1"], ["a2"], name="a2"),
        helper.make_node("Tanh", ["b1"], ["b2"], name="b2"),
        helper.make_node("Add", ["a2", "b2"], ["y"], name="sum"),
    ]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def feeds():
    return {"x": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)}


@pytest.mark.parametrize(("op", "value"), [("Abs", "a0"), ("Exp", "b1"), ("Sqrt", "a2"), ("Add", "y")])
def test_the_faulty_node_is_found(model, feeds, op, value):
    replacement = "Mul" if op == "Add" else "Cos"
    localiser = Localiser(run_with_fault(op, replacement), run_reference, Tolerance(), lambda text: None)
    found = localiser.find(model, feeds)
    assert (found.op, found.value, found.alone) == (op, value, True)
    assert found.error.max_abs_error > 0


def test_a_fault_that_only_shows_in_company(model, feeds):
    def run(part, fed):
        got = run_reference(part, fed)
        return [array + 1 for array in got] if len(part.graph.node) >= 4 else got

    found = Localiser(run, run_reference, Tolerance(), lambda text: None).find(model, feeds)
    assert (found.node, found.alone) == ("b1", False)


def test_no_difference_is_none(model, feeds):
    assert Localiser(run_reference, run_reference, Tolerance(), lambda text: None).find(model, feeds) is None


def test_live_values_are_those_still_in_use(model):
    assert submodel.live_values(model, 3) == ("b0", "a1")
    assert submodel.live_values(model, 7) == ("y",)


def test_index_limits_follow_casts_to_the_table():
    nodes = [
        helper.make_node("Cast", ["ids"], ["wide"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "wide"], ["y"]),
    ]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT32, [4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 2])
    table = onnx.numpy_helper.from_array(np.zeros((30, 2), np.float32), "table")
    model = helper.make_model(helper.make_graph(nodes, "g", [ids], [y], [table]))
    assert submodel.index_limits(model) == {"ids": 30}
