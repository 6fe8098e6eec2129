"""Host operators: run by the reference implementations of the `onnx` package, which is imported only for them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

from mcompile.errors import ArtifactError, ModelError
from mcompile.runtime.memory import Array
from mcompile.runtime.plan import ExecutionPlan, HostCall, Tensor


def host_calls(plan: ExecutionPlan) -> tuple[HostCall, ...]:
    return tuple(segment for segment in plan.segments if isinstance(segment, HostCall))


def require_host_package(calls: Sequence[HostCall]) -> None:
    """Raises ArtifactError that lists the host operators if there are any and the `onnx` package is not installed."""
    if calls and importlib.util.find_spec("onnx") is None:
        ops = ", ".join(f"{call.op} ({call.node})" for call in calls)
        raise ArtifactError(f"these operators run on the host and need the onnx package, which is not installed: {ops}")


class HostOperator:
    """A HostCall, ready to run."""

    def __init__(self, call: HostCall) -> None:
        from onnx.reference import ReferenceEvaluator

        self.call = call
        try:
            self._evaluator: Any = ReferenceEvaluator(call.model)
        except Exception as error:  # protobuf's and onnx's own errors have no common base
            raise ArtifactError(f"host operator {call.op} ({call.node}): its model cannot be read: {error}") from error
        self._names: Sequence[str] = self._evaluator.input_names
        if len(self._names) != len(call.inputs):
            raise ArtifactError(
                f"host operator {call.op} ({call.node}): its model has {len(self._names)} inputs, "
                f"the plan gives {len(call.inputs)}"
            )

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Write the results into `outputs`. Raises ModelError if they are not what the plan says."""
        results = self._evaluate(inputs)
        if len(results) < len(outputs):
            raise ModelError(f"{self._name()}: gave {len(results)} results, expected {len(outputs)}")
        for tensor, result, output in zip(self.call.outputs, results, outputs, strict=False):
            array = np.asarray(result)
            if array.shape != output.shape or array.dtype != output.dtype:
                raise ModelError(self._unexpected(tensor, array))
            output[...] = array

    def _evaluate(self, inputs: Sequence[Array]) -> list[Any]:
        try:
            return list(self._evaluator.run(None, dict(zip(self._names, inputs, strict=True))))
        except Exception as error:  # whatever the reference raises
            raise ModelError(f"{self._name()} failed: {type(error).__name__}: {error}") from error

    def _unexpected(self, tensor: Tensor, array: Array) -> str:
        return (
            f"{self._name()}: result {tensor.name!r} is {array.dtype}{list(array.shape)}, but the model was compiled "
            f"for {tensor.type}; results whose shape depends on data are supported only at that shape"
        )

    def _name(self) -> str:
        return f"host operator {self.call.op} ({self.call.node})"
