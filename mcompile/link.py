"""From built tasks to an Artifact: constants prepared and laid out, memory planned, the manifest written."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mcompile import __version__
from mcompile.build_pool import BuiltTask
from mcompile.frontend import ImportedModel
from mcompile.graph.memory_plan import ALIGNMENT, KernelCode, TaskCode, plan_memory
from mcompile.graph.partition import Partition, TaskUse
from mcompile.runtime.artifact import Artifact, Manifest
from mcompile.runtime.options import ModelMetadata
from mcompile.schedule.prepare import constant_inputs, preparation_key, prepare
from mcompile.target import Target

Array = NDArray[Any]


def link(
    imported: ImportedModel,
    partition: Partition,
    built: Mapping[str, BuiltTask],
    target: Target,
    summary: Mapping[str, Any],
) -> Artifact:
    """The artifact of a model whose tasks are `built` (by workload key)."""
    code = {key: _task_code(task) for key, task in built.items()}
    with tempfile.TemporaryFile() as file:
        constants = _ConstantBlob(built, file)
        plan = plan_memory(partition, code, constants, imported.inputs, imported.outputs)
        blob = constants.array()  # mapped: it outlives the file
    kernels = tuple(kernel for task in built.values() for kernel in task.kernels)
    manifest = Manifest(
        compiler_version=__version__,
        triple=target.triple,
        cpu=target.cpu,
        features=target.features,
        threads=target.threads,
        model=ModelMetadata(
            producer_name=imported.producer,
            graph_name=imported.graph.name,
            custom_metadata_map=dict(imported.metadata),
        ),
        summary=dict(summary),
    )
    return Artifact(manifest, plan, kernels, blob)


def _task_code(task: BuiltTask) -> TaskCode:
    return TaskCode(
        kernels=tuple(
            KernelCode(kernel.name, tuple(buffer.name for buffer in func.params))
            for kernel, func in zip(task.kernels, task.lowered.funcs, strict=True)
        ),
        scratch={buffer.name: buffer.size_bytes for buffer in task.lowered.scratch},
        prepared=frozenset(preparation.tensor for preparation in task.lowered.preparations),
    )


@dataclass
class _ConstantBlob:
    """Constants one after the other in a nameless file, so that what has been written need not stay in memory.

    Equal requests share a place: a constant is known by where its bytes lie, a prepared one also by its preparation.
    """

    built: Mapping[str, BuiltTask]
    file: IO[bytes]
    size_bytes: int = 0
    _places: dict[tuple[object, ...], int] = field(default_factory=dict)

    def raw(self, array: Array) -> int:
        key = ("raw", _identity(array))
        if key not in self._places:
            self._places[key] = self._append(array)
        return self._places[key]

    def prepared(self, use: TaskUse, name: str) -> int:
        preparations = self.built[use.task.workload_key].lowered.preparations
        preparation = next(each for each in preparations if each.tensor == name)
        arrays = {constant: use.constant(constant) for constant in constant_inputs(preparation)}
        key = (preparation_key(preparation), *(_identity(array) for array in arrays.values()))
        if key not in self._places:
            self._places[key] = self._append(prepare(preparation, arrays))
        return self._places[key]

    def array(self) -> NDArray[np.uint8]:
        self.file.flush()
        if not self.size_bytes:
            return np.zeros(0, np.uint8)
        return np.memmap(self.file, np.uint8, "r", shape=(self.size_bytes,))

    def _append(self, array: Array) -> int:
        offset = -(-self.size_bytes // ALIGNMENT) * ALIGNMENT
        self.file.write(bytes(offset - self.size_bytes))
        self.file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self.size_bytes = offset + array.nbytes
        return offset


def _identity(array: Array) -> tuple[object, ...]:
    return array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str


def kernel_names(partition: Partition) -> Sequence[str]:
    """A name for each task's kernels: its number, and the stage that does most of its work."""
    names = []
    for number, weighted in enumerate(partition.tasks()):
        computes = weighted.task.dag.computes
        main = next((compute for compute in reversed(computes) if compute.reduce_axes), computes[-1])
        stem = "".join(letter if letter.isalnum() else "_" for letter in main.name)
        names.append(f"k{number}_{stem}")
    return names
