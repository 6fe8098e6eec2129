"""Real networks: every fp32 model of the zoo imports and optimises natively, fast enough, into a legal graph."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import onnx
import pytest

from mcompile.config import Config
from mcompile.frontend import ImportedModel, import_model
from mcompile.graph.pipeline import optimize
from mcompile.target import parse_target
from tests.graph.graphs import ops

_FOLDER = Path(os.environ.get("MCOMPILE_ZOO", Path(__file__).parents[3] / "shared" / "zoo"))
_INPUTS = _FOLDER / "inputs.json"
_LISTED = json.loads(_INPUTS.read_text()) if _INPUTS.is_file() else {"fp32": [], "dims": {}}
_MODELS = [name for name in _LISTED["fp32"] if (_FOLDER / f"{name}.onnx").is_file()]
_LIGHT = sorted((Path(onnx.__file__).parent / "backend" / "test" / "data" / "light").glob("*.onnx"))
_TARGET = parse_target("x86-64-v3", 2)

pytestmark = pytest.mark.zoo


def _import(name: str) -> ImportedModel:
    """The model with those of the zoo's dims that its inputs have."""
    path = _FOLDER / f"{name}.onnx"
    inputs = onnx.load(path, load_external_data=False).graph.input
    named = {dim.dim_param for value in inputs for dim in value.type.tensor_type.shape.dim if dim.dim_param}
    return import_model(path, dims={dim: _LISTED["dims"][dim] for dim in sorted(named)})


@pytest.mark.skipif(not _MODELS, reason="no models in the folder that MCOMPILE_ZOO names")
@pytest.mark.parametrize("name", _MODELS or ["none"])
def test_zoo_models_are_native(name: str) -> None:
    imported = _import(name)
    assert not imported.host_ops
    graph = optimize(imported.graph, _TARGET, Config(verify=2))
    left = ops(graph)
    for op in (
        "Identity",
        "Dropout",
        "Shape",
        "ConstantOfShape",
        "Gemm",
        "BatchNormalization",
        "Erf",
        "Flatten",
        "Expand",
    ):
        assert not left[op], left
    assert len(graph.outputs) == len(imported.outputs)


@pytest.mark.parametrize("path", _LIGHT, ids=lambda path: path.stem)
def test_light_models_are_native(path: Path) -> None:
    imported = import_model(path)
    assert not imported.host_ops
    optimize(imported.graph, _TARGET, Config(verify=2))


@pytest.mark.skipif("resnet50" not in _MODELS, reason="no resnet50 in the folder that MCOMPILE_ZOO names")
def test_import_and_passes_take_seconds_at_most() -> None:
    start = time.perf_counter()
    optimize(_import("resnet50").graph, _TARGET, Config())
    assert time.perf_counter() - start < 5  # 0.3 s where it was written; room for a busy machine
