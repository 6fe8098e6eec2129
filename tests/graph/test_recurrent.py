"""LSTM, GRU and RNN, expanded and evaluated, against onnxruntime."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from mcompile.dtypes import DType, TensorType
from mcompile.errors import ModelError
from mcompile.graph.expand_recurrent import RECURRENT_GATES, expand_recurrent, recurrent_types
from mcompile.graph.graph import Array, Graph, Node
from mcompile.graph.interpret import evaluate_graph

STEPS, BATCH, INPUTS, HIDDEN = 5, 3, 4, 6
NAMES = {
    "LSTM": ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P"),
    "GRU": ("X", "W", "R", "B", "sequence_lens", "initial_h"),
    "RNN": ("X", "W", "R", "B", "sequence_lens", "initial_h"),
}


@dataclass
class Case:
    op: str
    attrs: dict[str, Any] = field(default_factory=dict)
    absent: tuple[str, ...] = ("sequence_lens", "P")
    constants: tuple[str, ...] = ("W", "R", "B", "P")

    @property
    def directions(self) -> int:
        return 2 if self.attrs.get("direction") == "bidirectional" else 1

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("Y", "Y_h", "Y_c") if self.op == "LSTM" else ("Y", "Y_h")

    def arrays(self) -> dict[str, Array]:
        gates, directions = RECURRENT_GATES[self.op], self.directions
        shapes = {
            "X": (STEPS, BATCH, INPUTS),
            "W": (directions, gates * HIDDEN, INPUTS),
            "R": (directions, gates * HIDDEN, HIDDEN),
            "B": (directions, 2 * gates * HIDDEN),
            "initial_h": (directions, BATCH, HIDDEN),
            "initial_c": (directions, BATCH, HIDDEN),
            "P": (directions, 3 * HIDDEN),
        }
        random = np.random.default_rng(0)
        arrays = {name: random.standard_normal(shape, np.float32) * 0.7 for name, shape in shapes.items()}
        arrays["sequence_lens"] = np.array([5, 2, 3], np.int32)
        return {name: arrays[name] for name in NAMES[self.op] if name not in self.absent}

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(name if name not in self.absent else "" for name in NAMES[self.op])


def graph_of(case: Case, arrays: dict[str, Array]) -> Graph:
    types = {name: TensorType(array.shape, DType.from_numpy(array.dtype)) for name, array in arrays.items()}
    graph = Graph("test", tuple(name for name in arrays if name not in case.constants), case.outputs)
    for name, array in arrays.items():
        graph.types[name] = types[name]
        if name in case.constants:
            graph.add_constant(name, array, types[name])
    attrs = {"hidden_size": HIDDEN, **case.attrs}
    node_types = recurrent_types(case.op, [types.get(name) for name in case.inputs], attrs)
    graph.add(Node("node", case.op, case.inputs, case.outputs, attrs), node_types)
    return graph


def onnxruntime_results(case: Case, arrays: dict[str, Array]) -> list[Array]:
    node = helper.make_node(case.op, case.inputs, case.outputs, hidden_size=HIDDEN, **case.attrs)
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in arrays.items()
        if name not in case.constants
    ]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in case.outputs]
    constants = [numpy_helper.from_array(arrays[name], name) for name in case.constants if name in arrays]
    graph = helper.make_graph([node], "test", infos, results, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return [np.asarray(result) for result in session.run(None, {info.name: arrays[info.name] for info in infos})]


def cases() -> list[Case]:
    result = [Case(op, {"direction": d}) for op in NAMES for d in ("forward", "reverse", "bidirectional")]
    masked = ("P",)
    result += [Case(op, {"direction": d}, masked) for op in NAMES for d in ("forward", "bidirectional")]
    result += [Case(op, {"direction": "bidirectional"}, masked, ("W", "R", "B", "P", "sequence_lens")) for op in NAMES]
    bare = ("B", "sequence_lens", "initial_h", "initial_c", "P")
    result += [Case(op, {}, bare) for op in NAMES]
    result += [Case(op, {"direction": "bidirectional"}, ("P", "sequence_lens"), ()) for op in NAMES]
    result += [Case("GRU", {"direction": d, "linear_before_reset": 1}) for d in ("forward", "bidirectional")]
    result += [Case("GRU", {"linear_before_reset": 1}, masked, ()), Case("GRU", {"linear_before_reset": 1}, bare)]
    result += [Case("LSTM", {"direction": d}, ("sequence_lens",)) for d in ("forward", "bidirectional")]
    result += [Case("LSTM", {}, (), ()), Case("LSTM", {"input_forget": 1})]
    result += [Case(op, {"clip": 0.5}) for op in NAMES]
    return result + activation_cases()


def activation_cases() -> list[Case]:
    with_scales: list[tuple[str, dict[str, Any]]] = [
        ("Relu", {}),
        ("Sigmoid", {}),
        ("Softsign", {}),
        ("Softplus", {}),
        ("LeakyRelu", {"activation_alpha": [0.2]}),
        ("ThresholdedRelu", {"activation_alpha": [0.3]}),
        ("Elu", {"activation_alpha": [0.7]}),
        ("HardSigmoid", {"activation_alpha": [0.3], "activation_beta": [0.4]}),
        ("ScaledTanh", {"activation_alpha": [0.9], "activation_beta": [1.2]}),
        ("Affine", {"activation_alpha": [0.5], "activation_beta": [0.1]}),
    ]
    result = [Case("RNN", {"activations": [name], **scales}) for name, scales in with_scales]
    several = {"activations": ["HardSigmoid", "LeakyRelu", "Tanh"], "activation_alpha": [0.3, 0.1]}
    return [*result, Case("LSTM", {**several, "activation_beta": [0.4]})]


def identify(case: Case) -> str:
    return f"{case.op}-{case.attrs}-{len(case.absent)}-{len(case.constants)}"


@pytest.mark.parametrize("case", cases(), ids=identify)
def test_agrees_with_onnxruntime(case: Case) -> None:
    arrays = case.arrays()
    graph = expand_recurrent(graph_of(case, arrays))
    assert not any(node.op in RECURRENT_GATES for node in graph.nodes.values())
    results = evaluate_graph(graph, {name: arrays[name] for name in graph.inputs})
    for name, expected in zip(case.outputs, onnxruntime_results(case, arrays), strict=True):
        np.testing.assert_allclose(results[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("op", NAMES)
@pytest.mark.parametrize("absent", [("P", "sequence_lens"), ("P",)], ids=["full", "lengths"])
def test_batch_major_layout(op: str, direction: str, absent: tuple[str, ...]) -> None:
    case = Case(op, {"direction": direction}, absent)
    arrays = case.arrays()
    expected = evaluate_graph(graph_of(case, arrays), {n: a for n, a in arrays.items() if n not in case.constants})
    swapped = {n: np.swapaxes(a, 0, 1).copy() if n in ("X", "initial_h", "initial_c") else a for n, a in arrays.items()}
    graph = expand_recurrent(graph_of(Case(op, {"direction": direction, "layout": 1}, absent), swapped))
    results = evaluate_graph(graph, {name: swapped[name] for name in graph.inputs})
    np.testing.assert_allclose(results["Y"], expected["Y"].transpose(2, 0, 1, 3), rtol=1e-6)
    np.testing.assert_allclose(results["Y_h"], expected["Y_h"].swapaxes(0, 1), rtol=1e-6)


def test_full_lengths_need_no_mask() -> None:
    case = Case("GRU", {}, ("P",), ("W", "R", "B", "sequence_lens"))
    arrays = case.arrays() | {"sequence_lens": np.full(BATCH, STEPS, np.int32)}
    graph = expand_recurrent(graph_of(case, arrays))
    (scan,) = [node for node in graph.nodes.values() if node.op == "Scan"]
    assert scan.attrs["num_scan_inputs"] == 1


def test_unused_sequence_is_not_stacked() -> None:
    case = Case("GRU")
    graph = graph_of(case, case.arrays())
    graph.outputs = ("Y_h",)
    graph = expand_recurrent(graph)
    (scan,) = [node for node in graph.nodes.values() if node.op == "Scan"]
    assert len(scan.outputs) == 1
    assert "Y" not in graph.types


def test_weights_move_into_the_body() -> None:
    case = Case("LSTM", {"direction": "bidirectional"})
    graph = expand_recurrent(graph_of(case, case.arrays()))
    assert not {"W", "R", "B"} & set(graph.constants)
    bodies = [node.attrs["body"] for node in graph.nodes.values() if node.op == "Scan"]
    assert [body.constants["R"].shape for body in bodies] == [(HIDDEN, 4 * HIDDEN)] * 2


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"direction": "sideways"}, "direction"),
        ({"hidden_size": 7}, "hidden_size"),
        ({"activations": ["Tanh"]}, "activations"),
        ({"activations": ["Sigmoid", "Nonsense"]}, "nonsense"),
    ],
)
def test_malformed_attributes(attrs: dict[str, Any], message: str) -> None:
    case = Case("GRU")
    types = [TensorType(array.shape, DType.FLOAT32) for array in case.arrays().values()]
    with pytest.raises(ModelError, match=message):
        recurrent_types("GRU", types[:4], attrs)


def test_wrong_weight_shape() -> None:
    types = [TensorType(shape, DType.FLOAT32) for shape in ((5, 1, 4), (1, 17, 4), (1, 18, 6))]
    with pytest.raises(ModelError, match="expected W of shape"):
        recurrent_types("GRU", types, {})
