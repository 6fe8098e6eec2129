"""Write LSTM, GRU and RNN as one MatMul over all time steps and a Scan, per direction.

    Y, Y_h = GRU(X, W, R, B)   ->   g = MatMul(X, W') + b;  Y_h, Y = Scan(h0, g; body: one step)

A Scan node has the semantics of ONNX Scan 9: inputs are the initial states, then the scanned values; outputs the final
states, then the stacked values; the body takes (states, slices) and gives (states, slices).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mcompile.dtypes import DType, TensorType
from mcompile.errors import InternalError, ModelError
from mcompile.graph.graph import Array, Graph, Node
from mcompile.graph.infer import derive
from mcompile.ops.registry import lookup

RECURRENT_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_DEFAULT_ACTIVATIONS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
_SCALES = {  # activation -> defaults of its alpha and beta, for those that have them
    "affine": (1.0, 0.0),
    "leakyrelu": (0.01,),
    "thresholdedrelu": (1.0,),
    "scaledtanh": (1.0, 1.0),
    "hardsigmoid": (0.2, 0.5),
    "elu": (1.0,),
}
_PLAIN = {"relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid", "softsign": "Softsign", "softplus": "Softplus"}


def is_recurrent(node: Node) -> bool:
    return node.domain == "" and node.op in RECURRENT_GATES


def expand_recurrent(graph: Graph) -> Graph:
    """The graph with every LSTM, GRU and RNN expanded. Raises ModelError where one is malformed."""
    if not any(is_recurrent(node) for node in graph.nodes.values()):
        return graph
    new = Graph(graph.name, graph.inputs, graph.outputs, _source_types(graph), dict(graph.constants))
    builder = _Builder(new, graph)
    for node in graph.topological():
        if is_recurrent(node):
            _expand(builder, node)
        else:
            new.add(node, [graph.types[output] for output in node.outputs])
    _drop_unused_constants(new, graph)
    return new


def recurrent_types(op: str, types: Sequence[TensorType | None], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    """The types of all outputs of a recurrent node: Y, Y_h and, for LSTM, Y_c. Raises ModelError."""
    facts = _facts(op, types, attrs)
    states = (facts.batch, facts.directions) if facts.batch_major else (facts.directions, facts.batch)
    sequence = (facts.batch, facts.steps) if facts.batch_major else (facts.steps,)
    rest = () if facts.batch_major else (facts.batch,)
    y = TensorType((*sequence, facts.directions, *rest, facts.hidden), facts.dtype)
    state = TensorType((*states, facts.hidden), facts.dtype)
    return (y, state, state) if op == "LSTM" else (y, state)


def _source_types(graph: Graph) -> dict[str, TensorType]:
    return {value: graph.types[value] for value in (*graph.inputs, *graph.constants)}


def _drop_unused_constants(new: Graph, old: Graph) -> None:
    """Weights that only the expanded nodes used."""
    for value in [value for value in old.constants if not new.users.get(value) and value not in new.outputs]:
        if old.users.get(value):
            del new.constants[value]
            del new.types[value]


# --- what a node asks for ---


@dataclass(frozen=True)
class _Facts:
    """Sizes and attributes of a recurrent node; `batch_major` is layout 1."""

    op: str
    steps: int
    batch: int
    inputs: int
    hidden: int
    directions: int
    dtype: DType
    batch_major: bool
    is_reversed: tuple[bool, ...]
    activations: tuple[_Activation, ...]
    clip: float | None
    attrs: Mapping[str, Any]

    @property
    def gates(self) -> int:
        return RECURRENT_GATES[self.op]

    def direction_activations(self, direction: int) -> tuple[_Activation, ...]:
        count = len(self.activations) // self.directions
        return self.activations[direction * count : (direction + 1) * count]


@dataclass(frozen=True)
class _Activation:
    name: str
    scales: tuple[float, ...]


_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


def _facts(op: str, types: Sequence[TensorType | None], attrs: Mapping[str, Any]) -> _Facts:
    x, w, r = types[:3]
    if x is None or w is None or r is None:
        raise ModelError(f"{op} needs the inputs X, W and R")
    name = str(attrs.get("direction") or "forward")
    if name not in _DIRECTIONS:
        raise ModelError(f"{op} has no direction {name!r}; expected one of {sorted(_DIRECTIONS)}")
    is_reversed = _DIRECTIONS[name]
    batch_major = bool(attrs.get("layout") or 0)
    steps, batch = (x.dims[1], x.dims[0]) if batch_major else x.dims[:2]
    hidden, gates = r.dims[-1], RECURRENT_GATES[op]
    facts = _Facts(
        op,
        steps,
        batch,
        x.dims[2],
        hidden,
        len(is_reversed),
        x.dtype,
        batch_major,
        is_reversed,
        _activations(op, len(is_reversed), attrs),
        None if attrs.get("clip") is None else float(attrs["clip"]),
        attrs,
    )
    _check_shape(op, "W", w, (facts.directions, gates * hidden, facts.inputs))
    _check_shape(op, "R", r, (facts.directions, gates * hidden, hidden))
    _check_shape(op, "B", types[3] if len(types) > 3 else None, (facts.directions, 2 * gates * hidden))
    if attrs.get("hidden_size") not in (None, hidden):
        raise ModelError(f"{op}: hidden_size is {attrs['hidden_size']}, but R has shape {list(r.dims)}")
    return facts


def _check_shape(op: str, name: str, type: TensorType | None, expected: tuple[int, ...]) -> None:
    if type is not None and type.dims != expected:
        raise ModelError(f"{op}: expected {name} of shape {list(expected)}, got {list(type.dims)}")


def _activations(op: str, directions: int, attrs: Mapping[str, Any]) -> tuple[_Activation, ...]:
    """The activations of all directions; alphas and betas go, in order, to those that have one."""
    names = tuple(attrs.get("activations") or _DEFAULT_ACTIVATIONS[op] * directions)
    if len(names) != len(_DEFAULT_ACTIVATIONS[op]) * directions:
        raise ModelError(f"{op}: expected {len(_DEFAULT_ACTIVATIONS[op]) * directions} activations, got {list(names)}")
    alphas, betas = (list(attrs.get(f"activation_{name}") or ()) for name in ("alpha", "beta"))
    result = []
    for name in (str(name).lower() for name in names):
        if name not in _SCALES and name not in _PLAIN:
            raise ModelError(f"{op} has no activation {name!r}; expected one of {sorted([*_SCALES, *_PLAIN])}")
        scales = [
            float(values.pop(0)) if values else default
            for values, default in zip((alphas, betas), _SCALES.get(name, ()), strict=False)
        ]
        result.append(_Activation(name, tuple(scales)))
    return tuple(result)


# --- building ---


@dataclass
class _Builder:
    """Adds nodes to `graph`, with names that `reserved` does not have either."""

    graph: Graph
    reserved: Graph | None = None
    prefix: str = ""

    def name(self, stem: str) -> str:
        stem = stem if stem.startswith(self.prefix) else f"{self.prefix}{stem}"
        number = 0
        name = self.graph.fresh(stem)
        while self.reserved is not None and (name in self.reserved.types or name in self.reserved.nodes):
            number += 1
            name = self.graph.fresh(f"{stem}.{number}")
        return name

    def constant(self, stem: str, array: Array) -> str:
        type_ = TensorType(array.shape, DType.from_numpy(array.dtype))
        return self.graph.add_constant(self.name(stem), array, type_)

    def add(
        self, op: str, inputs: Sequence[str], stem: str, outputs: Sequence[str] | None = None, **attrs: Any
    ) -> tuple[str, ...]:
        """Add a node and return all its outputs (called `outputs` where given)."""
        definition = lookup(op)
        if definition is None:
            raise InternalError(f"no op {op}")
        full = {**definition.attrs, **attrs}
        types = derive(definition, tuple(self.graph.types[v] if v else None for v in inputs), full).types
        name = self.name(stem)
        if outputs is None:
            outputs = [name, *(self.name(f"{name}.out{number}") for number in range(1, len(types)))]
        self.graph.add(Node(name, op, tuple(inputs), tuple(outputs), full), types)
        return tuple(outputs)

    def one(self, op: str, inputs: Sequence[str], stem: str, **attrs: Any) -> str:
        return self.add(op, inputs, stem, **attrs)[0]

    def reshape(self, value: str, shape: Sequence[int], stem: str) -> str:
        if self.graph.types[value].dims == tuple(shape):
            return value
        return self.one("Reshape", [value], stem, shape=np.array(shape, np.int64))

    def pick(self, value: str, axis: int, index: int, stem: str) -> str:
        """value[..., index, ...] without the dim `axis`; of a constant at once."""
        if value in self.graph.constants:
            return self.constant(stem, np.ascontiguousarray(np.take(self.graph.constants[value], index, axis)))
        shape = self.graph.types[value].dims
        if shape[axis] != 1:
            bounds = {"starts": index, "ends": index + 1, "axes": axis, "steps": 1}
            arrays = {name: np.array([bound], np.int64) for name, bound in bounds.items()}
            value = self.one("Slice", [value], stem, **arrays)
        return self.reshape(value, [*shape[:axis], *shape[axis + 1 :]], stem)

    def transpose(self, value: str, stem: str) -> str:
        if value in self.graph.constants:
            return self.constant(stem, np.ascontiguousarray(self.graph.constants[value].T))
        return self.one("Transpose", [value], stem, perm=(1, 0))

    def split(self, value: str, sizes: Sequence[int], stem: str) -> list[str]:
        """Parts of the last dim; of a constant at once."""
        if len(sizes) == 1:
            return [value]
        if value in self.graph.constants:
            parts = np.split(self.graph.constants[value], np.cumsum(sizes)[:-1], axis=-1)
            return [self.constant(stem, np.ascontiguousarray(part)) for part in parts]
        return list(self.add("Split", [value], stem, axis=-1, split=np.array(sizes, np.int64)))

    def sum(self, a: str, b: str, stem: str) -> str:
        constants = self.graph.constants
        if a in constants and b in constants:
            return self.constant(stem, constants[a] + constants[b])
        return self.one("Add", [a, b], stem)

    def activate(self, activation: _Activation, value: str, clip: float | None, stem: str) -> str:
        """`activation` of `value`, clipped to [-clip, clip] before."""
        if clip is not None:
            value = self.one("Clip", [value], f"{stem}.clip", min=-clip, max=clip)
        scales = activation.scales
        match activation.name:
            case "affine":
                return self._shifted(self._scaled(value, scales[0], stem), scales[1], stem)
            case "scaledtanh":
                tanh = self.one("Tanh", [self._scaled(value, scales[1], stem)], stem)
                return self._scaled(tanh, scales[0], stem)
            case "hardsigmoid":
                return self.one("HardSigmoid", [value], stem, alpha=scales[0], beta=scales[1])
            case "leakyrelu" | "thresholdedrelu" | "elu":
                ops = {"leakyrelu": "LeakyRelu", "thresholdedrelu": "ThresholdedRelu", "elu": "Elu"}
                return self.one(ops[activation.name], [value], stem, alpha=scales[0])
        return self.one(_PLAIN[activation.name], [value], stem)

    def _scaled(self, value: str, factor: float, stem: str) -> str:
        return value if factor == 1 else self.one("Mul", [value, self._number(factor, value)], f"{stem}.scale")

    def _shifted(self, value: str, by: float, stem: str) -> str:
        return value if by == 0 else self.one("Add", [value, self._number(by, value)], f"{stem}.shift")

    def _number(self, number: float, like: str) -> str:
        return self.constant("number", np.array(number, self.graph.types[like].dtype.numpy))


# --- one node ---


@dataclass(frozen=True)
class _Direction:
    """What one direction's Scan gives: stacked hidden states and the final states, as values of the graph."""

    sequence: str | None
    states: tuple[str, ...]


