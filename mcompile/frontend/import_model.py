"""import_model: ONNX -> Graph. Reads as the story of an import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx.inliner

from mcompile.dtypes import DType, TensorType
from mcompile.errors import ModelError
from mcompile.frontend.check import (
    Problem,
    check_structure,
    check_versions,
    light_model,
    opsets_of,
    run_checker,
    sort_nodes,
    text_of,
    texts,
)
from mcompile.frontend.convert import convert_nodes
from mcompile.frontend.dims import bind_inputs, declared_type
from mcompile.frontend.host import HostOp
from mcompile.frontend.scope import Import, Scope
from mcompile.frontend.source import ModelSource, open_source
from mcompile.frontend.tensors import dtype_of, load_tensor
from mcompile.graph.graph import Graph
from mcompile.graph.infer import apply
from mcompile.runtime.plan import Signature


@dataclass(frozen=True)
class ImportedModel:
    """A model as a Graph, and what its user was told about it.

    `inputs` and `outputs` are the model's, in order; `graph.inputs` and `graph.outputs` agree by position.
    """

    graph: Graph
    inputs: tuple[Signature, ...]
    outputs: tuple[Signature, ...]
    opset: int
    ir_version: int
    producer: str
    metadata: Mapping[str, str]
    host_ops: tuple[HostOp, ...]
    external_files: tuple[Path, ...]
    node_count: int  # nodes of the ONNX graph


def import_model(
    source: str | Path | bytes | onnx.ModelProto,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    dims: Mapping[str, int] | None = None,
) -> ImportedModel:
    """The model with static shapes and canonical ops.

    `shapes` gives input shapes by name, `dims` values of named dims. Raises ModelError listing every problem of the
    model, OptionError for shapes and dims that do not fit it.
    """
    try:
        return _import(open_source(source), shapes or {}, dims or {})
    except UnicodeDecodeError as error:
        raise ModelError(f"not an ONNX model, or a damaged one: a name is no UTF-8 text: {error}") from error


def _import(opened: ModelSource, shapes: Mapping[str, Sequence[int]], dims: Mapping[str, int]) -> ImportedModel:
    model = _inline_functions(opened.model)
    opset = opsets_of(model).get("", 0)
    state, scope = _begin(model, opened)
    _refuse("the model is invalid", [*check_versions(model), *check_structure(model.graph, opset), *state.problems])
    nodes = sort_nodes(model.graph.node, opset)
    light = light_model(model, nodes)
    invalid = run_checker(light)
    if "" in invalid:
        _refuse("the model is invalid", [invalid[""]])
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = bind_inputs([v for v in model.graph.input if v.name not in weights], shapes, dims)
    _add_inputs(state, scope, inputs)
    state.problems.extend(invalid.values())
    broken = [node for node in nodes if next(iter(node.output), "") in invalid]
    scope.names.update((output, None) for node in broken for output in node.output)
    convert_nodes(state, scope, [node for node in nodes if next(iter(node.output), "") not in invalid])
    outputs = _bind_outputs(state, scope, model)
    _refuse("the model cannot be compiled", state.problems)
    return ImportedModel(
        graph=state.graph,
        inputs=inputs,
        outputs=outputs,
        opset=opset,
        ir_version=model.ir_version,
        producer=" ".join(filter(None, (text_of(model.producer_name), text_of(model.producer_version)))),
        metadata={text_of(entry.key): text_of(entry.value) for entry in model.metadata_props},
        host_ops=tuple(state.host_ops),
        external_files=opened.external_files(),
        node_count=len(opened.model.graph.node),
    )


def _refuse(message: str, problems: Sequence[Problem]) -> None:
    if problems:
        raise ModelError(message, tuple(texts(problems)))


def _inline_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with calls of its own functions replaced by their bodies."""
    if not model.functions:
        return model
    try:
        return onnx.inliner.inline_local_functions(model)
    except Exception as error:  # the C++ inliner raises its own types
        raise ModelError(f"the model's functions cannot be inlined: {error}") from error


def _begin(model: onnx.ModelProto, source: ModelSource) -> tuple[Import, Scope]:
    """The import with the initializers in place; those that cannot be read are problems."""
    graph = Graph(text_of(model.graph.name) or "model")
    names = {output for node in model.graph.node for output in node.output}
    reserved = names | {v.name for v in model.graph.input} | {tensor.name for tensor in model.graph.initializer}
    state = Import(source, graph, reserved)
    scope = Scope(opsets_of(model))
    for tensor in model.graph.initializer:
        try:
            array = load_tensor(tensor, source)
        except ModelError as error:
            state.problems.append(Problem(str(error), ""))
            continue
        graph.add_constant(tensor.name, array, TensorType(array.shape, DType.from_numpy(array.dtype)))
        scope.names[tensor.name] = tensor.name
    return state, scope


def _add_inputs(state: Import, scope: Scope, inputs: Sequence[Signature]) -> None:
    state.graph.inputs = tuple(signature.name for signature in inputs)
    for signature in inputs:
        state.graph.types[signature.name] = signature.type
        scope.names[signature.name] = signature.name


def _bind_outputs(state: Import, scope: Scope, model: onnx.ModelProto) -> tuple[Signature, ...]:
    """Set the graph's outputs, checking what the model declares of them against what was derived."""
    graph = state.graph
    outputs: list[str] = []
    signatures: list[Signature] = []
    for info in model.graph.output:
        value = scope.find(info.name)
        if not value:
            continue  # a problem already
        actual = graph.types[value]
        try:
            code, shape = declared_type(info, f"output {info.name!r}")
            declared = None if code == 0 else dtype_of(code, f"output {info.name!r}")
        except ModelError as error:
            state.problems.append(Problem(str(error), ""))
            continue
        if not _fits(actual, declared, shape):
            told = f"{declared.value if declared else '?'}[{', '.join(map(str, shape or ()))}]"
            what = f" is declared as {told}, but the model computes {actual}"
            state.problems.append(Problem(f"output {info.name!r}", what))
            continue
        signatures.append(Signature(info.name, actual, actual.shape if shape is None else shape))
        outputs.append(_own_value(state, value, info.name, outputs))
    graph.outputs = tuple(outputs)
    return tuple(signatures)


def _fits(actual: TensorType, dtype: DType | None, shape: Sequence[int | str] | None) -> bool:
    if dtype is not None and dtype is not actual.dtype:
        return False
    if shape is None:
        return True
    known = zip(shape, actual.shape, strict=False)
    return len(shape) == len(actual.shape) and all(isinstance(dim, str) or dim == got for dim, got in known)


def _own_value(state: Import, value: str, output: str, earlier: Sequence[str]) -> str:
    """A value that a node computes for this output alone: inputs, constants and repeated outputs get an Identity."""
    graph = state.graph
    if value in graph.producers and value not in earlier:
        return value
    if value == output and value in graph.constants:
        hidden = state.fresh_value(f"{value}.value")
        graph.add_constant(hidden, graph.constants[value], graph.types[value])
        graph.replace_uses(value, hidden)
        del graph.constants[value], graph.types[value]
        value = hidden
    stem = output if output not in graph.types else state.fresh_value(f"{output}.output")
    return apply(graph, "Identity", (value,), stem=stem)
