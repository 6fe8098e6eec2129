"""mcompile.InferenceSession on ONNX models; the runtime's own behaviour is tested in tests/runtime."""

import os
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import mcompile
from mcompile.errors import ModelError, OptionError
from mcompile.runtime.cache import open_cache
from tests.conftest import convolution_model

X = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)


@pytest.fixture
def compiles(monkeypatch, tmp_path):
    """A list that grows by an entry with every compile; the cache is empty."""
    import mcompile.driver

    monkeypatch.setenv("MCOMPILE_CACHE", str(tmp_path / "cache"))
    calls = []
    real = mcompile.driver.compile_model
    monkeypatch.setattr(mcompile.driver, "compile_model", lambda *args: calls.append(args) or real(*args))
    return calls


def age(path):
    """Make a file old enough for its date to be trusted."""
    os.utime(path, ns=(10**18, 10**18))


def test_path_bytes_and_proto_give_the_same(small_model, compiles):
    data = small_model.read_bytes()
    sessions = [
        mcompile.InferenceSession(m, threads=1) for m in (small_model, str(small_model), data, onnx.load(small_model))
    ]
    results = [session.run(None, {"x": X})[0] for session in sessions]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_the_second_session_comes_from_the_cache(small_model, compiles):
    for _ in range(3):
        mcompile.InferenceSession(small_model, threads=1)
    assert len(compiles) == 1
    assert len(open_cache().entries()) == 1


def test_a_changed_model_is_compiled_again(small_model, compiles):
    age(small_model)
    before = mcompile.InferenceSession(small_model, threads=1).run(None, {"x": X})[0]
    model = onnx.load(small_model)
    weight = model.graph.initializer[0]
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * 2, weight.name))
    onnx.save(model, small_model)
    after = mcompile.InferenceSession(small_model, threads=1).run(None, {"x": X})[0]
    assert len(compiles) == 2
    assert np.abs(before - after).max() > 1e-6


@pytest.mark.parametrize("location", ["../weights.bin", "/dev/zero", "missing.bin"])
def test_external_data_elsewhere_is_not_read(tmp_path, compiles, location):
    model = convolution_model((2, 3, 8, 8))
    path = tmp_path / "external.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    proto = onnx.load(path, load_external_data=False)
    for entry in proto.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="external data of tensor"):
        mcompile.InferenceSession(path, threads=1)
    assert not compiles


def test_changed_external_data_is_noticed(tmp_path, compiles):
    path = tmp_path / "external.onnx"
    onnx.save(
        convolution_model((2, 3, 8, 8)), path, save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    for each in (path, tmp_path / "weights.bin"):
        age(each)
    for _ in range(2):
        mcompile.InferenceSession(path, threads=1)
    assert len(compiles) == 1
    weights = bytearray((tmp_path / "weights.bin").read_bytes())
    weights[3] ^= 1
    (tmp_path / "weights.bin").write_bytes(bytes(weights))
    mcompile.InferenceSession(path, threads=1)
    assert len(compiles) == 2


def test_threads_shapes_and_dims_are_part_of_the_key(open_model, compiles):
    for dims, threads in (({"batch": 1}, 1), ({"batch": 2}, 1), ({"batch": 2}, 2), ({"batch": 1}, 1)):
        mcompile.InferenceSession(open_model, threads=threads, dims=dims)
    assert len(compiles) == 3


def test_a_damaged_cache_entry_is_compiled_again(small_model, compiles):
    mcompile.InferenceSession(small_model, threads=1)
    path = open_cache().entries()[0].path
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(bytes(data))
    mcompile.InferenceSession(small_model, threads=1).run(None, {"x": X})
    assert len(compiles) == 2


def test_a_cache_that_cannot_be_written_does_no_harm(small_model, compiles, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MCOMPILE_CACHE", str(tmp_path / "file" / "cache"))
    mcompile.InferenceSession(small_model, threads=1).run(None, {"x": X})


def test_options_bind_open_dims(open_model, compiles):
    options = mcompile.SessionOptions()
    options.add_free_dimension_override_by_name("batch", 2)
    session = mcompile.InferenceSession(open_model, options, threads=1)
    assert session.get_inputs()[0].shape == [2, 3, 8, 8]
    with pytest.raises(ModelError, match="open dims"):
        mcompile.InferenceSession(open_model, threads=1)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(OptionError, match="expected a path, bytes, a ModelProto or an Artifact, got int"):
        mcompile.InferenceSession(3)
    with pytest.raises(ModelError, match=r"nothing\.onnx"):
        mcompile.InferenceSession(tmp_path / "nothing.onnx")
    with pytest.raises(ModelError):
        mcompile.InferenceSession(b"")


def test_an_artifact_is_loaded_as_it_is(small_model, tmp_path, compiles):
    artifact = mcompile.compile(small_model, mcompile.CompileOptions(threads=1))
    session = mcompile.InferenceSession(artifact)
    assert session.run(["y"], {"x": X})[0].shape == (2, 5)


def test_a_start_from_the_cache_brings_in_no_compiler(small_model, tmp_path):
    age(small_model)
    code = (
        "import sys, mcompile\n"
        f"mcompile.InferenceSession({str(small_model)!r}, threads=1)\n"
        "print([name for name in ('onnx', 'networkx', 'mcompile.ir', 'mcompile.driver') if name in sys.modules])"
    )
    environment = {**os.environ, "MCOMPILE_CACHE": str(tmp_path / "cache"), "PYTHONPATH": os.getcwd()}
    results = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert "mcompile.driver" in results[0]
    assert results[1].strip() == "[]"