def _expand(builder: _Builder, node: Node) -> None:
    graph = builder.graph
    inputs = [*node.inputs, *[""] * (8 - len(node.inputs))]
    types = [graph.types[value] if value else None for value in inputs]
    try:
        facts = _facts(node.op, types, node.attrs)
    except ModelError as error:
        raise ModelError(f"node {node.name}: {error}") from error
    outputs = [*node.outputs, *[""] * (3 - len(node.outputs))]
    wants_sequence = bool(outputs[0]) and _is_used(builder, outputs[0])
    mask = _mask(builder, facts, inputs[4], node.name)
    results = []
    for direction in range(facts.directions):
        builder.prefix = f"{node.name}." if facts.directions == 1 else f"{node.name}.{direction}."
        results.append(_expand_direction(builder, facts, inputs, direction, mask, wants_sequence))
    builder.prefix = f"{node.name}."
    if wants_sequence:
        axis = 2 if facts.batch_major else 1
        _stack(builder, [result.sequence or "" for result in results], axis, outputs[0])
    for number, output in enumerate(outputs[1:]):
        if output and _is_used(builder, output):
            _stack(builder, [result.states[number] for result in results], 1 if facts.batch_major else 0, output)
    builder.prefix = ""


def _is_used(builder: _Builder, output: str) -> bool:
    old = builder.reserved
    return old is None or bool(old.users.get(output)) or output in old.outputs


