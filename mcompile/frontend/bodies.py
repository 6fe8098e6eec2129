"""Bodies put in the place of a node: an If branch whose condition is known, an operator's function body."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, defs

from mcompile.dtypes import DType, TensorType
from mcompile.errors import ModelError
from mcompile.frontend.check import opsets_of, sort_nodes
from mcompile.frontend.scope import Import, Scope
from mcompile.frontend.tensors import load_tensor, type_proto

Convert = Callable[[Import, Scope, Iterable[NodeProto]], None]
_MAX_DEPTH = 32  # bodies inside bodies


def inline_branch(state: Import, scope: Scope, node: NodeProto, condition: bool, convert: Convert) -> None:
    """Convert the branch that is taken, in the scope around the If."""
    wanted = "then_branch" if condition else "else_branch"
    body = next((attribute.g for attribute in node.attribute if attribute.name == wanted), None)
    if body is None or len(body.output) != len(node.output):
        raise ModelError(f"expected a {wanted} with {len(node.output)} outputs")
    inner = Scope(scope.opsets, scope, _prefix(scope, node), scope.formal)
    bind_initializers(state, inner, body)
    convert(state, inner, sort_nodes(body.node, scope.opset("")))
    for output, result in zip(node.output, body.output, strict=True):
        scope.names[output] = inner.find(result.name)


def bind_initializers(state: Import, scope: Scope, graph: GraphProto) -> None:
    """Load the initializers of a graph as constants. Raises ModelError for the first one that cannot be read."""
    for tensor in graph.initializer:
        array = load_tensor(tensor, state.source)
        name = state.fresh_value(f"{scope.prefix}{tensor.name}") if scope.prefix else tensor.name
        state.graph.add_constant(name, array, TensorType(array.shape, DType.from_numpy(array.dtype)))
        scope.names[tensor.name] = name


def inline_function(
    state: Import, scope: Scope, node: NodeProto, schema: defs.OpSchema, inputs: Sequence[str], convert: Convert
) -> bool:
    """Convert the operator's function body, if it has one and all of it has a native form; say whether.

    The node's attributes must hold their values, not refer to those of another call.
    """
    if scope.prefix.count("/") >= _MAX_DEPTH:
        return False
    types = [state.graph.types[value] if value else None for value in inputs]
    body = _function_body(node, schema, scope.opset(node.domain), types)
    if body is None:
        return False
    before = state.graph.copy(), len(state.problems), len(state.host_ops)
    inner = Scope(opsets_of(body) or scope.opsets, None, _prefix(scope, node), _formal(node, schema))
    padded = [*inputs, *[""] * (len(body.input) - len(inputs))]
    inner.names.update(zip(body.input, padded, strict=False))
    convert(state, inner, body.node)
    if len(state.problems) > before[1] or len(state.host_ops) > before[2]:
        state.graph = before[0]
        del state.problems[before[1] :]
        del state.host_ops[before[2] :]
        return False
    for output, result in zip(node.output, body.output, strict=False):
        scope.names[output] = inner.find(result)
    return True


def _function_body(
    node: NodeProto, schema: defs.OpSchema, opset: int, types: Sequence[TensorType | None]
) -> FunctionProto | None:
    if schema.has_function:
        version = _version(schema.function_opset_versions, opset)
        data = schema.get_function_with_opset_version(version)
    elif schema.has_context_dependent_function:
        version = _version(schema.context_dependent_function_opset_versions, opset)
        protos = [type_proto(t).SerializeToString() if t is not None else b"" for t in types]
        data = schema.get_context_dependent_function_with_opset_version(version, node.SerializeToString(), protos)
    else:
        return None
    body = FunctionProto()
    body.ParseFromString(data)
    return body if body.node else None


def _version(versions: Sequence[int], opset: int) -> int:
    """The newest version that `opset` may use, else the oldest."""
    usable = [version for version in versions if version <= opset]
    return max(usable) if usable else min(versions)


def _formal(node: NodeProto, schema: defs.OpSchema) -> dict[str, AttributeProto]:
    """The call's attributes, defaults included, by name."""
    defaults = {name: entry.default_value for name, entry in schema.attributes.items() if entry.default_value.type}
    return {**defaults, **{attribute.name: attribute for attribute in node.attribute}}


def _prefix(scope: Scope, node: NodeProto) -> str:
    return f"{scope.prefix}{node.name or node.output[0]}/"
