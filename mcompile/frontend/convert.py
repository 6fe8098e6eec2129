"""ONNX nodes -> Graph nodes: canonical attributes, static operands folded, known values evaluated, types derived.

For each node the first of these that fits: constant, inlined If branch, native op, inlined function body, host op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto, defs

from mcompile.dtypes import DType, TensorType
from mcompile.errors import InternalError, ModelError
from mcompile.frontend import bodies
from mcompile.frontend.attributes import attributes
from mcompile.frontend.check import about, check_types, schema_of, subgraphs
from mcompile.frontend.host import (
    HostOp,
    as_arrays,
    infer_by_onnx,
    infer_outputs,
    needed_values,
    one_node_model,
    reference_opsets,
    reference_outputs,
)
from mcompile.frontend.scan import convert_scan
from mcompile.frontend.scope import Import, Scope
from mcompile.frontend.tensors import TooLarge, check_size
from mcompile.graph.expand_recurrent import RECURRENT_GATES, recurrent_types
from mcompile.graph.graph import Array, Graph, Node
from mcompile.graph.infer import HOST_DOMAIN, HOST_MODEL, Facts, derive
from mcompile.graph.passes.fold_constants import evaluate_op, is_worth_folding
from mcompile.ops.registry import OpDef, Unsupported, lookup

_UNFIT = (ModelError, Unsupported, NotImplementedError)  # an op's ways to say that it has no native form here


def convert_nodes(state: Import, scope: Scope, nodes: Iterable[NodeProto]) -> None:
    """Convert nodes in order; what cannot be converted becomes a problem in `state`, and so do not its users."""
    for node in nodes:
        inputs = [scope.find(name) for name in node.input]
        if any(value is None for value in inputs):
            scope.names.update((output, None) for output in node.output)
            continue
        try:
            convert_node(state, scope, node, [value or "" for value in inputs])
        except _UNFIT as error:
            state.problems.append(about(node, scope.opset(node.domain), str(error)))
            scope.names.update((output, None) for output in node.output)


def convert_node(state: Import, scope: Scope, node: NodeProto, inputs: Sequence[str]) -> None:
    """Convert one node. Raises ModelError, Unsupported or NotImplementedError saying why it cannot."""
    if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
        _bind_constant(state, scope, node.output[0], _constant(state, scope, node))
        return
    if node.op_type == "If" and inputs[0] in state.graph.constants:
        bodies.inline_branch(state, scope, node, bool(state.graph.constants[inputs[0]]), convert_nodes)
        return
    _check_inputs(state, scope, node, inputs)
    if node.op_type in RECURRENT_GATES and not _domain(node):
        attrs = attributes(node, state.source, scope.formal)
        types = [state.graph.types[value] if value else None for value in inputs]
        _add(state, scope, node, inputs, attrs, recurrent_types(node.op_type, types, attrs))
        return
    if node.op_type == "Scan" and not _domain(node) and scope.opset("") >= 9:
        _add_scan(state, scope, node, inputs)
        return
    try:
        native = _native(state, scope, node, inputs)
    except (Unsupported, NotImplementedError) as error:
        _convert_without_op(state, scope, node, inputs, error)
        return
    if not _fold(state, scope, node, native):
        _add(state, scope, node, native.inputs, native.attrs, native.facts.types)


@dataclass(frozen=True)
class _Native:
    op: OpDef
    inputs: tuple[str, ...]
    attrs: dict[str, Any]
    facts: Facts


def _native(state: Import, scope: Scope, node: NodeProto, inputs: Sequence[str]) -> _Native:
    """The node as an application of its OpDef. Raises what says that there is none or that it does not fit."""
    opset = scope.opset(node.domain)
    op = lookup(node.op_type, _domain(node))
    if op is None:
        raise Unsupported("no native implementation")
    if opset < op.since:
        raise Unsupported(f"native only from opset {op.since}")
    given = attributes(node, state.source, scope.formal)
    remaining = list(inputs)
    for position, name in op.operands.items():
        if position < len(remaining) and remaining[position]:
            given[name] = _known_operand(state, position, name, remaining[position])
            remaining[position] = ""
    for position, name in op.scalars.items():
        value = _known_scalar(state, remaining, position)
        if value is not None:
            given[name] = value
            remaining[position] = ""
    while remaining and not remaining[-1]:
        remaining.pop()
    if "num_outputs" in op.attrs and given.get("num_outputs") is None:
        given["num_outputs"] = len(node.output)  # before opset 18 only the node's outputs say it
    attrs = op.canonical(opset, given)
    unknown = sorted(set(attrs) - set(op.attrs) - set(op.operands.values()) - set(op.scalars.values()))
    if unknown:
        raise Unsupported(f"attribute {', '.join(unknown)} is not supported")
    types = tuple(state.graph.types[value] if value else None for value in remaining)
    facts = _derive(op, types, attrs)
    for position, type_ in enumerate(facts.types):
        check_size(type_.dims, f"output {position}")
    if len(node.output) > len(facts.types):
        raise Unsupported(f"only {len(facts.types)} of its {len(node.output)} outputs are supported")
    return _Native(op, tuple(remaining), attrs, facts)


def _domain(node: NodeProto) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


def _derive(op: OpDef, types: tuple[TensorType | None, ...], attrs: Mapping[str, Any]) -> Facts:
    try:
        return derive(op, types, attrs)
    except (InternalError, IndexError, ValueError, TypeError, AssertionError, KeyError, ZeroDivisionError) as error:
        shown = ", ".join(str(t) for t in types)
        raise Unsupported(f"no native form for inputs {shown} ({type(error).__name__}: {error})") from error


def _known_operand(state: Import, position: int, name: str, value: str) -> Array:
    if value not in state.graph.constants:
        raise Unsupported(f"input {position} ({name}) must be known when compiling, but {value!r} is computed")
    return state.graph.constants[value]


def _known_scalar(state: Import, inputs: Sequence[str], position: int) -> int | float | bool | None:
    """The value of a known operand of one element that does not raise the rank of the result."""
    array = state.graph.constants.get(inputs[position]) if position < len(inputs) else None
    if array is None or array.size != 1 or array.ndim > len(state.graph.types[inputs[0]].shape):
        return None
    return array.reshape(-1)[0].item()  # type: ignore[no-any-return]


# --- known values ---


def _constant(state: Import, scope: Scope, node: NodeProto) -> Array:
    """The value of a Constant node, in whichever of its attributes it stands."""
    values = attributes(node, state.source, scope.formal)
    if len(values) != 1:
        raise ModelError(f"expected one attribute with the value, got {sorted(values) or 'none'}")
    name, value = next(iter(values.items()))
    if isinstance(value, np.ndarray):
        return value
    dtypes = {"value_int": DType.INT64, "value_ints": DType.INT64, "value_float": DType.FLOAT32}
    if name in (*dtypes, "value_floats"):
        return np.array(value, dtypes.get(name, DType.FLOAT32).numpy)
    raise ModelError(f"a constant of kind {name} is not supported")


def _bind_constant(state: Import, scope: Scope, output: str, array: Array) -> None:
    name = _value_name(state, scope, output)
    try:
        type_ = TensorType(array.shape, DType.from_numpy(array.dtype))
    except ValueError as error:
        raise ModelError(f"output {output!r}: element type {array.dtype} is not supported") from error
    state.graph.add_constant(name, array, type_)
    scope.names[output] = name


def _fold(state: Import, scope: Scope, node: NodeProto, native: _Native) -> bool:
    """Evaluate the node if its inputs are known, or if it reads none of them (Shape, Size)."""
    graph = state.graph
    known = [_known_array(graph, value) if value else None for value in native.inputs]
    is_known = all(array is not None or not value for array, value in zip(known, native.inputs, strict=True))
    if native.facts.reads_nothing:
        known = [None if value == "" else _stand_in(graph.types[value]) for value in native.inputs]
    elif not is_known or not native.inputs:
        return False
    if not is_worth_folding(native.facts.types, [array for array in known if array is not None]):
        return False
    results = evaluate_op(native.op, known, native.attrs)
    for output, result in zip(node.output, results, strict=False):
        if output:
            _bind_constant(state, scope, output, result)
    return True


def _known_array(graph: Graph, value: str) -> Array | None:
    """A constant's array; a tensor without elements is known, too: a reduction over it is a constant."""
    type_ = graph.types[value]
    return _stand_in(type_) if type_.is_static and type_.size == 0 else graph.constants.get(value)


