"""Is the model well formed? Own checks first (they name the place), then onnx.checker; every problem is listed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, defs

from mcompile.dtypes import TensorType
from mcompile.errors import ModelError
from mcompile.frontend.tensors import type_text

OLDEST_OPSET = 7
OLDEST_IR = 3


def newest_opset() -> int:
    """The newest opset that the installed onnx knows."""
    return int(defs.onnx_opset_version())


def opsets_of(model: ModelProto | onnx.FunctionProto) -> dict[str, int]:
    """Domain -> version; `ai.onnx` counts as the default domain."""
    return {"" if entry.domain == "ai.onnx" else entry.domain: entry.version for entry in model.opset_import}


@dataclass(frozen=True)
class Problem:
    """What is wrong with a part of the model: `node 'conv1'` and ` (Conv, opset 17): why`."""

    who: str
    what: str

    def __str__(self) -> str:
        return f"{self.who}{self.what}"


_SHOWN = 4


def texts(problems: Iterable[Problem]) -> list[str]:
    """The problems, each once; many that differ in the node alone share a line."""
    groups: dict[str, list[str]] = {}
    for problem in dict.fromkeys(problems):
        groups.setdefault(problem.what, []).append(problem.who)
    lines = []
    for what, names in groups.items():
        if len(names) <= _SHOWN or not what:
            lines += [f"{name}{what}" for name in names]
        else:
            shown = ", ".join(names[:_SHOWN])
            lines.append(f"{shown} and {len(names) - _SHOWN} more{what}")
    return lines


def about(node: NodeProto, opset: int, reason: str) -> Problem:
    """A problem of a node."""
    return Problem(_name(node), f" ({_op(node)}, opset {opset}): {reason}")


def describe(node: NodeProto, opset: int) -> str:
    """How messages name a node: `node 'conv1' (Conv, opset 17)`, by its first output if it has no name."""
    return f"{_name(node)} ({_op(node)}, opset {opset})"


def _name(node: NodeProto) -> str:
    return f"node {node.name!r}" if node.name else f"node without name giving {next(iter(node.output), '')!r}"


def _op(node: NodeProto) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type


def check_versions(model: ModelProto) -> Iterator[Problem]:
    """Problems with the IR version and the opsets."""
    if not OLDEST_IR <= model.ir_version <= onnx.IR_VERSION:
        yield Problem(f"IR version {model.ir_version}", f": expected {OLDEST_IR}..{onnx.IR_VERSION}")
    opsets = opsets_of(model)
    if "" not in opsets:
        yield Problem("opset_import", " lacks the default domain")
    elif not OLDEST_OPSET <= opsets[""] <= newest_opset():
        known = f"{OLDEST_OPSET}..{newest_opset()} (onnx {onnx.__version__})"
        yield Problem(f"opset {opsets['']}", f": expected {known}; convert the model with onnx.version_converter")


def check_structure(graph: GraphProto, opset: int) -> Iterator[Problem]:
    """Values defined twice, values nothing defines, sparse constants, no outputs, in `graph` and its subgraphs."""
    if not graph.output:
        yield Problem("the graph", " has no outputs")
    for sparse in graph.sparse_initializer:
        yield Problem(f"sparse initializer {sparse.values.name!r}", " is not supported; store it dense")
    yield from _scope(graph, opset, frozenset())


def text_of(value: str | bytes) -> str:
    """A protobuf string, which is bytes where it is no UTF-8 text."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def _broken_names(graph: GraphProto) -> Iterator[Problem]:
    names: list[str | bytes] = [value.name for value in (*graph.input, *graph.output, *graph.initializer)]
    for node in graph.node:
        names += [node.name, node.op_type, node.domain, *node.input, *node.output]
    for name in names:
        if isinstance(name, bytes):
            yield Problem(f"name {text_of(name)!r}", " is no UTF-8 text")


def _scope(graph: GraphProto, opset: int, outer: frozenset[str]) -> Iterator[Problem]:
    yield from _broken_names(graph)
    names = [value.name for value in graph.input] + [tensor.name for tensor in graph.initializer]
    defined = {*names, *(sparse.values.name for sparse in graph.sparse_initializer)}
    for node in graph.node:
        for output in filter(None, node.output):
            if output in defined:
                yield about(node, opset, f"output {output!r} is defined already")
            defined.add(output)
    visible = outer | defined
    for node in graph.node:
        for value in filter(None, node.input):
            if value not in visible:
                yield about(node, opset, f"input {value!r}: no initializer, graph input or node defines it")
        for body in subgraphs(node):
            yield from _scope(body, opset, visible)
    for output in graph.output:
        if output.name not in visible:
            yield Problem(f"graph output {output.name!r}", ": no initializer, graph input or node defines it")


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def free_values(graph: GraphProto) -> list[str]:
    """Names that `graph` and its subgraphs take from outside, in order of first use."""
    defined = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    defined |= {output for node in graph.node for output in node.output}
    used: dict[str, None] = {}
    for node in graph.node:
        used.update(dict.fromkeys(filter(None, node.input)))
        for body in subgraphs(node):
            used.update(dict.fromkeys(free_values(body)))
    used.update(dict.fromkeys(output.name for output in graph.output))
    return [name for name in used if name not in defined]


