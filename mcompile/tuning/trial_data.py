"""What a task's candidates are run on: random inputs that show wrong answers, and the results expected of them.

Inputs depend on the task and a seed only. Each output lies between guards of a conspicuous pattern, which must be
whole after a run; so must the gaps in a strided output.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcompile.dtypes import DType, Kind
from mcompile.ir.evaluate import evaluate
from mcompile.ir.expr import Binary, BinaryOp, Load, Reduce, ReduceOp, walk
from mcompile.ir.tensor import Compute, ComputeDag, Placeholder, Tensor
from mcompile.runtime.memory import ALIGNMENT, Array, aligned_empty
from mcompile.schedule.task import Task

_PATTERN = 0xFB  # -2.6e36 as a float32
_SMALL_INTEGER = 100
# of the reference's largest magnitude, and of the element's
_TOLERANCE = {
    DType.FLOAT64: (1e-6, 1e-6),
    DType.FLOAT32: (1e-4, 1e-3),
    DType.FLOAT16: (1e-2, 1e-2),
    DType.BFLOAT16: (4e-2, 4e-2),
}
_ROUNDED_SHARE = 1e-3  # of the elements of an integer output computed from floats, which may be off by one


# --- inputs ---


def make_inputs(task: Task, seed: int, positive: bool = False) -> dict[str, Array]:
    """Values by placeholder. Floats lie in [-1, 1), or in [0.5, 1.5) if `positive`; integers used as indices fit.

    One factor of each sum of products is scaled as weights are in trained networks, so that the sum is about as large
    as its terms: a function applied to it neither saturates nor overflows, which would hide errors.
    """
    rng = np.random.default_rng([seed, int(task.workload_key, 16)])
    limits, scales = index_limits(task.dag), sum_scales(task)
    inputs: dict[str, Array] = {}
    for each in task.dag.placeholders:
        array = _random(rng, each, limits.get(each.name), positive)
        inputs[each.name] = (array * scales[each.name]).astype(array.dtype) if each.name in scales else array
    return inputs


def _random(rng: np.random.Generator, tensor: Placeholder, limit: int | None, positive: bool) -> Array:
    dtype = tensor.dtype
    if dtype.is_float:
        values = rng.random(tensor.shape, np.float32)
        return (values + np.float32(0.5) if positive else values * 2 - 1).astype(dtype.numpy)
    if dtype.kind is Kind.BOOL:
        return rng.integers(0, 2, tensor.shape).astype(bool)
    if limit is not None:
        low, high = 0, limit - 1
    elif dtype.bits == 8:
        low, high = int(dtype.min_value), int(dtype.max_value)
    else:
        low, high = (0 if positive else max(-_SMALL_INTEGER, int(dtype.min_value))), _SMALL_INTEGER
    return rng.integers(low, max(low, high), tensor.shape, endpoint=True).astype(dtype.numpy)


def index_limits(dag: ComputeDag) -> dict[str, int]:
    """For each integer placeholder whose elements become indices: the smallest extent that they index."""
    limits: dict[str, int] = {}
    for compute in dag.computes:
        for load in walk(compute.body):
            if not isinstance(load, Load):
                continue
            for index, extent in zip(load.indices, _shape(load), strict=True):
                for source in _integer_sources(index):
                    limits[source] = min(extent, limits.get(source, extent))
    return limits


def sum_scales(task: Task) -> dict[str, float]:
    """For one placeholder, constant if possible, of each sum of n products: 1 / sqrt(n)."""
    scales: dict[str, float] = {}
    for compute in task.dag.computes:
        body, count = compute.body, prod(axis.extent for axis in compute.reduce_axes)
        if not (isinstance(body, Reduce) and body.op is ReduceOp.SUM and body.dtype.is_float and count):
            continue
        sources = [each for each in _sources(compute) if each.dtype.is_float]
        if len(sources) > 1 and any(isinstance(node, Binary) and node.op is BinaryOp.MUL for node in walk(body)):
            constant = [each for each in sources if each.name in task.constants]
            name = (constant or sources)[-1].name
            scales[name] = min(scales.get(name, 1.0), count**-0.5)
    return scales


def _sources(compute: Compute) -> list[Placeholder]:
    """The placeholders that a compute reads, itself or through injective computes."""
    found: dict[Placeholder, None] = {}
    waiting: list[Tensor] = list(compute.inputs)
    while waiting:
        tensor = waiting.pop(0)
        if isinstance(tensor, Placeholder):
            found[tensor] = None
        elif isinstance(tensor, Compute) and not tensor.reduce_axes:
            waiting.extend(tensor.inputs)
    return list(found)


def _shape(load: Load) -> tuple[int, ...]:
    shape: tuple[int, ...] = load.source.shape
    return shape


def _integer_sources(expr: Any) -> set[str]:
    """Names of the integer placeholders whose elements an expression depends on, through other computes too."""
    found: set[str] = set()
    seen: set[Tensor] = set()
    waiting = [expr]
    while waiting:
        for node in walk(waiting.pop()):
            if not isinstance(node, Load) or node.source in seen or not node.source.dtype.is_integer:
                continue
            seen.add(node.source)
            if isinstance(node.source, Placeholder):
                found.add(node.source.name)
            elif isinstance(node.source, Compute):
                waiting.append(node.source.body)
    return found


# --- expected results ---


def reference(task: Task, seed: int) -> tuple[bool, dict[str, Placed], dict[str, Array]]:
    """Whether the inputs are positive (because others give no numbers), the inputs, and `ir.evaluate`'s outputs."""
    inputs = place_inputs(task, seed, False)
    outputs = _evaluate(task, inputs)
    if all(_is_finite(array) for array in outputs.values()):
        return False, inputs, outputs
    inputs = place_inputs(task, seed, True)
    return True, inputs, _evaluate(task, inputs)