def _stand_in(type_: TensorType) -> Array:
    """An array of the type that takes no memory; for ops that look at no element."""
    return np.broadcast_to(np.zeros((), type_.dtype.numpy), type_.dims)


# --- adding nodes ---


def _value_name(state: Import, scope: Scope, output: str) -> str:
    """The Graph's name for an ONNX value: the same in the main graph, prefixed in bodies."""
    if not scope.prefix and output not in state.graph.types:
        return output
    return state.fresh_value(f"{scope.prefix}{output}")


def _add(
    state: Import,
    scope: Scope,
    node: NodeProto,
    inputs: Sequence[str],
    attrs: Mapping[str, Any],
    types: Sequence[TensorType],
) -> None:
    """Add the node with a name for each output that its op has, used or not."""
    stem = f"{scope.prefix}{node.name or next(filter(None, node.output), node.op_type)}"
    outputs: list[str] = []
    for position in range(len(types)):
        given = node.output[position] if position < len(node.output) else ""
        name = _value_name(state, scope, given) if given else state.fresh_value(f"{stem}.{position}")
        if given:
            scope.names[given] = name
        outputs.append(name)
    new = Node(state.fresh_node(stem), node.op_type, tuple(inputs), tuple(outputs), attrs, _domain(node))
    state.graph.add(new, types)


