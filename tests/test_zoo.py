"""Whole models against onnxruntime: a sample of the zoo's drawn by MCOMPILE_SEED, all of them with --full."""

import onnx
import pytest

from benchmarks.light_models import light_names
from benchmarks.zoo_models import find_zoo, light
from mcompile.compare.comparison import CompareOptions, compare
from mcompile.driver import CompileOptions
from models import MODELS, build_model
from tests.conftest import sampled

ZOO = find_zoo()
ZOO_SAMPLE = 5
LIGHT_SAMPLE = 2
MODELS_SAMPLE = 3


def pytest_generate_tests(metafunc):
    if "zoo_name" in metafunc.fixturenames:
        metafunc.parametrize("zoo_name", sampled(metafunc.config, ZOO.names() if ZOO else [], ZOO_SAMPLE))
    if "light_name" in metafunc.fixturenames:
        metafunc.parametrize("light_name", sampled(metafunc.config, light_names(), LIGHT_SAMPLE))
    if "model_name" in metafunc.fixturenames:
        metafunc.parametrize("model_name", sampled(metafunc.config, sorted(MODELS), MODELS_SAMPLE))


def assert_agrees(path, dims=None):
    options = CompareOptions(CompileOptions(threads=2, dims=dims or {}), repeat=0, localise=False)
    result = compare(path, options)
    assert result.ok, result.outputs
    assert (result.host_ops, result.segments) == ((), 1)
    assert max(output.max_scaled_error for output in result.outputs) <= 1e-4


@pytest.mark.slow
def test_models_agree(model_name, tmp_path):
    onnx.save(build_model(model_name), tmp_path / f"{model_name}.onnx")
    assert_agrees(tmp_path / f"{model_name}.onnx")


@pytest.mark.slow
@pytest.mark.zoo  # skipped where there is none: set MCOMPILE_ZOO
def test_zoo_models_agree(zoo_name):
    model = ZOO.model(zoo_name)
    assert_agrees(model.path, model.dims)


@pytest.mark.slow
def test_light_models_agree(light_name):
    assert_agrees(light(light_name).path)
