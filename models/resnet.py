"""ResNet-18 and -50 (He et al. 2015, stride on the 3x3 convolution) and its 3-d form r3d_18 (Tran et al. 2018)."""

from __future__ import annotations

import onnx

from models.network import Network, tensor_input

_BRANCH_GAIN = 0.3  # of a block's last BatchNormalization: keeps the sum of many branches tame


def _unit(net: Network, x: str, channels: tuple[int, int], kernel: int, stride: int, dims: int, gain: float) -> str:
    y = net.conv(x, channels, [kernel] * dims, [stride] * dims)
    return net.batch_norm(y, channels[1], gain)


def _basic_block(net: Network, x: str, channels: tuple[int, int], stride: int, dims: int) -> str:
    inner, outer = channels
    y = net.op("Relu", _unit(net, x, (inner, outer), 3, stride, dims, 1.0))
    return _unit(net, y, (outer, outer), 3, 1, dims, _BRANCH_GAIN)


def _bottleneck(net: Network, x: str, channels: tuple[int, int], stride: int, dims: int) -> str:
    inner, outer = channels
    middle = outer // 4
    y = net.op("Relu", _unit(net, x, (inner, middle), 1, 1, dims, 1.0))
    y = net.op("Relu", _unit(net, y, (middle, middle), 3, stride, dims, 1.0))
    return _unit(net, y, (middle, outer), 1, 1, dims, _BRANCH_GAIN)


def _stages(net: Network, x: str, counts: tuple[int, ...], expansion: int, dims: int) -> str:
    block = _basic_block if expansion == 1 else _bottleneck
    inner = 64
    for stage, count in enumerate(counts):
        outer = (64 << stage) * expansion
        for index in range(count):
            stride = 2 if index == 0 and stage > 0 else 1
            y = block(net, x, (inner, outer), stride, dims)
            shortcut = x if inner == outer and stride == 1 else _unit(net, x, (inner, outer), 1, stride, dims, 1.0)
            x = net.op("Relu", net.op("Add", y, shortcut))
            inner = outer
    return net.dense(net.op("Flatten", net.op("GlobalAveragePool", x)), inner, 1000 if dims == 2 else 400)


def _resnet(name: str, counts: tuple[int, ...], expansion: int, batch: int | str, seed: int) -> onnx.ModelProto:
    net = Network(name, seed)
    x = net.op("Relu", net.batch_norm(net.conv("input", (3, 64), [7, 7], [2, 2]), 64))
    x = net.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    y = _stages(net, x, counts, expansion, 2)
    return net.model([tensor_input("input", [batch, 3, 224, 224])], y, [batch, 1000])


def resnet18(batch: int | str = 1, seed: int = 0) -> onnx.ModelProto:
    return _resnet("resnet18", (2, 2, 2, 2), 1, batch, seed)


def resnet50(batch: int | str = 1, seed: int = 0) -> onnx.ModelProto:
    return _resnet("resnet50", (3, 4, 6, 3), 4, batch, seed)


def r3d_18(batch: int | str = 1, seed: int = 0) -> onnx.ModelProto:
    """Clips of 16 frames of 112 x 112 pixels, 400 classes."""
    net = Network("r3d_18", seed)
    x = net.op("Relu", net.batch_norm(net.conv("input", (3, 64), [3, 7, 7], [1, 2, 2]), 64))
    y = _stages(net, x, (2, 2, 2, 2), 1, 3)
    return net.model([tensor_input("input", [batch, 3, 16, 112, 112])], y, [batch, 400])