def place_inputs(task: Task, seed: int, positive: bool) -> dict[str, Placed]:
    """`make_inputs` as the task's strides want them; where these make elements coincide, one of them counts."""
    placed: dict[str, Placed] = {}
    for name, array in make_inputs(task, seed, positive).items():
        placed[name] = Placed(array.shape, DType.from_numpy(array.dtype), task.strides[name])
        placed[name].array[...] = array
    return placed


def _evaluate(task: Task, inputs: Mapping[str, Placed]) -> dict[str, Array]:
    values = evaluate(task.dag, {name: placed.array for name, placed in inputs.items()})
    return {output.name: values[output.name] for output in task.dag.outputs}


def _is_finite(array: Array) -> bool:
    return array.dtype.kind in "biu" or bool(np.isfinite(array.astype(np.float64)).all())


def save_reference(path: Path, task: Task, positive: bool, outputs: Mapping[str, Array]) -> None:
    """Raw bytes: whether the inputs are positive, then the outputs one after the other."""
    with path.open("wb") as file:
        file.write(bytes([positive]))
        for output in task.dag.outputs:
            file.write(np.ascontiguousarray(outputs[output.name]).tobytes())


def load_reference(path: Path, task: Task) -> tuple[bool, dict[str, Array]]:
    outputs: dict[str, Array] = {}
    with path.open("rb") as file:
        positive = file.read(1) == b"\x01"
        for output in task.dag.outputs:
            data = file.read(prod(output.shape) * output.dtype.bytes)
            outputs[output.name] = np.frombuffer(data, output.dtype.numpy).reshape(output.shape)
    return positive, outputs


class Expected:
    """Which values of an output are right."""

    def __init__(self, output: Compute, values: Array, from_floats: bool) -> None:
        self._dtype = output.dtype
        self._values = values
        self._may_round = from_floats
        if not output.dtype.is_float:
            return
        wide = values.astype(np.float64 if output.dtype is DType.FLOAT64 else np.float32)
        magnitude = np.abs(wide)
        of_largest, of_own = _TOLERANCE[output.dtype]
        largest = float(np.max(magnitude, initial=0.0, where=np.isfinite(magnitude)))
        slack = (of_largest * largest + of_own * magnitude).astype(wide.dtype)
        with np.errstate(invalid="ignore"):
            self._low, self._high = wide - slack, wide + slack
        self._strange = ~np.isfinite(wide)
        self._has_strange = bool(self._strange.any())

    def wrong_share(self, got: Array) -> float:
        """Share of elements that are wrong."""
        if not got.size:
            return 0.0
        if not self._dtype.is_float:
            return self._wrong_integers(got)
        with np.errstate(invalid="ignore"):
            right = (got >= self._low) & (got <= self._high)
        if self._has_strange:
            same = (got == self._values) | (np.isnan(got) & np.isnan(self._values))
            right = np.where(self._strange, same, right)
        return 0.0 if right.all() else 1.0 - float(right.mean())

    def _wrong_integers(self, got: Array) -> float:
        differs = got != self._values
        share = float(differs.mean())
        if share and self._may_round and share <= _ROUNDED_SHARE and self._dtype is not DType.BOOL:
            off = np.abs(got[differs].astype(np.float64) - self._values[differs].astype(np.float64))
            return share if off.max() > 1 else 0.0
        return share


# --- memory ---


class Placed:
    """An array at a task's strides, in memory of its own between two guards."""

    def __init__(self, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...]) -> None:
        span = 0 if 0 in shape else 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        size = span * dtype.bytes
        self._memory = aligned_empty(ALIGNMENT + size + ALIGNMENT)
        self.flat: Array = self._memory[ALIGNMENT : ALIGNMENT + size].view(dtype.numpy)
        byte_strides = [stride * dtype.bytes for stride in strides]
        self.array: Array = np.lib.stride_tricks.as_strided(self.flat, shape, byte_strides)
        self._gaps: NDArray[np.bool_] | None = None
        if span > prod(shape):
            used = np.zeros(span, bool)
            np.lib.stride_tricks.as_strided(used, shape, strides)[...] = True
            self._gaps = ~used
        self.clear()

    def clear(self) -> None:
        """Fill everything, guards and gaps too, with the pattern."""
        self._memory[:] = _PATTERN

    def is_whole(self) -> bool:
        """Whether guards and gaps are as they were."""
        guards = (self._memory[:ALIGNMENT] == _PATTERN).all() and (self._memory[-ALIGNMENT:] == _PATTERN).all()
        if self._gaps is None or not guards:
            return bool(guards)
        bytes_ = self.flat.view(np.uint8).reshape(self.flat.size, -1)
        return bool((bytes_[self._gaps] == _PATTERN).all())
