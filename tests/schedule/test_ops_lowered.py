"""Every sample of every op: its constructed schedule, lowered and interpreted, gives the op's values."""

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
from mcompile.ir.interpret import interpret
from mcompile.ir.tensor import Compute, Placeholder, row_major
from mcompile.ir.verify import verify_func
from mcompile.ops.registry import OpDef, Sample, registered
from mcompile.schedule.constructed import construct
from mcompile.schedule.lower import lower
from mcompile.schedule.merge_axes import merge_axes
from mcompile.schedule.prepare import constant_inputs, prepare
from mcompile.schedule.task import Task
from mcompile.target import parse_target

Case = tuple[OpDef, Sample]


@cache
def cases() -> dict[str, Case]:
    return {f"{op.name}-{i}": (op, s) for op in registered() for i, s in enumerate(op.samples())}


def build(op: OpDef, sample: Sample, channels_last: bool) -> tuple[Task, dict[str, Any]] | None:
    """The op as a task of its own, with weights constant; None for an op that computes nothing."""
    attrs = {**op.attrs, **sample.attrs}
    if op.adapt is not None and sample.opset:
        attrs = op.adapt(sample.opset, attrs)
    inputs, arrays = [], {}
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
    return merge_axes(Task(dag, strides, constants, parse_target("cpu", 2))), arrays


@pytest.mark.parametrize("channels_last", [False, True], ids=["row-major", "channels-last"])
@pytest.mark.parametrize("name", cases())
def test_lowered(name: str, channels_last: bool) -> None:
    built = build(*cases()[name], channels_last)
    if built is None:
        pytest.skip("computes nothing")
    task, arrays = built
    arrays = {p.name: arrays[p.name].reshape(p.shape) for p in task.dag.placeholders}
    expected = evaluate(task.dag, arrays)
    lowered = lower(task, construct(task))
    buffers: dict[str, Any] = {}
    for func in lowered.funcs:
        verify_func(func)
        for param in func.params:
            buffers.setdefault(param.name, np.zeros(max(param.span, 1), param.dtype.numpy))
    packed = {p.tensor for p in lowered.preparations}
    for preparation in lowered.preparations:
        constants = {n: arrays[n] for n in constant_inputs(preparation)}
        buffers[preparation.tensor] = prepare(preparation, constants).reshape(-1)
    for placeholder in task.dag.placeholders:
        if placeholder.name in buffers and placeholder.name not in packed:
            view(task, placeholder.name, buffers)[...] = arrays[placeholder.name]
    for func in lowered.funcs:
        interpret(func, {param.name: buffers[param.name] for param in func.params})
    for output in task.dag.outputs:
        actual = view(task, output.name, buffers).astype(np.float64)
        want = expected[output.name].astype(np.float64)
        narrow = output.dtype in (DType.FLOAT16, DType.BFLOAT16)
        np.testing.assert_allclose(actual, want, rtol=2e-2 if narrow else 1e-4, atol=2e-2 if narrow else 1e-5)


def view(task: Task, name: str, buffers: dict[str, Any]) -> Any:
    tensor = next(t for t in task.dag.tensors if t.name == name)
    flat = buffers[name]
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, [s * flat.itemsize for s in task.strides[name]])
