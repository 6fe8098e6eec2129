"""The DCGAN generator (Radford et al. 2015): 100 numbers to an image of 64 x 64 pixels, by transposed convolutions."""

from __future__ import annotations

import onnx

from models.network import Network, tensor_input

_LATENT = 100
_CHANNELS = (512, 256, 128, 64, 3)


def dcgan(batch: int | str = 1, seed: int = 0) -> onnx.ModelProto:
    net = Network("dcgan", seed)
    x, inner = "input", _LATENT
    for layer, outer in enumerate(_CHANNELS):
        stride, pad = (1, 0) if layer == 0 else (2, 1)
        weight = net.normal((inner, outer, 4, 4), (2.0 * stride**2 / (16 * inner)) ** 0.5)
        x = net.op("ConvTranspose", x, weight, kernel_shape=[4, 4], strides=[stride] * 2, pads=[pad] * 4)
        last = outer == _CHANNELS[-1]
        x = net.op("Tanh", x) if last else net.op("Relu", net.batch_norm(x, outer))
        inner = outer
    return net.model([tensor_input("input", [batch, _LATENT, 1, 1])], x, [batch, 3, 64, 64])
