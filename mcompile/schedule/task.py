"""A Task: one fused subgraph to be scheduled, built and tuned on its own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from mcompile.ir.printer import print_dag
from mcompile.ir.tensor import ComputeDag
from mcompile.target import Target


@dataclass(frozen=True)
class Task:
    """What to compute and where its arguments lie.

    `strides` gives, for each placeholder and output of the dag (by tensor name), the strides of its buffer in
    elements: a view (slice of a concat, transposed value) is only other strides. `constants` names the placeholders
    whose values are known at compile time: their layout is free. Equal tasks have equal keys.
    """

    dag: ComputeDag
    strides: dict[str, tuple[int, ...]]
    constants: frozenset[str]
    target: Target

    @cached_property
    def workload_key(self) -> str:
        """Hash of the dag's text, strides and constants; target-independent."""
        strides = ";".join(f"{name}:{values}" for name, values in sorted(self.strides.items()))
        text = f"{print_dag(self.dag)}\n{strides}\n{sorted(self.constants)}"
        return hashlib.sha256(text.encode()).hexdigest()[:24]
