"""An ExecutionPlan and the kernels' facts as JSON values, and back.

Reading checks the form of everything (`ArtifactError` says where and what); whether the numbers make sense is
`verify_plan`'s question.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mcompile.dtypes import DType, TensorType
from mcompile.errors import ArtifactError
from mcompile.runtime.plan import (
    Argument,
    ExecutionPlan,
    HostCall,
    Kernel,
    KernelCall,
    NativeSegment,
    Repeat,
    Signature,
    Space,
    Tensor,
)

Json = Any  # what json.loads gives
T = TypeVar("T")

# --- writing ---


def encode_plan(plan: ExecutionPlan) -> Json:
    """The plan as JSON: objects for what has names, arrays for arguments."""
    return {
        "inputs": [_encode_signature(signature) for signature in plan.inputs],
        "outputs": [_encode_signature(signature) for signature in plan.outputs],
        "segments": [_encode_segment(segment) for segment in plan.segments],
        "arena_bytes": plan.arena_bytes,
        "constants_bytes": plan.constants_bytes,
    }


def encode_kernel(kernel: Kernel) -> Json:
    """All of a kernel but its code and its source."""
    return {name: getattr(kernel, name) for name in (*_KERNEL_TEXTS, *_KERNEL_NUMBERS)}


def _encode_signature(signature: Signature) -> Json:
    return {
        "name": signature.name,
        "dtype": signature.type.dtype.value,
        "shape": list(signature.type.shape),
        "declared_shape": list(signature.declared_shape),
    }


def _encode_segment(segment: NativeSegment | HostCall) -> Json:
    if isinstance(segment, NativeSegment):
        return {"calls": [_encode_call(call) for call in segment.calls]}
    return {
        "op": segment.op,
        "node": segment.node,
        "model": base64.b64encode(segment.model).decode("ascii"),
        "inputs": [_encode_tensor(tensor) for tensor in segment.inputs],
        "outputs": [_encode_tensor(tensor) for tensor in segment.outputs],
    }


def _encode_call(call: KernelCall | Repeat) -> Json:
    if isinstance(call, Repeat):
        return {"count": call.count, "calls": [_encode_call(inner) for inner in call.calls]}
    return {"kernel": call.kernel, "args": [_encode_argument(arg) for arg in call.args], "node": call.node}


def _encode_tensor(tensor: Tensor) -> Json:
    return {
        "name": tensor.name,
        "dtype": tensor.type.dtype.value,
        "shape": list(tensor.type.shape),
        "place": _encode_argument(tensor.place),
    }


def _encode_argument(argument: Argument) -> Json:
    return [argument.space.value, argument.offset, argument.index, argument.step]


# --- reading ---


def decode_plan(data: Json) -> ExecutionPlan:
    """The plan that `encode_plan` wrote. Raises ArtifactError for anything of another form."""
    fields = _object(data, "plan")
    return ExecutionPlan(
        _each(fields, "inputs", "plan", _decode_signature),
        _each(fields, "outputs", "plan", _decode_signature),
        _each(fields, "segments", "plan", _decode_segment),
        _integer(fields, "arena_bytes", "plan"),
        _integer(fields, "constants_bytes", "plan"),
    )


_KERNEL_TEXTS = ("name", "target")
_KERNEL_NUMBERS = ("parallel_extent", "scratch_bytes", "flops", "moved_bytes")


def decode_kernel(data: Json, code: bytes) -> Kernel:
    """The kernel that `encode_kernel` wrote, with its code."""
    fields = _object(data, "kernel")
    name, target = (_text(fields, key, "kernel") for key in _KERNEL_TEXTS)
    extent, scratch, flops, moved = (_integer(fields, key, "kernel") for key in _KERNEL_NUMBERS)
    return Kernel(name, target, code, extent, scratch, flops, moved)


def _decode_signature(data: Json, where: str) -> Signature:
    fields = _object(data, where)
    declared = tuple(_dim(dim, where) for dim in _array(fields, "declared_shape", where))
    return Signature(_text(fields, "name", where), _decode_type(fields, where), declared)


def _decode_type(fields: Mapping[str, Json], where: str) -> TensorType:
    name = _text(fields, "dtype", where)
    try:
        dtype = DType(name)
    except ValueError:
        raise ArtifactError(f"{where}: {name!r} is no element type") from None
    return TensorType(tuple(_number(dim, f"{where}.shape") for dim in _array(fields, "shape", where)), dtype)


def _decode_segment(data: Json, where: str) -> NativeSegment | HostCall:
    fields = _object(data, where)
    if "calls" in fields:
        return NativeSegment(_each(fields, "calls", where, _decode_call))
    try:
        model = base64.b64decode(_text(fields, "model", where), validate=True)
    except ValueError as error:
        raise ArtifactError(f"{where}.model: {error}") from error
    return HostCall(
        _text(fields, "op", where),
        _text(fields, "node", where),
        model,
        _each(fields, "inputs", where, _decode_tensor),
        _each(fields, "outputs", where, _decode_tensor),
    )


def _decode_call(data: Json, where: str) -> KernelCall | Repeat:
    fields = _object(data, where)
    if "count" in fields:
        return Repeat(_integer(fields, "count", where), _each(fields, "calls", where, _decode_kernel_call))
    return _decode_kernel_call(fields, where)


def _decode_kernel_call(data: Json, where: str) -> KernelCall:
    fields = _object(data, where)
    args = _each(fields, "args", where, _decode_argument)
    return KernelCall(_text(fields, "kernel", where), args, _text(fields, "node", where))


def _decode_tensor(data: Json, where: str) -> Tensor:
    fields = _object(data, where)
    place = _decode_argument(fields.get("place"), where)
    return Tensor(_text(fields, "name", where), _decode_type(fields, where), place)


def _decode_argument(data: Json, where: str) -> Argument:
    if not isinstance(data, list) or len(data) != 4 or data[0] not in list(_SPACES):
        raise ArtifactError(f"{where}: expected [space, offset, index, step], got {_shorten(data)}")
    offset, index, step = (_number(value, where) for value in data[1:])
    return Argument(_SPACES[data[0]], offset, index, step)


_SPACES = {space.value: space for space in Space}

# --- the form of a JSON value ---


def _object(data: Json, where: str) -> Mapping[str, Json]:
    if not isinstance(data, dict):
        raise ArtifactError(f"{where}: expected an object, got {_shorten(data)}")
    return data


def _array(fields: Mapping[str, Json], name: str, where: str) -> Sequence[Json]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise ArtifactError(f"{where}.{name}: expected an array, got {_shorten(value)}")
    return value


def _each(fields: Mapping[str, Json], name: str, where: str, decode: Callable[[Json, str], T]) -> tuple[T, ...]:
    return tuple(decode(value, f"{where}.{name}[{i}]") for i, value in enumerate(_array(fields, name, where)))


def _text(fields: Mapping[str, Json], name: str, where: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ArtifactError(f"{where}.{name}: expected a string, got {_shorten(value)}")
    return value


def _integer(fields: Mapping[str, Json], name: str, where: str) -> int:
    return _number(fields.get(name), f"{where}.{name}")


def _number(value: Json, where: str) -> int:
    if type(value) is not int or abs(value) >= 1 << 62:
        raise ArtifactError(f"{where}: expected an integer of at most 62 bits, got {_shorten(value)}")
    return value


def _dim(value: Json, where: str) -> int | str:
    return value if isinstance(value, str) else _number(value, where)


def _shorten(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
