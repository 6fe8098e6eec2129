"""The memory plan: no two live buffers overlap, and loops, host ops and random graphs give the right values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcompile.dtypes import DType, TensorType
from mcompile.graph.graph import Graph, Node
from mcompile.graph.memory_plan import Slot, allocate
from mcompile.runtime.plan import HostCall, NativeSegment, Repeat, Space
from tests.graph.execution import Builder, check
from tests.graph.test_layout import conv

_SLOTS = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 30), st.integers(0, 10)), max_size=30)


@given(_SLOTS)
def test_live_slots_never_overlap(rows):
    slots = [Slot(str(i), size, first, first + length) for i, (size, first, length) in enumerate(rows)]
    offsets, total = allocate(slots)
    for i, a in enumerate(slots):
        assert offsets[a.name] % 64 == 0
        assert offsets[a.name] + a.size_bytes <= total
        for b in slots[:i]:
            apart = a.last < b.first or b.last < a.first
            below = offsets[a.name] + a.size_bytes <= offsets[b.name]
            above = offsets[b.name] + b.size_bytes <= offsets[a.name]
            assert apart or below or above


def test_dead_buffers_are_used_again():
    offsets, total = allocate([Slot("a", 640, 0, 1), Slot("b", 640, 1, 2), Slot("c", 640, 2, 3), Slot("d", 64, 2, 3)])
    assert offsets["c"] == offsets["a"]
    assert total == 1344


def test_best_gap_is_taken():
    slots = [Slot("a", 1024, 0, 0), Slot("b", 512, 0, 9), Slot("c", 256, 0, 0), Slot("d", 192, 0, 9)]
    offsets, _ = allocate([*slots, Slot("e", 128, 1, 9)])
    assert offsets["e"] == offsets["c"]


def test_long_chain_needs_two_buffers():
    b = Builder()
    x = b.input(32, 32)
    for _ in range(6):
        x = b("Softmax", x)
    assert check(b.outputs(x)).plan.arena_bytes == 2 * 32 * 32 * 4


def test_in_place_where_the_code_can():
    b = Builder()
    x = b("Softmax", b.input(32, 32))
    y = b("Exp", x)
    total = b("Softmax", y)
    graph = b.outputs(b("Add", b("Softmax", total), b("Neg", b("Transpose", b("MatMul", x, b.weight(32, 32))))))
    plain, shared = check(graph), check(graph, in_place=True)
    assert shared.plan.arena_bytes <= plain.plan.arena_bytes


def test_host_calls_cut_the_segments():
    b = Builder()
    x = b("Neg", b.input(4))
    planned = check(b.outputs(b("Neg", b.host("Weird", b("Neg", b.host("Weird", x))))))
    kinds = [type(segment) for segment in planned.plan.segments]
    assert kinds == [NativeSegment, HostCall, NativeSegment, HostCall, NativeSegment]


def test_host_call_on_ends_and_constants():
    b = Builder()
    x = b.input(4)
    planned = check(b.outputs(b.host("Weird", x), b.host("Weird", b.weight(3))))
    spaces = [segment.inputs[0].place.space for segment in planned.plan.segments if isinstance(segment, HostCall)]
    assert spaces == [Space.INPUT, Space.CONSTANTS]


# --- loops ---


def cell(batch: int, inputs: int, hidden: int) -> Graph:
    """h' = tanh(x W + h R), which is also what is stacked; and the running sum of h."""
    b = Builder("cell")
    h, total, x = b.input(batch, hidden, name="h"), b.input(batch, hidden, name="s"), b.input(batch, inputs, name="x")
    new = b("Tanh", b("Add", b("MatMul", x, b.weight(inputs, hidden)), b("MatMul", h, b.weight(hidden, hidden))))
    return b.outputs(new, b("Add", total, new), new)


def scan(b: Builder, body: Graph, inputs: tuple[str, ...], outputs: list[TensorType], **attrs: Any) -> tuple[str, ...]:
    names = tuple(f"scan.{i}" for i in range(len(outputs)))
    b.graph.add(Node("scan", "Scan", inputs, names, {"body": body, "num_scan_inputs": 1, **attrs}), outputs)
    return names


def tensor(*shape: int) -> TensorType:
    return TensorType(shape, DType.FLOAT32)


