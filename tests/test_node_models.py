"""The node tests of the onnx package, from ONNX to native code: a sample drawn by MCOMPILE_SEED, or all with --full.

A model is compiled as it is, or with its small inputs as initializers where an operator needs them when compiling.
What cannot be compiled has to be refused by a ModelError.
"""

import warnings
from functools import cache

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases

from mcompile.driver import CompileOptions, compile_model
from mcompile.errors import ModelError
from mcompile.runtime import InferenceSession
from tests.conftest import sampled

SAMPLE = 120
SMALL = 64  # elements of an input that may be made an initializer

EXCLUDED = {  # name, or its beginning -> why
    "test_bernoulli": "random by definition",
    "test_optional_": "an input of optional type",
}


@cache
def cases():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {case.name: case for case in collect_testcases(None)}
    return {name: case for name, case in found.items() if not name.startswith(tuple(EXCLUDED)) and has_tensors(case)}


def has_tensors(case):
    """Whether all its inputs and outputs are tensors of numbers."""
    arrays = [array for side in case.data_sets[0] for array in side]
    return all(isinstance(array, (np.ndarray, np.generic)) and array.dtype.kind not in "OUS" for array in arrays)


def with_initializers(model, feeds):
    """The model with its small inputs, the first apart, as initializers; and the feeds that are left."""
    small = [name for name in list(feeds)[1:] if np.size(feeds[name]) <= SMALL]
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    changed.graph.initializer.extend(numpy_helper.from_array(np.asarray(feeds[name]), name) for name in small)
    inputs = [value for value in model.graph.input if value.name not in small]
    del changed.graph.input[:]
    changed.graph.input.extend(inputs)
    return changed, {name: array for name, array in feeds.items() if name not in small}


def run(model, feeds):
    shapes = {name: np.shape(array) for name, array in feeds.items()}
    artifact = compile_model(model, CompileOptions(threads=2, workers=1, shapes=shapes))
    return InferenceSession(artifact, threads=2).run(None, feeds)


def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", sampled(metafunc.config, sorted(cases()), SAMPLE))


@pytest.mark.filterwarnings("ignore")  # of the reference implementations that host ops run
def test_node_model(name):
    case = cases()[name]
    inputs, expected = case.data_sets[0]
    feeds = {value.name: np.asarray(array) for value, array in zip(case.model.graph.input, inputs, strict=False)}
    try:
        got = run(case.model, feeds)
    except ModelError:
        try:
            got = run(*with_initializers(case.model, feeds))
        except ModelError as error:
            pytest.skip(str(error))
    for array, wanted in zip(got, expected, strict=True):
        assert array.dtype == np.asarray(wanted).dtype
        assert_close(array, np.asarray(wanted), case)


def assert_close(array, wanted, case):
    if wanted.dtype.kind not in "fV":
        np.testing.assert_array_equal(array, wanted)
        return
    narrow = {"float16": 2e-3, "bfloat16": 2e-2}.get(wanted.dtype.name, 0.0)  # of one rounding more or less
    rtol, atol = max(case.rtol, 1e-3, narrow), max(case.atol, 1e-5, narrow)
    np.testing.assert_allclose(array.astype(np.float64), wanted.astype(np.float64), rtol=rtol, atol=atol)
