"""Spaces: every sketch's rows compute what the task says; the constructed schedule is a point; rules can be added."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from mcompile.ir.tensor import Compute
from mcompile.schedule.constructed import construct
from mcompile.schedule.constructed.builder import TraceBuilder
from mcompile.schedule.lower import lower
from mcompile.schedule.steps import LayoutRewrite, Prefetch, Split, Trace, Variant, trace_from_json, trace_to_json
from mcompile.schedule.task import Task
from mcompile.tuning.rules import DEFAULT_RULES, Partial
from mcompile.tuning.sketch import Choice, Decision, Sketch, TileSizes, Values
from mcompile.tuning.space import SketchSpace, TemplateSpace
from tests.schedule.programs import check as check_with
from tests.schedule.programs import conv_task, make_task, matmul, relu, run_natively, softmax
from tests.schedule.random_traces import random_task

CASES = 12
WINOGRAD_ERROR = 2e-5


def check(task: Task, trace: Trace, scaled_error: float = 2e-6) -> None:
    check_with(task, trace, run_natively(task.target), scaled_error=scaled_error)


def gemm(rows: int = 12, columns: int = 48, depth: int = 20) -> Task:
    return make_task([relu(matmul(rows, columns, depth))], constants=("b",))


def exact(task: Task) -> Task:
    return replace(task, target=replace(task.target, exact=True))


def legal_rows(sketch: Sketch, seed: int, n: int) -> list[list[int]]:
    return sketch.sample_legal(np.random.default_rng(seed), n).tolist()


@pytest.mark.parametrize("case", range(CASES))
def test_rows_compute_what_the_task_says(case: int) -> None:
    task = random_task(random.Random(case).choice)
    for sketch in SketchSpace().generate(task):
        rng = np.random.default_rng(case)
        rows = sketch.sample_legal(rng, 2)
        for row in np.concatenate([rows, sketch.mutate(rng, rows)]):
            if sketch.legal(row[None])[0]:
                trace = sketch.instantiate(row.tolist())
                assert trace_from_json(trace_to_json(trace)) == trace
                check(task, trace, scaled_error=WINOGRAD_ERROR if sketch.variant else 2e-6)


@pytest.mark.parametrize("space", [SketchSpace(), TemplateSpace()])
@pytest.mark.parametrize(
    "task",
    [gemm(128, 768, 768), conv_task(1, 16, 14, 14, 32, 3, 1, 1), make_task([softmax(64, 128)])],
    ids=["gemm", "conv", "softmax"],
)
def test_constructed_schedule_is_a_legal_point(task: Task, space: SketchSpace | TemplateSpace) -> None:
    for variant in (task, exact(task)):
        found = space.seed(variant)
        assert found is not None
        index, values = found
        sketch = space.generate(variant)[index]
        assert sketch.instantiate(values) == construct(variant)
        assert sketch.legal(np.array([values]))[0]


def test_unseeded_space_knows_nothing_of_the_constructed_schedule() -> None:
    space = SketchSpace(seeded=False)
    assert space.seed(gemm()) is None
    assert all("constructed" not in sketch.name for sketch in space.generate(gemm()))


def test_factors_need_not_divide() -> None:
    task = gemm(7, 48, 10)
    sketch = SketchSpace(seeded=False).generate(task)[0]
    by_name = dict(zip((d.name for d in sketch.decisions), sketch.starts, strict=False))
    row = [1] * sketch.columns
    for decision, start in zip(sketch.decisions, sketch.starts, strict=False):
        if isinstance(decision, Choice):
            row[start] = 0
    row[by_name["y.m"] + 1] = 3  # rows of a register tile: 7 = 3 + 3 + 1
    row[by_name["y.k"]] = 4  # reduce steps unrolled: 10 = 4 + 4 + 2
    check(task, sketch.instantiate(row))


def test_variants_of_the_dag_are_sketches_of_the_same_task() -> None:
    task = conv_task(1, 16, 14, 14, 32, 3, 1, 1)
    sketches = [sketch for sketch in SketchSpace(seeded=False).generate(task) if sketch.variant]
    assert sketches
    trace = sketches[0].instantiate(legal_rows(sketches[0], 0, 1)[0])
    assert isinstance(trace[0], Variant)
    check(task, trace, scaled_error=WINOGRAD_ERROR)
    assert not any(sketch.variant for sketch in SketchSpace(seeded=False).generate(exact(task)))


def test_template_keeps_the_packed_width_and_the_register_tile_together() -> None:
    task = gemm(128, 768, 768)
    sketch = TemplateSpace().generate(task)[0]
    for row in legal_rows(sketch, 1, 8):
        trace = sketch.instantiate(row)
        lower(task, trace)
        layouts = [step for step in trace if isinstance(step, LayoutRewrite)]
        widths = [
            step.factors[-2] * step.factors[-1] for step in trace if isinstance(step, Split) and len(step.factors) > 1
        ]
        assert all(max(layout.tiles) in widths for layout in layouts)


def test_prefetch_is_a_decision() -> None:
    task = gemm(128, 768, 768)
    sketch = SketchSpace(seeded=False).generate(task)[0]
    traces = [sketch.instantiate(row) for row in legal_rows(sketch, 2, 30)]
    assert {any(isinstance(step, Prefetch) for step in trace) for trace in traces} == {True, False}


def test_same_seed_same_rows() -> None:
    def rows() -> list[list[int]]:
        sketch = SketchSpace().generate(gemm())[1]
        rng = np.random.default_rng(5)
        drawn = sketch.sample_legal(rng, 20)
        return sketch.crossover(rng, sketch.mutate(rng, drawn), drawn).tolist()  # type: ignore[no-any-return]

    assert rows() == rows()


def test_mutation_changes_one_decision_and_crossover_takes_whole_ones() -> None:
    sketch = SketchSpace(seeded=False).generate(gemm(24, 96, 36))[0]
    rng = np.random.default_rng(0)
    rows = sketch.sample_legal(rng, 200)
    changed = sketch.mutate(rng, rows)
    slices = [slice(a, b) for a, b in zip(sketch.starts, sketch.starts[1:], strict=False)]
    counts = sum((rows[:, part] != changed[:, part]).any(axis=1).astype(int) for part in slices)
    assert int(np.max(counts)) == 1
    assert float(np.mean(counts == 1)) > 0.7
    assert float(sketch.legal(changed).mean()) > 0.6
    child = sketch.crossover(rng, rows, rows[::-1])
    for part in slices:
        from_a = (child[:, part] == rows[:, part]).all(axis=1)
        from_b = (child[:, part] == rows[::-1][:, part]).all(axis=1)
        assert (from_a | from_b).all()


def test_neighbours_are_legal_and_near() -> None:
    sketch = SketchSpace(seeded=False).generate(gemm(24, 96, 36))[0]
    row = legal_rows(sketch, 3, 1)[0]
    near = sketch.neighbours(row)
    assert len(near) > 5
    assert sketch.legal(near).all()
    assert ((near != np.array(row)).sum(axis=1) == 1).all()


# A user's own rule: two loops of an elementwise stage swapped.


@dataclass(frozen=True)
class SwappedLoops:
    stage: Compute

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return (TileSizes(f"{self.stage.name}.own", self.stage.shape[0], 2, 64), Choice("swap", (True, False)))

    def write(self, builder: TraceBuilder, values: Values) -> None:
        first, second = builder.loops(self.stage.name)[:2]
        outer, inner = builder.split(self.stage.name, first, *values[f"{self.stage.name}.own"])
        order = [second, outer, inner] if values["swap"] else [outer, inner, second]
        builder.reorder(self.stage.name, order)


class SwapRule:
    exclusive = True

    def apply(self, partial: Partial, stage: Compute) -> Sequence[Partial]:
        return (partial.add(SwappedLoops(stage), [stage], "swapped"),) if len(stage.axes) == 2 else ()


def test_a_rule_of_the_users_stands_before_the_built_in_ones() -> None:
    x = matmul(6, 10, 4)
    task = make_task([relu(x)])
    only = SketchSpace(rules=[SwapRule()], seeded=False, defaults=DEFAULT_RULES)
    elementwise = make_task([relu(x.inputs[0])], {"relu": (0, 2, 1)})  # type: ignore[arg-type]
    sketches = only.generate(elementwise)
    assert [sketch.name for sketch in sketches] == ["swapped"]
    for row in legal_rows(sketches[0], 0, 4):
        check(elementwise, sketches[0].instantiate(row))
        assert np.isfinite(sketches[0].draft_seconds(np.array([row]))).all()
    assert only.generate(task)
