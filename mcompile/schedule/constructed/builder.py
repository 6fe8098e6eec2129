"""TraceBuilder: writes a trace step by step while watching the loops that each step leaves."""

from __future__ import annotations

from mcompile.ir.expr import Expr, Load, substitute
from mcompile.ir.tensor import Compute
from mcompile.schedule import steps
from mcompile.schedule.analysis import TaskAnalysis
from mcompile.schedule.state import ScheduleState, Stage, apply_step, map_loads
from mcompile.schedule.steps import Step, Trace
from mcompile.schedule.task import Task


class TraceBuilder:
    def __init__(self, task: Task) -> None:
        self.task = task
        self.analysis = TaskAnalysis(task)
        self.state = ScheduleState(task.dag, {compute.name: Stage.of(compute) for compute in task.dag.computes})
        self._steps: list[Step] = []

    @property
    def trace(self) -> Trace:
        return tuple(self._steps)

    @property
    def lanes(self) -> int:
        """Elements of a vector of the task's widest output."""
        widest = max(output.dtype.bytes for output in self.task.dag.outputs)
        return self.task.target.lanes(max(4, widest))

    def stage(self, name: str) -> Stage:
        return self.state.stages[name]

    def loops(self, name: str) -> list[str]:
        return self.state.stages[name].loops

    def expanded(self, name: str) -> Compute:
        """The stage's compute with the stages inlined so far put in."""

        def expand(load: Load) -> Expr | None:
            stage = self.state.stages.get(load.source.name)
            if stage is None or not stage.inlined:
                return None
            inner = map_loads(stage.compute, expand)
            axes = (axis.var for axis in inner.axes)
            return substitute(inner.body, dict(zip(axes, load.indices, strict=True)))

        return map_loads(self.state.stages[name].compute, expand)

    def add(self, step: Step) -> None:
        apply_step(self.state, step)
        self._steps.append(step)

    def inline(self, stage: Compute) -> None:
        self.add(steps.ComputeInline(stage.name))

    def split(self, stage: str, iterator: str, *factors: int) -> list[str]:
        """Split; gives the new iterators, outermost first."""
        self.add(steps.Split(stage, iterator, factors))
        return [f"{iterator}.{level}" for level in range(len(factors) + 1)]

    def reorder(self, stage: str, iterators: list[str]) -> None:
        if iterators != self.loops(stage):
            self.add(steps.Reorder(stage, tuple(iterators)))

    def fuse(self, stage: str, iterators: list[str]) -> str:
        if len(iterators) == 1:
            return iterators[0]
        self.add(steps.Fuse(stage, tuple(iterators)))
        return "@".join(iterators)

    def parallel(self, stage: str, iterators: list[str]) -> str:
        """Fuse the given outermost loops and run them on all threads."""
        fused = self.fuse(stage, iterators)
        self.add(steps.Parallel(stage, fused))
        return fused

    def vectorize(self, stage: str, iterator: str) -> None:
        self.add(steps.Vectorize(stage, iterator))

    def unroll(self, stage: str, *iterators: str) -> None:
        for iterator in iterators:
            self.add(steps.Unroll(stage, iterator))

    def compute_at(self, stage: str, target: str, iterator: str) -> None:
        self.add(steps.ComputeAt(stage, target, iterator))