def _stack(builder: _Builder, values: Sequence[str], axis: int, output: str) -> None:
    """`output` = `values` stacked along a new dim `axis`."""
    axes = np.array([axis], np.int64)
    if len(values) == 1:
        builder.add("Unsqueeze", values, "stack", [output], axes=axes)
        return
    parts = [builder.one("Unsqueeze", [value], "part", axes=axes) for value in values]
    builder.add("Concat", parts, "stack", [output], axis=axis)


def _mask(builder: _Builder, facts: _Facts, lengths: str, stem: str) -> str | None:
    """BOOL [steps, batch, 1] (batch first if batch-major): whether a step lies within its sequence; None: all do."""
    if not lengths:
        return None
    graph = builder.graph
    shape = (facts.batch, facts.steps, 1) if facts.batch_major else (facts.steps, facts.batch, 1)
    order = (1, facts.steps, 1) if facts.batch_major else (facts.steps, 1, 1)
    spread = (facts.batch, 1, 1) if facts.batch_major else (1, facts.batch, 1)
    steps = np.arange(facts.steps, dtype=graph.types[lengths].dtype.numpy).reshape(order)
    if lengths in graph.constants:
        values = graph.constants[lengths]
        if (values >= facts.steps).all():
            return None
        return builder.constant(f"{stem}.mask", np.broadcast_to(steps < values.reshape(spread), shape).copy())
    column = builder.reshape(lengths, spread, f"{stem}.lengths")
    return builder.one("Less", [builder.constant(f"{stem}.steps", steps), column], f"{stem}.mask")


