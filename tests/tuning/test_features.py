"""Features and estimates of populations: exact where they can be counted, finite everywhere, in the right order."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from mcompile.ir.expr import ReduceOp, Unary, UnaryOp
from mcompile.ir.tensor import compute, placeholder, reduce_axis, reduce_over
from mcompile.schedule.task import Task
from mcompile.tuning.draft import count_operations
from mcompile.tuning.features import FEATURE_NAMES, Features
from mcompile.tuning.sketch import Sketch
from mcompile.tuning.space import SketchSpace
from tests.schedule.programs import F32, conv_task, make_task, matmul, softmax
from tests.schedule.random_traces import random_task
from tests.tuning.test_rules import row_of, sketches_of


def column(features: Features, name: str) -> NDArray[np.float64]:
    """A feature as it was before the logarithm."""
    return np.exp2(features.rows[:, FEATURE_NAMES.index(name)].astype(np.float64)) - 1.0


def gemm_sketch(m: int = 64, n: int = 256, k: int = 96) -> Sketch:
    return sketches_of(make_task([matmul(m, n, k)], constants=("b",)))["tile y by n"]


def facts(sketch: Sketch, row: Sequence[int]) -> Features:
    return sketch.features(np.array([row]))


def test_sizes_of_a_register_tile() -> None:
    sketch = gemm_sketch()
    lanes = sketch.task.target.lanes(4)
    features = facts(sketch, row_of(sketch, y__m=[4, 8], y__n=[2], y__k=[3], y__columns="grid"))
    acc = int(np.argmax(column(features, "is_reduction")))
    assert column(features, "points")[acc] == pytest.approx(64 * 256 * 96, rel=1e-4)
    assert column(features, "tile")[acc] == pytest.approx(8 * 2 * 3, rel=1e-4)
    assert column(features, "unrolled_reduce")[acc] == pytest.approx(3, rel=1e-4)
    assert column(features, "loads")[acc] == pytest.approx(3 * (8 + 2), rel=1e-4)
    assert column(features, "in_registers")[acc] == pytest.approx(1)
    assert column(features, "vector_extent")[acc] == pytest.approx(lanes)
    grid = 256 / (2 * lanes) * 64 / (4 * 8)
    assert column(features, "parallel").max() == pytest.approx(grid, rel=1e-4)


def test_traffic_falls_with_the_tile() -> None:
    """A taller register tile reads the weights fewer times from beyond the first cache."""
    sketch = gemm_sketch(256, 1024, 1024)
    rows = [row_of(sketch, y__m=[1, rows], y__n=[2], y__columns="inside") for rows in (1, 4, 12)]
    features = sketch.features(np.array(rows))
    reduction = column(features, "is_reduction") > 0.5
    traffic = column(features, "buffer1_l1_traffic")[reduction]
    assert traffic[0] > traffic[1] > traffic[2]


def test_rows_do_not_depend_on_their_company() -> None:
    sketch = gemm_sketch()
    values = sketch.sample_legal(np.random.default_rng(0), 60)
    together = sketch.features(values)
    drafts = sketch.draft_seconds(values)
    for index in (0, 17, 59):
        alone = sketch.features(values[index : index + 1])
        np.testing.assert_array_equal(together.rows[together.program == index], alone.rows)
        assert sketch.draft_seconds(values[index : index + 1])[0] == drafts[index]
    assert (np.diff(together.program) >= 0).all()


@pytest.mark.parametrize("case", range(12))
def test_features_are_finite_for_random_tasks(case: int) -> None:
    for sketch in SketchSpace().generate(random_task(random.Random(case).choice)):
        values = sketch.sample_legal(np.random.default_rng(case), 20)
        features = sketch.features(values)
        assert features.rows.shape[1] == len(FEATURE_NAMES)
        assert np.isfinite(features.rows).all()
        assert set(features.program.tolist()) == set(range(len(values)))
        assert (sketch.draft_seconds(values) > 0).all()


def test_draft_knows_good_tiles_from_bad_ones() -> None:
    sketch = gemm_sketch(128, 768, 768)
    good = row_of(sketch, y__m=[4, 8], y__n=[3], y__k=[2], y__columns="grid")
    scalar_rows = row_of(sketch, y__m=[4, 1], y__n=[1], y__k=[1], y__columns="grid")
    serial = row_of(sketch, y__m=[128, 1], y__n=[3], y__k=[2], y__columns="inside")
    seconds = sketch.draft_seconds(np.array([good, scalar_rows, serial]))
    assert seconds[0] * 2 < seconds[1]
    assert seconds[0] * 2 < seconds[2]


def test_operations_of_a_body() -> None:
    x, k = placeholder("x", (8, 16), F32), reduce_axis(16)
    dot = compute("dot", (8,), lambda i: reduce_over(ReduceOp.SUM, x[i, k.var] * x[i, k.var], [k]), [k])
    found = count_operations(dot.body, None)
    assert (found.fused, found.simple) == (1, 0)
    largest = compute("largest", (8,), lambda i: reduce_over(ReduceOp.MAX, x[i, k.var], [k]), [k])
    assert count_operations(largest.body, None).simple == 1
    e = compute("e", (8, 16), lambda i, j: Unary(UnaryOp.EXP, x[i, j]) / (x[i, j] + 1.0))
    found = count_operations(e.body, None)
    assert (found.transcendental, found.divide, found.simple) == (1, 1, 1)


@pytest.mark.parametrize(
    "task", [conv_task(1, 64, 28, 28, 64, 3, 1, 1), make_task([softmax(256, 128)])], ids=["conv", "softmax"]
)
def test_populations_are_scored_fast(task: Task) -> None:
    """Aimed at 20,000 candidates a second on a quiet core; here with room for a busy one."""
    sketch = max(SketchSpace(seeded=False).generate(task), key=lambda s: (not s.variant, s.columns))
    rng = np.random.default_rng(0)
    sketch.features(sketch.sample_legal(rng, 2048))
    values = sketch.sample(rng, 4096)
    start = time.process_time()
    legal = values[sketch.legal(values)]
    sketch.features(legal)
    sketch.draft_seconds(legal)
    assert len(values) / (time.process_time() - start) > 5000
