"""Nodes run by onnx's reference implementation: folded when importing, or kept as host ops."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto
from onnx.reference import ReferenceEvaluator

from mcompile.dtypes import TensorType
from mcompile.errors import ModelError
from mcompile.frontend.check import free_values, newest_opset, schema_of, subgraphs
from mcompile.frontend.tensors import check_size, dtype_of, type_proto
from mcompile.graph.graph import Array

_SHAPE_DATA_BYTES = 1 << 12  # constants up to this size are shown to shape inference


@dataclass(frozen=True)
class HostOp:
    """A node that Python will run, and why no native code does."""

    node: str
    op: str
    reason: str


def needed_values(node: NodeProto) -> tuple[str, ...]:
    """The values a node needs, those its subgraphs capture included; each once, in order."""
    captured = [value for body in subgraphs(node) for value in free_values(body)]
    return tuple(dict.fromkeys(value for value in [*node.input, *captured] if value))


def one_node_model(
    node: NodeProto, inputs: Mapping[str, TensorType], outputs: Mapping[str, TensorType], opsets: Mapping[str, int]
) -> onnx.ModelProto:
    """A model of one node; its inputs are `inputs` in order, its outputs `outputs` in order."""
    graph = onnx.helper.make_graph(
        [node],
        "host",
        [onnx.helper.make_value_info(name, type_proto(t)) for name, t in inputs.items()],
        [onnx.helper.make_value_info(name, type_proto(t)) for name, t in outputs.items()],
    )
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in sorted(opsets.items())]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=min(onnx.IR_VERSION, 10))


def reference_opsets(node: NodeProto, opsets: Mapping[str, int]) -> dict[str, int]:
    """The opsets, or those with the oldest newer one that onnx's reference implements where the node's own is not.

    The reference leaves out some old versions of operators whose newer ones only allow more. Raises ModelError.
    """
    context = onnx.checker.C.CheckerContext()
    context.ir_version = onnx.IR_VERSION
    opset = opsets.get(node.domain, 0)
    newest = newest_opset() if not node.domain else opset
    for version in range(opset, newest + 1):
        tried = {**opsets, node.domain: version}
        if version > opset:
            context.opset_imports = tried
            try:
                onnx.checker.check_node(node, context)
            except onnx.checker.ValidationError:
                break
        if _can_run(node, tried):
            return tried
    raise ModelError("onnx has no reference implementation of it")


def _can_run(node: NodeProto, opsets: Mapping[str, int]) -> bool:
    """Whether onnx's reference can be set up for the node."""
    names = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in needed_values(node)]
    outputs = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in node.output if name]
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "try", names, outputs), opset_imports=imports)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ReferenceEvaluator(model)
    except Exception:  # whatever it raises, it cannot run the node
        return False
    return True


def reference_outputs(node: NodeProto, arrays: Mapping[str, Array], opsets: Mapping[str, int]) -> list[Any]:
    """The node's outputs for known inputs, by onnx's reference. Raises ModelError if it cannot run it."""
    names = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in arrays]
    outputs = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in node.output if name]
    graph = onnx.helper.make_graph([node], "fold", names, outputs)
    versions = reference_opsets(node, opsets)
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in versions.items()]
    model = onnx.helper.make_model(graph, opset_imports=imports)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return list(ReferenceEvaluator(model).run(None, dict(arrays)))
    except Exception as error:  # the reference raises anything for operators and inputs it cannot do
        raise ModelError(f"onnx's reference implementation failed: {_short(error)}") from error


def infer_outputs(
    node: NodeProto, types: Mapping[str, TensorType], known: Mapping[str, Array], opsets: Mapping[str, int]
) -> dict[str, TensorType]:
    """Output types by onnx's shape inference. Raises ModelError if a shape depends on data or is unknown."""
    inferred = infer_by_onnx(node, types, known, opsets)
    return {name: _static(inferred.get(name), name) for name in node.output if name}


def infer_by_onnx(
    node: NodeProto, types: Mapping[str, TensorType], known: Mapping[str, Array], opsets: Mapping[str, int]
) -> dict[str, onnx.TypeProto]:
    """What onnx's shape inference finds of the outputs. Raises ModelError if it finds that the inputs do not fit."""
    opset = opsets.get(node.domain, 0)
    schema = schema_of(node.op_type, node.domain, opset)
    if schema is None:
        raise ModelError("onnx has no such operator")
    data = {
        name: onnx.numpy_helper.from_array(np.array(array), name)
        for name, array in known.items()
        if array.nbytes <= _SHAPE_DATA_BYTES
    }
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    protos = {name: type_proto(t) for name, t in types.items()}
    try:
        inferred: dict[str, onnx.TypeProto] = onnx.shape_inference.infer_node_outputs(
            schema, node, protos, data, opset_imports=imports
        )
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        shown = ", ".join(str(t) for t in types.values())
        reason = _short(error).replace("[ShapeInferenceError] ", "").replace("[TypeInferenceError] ", "")
        raise ModelError(f"inputs {shown} do not fit: {reason}") from error
    return inferred


def _static(proto: onnx.TypeProto | None, name: str) -> TensorType:
    if proto is None or not proto.HasField("tensor_type") or not proto.tensor_type.HasField("shape"):
        raise ModelError(f"output {name!r} has no shape known when compiling")
    dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in proto.tensor_type.shape.dim]
    if -1 in dims:
        raise ModelError(f"output {name!r} has a shape that depends on data")
    check_size(tuple(dims), f"output {name!r}")
    return TensorType(tuple(dims), dtype_of(proto.tensor_type.elem_type, f"output {name!r}"))


def as_arrays(results: Sequence[Any]) -> list[Array]:
    """Reference results as arrays. Raises ModelError for sequences and missing ones."""
    for result in results:
        if not isinstance(result, (np.ndarray, np.generic)):
            raise ModelError(f"gives a {type(result).__name__}, expected a tensor")
    return [np.asarray(result) for result in results]


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