def _expand_direction(
    builder: _Builder, facts: _Facts, inputs: Sequence[str], direction: int, mask: str | None, wants_sequence: bool
) -> _Direction:
    _, weights, recurrent, bias = inputs[:4]
    recurrent = builder.transpose(builder.pick(recurrent, 0, direction, "R"), "R")
    input_bias, recurrent_bias = _biases(builder, facts, bias, direction)
    weights = builder.transpose(builder.pick(weights, 0, direction, "W"), "W")
    projected = _project(builder, facts, inputs[0], weights, input_bias)
    states = [_initial(builder, facts, inputs[5], direction, "h0")]
    if facts.op == "LSTM":
        states.append(_initial(builder, facts, inputs[6], direction, "c0"))
    peepholes = builder.pick(inputs[7], 0, direction, "P") if facts.op == "LSTM" and inputs[7] else None
    scanned = [projected] if mask is None else [projected, mask]
    shared = {"R": recurrent, "Rb": recurrent_bias, "P": peepholes}
    captured = {name: value for name, value in shared.items() if value is not None}
    constants, fixed = _captured(builder, captured)
    body = _body(builder, facts, direction, states, scanned, constants, fixed, wants_sequence)
    return _scan(builder, facts, direction, body, [*states, *fixed.values()], scanned, wants_sequence)


def _captured(builder: _Builder, captured: Mapping[str, str]) -> tuple[dict[str, Array], dict[str, str]]:
    """Constants, which the body holds itself, and the other values, which it passes through as states."""
    constants = {name: builder.graph.constants[v] for name, v in captured.items() if v in builder.graph.constants}
    return constants, {name: value for name, value in captured.items() if name not in constants}


