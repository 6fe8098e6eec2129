"""Where the benchmark models are: the zoo, if this machine has one, and the light models of the onnx package.

The zoo is a folder named by MCOMPILE_ZOO, or ../shared/zoo beside the repository. It holds `*.onnx` files, or a
`zoo.py` whose `build DIR NAME ...` writes them; and `inputs.json`: {"dims": {name: size}, "fp32": [model names]}.
Built files are kept in the cache folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from benchmarks.light_models import light_model, light_names
from mcompile import config

_BESIDE = Path(__file__).parents[2] / "shared" / "zoo"


@dataclass(frozen=True)
class BenchmarkModel:
    """A model file and the sizes of its open dims."""

    name: str
    group: str  # "zoo" or "light"
    path: Path
    dims: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Zoo:
    """A folder of models; `model` builds what is not built yet."""

    folder: Path

    @property
    def inputs(self) -> dict[str, object]:
        path = self.folder / "inputs.json"
        content: dict[str, object] = json.loads(path.read_text()) if path.is_file() else {}
        return content

    def names(self) -> list[str]:
        """The fp32 models."""
        listed = self.inputs.get("fp32")
        if isinstance(listed, list):
            return [str(name) for name in listed]
        return sorted(path.stem for path in self.folder.glob("*.onnx"))

    def model(self, name: str) -> BenchmarkModel:
        dims = self.inputs.get("dims")
        path = self.folder / f"{name}.onnx"
        if not path.is_file():
            path = _built(name, lambda built: self._build(name, built))
        named = _open_dims(path)
        sizes = {dim: size for dim, size in dims.items() if dim in named} if isinstance(dims, dict) else {}
        return BenchmarkModel(name, "zoo", path, sizes)

    def _build(self, name: str, path: Path) -> None:
        script = self.folder / "zoo.py"
        subprocess.run([sys.executable, str(script), "build", str(path.parent), name], check=True, stdout=sys.stderr)


def find_zoo() -> Zoo | None:
    """The zoo of this machine, or None."""
    named = os.environ.get("MCOMPILE_ZOO")
    folder = Path(named) if named else _BESIDE
    if (folder / "zoo.py").is_file() or any(folder.glob("*.onnx")):
        return Zoo(folder)
    return None


def _open_dims(path: Path) -> set[str]:
    """The names of the dims that a model's inputs leave open."""
    inputs = onnx.load(path, load_external_data=False).graph.input
    return {dim.dim_param for value in inputs for dim in value.type.tensor_type.shape.dim if dim.dim_param}


def _built(name: str, build: Callable[[Path], None]) -> Path:
    """The file of model `name` in the cache folder, made by `build` if it is not there."""
    path = config.load().cache / "models" / f"{name}.onnx"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        build(path)
    return path


def light(name: str) -> BenchmarkModel:
    return BenchmarkModel(name, "light", _built(name, lambda path: onnx.save(light_model(name), path)))


def benchmark_models(names: list[str] | None = None, group: str | None = None) -> list[BenchmarkModel]:
    """The models called `names`, or all: the zoo's (none where there is no zoo), then the light ones."""
    zoo = find_zoo()
    makers = dict.fromkeys(zoo.names(), zoo.model) if zoo and group != "light" else {}
    if group != "zoo":
        makers |= dict.fromkeys(light_names(), light)
    unknown = sorted(set(names or ()) - set(makers))
    if unknown:
        raise SystemExit(f"unknown model {', '.join(unknown)}; there are {', '.join(makers) or 'none'}")
    return [makers[name](name) for name in makers if not names or name in names]
