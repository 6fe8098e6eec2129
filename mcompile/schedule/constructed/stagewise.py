"""The general rule: every reduction gets loops of its own, with its elementwise neighbours folded in.

Reductions are computed in register tiles inside the loops of the stage that consumes them (their epilogue), or of a
copy of themselves; cheap injective stages are inlined, others have loops of their own.
"""

from __future__ import annotations

from mcompile.ir.tensor import Compute
from mcompile.schedule.analysis import is_plain_copy, is_transcendental, loads_of, operations
from mcompile.schedule.constructed.builder import TraceBuilder
from mcompile.schedule.constructed.injective import schedule_injective
from mcompile.schedule.constructed.reduction import ReductionPlan, plan_reduction, schedule_reduction


def schedule_stagewise(builder: TraceBuilder) -> None:
    analysis = builder.analysis
    plans: list[ReductionPlan] = []
    taken: set[str] = set()
    for reduction in analysis.reductions:
        plan = plan_reduction(analysis, reduction, taken)
        plans.append(plan)
        neighbours = (*plan.between, *plan.prologue)
        taken |= {reduction.name, plan.epilogue.name, *(stage.name for stage in neighbours)}
    injective = [s for s in analysis.stages if not s.reduce_axes and s.name not in taken]
    roots: list[Compute] = []
    for stage in injective:
        if stage.name not in analysis.outputs and not _is_worth_keeping(builder, stage):
            builder.inline(stage)
        else:
            roots.append(stage)
    for plan in plans:
        schedule_reduction(builder, plan)
    for stage in roots:
        schedule_injective(builder, stage.name)


def _is_worth_keeping(builder: TraceBuilder, stage: Compute) -> bool:
    """Whether recomputing the stage in each reader would cost more than storing it."""
    consumers = builder.analysis.consumers(stage)
    uses = sum(sum(load.source is stage for load in loads_of(consumer)) for consumer in consumers)
    return uses > 1 and (is_transcendental(stage) or operations(stage.body) > 16) and not is_plain_copy(stage)
