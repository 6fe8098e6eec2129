"""Fixtures that several packages' tests use. MCOMPILE_SEED picks the sample where a test sweeps; --full takes all."""

import os
import random
from collections.abc import Iterable
from typing import TypeVar

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

T = TypeVar("T")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="whole sweeps instead of the sample that MCOMPILE_SEED draws")


def pytest_report_header():
    return f"MCOMPILE_SEED={sample_seed()}"


def sample_seed() -> int:
    return int(os.environ.get("MCOMPILE_SEED", "0"))


def sampled(config: pytest.Config, items: Iterable[T], count: int) -> list[T]:
    """`count` of `items`, drawn by MCOMPILE_SEED, in their order; all of them with --full."""
    items = list(items)
    if config.getoption("full") or count >= len(items):
        return items
    return [items[index] for index in sorted(random.Random(sample_seed()).sample(range(len(items)), count))]


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path_factory, monkeypatch):
    """No test reads or fills the user's cache."""
    monkeypatch.setenv("MCOMPILE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def convolution_model(dims=("batch", 3, 8, 8)):
    """Two convolutions with a residual sum, a pooling, a matrix product and a softmax; an open batch by default."""
    generator = np.random.default_rng(3)

    def weight(name, *shape):
        return numpy_helper.from_array((generator.standard_normal(shape) * 0.3).astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"], name="relu"),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], name="second", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c2", "r1"], ["s"], name="sum"),
        helper.make_node("GlobalAveragePool", ["s"], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["f"], name="flat"),
        helper.make_node("Gemm", ["f", "w3"], ["g"], name="dense", transB=1),
        helper.make_node("Softmax", ["g"], ["y"], name="softmax", axis=-1),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, list(dims))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [dims[0], 5])
    weights = [weight("w1", 16, 3, 3, 3), weight("w2", 16, 16, 3, 3), weight("w3", 5, 16)]
    graph = helper.make_graph(nodes, "small", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def open_model(tmp_path):
    """The path of a small network whose batch is open."""
    onnx.save(convolution_model(), tmp_path / "open.onnx")
    return tmp_path / "open.onnx"


@pytest.fixture
def small_model(tmp_path):
    """The path of a small network with fixed shapes."""
    onnx.save(convolution_model((2, 3, 8, 8)), tmp_path / "small.onnx")
    return tmp_path / "small.onnx"
