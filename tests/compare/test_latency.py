import numpy as np
import pytest

from mcompile.compare.latency import _plan_blocks, summarise


def test_speedup_is_the_ratio_of_medians_with_an_interval_around_it():
    race = summarise([[0.010, 0.011], [0.010, 0.010]], [[0.020, 0.022], [0.020, 0.020]])
    assert race.speedup == pytest.approx(2.0)
    assert race.speedup_low <= 2.0 <= race.speedup_high
    assert race.ours.median_ms == pytest.approx(10.0)
    assert race.theirs.runs == 4


def test_a_drifting_machine_does_not_change_the_ratio():
    drift = np.linspace(1.0, 3.0, 10)
    race = summarise([[0.01 * d] * 3 for d in drift], [[0.02 * d] * 3 for d in drift])
    assert race.speedup_low == pytest.approx(2.0)
    assert race.speedup_high == pytest.approx(2.0)


@pytest.mark.parametrize("seconds", [1e-5, 1e-3, 0.1, 5.0])
@pytest.mark.parametrize("repeat", [1, 3, 40, 1000])
def test_blocks_hold_the_runs_asked_for(seconds, repeat):
    size, blocks = _plan_blocks(seconds, repeat)
    assert size >= 1
    assert size * blocks >= repeat
    assert 1 <= blocks <= 10
