import numpy as np
import pytest

from mcompile.compare.accuracy import Tolerance, output_error, worst_of

DEFAULT = Tolerance()
REFERENCE = np.array([[1.0, -2.0, 4.0]], np.float32)


def error_of(got, reference=REFERENCE, tolerance=DEFAULT):
    return output_error("y", np.asarray(got), np.asarray(reference), tolerance)


def test_equal_arrays_pass_with_no_error():
    error = error_of(REFERENCE.copy())
    assert error.ok
    assert (error.max_abs_error, error.max_scaled_error, error.outside_share) == (0.0, 0.0, 0.0)


def test_one_element_outside_is_reported_with_the_tolerance_it_needs():
    error = error_of(REFERENCE + np.array([[0.0, 0.5, 0.0]], np.float32), tolerance=Tolerance(rtol=0.1, atol=0.0))
    assert not error.ok
    assert error.outside_share == pytest.approx(1 / 3)
    assert error.required_atol == pytest.approx(0.5 - 0.1 * 2.0)
    assert error.required_rtol == pytest.approx(0.25)
    assert error.max_scaled_error == pytest.approx(0.5 / 4.0)


def test_required_atol_just_passes():
    got = REFERENCE + np.array([[0.0, 0.5, 0.0]], np.float32)
    needed = error_of(got, tolerance=Tolerance(rtol=0.1, atol=0.0)).required_atol
    assert error_of(got, tolerance=Tolerance(rtol=0.1, atol=needed * 1.001)).ok
    assert not error_of(got, tolerance=Tolerance(rtol=0.1, atol=needed * 0.999)).ok


def test_default_tolerance_counts_by_channel():
    reference = np.zeros((1, 2, 4), np.float32)
    reference[0, 0], reference[0, 1] = 1000.0, 0.01
    got = reference.copy()
    got[0, 1, 2] += 0.005  # nothing against 1000, much against 0.01
    assert not error_of(got, reference).ok


def test_default_tolerance_bounds_the_scaled_error():
    got = REFERENCE.copy()
    got[0, 2] *= 1.0009  # within rtol = 1e-3, but 9e-4 of the largest magnitude
    error = error_of(got)
    assert error.outside_share == 0.0
    assert not error.ok


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_special_values_must_agree(special):
    reference = REFERENCE.copy()
    reference[0, 0] = special
    assert error_of(reference.copy(), reference).ok
    assert "NaN or infinity expected" in error_of(REFERENCE, reference).problem
    assert "reference is finite" in error_of(reference, REFERENCE).problem


def test_wrong_shape_and_dtype_are_problems():
    assert "expected shape (1, 3), got (3,)" in error_of(REFERENCE[0]).problem
    assert "expected dtype float32, got float64" in error_of(REFERENCE.astype(np.float64)).problem


def test_integers_must_be_equal():
    reference = np.array([10_000, 2], np.int64)
    assert error_of(reference.copy(), reference).ok
    assert not error_of(np.array([10_001, 2], np.int64), reference).ok


def test_empty_outputs_agree():
    assert error_of(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32)).ok


def test_worst_of_keeps_the_worst_of_each_figure():
    bad = error_of(REFERENCE + np.array([[0.0, 0.5, 0.0]], np.float32))
    worst = worst_of([error_of(REFERENCE), bad])
    assert not worst.ok
    assert worst.max_abs_error == bad.max_abs_error


def test_half_precision_is_allowed_its_own_roundings():
    reference = np.array([[1.0, 2.0]], np.float16)
    assert error_of(reference * np.float16(1.002), reference).ok
    assert not error_of(reference * np.float16(1.01), reference).ok
    assert not error_of(reference * np.float16(1.002), reference, Tolerance(rtol=1e-3, atol=0.0)).ok