def _add_scan(state: Import, scope: Scope, node: NodeProto, inputs: Sequence[str]) -> None:
    given = attributes(node, state.source, scope.formal)
    operands, attrs, types = convert_scan(state, scope, inputs, given, convert_nodes)
    states = len(inputs) - int(attrs["num_scan_inputs"])
    passed = len(operands) - len(inputs)
    call = NodeProto()
    call.CopyFrom(node)
    del call.output[:]
    call.output.extend((*node.output[:states], *[""] * passed, *node.output[states:]))
    _add(state, scope, call, operands, attrs, types)


def _convert_without_op(state: Import, scope: Scope, node: NodeProto, inputs: Sequence[str], reason: Exception) -> None:
    """Evaluate, inline or leave to the host a node that has no native form."""
    known = {name: state.graph.constants[value] for name, value in _known_inputs(state, scope, node)}
    needed, resolved = needed_values(node), _without_references(node, scope)
    schema = schema_of(node.op_type, node.domain, scope.opset(node.domain))
    if needed and len(known) == len(needed) and _is_deterministic(schema) and _is_small(scope, node, known):
        for output, array in zip(
            filter(None, node.output), as_arrays(reference_outputs(resolved, known, scope.opsets)), strict=False
        ):
            _bind_constant(state, scope, output, array)
        return
    if schema is not None and bodies.inline_function(state, scope, resolved, schema, inputs, convert_nodes):
        return
    try:
        _add_host(state, scope, resolved, known, str(reason))
    except ModelError as error:
        raise ModelError(f"{reason}; and not as a host op: {error}") from error


def _is_small(scope: Scope, node: NodeProto, known: Mapping[str, Array]) -> bool:
    """Whether the results of known inputs are worth keeping. Raises TooLarge before anything is allocated."""
    types = {name: TensorType(array.shape, DType.from_numpy(array.dtype)) for name, array in known.items()}
    try:
        outputs = infer_outputs(_without_references(node, scope), types, known, scope.opsets)
    except TooLarge:
        raise
    except ModelError:
        return True  # a shape that depends on data is bounded by the data
    return is_worth_folding(list(outputs.values()), list(known.values()))


def _known_inputs(state: Import, scope: Scope, node: NodeProto) -> list[tuple[str, str]]:
    pairs = [(name, scope.find(name)) for name in needed_values(node)]
    return [(name, value) for name, value in pairs if value and value in state.graph.constants]


def _is_deterministic(schema: defs.OpSchema | None) -> bool:
    return schema is not None and not schema.non_deterministic


def _add_host(state: Import, scope: Scope, node: NodeProto, known: Mapping[str, Array], reason: str) -> None:
    """Add the node as a host op: its attribute holds a one-node model whose inputs are the Node's, in order."""
    values = {name: scope.find(name) for name in needed_values(node)}
    missing = [name for name, value in values.items() if not value]
    if missing:
        raise ModelError(f"needs {', '.join(missing)}, which could not be converted")
    types = {name: state.graph.types[value] for name, value in values.items() if value}
    outputs = infer_outputs(node, types, known, scope.opsets)
    model = one_node_model(node, types, outputs, reference_opsets(node, scope.opsets))
    names = tuple(_value_name(state, scope, output) for output in outputs)
    scope.names.update(zip(outputs, names, strict=True))
    stem = state.fresh_node(f"{scope.prefix}{node.name or node.output[0] or node.op_type}")
    attrs = {HOST_MODEL: model.SerializeToString(deterministic=True)}
    inputs = tuple(value for value in values.values() if value)
    state.graph.add(Node(stem, node.op_type, inputs, names, attrs, HOST_DOMAIN), outputs.values())
    state.host_ops.append(HostOp(stem, node.op_type, reason))


def _without_references(node: NodeProto, scope: Scope) -> NodeProto:
    """The node with attributes that refer to the function call's replaced by their values."""
    if not any(attribute.ref_attr_name for attribute in node.attribute):
        return node
    resolved = NodeProto()
    resolved.CopyFrom(node)
    del resolved.attribute[:]
    for attribute in node.attribute:
        given = scope.formal.get(attribute.ref_attr_name) if attribute.ref_attr_name else attribute
        if given is not None:
            copy = resolved.attribute.add()
            copy.CopyFrom(given)
            copy.name = attribute.name
    return resolved


def _check_inputs(state: Import, scope: Scope, node: NodeProto, inputs: Sequence[str]) -> None:
    """Raises ModelError where the schema does not allow the inputs' dtypes or their number."""
    schema = schema_of(node.op_type, node.domain, scope.opset(node.domain))
    if schema is None:
        return
    if not schema.min_input <= len(inputs) <= schema.max_input:
        raise ModelError(f"expected {schema.min_input} to {schema.max_input} inputs, got {len(inputs)}")
    if any(True for _ in subgraphs(node)):
        return
    fault = check_types(schema, [state.graph.types[value] if value else None for value in inputs])
    if fault:
        raise ModelError(fault)
    types = {name: state.graph.types[value] for name, value in zip(node.input, inputs, strict=True) if value}
    known = {name: state.graph.constants[value] for name, value in _known_inputs(state, scope, node)}
    if len(known) < len(types):  # evaluating known ones is a check of its own
        infer_by_onnx(_without_references(node, scope), types, known, scope.opsets)