def sort_nodes(nodes: Sequence[NodeProto], opset: int) -> list[NodeProto]:
    """The nodes, each after those it needs. Raises ModelError naming the nodes of a cycle."""
    producers = {output: index for index, node in enumerate(nodes) for output in node.output if output}
    needs = [[producers[value] for value in _uses(node) if value in producers] for node in nodes]
    order: list[int] = []
    state = [0] * len(nodes)  # 0 new, 1 on the path, 2 done
    for root in range(len(nodes)):
        path = [(root, iter(needs[root]))] if not state[root] else []
        state[root] = state[root] or 1
        while path:
            index, remaining = path[-1]
            below = next(remaining, None)
            if below is None:
                state[index] = 2
                order.append(index)
                path.pop()
            elif state[below] == 1:
                cycle = [entry for entry, _ in path]
                names = [describe(nodes[entry], opset) for entry in cycle[cycle.index(below) :]]
                raise ModelError("the graph has a cycle", (" -> ".join([*names, names[0]]),))
            elif not state[below]:
                state[below] = 1
                path.append((below, iter(needs[below])))
    return [nodes[index] for index in order]


def _uses(node: NodeProto) -> Iterator[str]:
    yield from filter(None, node.input)
    for body in subgraphs(node):
        yield from free_values(body)


def light_model(model: ModelProto, nodes: Iterable[NodeProto]) -> ModelProto:
    """The model with `nodes` in order and each weight that is stored elsewhere declared as an input.

    What remains is small, so that onnx.checker and shape inference copy no weight.
    """
    light = ModelProto()
    light.CopyFrom(model)
    light.ir_version = max(light.ir_version, 4)  # before 4 every initializer had to be an input as well
    graph = light.graph
    elsewhere = [tensor for tensor in graph.initializer if tensor.data_location == TensorProto.EXTERNAL]
    kept = [tensor for tensor in model.graph.initializer if tensor.data_location != TensorProto.EXTERNAL]
    declared = {value.name for value in graph.input}
    weights = {tensor.name: tensor for tensor in elsewhere}
    del graph.node[:]
    for node in nodes:
        tensor = _external_constant(node)
        if tensor is None:
            graph.node.add().CopyFrom(node)
        else:
            weights[node.output[0]] = tensor
    graph.input.extend(
        onnx.helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
        for name, tensor in weights.items()
        if name not in declared
    )
    del graph.initializer[:]
    graph.initializer.extend(kept)
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):  # an undeclared shape is fine with us, not with the checker
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
            value.type.tensor_type.shape.SetInParent()
    return light


def _external_constant(node: NodeProto) -> TensorProto | None:
    if node.op_type != "Constant" or len(node.attribute) != 1 or len(node.output) != 1:
        return None
    tensor = node.attribute[0].t
    return tensor if tensor.data_location == TensorProto.EXTERNAL else None


def run_checker(light: ModelProto) -> dict[str, Problem]:
    """Problems that onnx.checker finds, by the first output of the node at fault ("" for the model)."""
    opset = opsets_of(light).get("", 0)
    try:
        onnx.checker.check_model(light)
        return {}
    except UnicodeDecodeError:
        raise
    except (onnx.checker.ValidationError, ValueError, TypeError) as error:
        problems = dict(_node_problems(light, opset))
        return problems or {"": Problem("onnx.checker", f": {_first_line(error)}")}


def _node_problems(light: ModelProto, opset: int) -> Iterator[tuple[str, Problem]]:
    context = onnx.checker.C.CheckerContext()
    context.ir_version = light.ir_version
    context.opset_imports = opsets_of(light)
    for node in light.graph.node:
        if any(True for _ in subgraphs(node)):
            continue
        try:
            onnx.checker.check_node(node, context)
        except onnx.checker.ValidationError as error:
            key = next(iter(node.output), "")
            if "No Op registered for" in str(error):
                yield key, about(node, opset, f"no such operator in opset {opset}")
            else:
                yield key, about(node, opset, _first_line(error))


def _first_line(error: Exception) -> str:
    """The message up to `==> Context`, on one line."""
    return " ".join(str(error).split("==> Context")[0].split())


@lru_cache(maxsize=1024)
def schema_of(op: str, domain: str, opset: int) -> defs.OpSchema | None:
    """The operator's schema as of `opset`, or None."""
    try:
        return defs.get_schema(op, opset, domain)
    except defs.SchemaError:
        return None


def check_types(schema: defs.OpSchema, types: Sequence[TensorType | None]) -> str | None:
    """What is wrong with a node's input dtypes by the schema's type constraints; None if nothing."""
    formals = list(schema.inputs)
    bound: dict[str, tuple[int, TensorType]] = {}
    for position, type_ in enumerate(types):
        if type_ is None or not formals:
            continue
        formal = formals[min(position, len(formals) - 1)]
        if type_text(type_.dtype) not in formal.types:
            allowed = ", ".join(sorted(text.removeprefix("tensor(").removesuffix(")") for text in formal.types))
            return f"input {position} ({formal.name}) is {type_.dtype.value}; expected one of {allowed}"
        is_variadic = position >= len(formals) - 1 and formal.option == defs.OpSchema.FormalParameterOption.Variadic
        if is_variadic and not formal.is_homogeneous:
            continue
        first, other = bound.setdefault(formal.type_str, (position, type_))
        if other.dtype is not type_.dtype:
            return f"input {position} ({formal.name}) is {type_}; expected {other.dtype.value} as input {first} is"
    return None
