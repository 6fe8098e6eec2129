"""Where a model's bytes come from: a file (mapped), bytes or a ModelProto, and its external data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from mcompile.errors import ModelError
from mcompile.frontend.wire import IN_MODEL, skeleton

Bytes = NDArray[np.uint8]


@dataclass
class ModelSource:
    """A model split into its skeleton (weights left out) and the bytes its tensors refer to."""

    model: onnx.ModelProto
    data: Bytes
    folder: Path | None  # where external data may lie; None for a model given as bytes
    files: dict[str, Bytes] = field(default_factory=dict)  # location -> mapped file

    def bytes_at(self, location: str, tensor: str) -> Bytes:
        """The bytes of the model itself or of an external data file. Raises ModelError."""
        if location == IN_MODEL:
            return self.data
        if location not in self.files:
            self.files[location] = _map(self.external_path(location, tensor), f"external data of tensor {tensor!r}")
        return self.files[location]

    def external_files(self) -> tuple[Path, ...]:
        """The external data files that were opened, sorted."""
        return tuple(sorted(self.folder / location for location in self.files)) if self.folder else ()

    def external_path(self, location: str, tensor: str) -> Path:
        """The file of a location. Raises ModelError unless it lies in the model's folder."""
        where = f"external data of tensor {tensor!r}: location {location!r}"
        if self.folder is None:
            raise ModelError(f"{where}: a model given as bytes has no folder; give the path of the model file")
        relative = Path(location)
        if not location or relative.is_absolute() or ".." in relative.parts or "\0" in location:
            raise ModelError(f"{where}: expected a relative path inside the model's folder, without `..`")
        path = self.folder / relative
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise ModelError(f"{where}: leads out of the model's folder {self.folder} through a symbolic link")
        if not path.is_file():
            raise ModelError(f"{where}: no such file in {self.folder}")
        return path


def open_source(source: str | Path | bytes | onnx.ModelProto) -> ModelSource:
    """Read a model without its weights. Raises ModelError if it is missing, empty, truncated or no ONNX model."""
    if isinstance(source, onnx.ModelProto):
        return _parse(_serialise(source), None, "the given ModelProto")
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _parse(np.frombuffer(source, np.uint8), None, "the given bytes")
    path = Path(source)
    return _parse(_map(path, "model"), path.parent, str(path))


def _serialise(model: onnx.ModelProto) -> Bytes:
    try:
        return np.frombuffer(model.SerializeToString(), np.uint8)
    except Exception as error:  # protobuf's own error types
        raise ModelError(f"the ModelProto cannot be serialised ({error}); over 2 GiB, give a file's path") from error


def _map(path: Path, what: str) -> Bytes:
    if path.is_dir():
        raise ModelError(f"{what}: {path} is a folder, expected a file")
    try:
        if path.stat().st_size == 0:
            raise ModelError(f"{what}: {path} is empty")
        return np.memmap(path, np.uint8, "r")
    except OSError as error:
        raise ModelError(f"{what}: cannot read {path}: {error.strerror or error}") from error


def _parse(data: Bytes, folder: Path | None, name: str) -> ModelSource:
    if data.size == 0:
        raise ModelError(f"{name}: no bytes; expected a serialised ONNX model")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(skeleton(data.data))
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
    except Exception as error:  # protobuf's own error types
        raise ModelError(f"{name}: not an ONNX model, or a damaged one: {error}") from error
    if not model.HasField("graph"):
        raise ModelError(f"{name}: not an ONNX model: it holds no graph")
    return ModelSource(model, data, folder)


def external_entries(tensor: onnx.TensorProto) -> dict[str, Any]:
    return {entry.key: entry.value for entry in tensor.external_data}
