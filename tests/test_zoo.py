"""Whole models against onnxruntime. Which of the zoo's are run is drawn by MCOMPILE_SEED; models/ are run always."""

import random

import onnx
import pytest

from benchmarks.light_models import light_names
from benchmarks.zoo_models import find_zoo, light
from mcompile.compare.comparison import CompareOptions, compare
from mcompile.driver import CompileOptions
from models import build_model
from tests.conftest import sample_seed

ZOO = find_zoo()
ZOO_SAMPLE = 4
LIGHT_SAMPLE = 2


def sample(names, count):
    return sorted(random.Random(sample_seed()).sample(names, min(count, len(names))))


def assert_agrees(path, dims=None):
    options = CompareOptions(CompileOptions(threads=2, dims=dims or {}), repeat=0, localise=False)
    result = compare(path, options)
    assert result.ok, result.outputs
    assert (result.host_ops, result.segments) == ((), 1)
    assert max(output.max_scaled_error for output in result.outputs) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dcgan", "mobilenet_v2", "resnet18"])
def test_models_agree(name, tmp_path):
    onnx.save(build_model(name), tmp_path / f"{name}.onnx")
    assert_agrees(tmp_path / f"{name}.onnx")


@pytest.mark.slow
@pytest.mark.zoo
@pytest.mark.skipif(ZOO is None, reason="no zoo on this machine: set MCOMPILE_ZOO")
@pytest.mark.parametrize("name", sample(ZOO.names(), ZOO_SAMPLE) if ZOO else [])
def test_zoo_models_agree(name):
    model = ZOO.model(name)
    assert_agrees(model.path, model.dims)


@pytest.mark.slow
@pytest.mark.parametrize("name", sample(light_names(), LIGHT_SAMPLE))
def test_light_models_agree(name):
    assert_agrees(light(name).path)