def _biases(builder: _Builder, facts: _Facts, bias: str, direction: int) -> tuple[str | None, str | None]:
    """The bias of the input projection, and what must be added to h R' apart (GRU with linear_before_reset)."""
    if not bias:
        return None, None
    size = facts.gates * facts.hidden
    input_bias, recurrent_bias = builder.split(builder.pick(bias, 0, direction, "B"), [size, size], "B")
    if facts.op == "GRU" and facts.attrs.get("linear_before_reset"):
        return input_bias, recurrent_bias
    return builder.sum(input_bias, recurrent_bias, "B"), None


def _project(builder: _Builder, facts: _Facts, x: str, weights: str, bias: str | None) -> str:
    """X W' + b for all steps at once, [steps, batch, gates * hidden] (batch first if batch-major)."""
    rows = builder.reshape(x, (facts.steps * facts.batch, facts.inputs), "X")
    product = builder.one("MatMul", [rows, weights], "XW")
    if bias is not None:
        product = builder.one("Add", [product, bias], "XWb")
    shape = (facts.batch, facts.steps) if facts.batch_major else (facts.steps, facts.batch)
    return builder.reshape(product, (*shape, facts.gates * facts.hidden), "XWb")


def _initial(builder: _Builder, facts: _Facts, value: str, direction: int, stem: str) -> str:
    if not value:
        return builder.constant(stem, np.zeros((facts.batch, facts.hidden), facts.dtype.numpy))
    return builder.pick(value, 1 if facts.batch_major else 0, direction, stem)


def _scan(
    builder: _Builder,
    facts: _Facts,
    direction: int,
    body: Graph,
    states: Sequence[str],
    scanned: Sequence[str],
    wants_sequence: bool,
) -> _Direction:
    graph = builder.graph
    axis, backward = int(facts.batch_major), int(facts.is_reversed[direction])
    stacked = int(wants_sequence)
    attrs = {
        "body": body,
        "num_scan_inputs": len(scanned),
        "scan_input_axes": (axis,) * len(scanned),
        "scan_input_directions": (backward,) * len(scanned),
        "scan_output_axes": (axis,) * stacked,
        "scan_output_directions": (backward,) * stacked,
    }
    name = builder.name("scan")
    outputs = [builder.name(f"scan.state{number}") for number in range(len(states))]
    types = [graph.types[state] for state in states]
    if wants_sequence:
        outputs.append(builder.name("scan.sequence"))
        lead = (facts.batch, facts.steps) if facts.batch_major else (facts.steps, facts.batch)
        types.append(TensorType((*lead, facts.hidden), facts.dtype))
    graph.add(Node(name, "Scan", (*states, *scanned), tuple(outputs), attrs), types)
    return _Direction(outputs[-1] if wants_sequence else None, tuple(outputs[: len(states)]))


# --- the body: one step ---


@dataclass
class _Step(_Builder):
    """The body under construction."""

    facts: _Facts = field(kw_only=True)
    activations: tuple[_Activation, ...] = field(kw_only=True)

    def has(self, value: str) -> bool:
        return value in self.graph.types

    def act(self, number: int, value: str, stem: str) -> str:
        return self.activate(self.activations[number], value, self.facts.clip, stem)

    def gate_parts(self, value: str, stem: str) -> list[str]:
        return self.split(value, [self.facts.hidden] * self.facts.gates, stem)

    def plus_product(self, value: str, a: str, b: str, stem: str) -> str:
        return self.one("Add", [value, self.one("Mul", [a, b], f"{stem}.mul")], stem)


