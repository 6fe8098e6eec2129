"""AttributeProto -> Python values: int, float, str, tuples of them, arrays; subgraphs stay protos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx import AttributeProto, NodeProto

from mcompile.errors import ModelError
from mcompile.frontend.source import ModelSource
from mcompile.frontend.tensors import load_tensor


def attributes(
    node: NodeProto, source: ModelSource, formal: Mapping[str, AttributeProto] | None = None
) -> dict[str, Any]:
    """A node's attributes; `formal` are those of the function call whose body the node stands in.

    Raises ModelError for sparse tensors and kinds without a value here.
    """
    values: dict[str, Any] = {}
    for attribute in node.attribute:
        name = attribute.name
        if attribute.ref_attr_name:
            given = (formal or {}).get(attribute.ref_attr_name)
            if given is None:
                continue  # the call leaves it out, so the node takes its own default
            attribute = given
        values[name] = _value(attribute, name, source)
    return values


def _value(attribute: AttributeProto, name: str, source: ModelSource) -> Any:
    match attribute.type:
        case AttributeProto.INT:
            return attribute.i
        case AttributeProto.FLOAT:
            return attribute.f
        case AttributeProto.STRING:
            return attribute.s.decode("utf-8", "replace")
        case AttributeProto.INTS:
            return tuple(attribute.ints)
        case AttributeProto.FLOATS:
            return tuple(attribute.floats)
        case AttributeProto.STRINGS:
            return tuple(text.decode("utf-8", "replace") for text in attribute.strings)
        case AttributeProto.TENSOR:
            return load_tensor(attribute.t, source)
        case AttributeProto.GRAPH:
            return attribute.g
        case AttributeProto.SPARSE_TENSOR:
            raise ModelError(f"attribute {name}: sparse tensors are not supported; store a dense one")
    kind = AttributeProto.AttributeType.Name(attribute.type) if attribute.type else "UNDEFINED"
    raise ModelError(f"attribute {name}: kind {kind} is not supported")
