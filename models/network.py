"""A small writer of ONNX graphs: names, weights from a seed, and the layers that several networks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 8
Dims = Sequence[int | str]


class Network:
    """Collects nodes and initializers; every method that adds a node returns the name of its output."""

    def __init__(self, name: str, seed: int) -> None:
        self._name = name
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"{kind}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), [f"{name}_out"], name=name, **attributes))
        return f"{name}_out"

    def constant(self, array: NDArray[Any], stem: str = "const") -> str:
        name = f"{stem}_{len(self._initializers)}"
        self._initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def normal(self, shape: Sequence[int], scale: float, stem: str = "weight") -> str:
        return self.constant((self._random.standard_normal(shape) * scale).astype(np.float32), stem)

    def uniform(self, shape: Sequence[int], low: float, high: float, stem: str) -> str:
        return self.constant(self._random.uniform(low, high, shape).astype(np.float32), stem)

    def conv(
        self, x: str, channels: tuple[int, int], kernel: Sequence[int], strides: Sequence[int], group: int = 1
    ) -> str:
        """Convolution without bias, (in, out) channels, padded by half its kernel; weights by He et al."""
        inner = channels[0] // group
        fan = inner * int(np.prod(kernel))
        weight = self.normal((channels[1], inner, *kernel), (2.0 / fan) ** 0.5)
        pads = [extent // 2 for extent in kernel] * 2
        return self.op("Conv", x, weight, kernel_shape=list(kernel), strides=list(strides), pads=pads, group=group)

    def batch_norm(self, x: str, channels: int, gain: float = 1.0) -> str:
        """BatchNormalization with statistics near the unit ones, its scale near `gain`."""
        scale = self.uniform((channels,), 0.8 * gain, 1.2 * gain, "scale")
        bias, mean = self.normal((channels,), 0.05, "bias"), self.normal((channels,), 0.1, "mean")
        return self.op("BatchNormalization", x, scale, bias, mean, self.uniform((channels,), 0.8, 1.2, "var"))

    def dense(self, x: str, inner: int, outer: int) -> str:
        """Gemm with bias whose outputs have a standard deviation near that of its inputs."""
        return self.op("Gemm", x, self.normal((outer, inner), inner**-0.5), self.normal((outer,), 0.02), transB=1)

    def model(self, inputs: Sequence[onnx.ValueInfoProto], output: str, shape: Dims) -> onnx.ModelProto:
        """The checked model; its one output, `output`, is called "output"."""
        self._nodes.append(helper.make_node("Identity", [output], ["output"], name="output"))
        outputs = [helper.make_tensor_value_info("output", TensorProto.FLOAT, list(shape))]
        graph = helper.make_graph(self._nodes, self._name, list(inputs), outputs, self._initializers)
        opset = helper.make_opsetid("", OPSET)
        model = helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name="mcompile.models")
        onnx.checker.check_model(model)
        return model


def tensor_input(name: str, shape: Dims, element: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element, list(shape))
