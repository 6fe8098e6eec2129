"""The `light_*` models inside the onnx package, with weights that are worth comparing.

Their own weights are all equal (made by ConstantOfShape), so outputs hardly depend on inputs and errors hide. Here they
get random values from a seed, scaled by what the weight is for, and the last layer is scaled so that its outputs have a
standard deviation of 2: else the softmax behind it would be one-hot.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
_LOGIT_DEVIATION = 2.0


def light_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("light_*.onnx"))


def light_model(name: str, seed: int = 7) -> onnx.ModelProto:
    """The model `name` with random weights. Equal arguments give equal models."""
    model = onnx.load(_FOLDER / f"{name}.onnx")
    random = np.random.default_rng(seed)
    _randomise(model, random)
    model.ir_version = max(model.ir_version, 4)  # before 4 every initializer had to be listed as an input
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    _scale_logits(model, random)
    onnx.checker.check_model(model)
    return model


def _roles(graph: onnx.GraphProto) -> dict[str, str]:
    """What each weight is for, from the node that uses it."""
    roles: dict[str, str] = {}
    for node in graph.node:
        if node.op_type == "BatchNormalization":
            roles.update(zip(node.input[1:5], ("scale", "bias", "mean", "variance"), strict=True))
        elif node.op_type in ("Conv", "Gemm") and len(node.input) > 2:
            roles[node.input[2]] = "bias"
        elif node.op_type == "Unsqueeze":  # some models write scale and shift as Unsqueeze + Mul and Add
            users = [user.op_type for user in graph.node if node.output[0] in user.input]
            roles.setdefault(node.input[0], "scale" if users == ["Mul"] else "bias")
    return roles


def _weights(role: str, shape: list[int], random: np.random.Generator) -> onnx.TensorProto:
    match role:
        case "bias" | "mean":
            values = random.standard_normal(shape) * 0.05
        case "variance" | "scale":
            values = random.uniform(0.8, 1.2, shape)
        case _:
            values = random.standard_normal(shape) * (2.0 / max(1, int(np.prod(shape[1:])))) ** 0.5
    return numpy_helper.from_array(values.astype(np.float32))


def _randomise(model: onnx.ModelProto, random: np.random.Generator) -> None:
    graph = model.graph
    roles = _roles(graph)
    shapes = {tensor.name: tensor for tensor in graph.initializer}
    kept, made = [], set()
    for node in graph.node:
        if node.op_type != "ConstantOfShape":
            kept.append(node)
            continue
        shape = [int(size) for size in numpy_helper.to_array(shapes[node.input[0]])]
        tensor = _weights(roles.get(node.output[0], "weight"), shape, random)
        tensor.name = node.output[0]
        graph.initializer.append(tensor)
        made.add(node.input[0])
    del graph.node[:]
    graph.node.extend(kept)
    used = {value for node in kept for value in node.input}
    for tensor in [tensor for tensor in graph.initializer if tensor.name in made - used]:
        graph.initializer.remove(tensor)
    for value in [value for value in graph.input if value.name in made - used]:
        graph.input.remove(value)


def _scale_logits(model: onnx.ModelProto, random: np.random.Generator) -> None:
    import onnxruntime

    last = [node for node in model.graph.node if node.op_type in ("Gemm", "Conv")][-1]
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    probe.graph.output.append(helper.make_tensor_value_info(last.output[0], TensorProto.FLOAT, None))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(probe.SerializeToString(), options, providers=["CPUExecutionProvider"])
    signature = session.get_inputs()[0]
    feed = random.standard_normal(signature.shape).astype(np.float32)
    logits = session.run([last.output[0]], {signature.name: feed})[0]
    factor = _LOGIT_DEVIATION / (float(logits.std()) + 1e-30)
    for tensor in model.graph.initializer:
        if tensor.name in last.input[1:]:
            scaled = (numpy_helper.to_array(tensor) * factor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(scaled, tensor.name))