def _body(
    builder: _Builder,
    facts: _Facts,
    direction: int,
    states: Sequence[str],
    scanned: Sequence[str],
    constants: Mapping[str, Array],
    fixed: Mapping[str, str],
    wants_sequence: bool,
) -> Graph:
    """One step: (h, [c], fixed..., x W' + b, [mask]) -> (h, [c], fixed..., [y])."""
    types = builder.graph.types
    graph = Graph(f"{builder.prefix}step")
    step = _Step(graph, facts=facts, activations=facts.direction_activations(direction))
    state_names = ["h", "c"][: len(states)]
    for name, value in [*zip(state_names, states, strict=True), *fixed.items()]:
        graph.types[name] = types[value]
    dim = int(facts.batch_major)
    for name, value in zip(["g", "mask"], scanned, strict=False):
        shape = types[value].dims
        graph.types[name] = TensorType((*shape[:dim], *shape[dim + 1 :]), types[value].dtype)
    for name, array in constants.items():
        graph.add_constant(name, array, TensorType(array.shape, DType.from_numpy(array.dtype)))
    graph.inputs = (*state_names, *fixed, *["g", "mask"][: len(scanned)])
    new = {"LSTM": _lstm_step, "GRU": _gru_step, "RNN": _rnn_step}[facts.op](step)
    sequence = new[0]
    if step.has("mask"):
        zero = step.constant("zero", np.zeros((), facts.dtype.numpy))
        sequence = step.one("Where", ["mask", new[0], zero], "y") if wants_sequence else ""
        new = [step.one("Where", ["mask", value, old], old) for value, old in zip(new, state_names, strict=True)]
    graph.outputs = (*new, *fixed, *([sequence] if wants_sequence else []))
    return graph


def _lstm_step(step: _Step) -> list[str]:
    gates = step.one("Add", [step.one("MatMul", ["h", "R"], "hR"), "g"], "gates")
    i, o, f, c = step.gate_parts(gates, "gate")
    peepholes = step.split("P", [step.facts.hidden] * 3, "P") if step.has("P") else None
    if peepholes is not None:
        i = step.plus_product(i, peepholes[0], "c", "i")
        f = step.plus_product(f, peepholes[2], "c", "f")
    i = step.act(0, i, "i")
    if step.facts.attrs.get("input_forget"):
        one = step.constant("one", np.ones((), step.facts.dtype.numpy))
        f = step.one("Sub", [one, i], "f")
    else:
        f = step.act(0, f, "f")
    kept = step.one("Mul", [f, "c"], "kept")
    cell = step.plus_product(kept, i, step.act(1, c, "new"), "cell")
    if peepholes is not None:
        o = step.plus_product(o, peepholes[1], cell, "o")
    hidden = step.one("Mul", [step.act(0, o, "o"), step.activate(step.activations[2], cell, None, "out")], "hidden")
    return [hidden, cell]


def _gru_step(step: _Step) -> list[str]:
    hidden = step.facts.hidden
    if step.facts.attrs.get("linear_before_reset"):
        product = step.one("MatMul", ["h", "R"], "hR")
        if step.has("Rb"):
            product = step.one("Add", [product, "Rb"], "hRb")
        from_h = step.gate_parts(product, "from_h")
        from_x = step.gate_parts("g", "from_x")
        z, r = (step.act(0, step.one("Add", [from_x[k], from_h[k]], name), name) for k, name in enumerate("zr"))
        new = step.act(1, step.plus_product(from_x[2], r, from_h[2], "new"), "new")
    else:
        gates, last = step.split("R", [2 * hidden, hidden], "R")
        x_gates, x_last = step.split("g", [2 * hidden, hidden], "from_x")
        both = step.one("Add", [step.one("MatMul", ["h", gates], "hR"), x_gates], "gates")
        z, r = step.split(both, [hidden, hidden], "gate")
        z, r = step.act(0, z, "z"), step.act(0, r, "r")
        reset = step.one("Mul", [r, "h"], "reset")
        new = step.act(1, step.one("Add", [step.one("MatMul", [reset, last], "rhR"), x_last], "new"), "new")
    one = step.constant("one", np.ones((), step.facts.dtype.numpy))
    mixed = step.one("Mul", [step.one("Sub", [one, z], "1-z"), new], "mixed")
    return [step.plus_product(mixed, z, "h", "hidden")]


def _rnn_step(step: _Step) -> list[str]:
    total = step.one("Add", [step.one("MatMul", ["h", "R"], "hR"), "g"], "total")
    return [step.act(0, total, "hidden")]
