"""Small tasks of every kind, and the check that a lowered task computes what its dag says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcompile.dtypes import DType
from mcompile.ir.expr import ReduceOp, Unary, UnaryOp, all_of, maximum, select
from mcompile.ir.interpret import evaluate, interpret
from mcompile.ir.stmt import Buffer
from mcompile.ir.tensor import Compute, Tensor, build_dag, compute, placeholder, reduce_axis, reduce_over, row_major
from mcompile.ir.verify import verify_func
from mcompile.schedule.lower import LoweredTask, lower
from mcompile.schedule.merge_axes import merge_axes
from mcompile.schedule.prepare import constant_inputs, prepare
from mcompile.schedule.steps import Trace
from mcompile.schedule.task import Task
from mcompile.target import Target, parse_target
from tests.backend import native
from tests.backend.native import aligned

Array = NDArray[Any]
F32 = DType.FLOAT32
CHANNELS_LAST = (0, 2, 3, 1)


def strides_in_order(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def plain_task(
    outputs: list[Compute],
    orders: dict[str, tuple[int, ...]] | None = None,
    constants: tuple[str, ...] = (),
    threads: int = 2,
    target: str = "cpu",
) -> Task:
    dag = build_dag(outputs)
    strides = {}
    for tensor in (*dag.placeholders, *dag.outputs):
        order = (orders or {}).get(tensor.name)
        strides[tensor.name] = row_major(tensor.shape) if order is None else strides_in_order(tensor.shape, order)
    return Task(dag, strides, frozenset(constants), parse_target(target, threads))


def make_task(
    outputs: list[Compute],
    orders: dict[str, tuple[int, ...]] | None = None,
    constants: tuple[str, ...] = (),
    threads: int = 2,
    target: str = "cpu",
) -> Task:
    """The canonical form of a task."""
    return merge_axes(plain_task(outputs, orders, constants, threads, target))


def relu(x: Tensor, name: str = "relu") -> Compute:
    return compute(name, x.shape, lambda *i: maximum(x[i], 0.0))


def conv2d(
    batch: int,
    channels: int,
    height: int,
    width: int,
    filters: int,
    kernel: int,
    stride: int = 1,
    pad: int = 0,
    groups: int = 1,
) -> Compute:
    """Convolution + bias + relu; x and relu channels-last is up to the caller."""
    x = placeholder("x", (batch, channels, height, width), F32)
    w = placeholder("w", (filters, channels // groups, kernel, kernel), F32)
    b = placeholder("b", (filters,), F32)
    source: Tensor = x
    if pad:
        source = compute(
            "pad",
            (batch, channels, height + 2 * pad, width + 2 * pad),
            lambda n, c, h, v: select(
                all_of([h >= pad, h < height + pad, v >= pad, v < width + pad]), x[n, c, h - pad, v - pad], 0.0
            ),
            axis_names=("n", "c", "h", "w"),
        )
    out_height, out_width = (height + 2 * pad - kernel) // stride + 1, (width + 2 * pad - kernel) // stride + 1
    kh, kw, ic = reduce_axis(kernel, "kh"), reduce_axis(kernel, "kw"), reduce_axis(channels // groups, "ic")
    per_group, inputs = filters // groups, channels // groups

    def body(n: Any, oc: Any, h: Any, v: Any) -> Any:
        channel = ic.var if groups == 1 else oc // per_group * inputs + ic.var
        value = source[n, channel, h * stride + kh.var, v * stride + kw.var] * w[oc, ic.var, kh.var, kw.var]
        return reduce_over(ReduceOp.SUM, value, [kh, kw, ic])

    y = compute("conv", (batch, filters, out_height, out_width), body, [kh, kw, ic], ("n", "oc", "oh", "ow"))
    z = compute("bias", y.shape, lambda n, c, h, v: y[n, c, h, v] + b[c], axis_names=("n", "oc", "oh", "ow"))
    return relu(z)


def conv_task(*args: int, groups: int = 1, target: str = "cpu") -> Task:
    orders = {"x": CHANNELS_LAST, "relu": CHANNELS_LAST}
    return make_task([conv2d(*args, groups=groups)], orders, ("w", "b"), target=target)


def matmul(m: int, n: int, k: int, batch: int = 1) -> Compute:
    a, b = placeholder("a", (batch, m, k), F32), placeholder("b", (batch, k, n), F32)
    axis = reduce_axis(k)
    return compute(
        "y",
        (batch, m, n),
        lambda h, i, j: reduce_over(ReduceOp.SUM, a[h, i, axis.var] * b[h, axis.var, j], [axis]),
        [axis],
        ("h", "m", "n"),
    )


def softmax(rows: int, columns: int) -> Compute:
    x = placeholder("x", (rows, columns), F32)
    k, k2 = reduce_axis(columns), reduce_axis(columns)
    top = compute("top", (rows,), lambda i: reduce_over(ReduceOp.MAX, x[i, k.var], [k]), [k])
    e = compute("e", (rows, columns), lambda i, j: Unary(UnaryOp.EXP, x[i, j] - top[i]))
    total = compute("total", (rows,), lambda i: reduce_over(ReduceOp.SUM, e[i, k2.var], [k2]), [k2])
    return compute("y", (rows, columns), lambda i, j: e[i, j] / total[i])


def random_inputs(task: Task, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {t.name: rng.standard_normal(t.shape).astype(t.dtype.numpy) for t in task.dag.placeholders}


def strided(array: Array, strides: tuple[int, ...], span: int) -> Array:
    """A flat buffer holding `array` at the given element strides."""
    flat = np.full(span, 7, array.dtype)
    view = np.lib.stride_tricks.as_strided(flat, array.shape, [s * array.itemsize for s in strides])
    view[...] = array
    return flat


Runner = Callable[[LoweredTask, dict[str, Array]], None]


def run_interpreted(lowered: LoweredTask, buffers: dict[str, Array]) -> None:
    for func in lowered.funcs:
        verify_func(func)
        interpret(func, {param.name: buffers[param.name] for param in func.params})


def native_targets() -> list[str]:
    """What can run here: this machine, and AVX2 where it has that."""
    host, level = parse_target("cpu", threads=1), "x86-64-v3"
    return ["cpu", level] if set(parse_target(level, threads=1).features) <= set(host.features) else ["cpu"]


def run_natively(target: Target) -> Runner:
    """Builds the functions for `target` and runs them on this machine."""

    def run(lowered: LoweredTask, buffers: dict[str, Array]) -> None:
        for func in lowered.funcs:
            arrays = {param.name: aligned(buffers[param.name]) for param in func.params}
            native.run(func, target, arrays)
            buffers.update(arrays)

    return run


def outputs_of(
    task: Task, lowered: LoweredTask, inputs: dict[str, Array], run: Runner = run_interpreted
) -> dict[str, Array]:
    """The task's outputs after running `lowered` on `inputs`; all other memory is filled with a conspicuous number."""
    params: dict[str, Buffer] = {param.name: param for func in lowered.funcs for param in func.params}
    buffers: dict[str, Array] = {}
    for name, param in params.items():
        if name in inputs:
            buffers[name] = strided(inputs[name], task.strides[name], span_of(task, name))
        else:
            buffers[name] = np.full(param.span, 5, param.dtype.numpy)
    for preparation in lowered.preparations:
        constants = {name: inputs[name] for name in constant_inputs(preparation)}
        buffers[preparation.tensor] = prepare(preparation, constants).reshape(-1)
    run(lowered, buffers)
    outputs = {}
    for output in task.dag.outputs:
        strides = [s * output.dtype.bytes for s in task.strides[output.name]]
        outputs[output.name] = np.lib.stride_tricks.as_strided(buffers[output.name], output.shape, strides)
    return outputs


def check(
    task: Task, trace: Trace, run: Runner = run_interpreted, seed: int = 0, scaled_error: float = 2e-6
) -> LoweredTask:
    """Lower, run, and compare every output with the dag's evaluation."""
    lowered = lower(task, trace)
    inputs = random_inputs(task, seed)
    expected = evaluate(task.dag, inputs)
    for name, actual in outputs_of(task, lowered, inputs, run).items():
        largest = float(np.abs(expected[name]).max())
        np.testing.assert_allclose(
            actual, expected[name], rtol=2e-5, atol=scaled_error * max(10.0, largest), err_msg=name
        )
    return lowered


def span_of(task: Task, name: str) -> int:
    tensor = next(t for t in task.dag.tensors if t.name == name)
    return Buffer(name, tensor.shape, tensor.dtype, task.strides[name]).span
