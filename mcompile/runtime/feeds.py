"""A caller's arrays against a plan's inputs and outputs: checks, and copies where an array does not fit as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mcompile.dtypes import DType
from mcompile.errors import OptionError
from mcompile.runtime.memory import ALIGNMENT, Array
from mcompile.runtime.plan import Signature

ONNX_TYPE_NAMES = {
    DType.BOOL: "bool",
    DType.FLOAT32: "float",
    DType.FLOAT64: "double",
}


class NodeArg:
    """An input or output as onnxruntime describes it; `shape` is the one compiled for."""

    def __init__(self, signature: Signature) -> None:
        dtype = signature.type.dtype
        self.name = signature.name
        self.shape: list[int] = list(signature.type.dims)
        self.declared_shape: list[int | str] = list(signature.declared_shape)
        self.type = f"tensor({ONNX_TYPE_NAMES.get(dtype, dtype.value)})"

    def __repr__(self) -> str:
        return f"NodeArg(name={self.name!r}, type={self.type!r}, shape={self.shape})"


class Port:
    """One input or output: says what fits, and makes it fit."""

    def __init__(self, kind: str, signature: Signature) -> None:
        self.kind = kind
        self.name = signature.name
        self.type = signature.type
        self.shape = signature.type.dims
        self.dtype: np.dtype[Any] = signature.type.dtype.numpy
        self.size_bytes = signature.type.size_bytes
        self._end = self.size_bytes + ALIGNMENT

    def read(self, value: Any) -> Array:
        """The value as an array that kernels can read in place: itself if possible, else a copy."""
        if type(value) is np.ndarray and value.dtype == self.dtype and value.shape == self.shape:
            flags = value.flags
            if flags.c_contiguous and flags.aligned:
                return value
        return self._convert(value)

    def _convert(self, value: Any) -> Array:
        array = self._as_array(value)
        if array.dtype.newbyteorder("=") != self.dtype or array.shape != self.shape:
            raise OptionError(self._mismatch(array))
        return np.require(array, self.dtype, ["C", "A"])

    def _as_array(self, value: Any) -> Array:
        if isinstance(value, np.ndarray):
            return value
        if isinstance(value, list | tuple | int | float | np.generic):
            return self._from_numbers(value)
        if hasattr(value, "__dlpack__"):
            return self._from_dlpack(value)
        if hasattr(value, "__array__"):
            return np.asarray(value)
        raise OptionError(f"{self.kind} {self.name!r}: expected an array of {self.type}, got {type(value).__name__}")

    def _from_dlpack(self, value: Any) -> Array:
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError) as error:  # on another device, of an unknown element type
            raise OptionError(f"{self.kind} {self.name!r}: no array of the CPU: {error}") from error

    def _from_numbers(self, value: Any) -> Array:
        """Python's numbers have no element type of their own: they take the input's if their kind fits."""
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise OptionError(f"{self.kind} {self.name!r}: expected {self.type}, got a ragged list") from error
        if isinstance(value, np.generic) or not np.can_cast(array.dtype, self.dtype, "same_kind"):
            return array
        return array.astype(self.dtype)

    def empty(self) -> Array:
        """A fresh array."""
        raw = np.empty(self._end, np.uint8)
        start = -raw.__array_interface__["data"][0] % ALIGNMENT
        return np.ndarray(self.shape, self.dtype, raw, start)

    def check_writable(self, array: Any) -> Array:
        """A caller's array that results are written to. Raises OptionError unless it fits as it is."""
        if not isinstance(array, np.ndarray):
            raise OptionError(f"{self.kind} {self.name!r}: expected an array to write to, got {type(array).__name__}")
        if array.dtype != self.dtype or array.shape != self.shape:
            raise OptionError(self._mismatch(array))
        flags = array.flags
        if not (flags.c_contiguous and flags.aligned and flags.writeable):
            raise OptionError(
                f"{self.kind} {self.name!r}: expected a contiguous, aligned, writable array to write to, got "
                f"contiguous={flags.c_contiguous}, aligned={flags.aligned}, writable={flags.writeable}"
            )
        return array

    def _mismatch(self, array: Array) -> str:
        return f"{self.kind} {self.name!r}: expected {self.type}, got {array.dtype}{list(array.shape)}"


def gather_inputs(ports: Sequence[Port], feeds: Mapping[str, Any]) -> list[Array]:
    """The inputs in the plan's order. Raises OptionError for a missing or unknown name, a wrong shape or dtype."""
    if len(feeds) != len(ports):
        raise OptionError(_wrong_names(ports, feeds))
    try:
        return [port.read(feeds[port.name]) for port in ports]
    except KeyError:
        raise OptionError(_wrong_names(ports, feeds)) from None


def _wrong_names(ports: Sequence[Port], feeds: Mapping[str, Any]) -> str:
    names = [port.name for port in ports]
    missing = [name for name in names if name not in feeds]
    unknown = [str(name) for name in feeds if name not in names]
    parts = [f"{label}: {', '.join(list_)}" for label, list_ in (("missing", missing), ("unknown", unknown)) if list_]
    return f"inputs: {'; '.join(parts)}; the model has {', '.join(map(str, names)) or 'none'}"


def select_outputs(ports: Sequence[Port], names: Sequence[str]) -> list[int]:
    """Positions of named outputs. Raises OptionError for an unknown name."""
    positions = {port.name: position for position, port in enumerate(ports)}
    unknown = [str(name) for name in names if name not in positions]
    if unknown:
        raise OptionError(f"outputs: unknown: {', '.join(unknown)}; the model has {', '.join(positions) or 'none'}")
    return [positions[name] for name in names]


def detach(inputs: Sequence[Array], outputs: Sequence[Array]) -> list[Array]:
    """The inputs, copied where they may share memory with an output. Raises OptionError if two outputs do."""
    for i, output in enumerate(outputs):
        if any(np.may_share_memory(output, other) for other in outputs[:i]):
            raise OptionError("outputs: two of the arrays to write to share memory")
    return [
        array.copy() if any(np.may_share_memory(array, output) for output in outputs) else array for array in inputs
    ]
