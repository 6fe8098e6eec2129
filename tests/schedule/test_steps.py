"""Traces as JSON: there and back unchanged, and nothing else accepted."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcompile.errors import ScheduleError
from mcompile.schedule import steps
from mcompile.schedule.steps import Step, Trace, print_trace, trace_from_json, trace_to_json

EXAMPLES: tuple[Step, ...] = (
    steps.Split("y", "i", (4, 2)),
    steps.Fuse("y", ("i.0", "j")),
    steps.Reorder("y", ("k", "i", "j")),
    steps.ComputeAt("x", "y", "i.0", "shared"),
    steps.ComputeInline("x"),
    steps.CacheWrite("y"),
    steps.CacheRead("x", "y"),
    steps.Rfactor("y", "k", 8),
    steps.Vectorize("y", "j"),
    steps.Unroll("y", "i"),
    steps.Parallel("y", "i"),
    steps.Bind("y", "i", "threadIdx.x"),
    steps.LayoutRewrite("w", (32, 0), ((0, 0), (1, 0), (0, 1))),
    steps.Prefetch("y_acc", "w", "y", "j.0"),
    steps.Variant("winograd"),
)
KINDS = {type(step) for step in EXAMPLES}


def every_kind() -> set[type[Step]]:
    return set(Step.__subclasses__())


def test_every_kind_has_an_example() -> None:
    assert every_kind() == KINDS


@pytest.mark.parametrize("step", EXAMPLES, ids=lambda step: step.kind)
def test_round_trip(step: Step) -> None:
    text = json.dumps(trace_to_json((step,)))
    assert trace_from_json(json.loads(text)) == (step,)


def test_the_form() -> None:
    trace = (steps.Split("y", "i", (4, 2)), steps.LayoutRewrite("w", (32, 0), ((0, 0), (1, 0), (0, 1))))
    assert trace_to_json(trace) == [
        ["split", "y", "i", [4, 2]],
        ["layout_rewrite", "w", [32, 0], [[0, 0], [1, 0], [0, 1]]],
    ]


_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "str": st.text(max_size=4),
    "int": st.integers(),
    "tuple[str, ...]": st.lists(st.text(max_size=3), max_size=3).map(tuple),
    "tuple[int, ...]": st.lists(st.integers(), max_size=3).map(tuple),
    "tuple[tuple[int, int], ...]": st.lists(st.tuples(st.integers(), st.integers()), max_size=3).map(tuple),
}


def steps_of(kind: type[Step]) -> st.SearchStrategy[Step]:
    return st.builds(kind, *(_VALUES[str(field.type)] for field in fields(kind)))


traces = st.lists(st.one_of(*(steps_of(kind) for kind in sorted(KINDS, key=lambda kind: kind.kind))), max_size=5)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(traces.map(tuple))
def test_any_trace_comes_back(trace: Trace) -> None:
    assert trace_from_json(json.loads(json.dumps(trace_to_json(trace)))) == trace


MALFORMED: dict[str, tuple[Any, str]] = {
    "no list": ({"split": []}, "expected a list of steps, got dict"),
    "nothing": (None, "expected a list of steps, got NoneType"),
    "step is text": (["split"], r"expected \[kind, ...\] with a known kind, got 'split'"),
    "empty step": ([[]], r"with a known kind, got \[\]"),
    "unknown kind": ([["tile", "y"]], r"with a known kind, got \['tile', 'y'\]"),
    "kind is a list": ([[["split"], "y", "i", [2]]], "with a known kind"),
    "kind is a number": ([[3, "y"]], "with a known kind"),
    "too few fields": ([["split", "y", "i"]], "split takes 3 fields, got 2"),
    "too many fields": ([["compute_inline", "y", "z"]], "compute_inline takes 1 fields, got 2"),
    "name is a number": ([["compute_inline", 3]], "expected str, got 3"),
    "factors are text": ([["split", "y", "i", ["2"]]], r"expected tuple\[int, ...\], got \('2',\)"),
    "factors are one number": ([["split", "y", "i", 2]], r"expected tuple\[int, ...\], got 2"),
    "factor is a fraction": ([["rfactor", "y", "k", 2.0]], "expected int, got 2.0"),
    "factor is a bool": ([["rfactor", "y", "k", True]], "expected int, got True"),
    "iterators are text": ([["fuse", "y", "ij"]], r"expected tuple\[str, ...\], got 'ij'"),
    "order of single numbers": ([["layout_rewrite", "w", [2], [0, 1]]], r"expected tuple\[tuple\[int, int\], ...\]"),
    "order of triples": ([["layout_rewrite", "w", [2], [[0, 0, 1]]]], r"expected tuple\[tuple\[int, int\], ...\]"),
    "second step": ([["unroll", "y", "i"], ["unroll", "y"]], "unroll takes 2 fields, got 1"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(name: str) -> None:
    data, message = MALFORMED[name]
    with pytest.raises(ScheduleError, match=message):
        trace_from_json(data)


_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.sampled_from([step.kind for step in EXAMPLES]), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(_JSON)
def test_any_json_is_a_trace_or_an_error(data: Any) -> None:
    try:
        trace = trace_from_json(data)
    except ScheduleError:
        return
    assert trace_to_json(trace) == data


def test_print_trace() -> None:
    assert print_trace((steps.Split("y", "i", (4,)), steps.Unroll("y", "i.1"))) == (
        "Split(stage='y', iterator='i', factors=(4,))\nUnroll(stage='y', iterator='i.1')"
    )
