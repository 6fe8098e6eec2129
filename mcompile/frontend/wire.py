"""Splits a serialised ONNX model into a small skeleton and the byte ranges of its weights, without copying a weight.

The skeleton is the same model in which each large `raw_data` has become external data at a range of the model's own
bytes (location `IN_MODEL`). It parses fast, and a model over protobuf's 2 GiB limit can be read as well.
"""

from __future__ import annotations

from mcompile.errors import ModelError

IN_MODEL = "<model>"
LARGE_BYTES = 1 << 10  # a message smaller than this is left as it is
_MAX_DEPTH = 64

# Fields (onnx.proto) that lead to tensors: message -> field number -> message.
_MODEL, _GRAPH, _NODE, _ATTRIBUTE, _TENSOR = "ModelProto", "GraphProto", "NodeProto", "AttributeProto", "TensorProto"
_PATHS: dict[str, dict[int, str]] = {
    _MODEL: {7: _GRAPH},
    _GRAPH: {1: _NODE, 5: _TENSOR},
    _NODE: {5: _ATTRIBUTE},
    _ATTRIBUTE: {5: _TENSOR, 6: _GRAPH},
    _TENSOR: {},
}
_RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 9, 13, 14
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def skeleton(model: memoryview) -> bytes:
    """The serialised skeleton. Raises ModelError where the bytes are no protobuf message or end too early."""
    return b"".join(_rewrite(model, 0, len(model), _MODEL, 0))


def _rewrite(data: memoryview, start: int, end: int, message: str, depth: int) -> list[bytes | memoryview]:
    if depth > _MAX_DEPTH:
        raise ModelError(f"the model nests subgraphs more than {_MAX_DEPTH} messages deep")
    pieces: list[bytes | memoryview] = []
    external = b""  # last of all, as the last of a field's values counts
    position = kept = start
    while position < end:
        tag, body = _varint(data, position, end)
        field, kind = tag >> 3, tag & 7
        length, body = _payload(data, body, end, kind, message)
        after = body + length
        if after > end:
            raise ModelError(f"the model is truncated: a {message} needs {after - end} more bytes (at byte {position})")
        if kind == _LENGTH and length >= LARGE_BYTES:
            child = _PATHS[message].get(field)
            if message == _TENSOR and field == _RAW_DATA:
                pieces.append(data[kept:position])
                external = _external(body, length)
                kept = after
            elif child is not None:
                inner = _rewrite(data, body, after, child, depth + 1)
                size = sum(len(piece) for piece in inner)
                pieces += [data[kept:position], _encode(tag), _encode(size), *inner]
                kept = after
        position = after
    return [*pieces, data[kept:end], external]


def _payload(data: memoryview, position: int, end: int, kind: int, message: str) -> tuple[int, int]:
    """Length and start of a field's payload."""
    if kind == _VARINT:
        return 0, _varint(data, position, end)[1]
    if kind == _LENGTH:
        return _varint(data, position, end)
    if kind in (_FIXED64, _FIXED32):
        return (8 if kind == _FIXED64 else 4), position
    raise ModelError(f"not an ONNX model: byte {position} of a {message} is no protobuf field (wire type {kind})")


def _varint(data: memoryview, position: int, end: int) -> tuple[int, int]:
    """Value and the position after it."""
    value = shift = 0
    while position < end and shift < 70:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7
    raise ModelError(f"not an ONNX model, or a truncated one: no number at byte {position}")


def _encode(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _external(offset: int, length: int) -> bytes:
    """The fields of a TensorProto whose data is `length` bytes of the model at `offset`."""
    entries = {"location": IN_MODEL, "offset": str(offset), "length": str(length)}
    fields = b"".join(_field(_EXTERNAL_DATA, _field(1, k.encode()) + _field(2, v.encode())) for k, v in entries.items())
    return fields + _encode(_DATA_LOCATION << 3 | _VARINT) + _encode(1)


def _field(number: int, payload: bytes) -> bytes:
    return _encode(number << 3 | _LENGTH) + _encode(len(payload)) + payload
