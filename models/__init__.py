"""Standard networks written with onnx.helper and seeded weights: no downloads, no framework."""

from __future__ import annotations

from collections.abc import Callable

import onnx

from models.bert import bert_base
from models.dcgan import dcgan
from models.mobilenet import mobilenet_v2
from models.resnet import r3d_18, resnet18, resnet50

ModelBuilder = Callable[[int | str, int], onnx.ModelProto]  # (batch, seed) -> model

MODELS: dict[str, ModelBuilder] = {
    "bert_base": bert_base,
    "dcgan": dcgan,
    "mobilenet_v2": mobilenet_v2,
    "r3d_18": r3d_18,
    "resnet18": resnet18,
    "resnet50": resnet50,
}


def build_model(name: str, batch: int | str = 1, seed: int = 0) -> onnx.ModelProto:
    """The network `name` of MODELS; a string as `batch` names an open dim. Equal arguments give equal bytes."""
    return MODELS[name](batch, seed)
