"""python -m benchmarks.kernels [--threads N] [--repeat N] [--json]

Single layers, untuned, inside a model (their input lies as the layer before leaves it): the direct kernel's time
against the FMA peak and the memory bandwidth that are measured in the same process, the time of the algorithm that a
compile chooses, and onnxruntime's time for the layer alone. Layers: nine convolutions of ResNet-50, the matrix products
of BERT-base with 128 tokens, a depthwise convolution, and a softmax and a layer normalisation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from mcompile.backend.cpu.peak import Peak, measure_peak
from mcompile.driver import CompileOptions, compile_model, profile_artifact
from mcompile.target import parse_target

_COLUMNS = "{:<34} {:>9} {:>9} {:>8} {:>7} {:>8} {:>9} {:>7}"


@dataclass(frozen=True)
class Layer:
    """A layer alone, and behind another one; `flops` of one run, `moved_bytes` that it at least reads and writes."""

    name: str
    alone: onnx.ModelProto
    model: onnx.ModelProto
    flops: int
    moved_bytes: int


@dataclass(frozen=True)
class Row:
    """Milliseconds of the layer's own kernels: computed directly, and as compiled by default (perhaps Winograd)."""

    name: str
    direct_ms: float
    chosen_ms: float
    gflops: float
    peak_share: float
    bandwidth_share: float
    onnxruntime_ms: float
    kernel_speedup: float


