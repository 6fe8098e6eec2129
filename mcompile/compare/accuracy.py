"""How far one engine's outputs are from the reference's, and whether that is acceptable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

DEFAULT_RTOL = 1e-3
DEFAULT_CHANNEL_ATOL = 1e-4  # times the largest magnitude of the element's channel
DEFAULT_SCALED = 1e-4  # of max|a - b| / max|b| over an output
_ROUNDINGS = 4  # of the output's own element type are always allowed by default: this counts for 16-bit floats


@dataclass(frozen=True)
class Tolerance:
    """An element a agrees with its reference b when |a - b| <= rtol * |b| + atol.

    Without `atol` it is 1e-4 of the largest |b| in the element's channel (axis 1 of a tensor of three dims or more,
    else the whole tensor), and the whole output must also have max|a - b| <= 1e-4 * max|b|; of 16-bit floats these
    bounds are four roundings. Integers and booleans must be equal.
    """

    rtol: float = DEFAULT_RTOL
    atol: float | None = None

    def relative(self, dtype: np.dtype[Any]) -> float:
        """What `rtol` comes to for outputs of a floating type."""
        return self.rtol if self.atol is not None else max(self.rtol, _roundings(dtype))

    def absolute(self, magnitude: Array, dtype: np.dtype[Any]) -> Array:
        """The absolute part for each element, broadcastable to the shape of the reference's `magnitude`."""
        if self.atol is not None:
            return np.float64(self.atol) + np.zeros((), np.float64)
        return max(DEFAULT_CHANNEL_ATOL, _roundings(dtype)) * _channel_magnitude(magnitude)


@dataclass(frozen=True)
class OutputError:
    """The difference in one output, the worst over all inputs that were tried."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    max_abs_error: float
    max_scaled_error: float  # max|a - b| / max|b|
    outside_share: float  # of the elements, those outside the tolerance
    required_atol: float  # the smallest atol that would pass at this rtol
    required_rtol: float  # the smallest rtol that would pass with this absolute part
    ok: bool
    problem: str = ""  # a wrong shape or dtype, NaN where the reference has none


def output_error(name: str, got: Array, reference: Array, tolerance: Tolerance) -> OutputError:
    """Compare one output with its reference. NaN agrees with NaN, an infinity with the same infinity."""
    problem = _mismatch(got, reference)
    if problem:
        infinite = float("inf")
        shape, dtype = tuple(got.shape), str(got.dtype)
        return OutputError(name, shape, dtype, infinite, infinite, 1.0, infinite, infinite, False, problem)
    finite = np.isfinite(reference) if reference.dtype.kind in "fV" else np.ones(reference.shape, bool)
    expected = np.where(finite, _wide(reference), 0.0)  # what is not finite has been compared already
    difference = np.abs(np.where(finite, _wide(got), 0.0) - expected)
    magnitude = np.abs(expected)
    exact = reference.dtype.kind in "biu"
    absolute = np.zeros(()) if exact else tolerance.absolute(magnitude, reference.dtype)
    rtol = 0.0 if exact else tolerance.relative(reference.dtype)
    outside = difference > rtol * magnitude + absolute
    max_abs = _largest(difference)
    scaled = max_abs / largest if (largest := _largest(magnitude)) else max_abs
    fine_scale = exact or tolerance.atol is not None or scaled <= max(DEFAULT_SCALED, _roundings(reference.dtype))
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(difference > absolute, (difference - absolute) / magnitude, 0.0)
    return OutputError(
        name,
        tuple(reference.shape),
        str(reference.dtype),
        max_abs,
        scaled,
        float(outside.mean()) if outside.size else 0.0,
        max(0.0, _largest(difference - rtol * magnitude)),
        _largest(relative),
        bool(not outside.any() and fine_scale),
    )


def worst_of(errors: Sequence[OutputError]) -> OutputError:
    """One row for the same output under several inputs."""
    failed = next((error for error in errors if not error.ok), errors[0])
    return OutputError(
        failed.name,
        failed.shape,
        failed.dtype,
        max(error.max_abs_error for error in errors),
        max(error.max_scaled_error for error in errors),
        max(error.outside_share for error in errors),
        max(error.required_atol for error in errors),
        max(error.required_rtol for error in errors),
        all(error.ok for error in errors),
        failed.problem,
    )


def _mismatch(got: Array, reference: Array) -> str:
    if got.shape != reference.shape:
        return f"expected shape {tuple(reference.shape)}, got {tuple(got.shape)}"
    if got.dtype != reference.dtype:
        return f"expected dtype {reference.dtype}, got {got.dtype}"
    if reference.dtype.kind not in "fV":
        return ""
    wide, other = _wide(got), _wide(reference)
    special = ~np.isfinite(other)
    if not np.array_equal(wide[special], other[special], equal_nan=True):
        return "NaN or infinity expected, got another value"
    if not np.isfinite(wide[~special]).all():
        return "got NaN or infinity where the reference is finite"
    return ""


def _roundings(dtype: np.dtype[Any]) -> float:
    """A few units in the last place of a floating type, relative to 1."""
    bits = {"float16": 10, "bfloat16": 7, "float64": 52}.get(dtype.name, 23)
    return float(_ROUNDINGS * 2.0**-bits)


def _wide(array: Array) -> Array:
    return array.astype(np.float64)


def _largest(array: Array) -> float:
    return float(array.max()) if array.size else 0.0


def _channel_magnitude(magnitude: Array) -> Array:
    if magnitude.size == 0:
        return np.zeros((), np.float64)
    axes = tuple(axis for axis in range(magnitude.ndim) if axis != 1) if magnitude.ndim >= 3 else None
    return np.asarray(magnitude.max(axis=axes, keepdims=True), np.float64)
