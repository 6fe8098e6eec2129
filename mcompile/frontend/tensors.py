"""TensorProto -> numpy array, weights mapped rather than copied; ONNX element types <-> DType."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from mcompile.dtypes import DType, TensorType
from mcompile.errors import ModelError
from mcompile.frontend.source import ModelSource, external_entries
from mcompile.graph.graph import Array

MAX_ELEMENTS = 1 << 35  # no tensor of a model that runs anywhere near here has more
_COPIED_BYTES = 1 << 16  # unaligned tensors up to this size are copied, larger ones stay mapped

_DTYPES = {
    TensorProto.BOOL: DType.BOOL,
    TensorProto.INT8: DType.INT8,
    TensorProto.INT16: DType.INT16,
    TensorProto.INT32: DType.INT32,
    TensorProto.INT64: DType.INT64,
    TensorProto.UINT8: DType.UINT8,
    TensorProto.UINT16: DType.UINT16,
    TensorProto.UINT32: DType.UINT32,
    TensorProto.UINT64: DType.UINT64,
    TensorProto.FLOAT16: DType.FLOAT16,
    TensorProto.BFLOAT16: DType.BFLOAT16,
    TensorProto.FLOAT: DType.FLOAT32,
    TensorProto.DOUBLE: DType.FLOAT64,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class TooLarge(ModelError):
    """A tensor has more elements than any memory holds."""


def dtype_of(code: int, what: str) -> DType:
    """The DType of a TensorProto.DataType number. Raises ModelError naming `what` for one we do not know."""
    if code in _DTYPES:
        return _DTYPES[code]
    known = {value: name for name, value in TensorProto.DataType.items()}
    raise ModelError(f"{what}: element type {known.get(code, code)} is not supported")


def element_code(dtype: DType) -> int:
    """The TensorProto.DataType number of a DType."""
    return int(_CODES[dtype])


def type_text(dtype: DType) -> str:
    """ONNX's name of a tensor type, as operator schemas use it: `tensor(float)`."""
    names = {DType.FLOAT32: "float", DType.FLOAT64: "double"}
    return f"tensor({names.get(dtype, dtype.value)})"


def type_proto(type_: TensorType) -> onnx.TypeProto:
    return onnx.helper.make_tensor_type_proto(element_code(type_.dtype), type_.shape)


def check_size(shape: tuple[int, ...], what: str) -> None:
    """Raises TooLarge for more elements than any memory holds, ModelError for negative dims."""
    if any(dim < 0 for dim in shape):
        raise ModelError(f"{what}: negative dim in shape {list(shape)}")
    if prod(shape) > MAX_ELEMENTS:
        raise TooLarge(f"{what}: shape {list(shape)} has {prod(shape)} elements, more than any memory can hold")


def load_tensor(tensor: TensorProto, source: ModelSource) -> Array:
    """The tensor's values; large raw data is a read-only view of the mapped file. Raises ModelError."""
    what = f"tensor {tensor.name!r}"
    dtype = dtype_of(tensor.data_type, what)
    shape = tuple(tensor.dims)
    check_size(shape, what)
    size = prod(shape)
    if tensor.data_location == TensorProto.EXTERNAL:
        return _external(tensor, source, dtype, size).reshape(shape)
    if tensor.HasField("raw_data"):
        if len(tensor.raw_data) != size * dtype.bytes:
            raise ModelError(_wrong_length(what, len(tensor.raw_data), size, dtype))
        return np.frombuffer(tensor.raw_data, dtype.numpy).reshape(shape)
    try:
        array: Array = numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as error:
        raise ModelError(f"{what}: shape {list(shape)} and its data do not fit: {error}") from error
    return array.astype(dtype.numpy, copy=False)


def _external(tensor: TensorProto, source: ModelSource, dtype: DType, size: int) -> Array:
    what = f"tensor {tensor.name!r}"
    entries = external_entries(tensor)
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or size * dtype.bytes)
    except ValueError as error:
        raise ModelError(f"{what}: external data: {error}") from error
    if length != size * dtype.bytes:
        raise ModelError(_wrong_length(what, length, size, dtype))
    data = source.bytes_at(entries.get("location", ""), tensor.name)
    if offset < 0 or offset + length > data.size:
        raise ModelError(f"{what}: bytes {offset}..{offset + length} lie outside its file of {data.size} bytes")
    array = np.frombuffer(data.data, dtype.numpy, size, offset) if size else np.zeros(0, dtype.numpy)
    return array if array.flags.aligned or array.nbytes > _COPIED_BYTES else array.copy()


def _wrong_length(what: str, got: int, size: int, dtype: DType) -> str:
    return f"{what}: expected {size * dtype.bytes} bytes of data ({size} x {dtype.value}), got {got}"
