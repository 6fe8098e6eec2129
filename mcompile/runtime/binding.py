"""onnxruntime's IO binding and OrtValue, for memory of the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mcompile.errors import OptionError
from mcompile.runtime.memory import Array, address

if TYPE_CHECKING:
    from mcompile.runtime.session import InferenceSession


class OrtValue:
    """A tensor; it shares the array's memory."""

    def __init__(self, array: Array) -> None:
        self._array = array

    @staticmethod
    def ortvalue_from_numpy(numpy_obj: Array, device_type: str = "cpu", device_id: int = 0) -> OrtValue:
        _check_device(device_type)
        return OrtValue(numpy_obj)

    @staticmethod
    def from_dlpack(value: Any) -> OrtValue:
        """Shares the memory of any array that speaks DLPack."""
        return OrtValue(np.from_dlpack(value))

    def numpy(self) -> Array:
        return self._array

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def device_name(self) -> str:
        return "cpu"

    def data_ptr(self) -> int:
        return address(self._array)

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


class IOBinding:
    """Arrays bound to a session's inputs and outputs: bound outputs are written in place, run after run."""

    def __init__(self, session: InferenceSession) -> None:
        self._session = session
        self._inputs: dict[str, Array] = {}
        self._outputs: dict[str, Array | None] = {}
        self._results: list[Array] = []

    def bind_cpu_input(self, name: str, arr_on_cpu: Array) -> None:
        self._inputs[name] = arr_on_cpu

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        self._inputs[name] = ortvalue.numpy()

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Memory at an address; the caller keeps it alive."""
        _check_device(device_type)
        self._inputs[name] = _array_at(buffer_ptr, np.dtype(element_type), tuple(shape))

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Memory at an address (the caller keeps it alive), or, without one, a fresh array at every run."""
        _check_device(device_type)
        if buffer_ptr is None:
            self._outputs[name] = None
        elif element_type is None or shape is None:
            raise OptionError(f"output {name!r}: a buffer needs an element type and a shape")
        else:
            self._outputs[name] = _array_at(buffer_ptr, np.dtype(element_type), tuple(shape))

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        self._outputs[name] = ortvalue.numpy()

    def bind_cpu_output(self, name: str, array: Array) -> None:
        """Results are written to the array."""
        self._outputs[name] = array

    def run(self) -> None:
        """Run the session with what is bound; without bound outputs all are computed."""
        given = {name: array for name, array in self._outputs.items() if array is not None}
        self._results = self._session.run(list(self._outputs) or None, self._inputs, outputs=given)

    def get_outputs(self) -> list[OrtValue]:
        """Of the last run, in the order of binding."""
        return [OrtValue(array) for array in self._results]

    def copy_outputs_to_cpu(self) -> list[Array]:
        return [array.copy() for array in self._results]

    def clear_binding_inputs(self) -> None:
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        self._outputs.clear()

    def synchronize_inputs(self) -> None:
        """Nothing to wait for on a CPU."""

    def synchronize_outputs(self) -> None:
        """Nothing to wait for on a CPU."""


def _array_at(place: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = (ctypes.c_uint8 * size).from_address(place)
    return np.ndarray(shape, dtype, memory)  # type: ignore[arg-type]


def _check_device(device_type: str) -> None:
    if device_type != "cpu":
        raise OptionError(f"device {device_type!r}: expected 'cpu'")
