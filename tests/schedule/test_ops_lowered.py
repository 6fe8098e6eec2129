"""Samples of every op: its constructed schedule, lowered, gives the op's values when interpreted and when built.

Which samples is drawn by MCOMPILE_SEED; --full takes all.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import mcompile.ops  # noqa: F401  (registers the ops)
from mcompile.dtypes import DType
from mcompile.graph.partition import canonical_dag
from mcompile.graph.views import tensors_of
from mcompile.ir.evaluate import evaluate
from mcompile.ir.tensor import Compute, Placeholder, row_major
from mcompile.ops.registry import OpDef, Sample, registered
from mcompile.schedule.constructed import construct
from mcompile.schedule.lower import lower
from mcompile.schedule.merge_axes import merge_axes
from mcompile.schedule.task import Task
from mcompile.target import parse_target
from tests.conftest import sampled
from tests.schedule.programs import Runner, native_targets, outputs_of, run_interpreted, run_natively

Case = tuple[OpDef, Sample]


LOWERED, NATIVE = 240, 60  # cases of a run without --full


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = [(name, channels_last) for name in cases() for channels_last in (False, True)]
    for fixture, count in (("lowered_case", LOWERED), ("native_case", NATIVE)):
        if fixture in metafunc.fixturenames:
            chosen = sampled(metafunc.config, every, count)
            ids = [f"{name}-{'channels-last' if last else 'row-major'}" for name, last in chosen]
            metafunc.parametrize(fixture, chosen, ids=ids)


@cache
def cases() -> dict[str, Case]:
    return {f"{op.name}-{i}": (op, s) for op in registered() for i, s in enumerate(op.samples())}


def build(op: OpDef, sample: Sample, channels_last: bool, target: str) -> tuple[Task, dict[str, Any]] | None:
    """The op as a task of its own, with weights constant; None for an op that computes nothing."""
    attrs = {**op.attrs, **sample.attrs}
    if op.adapt is not None and sample.opset:
        attrs = op.adapt(sample.opset, attrs)
    inputs: list[Placeholder | None] = []
    arrays: dict[str, Any] = {}
    for index, array in enumerate(sample.inputs):
        if array is None or index in op.operands:
            inputs.append(None)
            continue
        array = np.asarray(array)
        inputs.append(Placeholder(f"x{index}", array.shape, DType.from_numpy(array.dtype)))
        arrays[f"x{index}"] = array
    outputs = [tensor for tensor in op.compute(inputs, attrs) if isinstance(tensor, Compute)]
    if not outputs:
        return None
    dag = canonical_dag(outputs)
    originals = [t for t in tensors_of(outputs) if isinstance(t, Placeholder)]
    arrays = {p.name: arrays[o.name] for p, o in zip(dag.placeholders, originals, strict=True)}
    strides = {t.name: row_major(t.shape) for t in (*dag.placeholders, *dag.outputs)}
    if channels_last:
        for tensor in (*dag.placeholders[:1], *dag.outputs):
            if len(tensor.shape) > 2:
                order = (0, *range(2, len(tensor.shape)), 1)
                permuted = row_major([tensor.shape[d] for d in order])
                strides[tensor.name] = tuple(permuted[order.index(d)] for d in range(len(tensor.shape)))
    constants = frozenset(p.name for p in dag.placeholders[1:])
    return merge_axes(Task(dag, strides, constants, parse_target(target, 2))), arrays


def check_op(name: str, channels_last: bool, target: str, run: Runner) -> None:
    built = build(*cases()[name], channels_last, target)
    if built is None:
        pytest.skip("computes nothing")
    task, arrays = built
    arrays = {p.name: arrays[p.name].reshape(p.shape) for p in task.dag.placeholders}
    expected = evaluate(task.dag, arrays)
    actual = outputs_of(task, lower(task, construct(task)), arrays, run)
    for output in task.dag.outputs:
        narrow = output.dtype in (DType.FLOAT16, DType.BFLOAT16)
        got, want = actual[output.name].astype(np.float64), expected[output.name].astype(np.float64)
        np.testing.assert_allclose(got, want, rtol=2e-2 if narrow else 1e-4, atol=2e-2 if narrow else 1e-5)


def test_lowered(lowered_case: tuple[str, bool]) -> None:
    check_op(*lowered_case, "cpu", run_interpreted)


@pytest.mark.parametrize("target", native_targets())
def test_native(native_case: tuple[str, bool], target: str) -> None:
    check_op(*native_case, target, run_natively(parse_target(target, threads=2)))
