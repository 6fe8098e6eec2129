import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from mcompile.compare.latency import race
from mcompile.compare.side import Side, SideSpec
from mcompile.errors import ModelError


@pytest.fixture
def model(tmp_path):
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", infos[:1], infos[1:])
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), tmp_path / "relu.onnx")
    return tmp_path / "relu.onnx"


@pytest.fixture
def feeds(tmp_path):
    np.savez(tmp_path / "feeds.npz", x=np.array([[-1, 2, -3, 4]], np.float32))
    return tmp_path / "feeds.npz"


def test_onnxruntime_runs_and_tells_its_settings(model, feeds, tmp_path):
    with Side(SideSpec("onnxruntime", str(model), 1, {"n": 1})) as side:
        side.run(feeds, tmp_path / "out.npz")
        assert side.settings["intra_op_num_threads"] == 1
        assert side.settings["graph_optimization_level"] == "all"
        assert side.peak_bytes() > 1 << 20
    with np.load(tmp_path / "out.npz") as outputs:
        np.testing.assert_array_equal(outputs["arr_0"], [[0, 2, 0, 4]])


def test_two_sides_race_and_both_end(model, feeds):
    spec = SideSpec("onnxruntime", str(model), 1)
    with Side(spec) as ours, Side(spec) as theirs:
        result = race(ours, theirs, feeds, 8)
        children = [ours._child, theirs._child]
    assert result.ours.runs >= 8
    assert result.speedup > 0
    assert all(child.poll() is not None for child in children)


def test_an_error_in_the_child_is_raised_here(tmp_path):
    with pytest.raises(ModelError, match=r"onnxruntime: .*nothing\.onnx"):
        Side(SideSpec("onnxruntime", str(tmp_path / "nothing.onnx"), 1))


def test_an_error_in_a_run_is_raised_here_and_the_child_lives_on(model, feeds, tmp_path):
    np.savez(tmp_path / "wrong.npz", z=np.zeros(1, np.float32))
    with Side(SideSpec("onnxruntime", str(model), 1)) as side:
        with pytest.raises(ModelError, match="onnxruntime"):
            side.run(tmp_path / "wrong.npz", tmp_path / "out.npz")
        side.run(feeds, tmp_path / "out.npz")
