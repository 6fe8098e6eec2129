import numpy as np
import onnx
import onnxruntime
import pytest

import models.__main__
from models import build_model

SMALL = ["dcgan", "mobilenet_v2", "resnet18"]


@pytest.mark.parametrize("name", SMALL)
def test_outputs_depend_on_inputs_and_are_tame(name):
    model = build_model(name)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    signature = session.get_inputs()[0]
    random = np.random.default_rng(0)
    first, second = (
        session.run(None, {signature.name: random.standard_normal(signature.shape).astype(np.float32)})[0]
        for _ in range(2)
    )
    assert np.isfinite(first).all()
    assert 0.01 < first.std() < 100
    assert np.abs(first - second).max() > 0.01 * np.abs(first).max()


def test_equal_seeds_give_equal_bytes():
    first, second = (build_model("dcgan").SerializeToString(deterministic=True) for _ in range(2))
    assert first == second
    assert first != build_model("dcgan", seed=1).SerializeToString(deterministic=True)


def test_a_named_batch_stays_open():
    model = build_model("dcgan", batch="batch")
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_the_command_writes_the_file(tmp_path, capsys):
    path = tmp_path / "dcgan.onnx"
    assert models.__main__.main(["dcgan", "-o", str(path), "--batch", "2"]) == 0
    assert capsys.readouterr().out.strip() == str(path)
    assert onnx.load(path).graph.input[0].type.tensor_type.shape.dim[0].dim_value == 2


def test_the_command_refuses_an_unknown_name(capsys):
    with pytest.raises(SystemExit) as raised:
        models.__main__.main(["alexnet"])
    assert raised.value.code == 2
    assert "resnet50" in capsys.readouterr().err
