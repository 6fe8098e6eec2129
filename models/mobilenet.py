"""MobileNet-V2 (Sandler et al. 2018, table 2), width 1.0."""

from __future__ import annotations

import numpy as np
import onnx

from models.network import Network, tensor_input

_STAGES = (  # expansion, channels, blocks, stride
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class _MobileNet(Network):
    def unit(self, x: str, channels: tuple[int, int], kernel: int, stride: int, group: int = 1) -> str:
        """Convolution, normalisation, Relu6."""
        y = self.batch_norm(self.conv(x, channels, [kernel] * 2, [stride] * 2, group), channels[1])
        return self.op("Clip", y, self._low, self._high)

    def bounds(self) -> None:
        self._low = self.constant(np.array(0.0, np.float32), "low")
        self._high = self.constant(np.array(6.0, np.float32), "high")

    def inverted_residual(self, x: str, channels: tuple[int, int], expansion: int, stride: int) -> str:
        inner, outer = channels
        middle = inner * expansion
        y = self.unit(x, (inner, middle), 1, 1) if expansion > 1 else x
        y = self.unit(y, (middle, middle), 3, stride, group=middle)
        y = self.batch_norm(self.conv(y, (middle, outer), [1, 1], [1, 1]), outer)
        return self.op("Add", y, x) if stride == 1 and inner == outer else y


def mobilenet_v2(batch: int | str = 1, seed: int = 0) -> onnx.ModelProto:
    net = _MobileNet("mobilenet_v2", seed)
    net.bounds()
    x, inner = net.unit("input", (3, 32), 3, 2), 32
    for expansion, outer, count, first_stride in _STAGES:
        for index in range(count):
            x = net.inverted_residual(x, (inner, outer), expansion, first_stride if index == 0 else 1)
            inner = outer
    x = net.unit(x, (inner, 1280), 1, 1)
    y = net.dense(net.op("Flatten", net.op("GlobalAveragePool", x)), 1280, 1000)
    return net.model([tensor_input("input", [batch, 3, 224, 224])], y, [batch, 1000])