def conv(channels: int, size: int, out: int, kernel: int, stride: int = 1, group: int = 1) -> Layer:
    weight = np.zeros((out, channels // group, kernel, kernel), np.float32)
    pads = [kernel // 2] * 4
    attributes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": pads, "group": group}
    side = (size + 2 * (kernel // 2) - kernel) // stride + 1
    kind = "depthwise" if group > 1 else "conv"
    name = f"{kind} {channels}x{size}x{size} -> {out}, {kernel}x{kernel} / {stride}"
    shapes = ([1, channels, size, size], [1, out, side, side])
    flops = 2 * side * side * out * (channels // group) * kernel * kernel
    return _layer(name, "Conv", shapes, [weight], attributes, flops)


def matmul(rows: int, inner: int, columns: int) -> Layer:
    weight = np.zeros((inner, columns), np.float32)
    name = f"matmul {rows}x{inner} . {inner}x{columns}"
    return _layer(name, "MatMul", ([rows, inner], [rows, columns]), [weight], {}, 2 * rows * inner * columns)


def row_wise(kind: str, rows: int, width: int) -> Layer:
    """Softmax or LayerNormalization over the last axis."""
    weights = [np.ones(width, np.float32)] if kind == "LayerNormalization" else []
    shape = [rows, width]
    return _layer(f"{kind.lower()} {rows}x{width}", kind, (shape, shape), weights, {"axis": -1}, 0)


LAYERS: tuple[Callable[[], Layer], ...] = (
    lambda: conv(64, 56, 64, 3),
    lambda: conv(128, 28, 128, 3),
    lambda: conv(256, 14, 256, 3),
    lambda: conv(512, 7, 512, 3),
    lambda: conv(64, 56, 256, 1),
    lambda: conv(256, 56, 64, 1),
    lambda: conv(1024, 14, 256, 1),
    lambda: conv(512, 7, 2048, 1),
    lambda: conv(128, 56, 128, 3, stride=2),
    lambda: matmul(128, 768, 768),
    lambda: matmul(128, 768, 3072),
    lambda: matmul(128, 3072, 768),
    lambda: conv(144, 56, 144, 3, group=144),
    lambda: row_wise("Softmax", 1536, 128),
    lambda: row_wise("LayerNormalization", 128, 768),
)


def measure(layer: Layer, peak: Peak, threads: int, repeat: int) -> Row:
    shape = [dim.dim_value for dim in layer.model.graph.input[0].type.tensor_type.shape.dim]
    feeds = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
    milliseconds = []
    for exact in (True, False):
        artifact = compile_model(layer.model, CompileOptions(threads=threads, workers=1, exact=exact))
        result = profile_artifact(artifact, feeds, repeat, threads, peak)
        milliseconds.append(sum(call.milliseconds for call in result.calls if "layer" in call.node))
    direct_ms, chosen_ms = milliseconds
    ort_ms = _onnxruntime_ms(layer.alone, feeds, threads, repeat)
    flops_per_second = layer.flops / (direct_ms * 1e-3)
    return Row(
        layer.name,
        direct_ms,
        chosen_ms,
        flops_per_second / 1e9,
        flops_per_second / peak.flops_per_second,
        layer.moved_bytes / (direct_ms * 1e-3) / peak.bytes_per_second,
        ort_ms,
        ort_ms / chosen_ms,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.split("\n\n")[1])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=50)
    parser.add_argument("--json", action="store_true", help="one JSON line a layer")
    options = parser.parse_args(argv)
    target = parse_target("cpu", options.threads)
    if not options.json:
        peak = measure_peak(target, options.threads)
        print(f"# {target.cpu}, {options.threads} threads: {_format_peak(peak)}")
        print(_COLUMNS.format("layer", "direct ms", "chosen ms", "GFLOP/s", "peak", "bandw.", "ort ms", "ratio"))
    for make in LAYERS:
        peak = measure_peak(target, options.threads)  # again for each: the machine's clock moves
        row = measure(make(), peak, options.threads, options.repeat)
        print(json.dumps(asdict(row)) if options.json else _format_row(row), flush=True)
    return 0


def _layer(
    name: str,
    kind: str,
    shapes: tuple[list[int], list[int]],
    weights: list[NDArray[np.float32]],
    attributes: dict[str, Any],
    flops: int,
) -> Layer:
    random = np.random.default_rng(1)
    tensors = [
        numpy_helper.from_array((random.standard_normal(weight.shape) * 0.1).astype(np.float32), f"w{index}")
        for index, weight in enumerate(weights)
    ]
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in zip("xy", shapes, strict=True)]

    def model(before: list[onnx.NodeProto], extra: list[onnx.TensorProto]) -> onnx.ModelProto:
        source = before[-1].output[0] if before else "x"
        operands = [source, *(tensor.name for tensor in tensors)]
        node = helper.make_node(kind, operands, ["y"], name="layer", **attributes)
        graph = helper.make_graph([*before, node], "layer", infos[:1], infos[1:], [*tensors, *extra])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    moved = 4 * (sum(int(np.prod(shape)) for shape in shapes) + sum(weight.size for weight in weights))
    return Layer(name, model([], []), model(*_layer_before(shapes[0])), flops, moved)


def _layer_before(shape: list[int]) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """What leaves an image as convolutions do: a depthwise 1x1 convolution; nothing for a matrix."""
    if len(shape) < 4:
        return [], []
    scale = np.full((shape[1], 1, 1, 1), 0.5, np.float32)
    node = helper.make_node("Conv", ["x", "scale"], ["scaled"], name="before", group=shape[1])
    return [node], [numpy_helper.from_array(scale, "scale")]


def _onnxruntime_ms(model: onnx.ModelProto, feeds: dict[str, NDArray[np.float32]], threads: int, repeat: int) -> float:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    seconds = []
    for _ in range(repeat + 5):
        start = time.perf_counter()
        session.run(None, feeds)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[5:])) * 1e3


def _format_peak(peak: Peak) -> str:
    return f"{peak.flops_per_second / 1e9:.1f} GFLOP/s, {peak.bytes_per_second / 1e9:.1f} GB/s measured"


def _format_row(row: Row) -> str:
    return _COLUMNS.format(
        row.name,
        f"{row.direct_ms:.3f}",
        f"{row.chosen_ms:.3f}",
        f"{row.gflops:.1f}",
        f"{row.peak_share:.0%}",
        f"{row.bandwidth_share:.0%}",
        f"{row.onnxruntime_ms:.3f}",
        f"{row.kernel_speedup:.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
