"""A task in the measuring process: its inputs, what is expected of candidates, and its constants as they want them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mcompile.runtime.memory import Array, Bytes, aligned_empty, round_up
from mcompile.schedule.prepare import preparation_key, prepare
from mcompile.schedule.task import Task
from mcompile.tuning.trial import CandidateCode
from mcompile.tuning.trial_data import Expected, Placed, load_reference, place_inputs, reference, save_reference

_PACKED_BYTES = 64 << 20  # of prepared constants that are kept


class TrialTask:
    """`path` keeps the reference for a later process; it is computed where there is none."""

    def __init__(self, task: Task, path: Path, seed: int) -> None:
        self.task = task
        if path.exists():
            positive, values = load_reference(path, task)
            self.inputs = place_inputs(task, seed, positive)
        else:
            positive, self.inputs, values = reference(task, seed)
            partial = path.with_suffix(".part")
            save_reference(partial, task, positive, values)
            partial.rename(path)  # whole or not there
        from_floats = any(tensor.dtype.is_float for tensor in task.dag.tensors)
        self.expected = {each.name: Expected(each, values[each.name], from_floats) for each in task.dag.outputs}
        self.outputs = {each.name: Placed(each.shape, each.dtype, task.strides[each.name]) for each in task.dag.outputs}
        self._packed: OrderedDict[str, Array] = OrderedDict()

    def constants_of(self, code: CandidateCode) -> dict[str, Array]:
        """The constants that a candidate's kernels read, as they lie in memory. Raises MemoryError."""
        wanted = {name for params in code.params for name in params}
        arrays = {name: placed.array for name, placed in self.inputs.items() if name in self.task.constants}
        flat = {name: self.inputs[name].flat for name in arrays}
        for preparation in code.preparations:
            key = preparation_key(preparation) + preparation.tensor
            if key not in self._packed:
                self._packed[key] = prepare(preparation, arrays)
            self._packed.move_to_end(key)
            flat[preparation.tensor] = self._packed[key]
        while sum(array.nbytes for array in self._packed.values()) > _PACKED_BYTES:
            self._packed.popitem(last=False)
        return {name: array for name, array in flat.items() if name in wanted}

    def clear_outputs(self) -> None:
        for placed in self.outputs.values():
            placed.clear()

    def problem(self) -> str:
        """What is wrong with the outputs as they are; nothing if they are right."""
        for name, placed in self.outputs.items():
            if not placed.is_whole():
                return f"{name}: wrote outside its elements"
            share = self.expected[name].wrong_share(placed.array)
            if share:
                return f"{name}: {share:.2%} of the elements are wrong"
        return ""


class ConstantCopies:
    """Copies of constants, so that each run may find its own in no near cache, as in a model with many weights."""

    def __init__(self, constants: Mapping[str, Array], most: int, memory: Bytes) -> None:
        self._constants = constants
        self._size = sum(round_up(array.nbytes) for array in constants.values())
        self.count = max(1, min(most, memory.size // self._size if self._size else 1))
        self._memory = memory
        self._copies: list[dict[str, Array]] = []

    def __getitem__(self, index: int) -> dict[str, Array]:
        while len(self._copies) <= index % self.count:
            self._copies.append(self._copy(len(self._copies)))
        return self._copies[index % self.count]

    def _copy(self, number: int) -> dict[str, Array]:
        start = number * self._size
        memory = self._memory if start + self._size <= self._memory.size else aligned_empty(start + self._size)
        copy: dict[str, Array] = {}
        for name, array in self._constants.items():
            place = memory[start : start + array.nbytes]
            place.view(array.dtype)[:] = np.ascontiguousarray(array).reshape(-1)
            copy[name] = place
            start += round_up(array.nbytes)
        return copy