@pytest.mark.parametrize("length", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("reverse", [0, 1])
def test_scan(length, reverse):
    b = Builder()
    x = b("Relu", b.input(length, 2, 3))
    start = (b.weight(2, 4), b("Exp", b.input(2, 4)))
    types = [tensor(2, 4), tensor(2, 4), tensor(length, 2, 4)]
    attrs = {"scan_input_directions": (reverse,), "scan_output_directions": (reverse,)}
    last, total, rows = scan(b, cell(2, 3, 4), (*start, x), types, **attrs)
    planned = check(b.outputs(b("Neg", last), total, b("Exp", rows)))
    repeats = [call for segment in planned.plan.segments for call in segment.calls if isinstance(call, Repeat)]
    assert [repeat.count for repeat in repeats] == ([length // 2] if length > 3 else [])


def test_scan_over_another_axis_and_with_unwanted_results():
    b = Builder()
    x = b("Transpose", b.input(3, 2, 5))
    types = [tensor(2, 4), tensor(2, 4), tensor(2, 5, 4)]
    start = (b.weight(2, 4), b.weight(2, 4))
    attrs = {"scan_input_axes": (0,), "scan_output_axes": (1,)}
    _, _, rows = scan(b, cell(2, 3, 4), (*start, x), types, **attrs)
    check(b.outputs(b("Neg", rows)))
    other = Builder()
    body = cell(2, 3, 4)
    start = (other.weight(2, 4), other.weight(2, 4))
    names = scan(other, body, (*start, other.input(2, 5, 3)), [tensor(2, 4)], scan_input_axes=(1,))
    check(other.outputs(names[0]))


def test_scan_writes_into_a_concat():
    b = Builder()
    types = [tensor(2, 4), tensor(2, 4), tensor(5, 2, 4)]
    start = (b.weight(2, 4), b.weight(2, 4))
    names = scan(b, cell(2, 3, 4), (*start, b.input(5, 2, 3)), types, scan_input_directions=(1,))
    rows = b("Unsqueeze", names[2], axes=np.array([2]))
    joined = b("Concat", rows, b("Neg", rows), axis=2)
    planned = check(b.outputs(b("Reshape", joined, shape=np.array([5, 2, 8]))))
    assert planned.copies == 0


def test_scan_tasks_weigh_as_often_as_they_run():
    b = Builder()
    types = [tensor(2, 4), tensor(2, 4), tensor(6, 2, 4)]
    names = scan(b, cell(2, 3, 4), (b.weight(2, 4), b.weight(2, 4), b.input(6, 2, 3)), types)
    planned = check(b.outputs(*names))
    assert sorted(item.weight for item in planned.partition.tasks()) == [2, 6, 6, 6, 6]


def test_loop_in_a_loop():
    outer = Builder("outer")
    state, rows = outer.input(2, 4, name="p"), outer.input(3, 2, 3, name="q")
    types = [tensor(2, 4), tensor(2, 4), tensor(3, 2, 4)]
    last, _, stacked = scan(outer, cell(2, 3, 4), (state, outer.weight(2, 4), rows), types)
    body = outer.outputs(last, stacked)
    b = Builder()
    names = scan(b, body, (b.weight(2, 4), b.input(5, 3, 2, 3)), [tensor(2, 4), tensor(5, 3, 2, 4)])
    check(b.outputs(*names))


def test_states_handed_through():
    """A body that swaps its states and returns one of its inputs."""
    body = Builder("swap")
    a, c, x = body.input(3, name="a"), body.input(3, name="c"), body.input(3, name="x")
    graph = body.outputs(c, body("Add", a, x), x)
    b = Builder()
    types = [tensor(3), tensor(3), tensor(5, 3)]
    names = scan(b, graph, (b.weight(3), b.weight(3), b.input(5, 3)), types)
    check(b.outputs(*names))


# --- random graphs ---

_UNARY = ("Relu", "Exp", "Neg", "Sigmoid")


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A few nodes on (1, 4, 4, 4) tensors: pointwise, convolutions, pools, views, splits and concats."""
    b = Builder()
    values = [b.input(1, 4, 4, 4), b.input(1, 4, 4, 4)]

    def pick() -> str:
        return draw(st.sampled_from(values[-5:]))

    for _ in range(draw(st.integers(1, 10))):
        match draw(st.integers(0, 9)):
            case 0 | 1:
                values.append(b(draw(st.sampled_from(_UNARY)), b("Tanh", pick())))
            case 2 | 3:
                values.append(b(draw(st.sampled_from(("Add", "Mul"))), pick(), pick()))
            case 4:
                values.append(b("Tanh", conv(b, pick(), 4)))
            case 5:
                axis = draw(st.sampled_from((1, 2, 3)))
                half = b.many("Split", b("Concat", pick(), pick(), axis=axis), axis=axis, num_outputs=2)
                values.append(b("Add", *half))
            case 6:
                perm = draw(st.sampled_from(((0, 1, 3, 2), (0, 2, 3, 1), (0, 3, 2, 1))))
                values.append(b("Transpose", pick(), perm=perm))
            case 7:
                flat = b("Reshape", pick(), shape=np.array(draw(st.sampled_from(((1, 16, 4), (4, 16), (2, 2, 16))))))
                values.append(b("Reshape", flat, shape=np.array([1, 4, 4, 4])))
            case 8:
                values.append(b("Softmax", pick(), axis=draw(st.sampled_from((1, 3)))))
            case 9:
                start = draw(st.integers(0, 1))
                cut = b("Slice", pick(), starts=np.array([start]), ends=np.array([start + 2]), axes=np.array([1]))
                parts = [cut, b("Neg", cut)]
                values.append(b("Concat", *draw(st.permutations(parts)), axis=1))
    outputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
    return b.outputs(*outputs, values[-1])


@settings(max_examples=40, deadline=None)
@given(graphs(), st.booleans())
def test_random_graphs_keep_their_values(graph, in_place):
    check(graph, in_place=in_place)
