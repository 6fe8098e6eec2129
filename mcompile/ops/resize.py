"""Resize and Upsample.

The source coordinate of output position o is a * o + b in every coordinate mode. a and b are kept as exact fractions,
so that an index is integer arithmetic (o // 2 for the common upscaling by 2) and costs nothing once hoisted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import floor, gcd, lcm, prod
from typing import Any

import numpy as np

from mcompile.dtypes import DType
from mcompile.errors import ModelError
from mcompile.ir.expr import Const, Expr, Var, all_of, maximum, minimum, select
from mcompile.ir.tensor import Compute, Tensor, compute
from mcompile.ops.index_math import clamp, ints, is_given, normalize_axes, operand
from mcompile.ops.precision import real
from mcompile.ops.registry import Array, Attrs, Inputs, OpKind, Sample, Unsupported, define
from mcompile.ops.sampling import numbers, series

_LARGEST_UNIT = 1 << 46  # index products stay below 2^63
_FINEST = 1 << 20  # denominators to round to where the exact unit is larger (a FLOAT32 scale alone stays exact)
_TIE = 1e-6  # coordinates so close to a half count as one when rounding, as in onnxruntime
_MOST_TAPS = 256  # loads in one expression: cubic in 4 dims; antialias at strong shrinking asks for more


@dataclass(frozen=True)
class _Axis:
    """One resized dim: `extent` elements become `size`."""

    extent: int
    size: int
    scale: Fraction
    roi: tuple[Fraction, Fraction]

    @property
    def resized(self) -> Fraction:
        """The standard's length_resized: not rounded where scales were given."""
        return self.scale * self.extent


@dataclass(frozen=True)
class _Line:
    """The source coordinate (slope * o + shift) / unit of output position o, all integers."""

    slope: int
    shift: int
    unit: int

    def floor(self, o: Expr) -> Expr:
        """floor of the coordinate."""
        common = gcd(self.slope, self.unit)
        return (o * (self.slope // common) + self.shift // common) // (self.unit // common)

    def floor_at(self, o: int) -> int:
        return (self.slope * o + self.shift) // self.unit

    def fraction(self, o: Expr, dtype: DType) -> Expr:
        """The coordinate minus its floor."""
        return ((o * self.slope + self.shift) % self.unit).astype(dtype) * (1.0 / self.unit)


def _line(slope: Fraction, shift: Fraction) -> _Line:
    if lcm(slope.denominator, shift.denominator) > _LARGEST_UNIT:
        slope, shift = slope.limit_denominator(_FINEST), shift.limit_denominator(_FINEST)
    unit = lcm(slope.denominator, shift.denominator)
    return _Line(int(slope * unit), int(shift * unit), unit)


def _coordinate(mode: str, axis: _Axis) -> tuple[Fraction, Fraction]:
    """(a, b) of the source coordinate a * o + b (ONNX Resize, coordinate_transformation_mode)."""
    half, step = Fraction(1, 2), 1 / axis.scale
    match mode:
        case "half_pixel":
            return step, half * step - half
        case "pytorch_half_pixel":
            return (step, half * step - half) if axis.size > 1 else (Fraction(0), Fraction(0))
        case "half_pixel_symmetric":
            offset = Fraction(axis.extent, 2) * (1 - axis.size / axis.resized)
            return step, offset + half * step - half
        case "align_corners":
            return (axis.extent - 1) / (axis.resized - 1) if axis.resized != 1 else Fraction(0), Fraction(0)
        case "asymmetric":
            return step, Fraction(0)
        case "tf_half_pixel_for_nn":
            return step, half * step
        case "tf_crop_and_resize":
            return _crop_coordinate(axis)
    raise ModelError(f"Resize has no coordinate_transformation_mode {mode!r}")


def _crop_coordinate(axis: _Axis) -> tuple[Fraction, Fraction]:
    first, last = axis.roi
    if axis.resized == 1:
        return Fraction(0), (first + last) * (axis.extent - 1) / 2
    return (last - first) * (axis.extent - 1) / (axis.resized - 1), first * (axis.extent - 1)


# --- nearest ---


def _nearest_line(line: _Line, nearest: str, axis: _Axis) -> _Line:
    """The line whose floor is the wanted index."""
    unit = Fraction(1, 2 * line.unit)
    if nearest == "simple":  # before opset 11
        nearest = "ceil" if axis.scale < 1 else "floor"
    match nearest:
        case "floor":
            return line
        case "ceil":
            return _exact(line, 1 - 2 * unit)
        case "round_prefer_floor":
            return _exact(line, Fraction(1, 2) - unit)
        case "round_prefer_ceil":
            return _exact(line, Fraction(1, 2))
    raise ModelError(f"Resize has no nearest_mode {nearest!r}")


def _exact(line: _Line, by: Fraction) -> _Line:
    """`line` moved without rounding."""
    unit = lcm(line.unit, by.denominator)
    return _Line(line.slope * (unit // line.unit), line.shift * (unit // line.unit) + int(by * unit), unit)


def _float_coordinates(mode: str, axis: _Axis) -> Array:
    """The coordinates in FLOAT32 with the operations in the standard's order: what runtimes round to."""
    o, scale = np.arange(axis.size, dtype=np.float32), np.float32(axis.scale)
    half = np.float32(0.5)
    match mode:
        case "half_pixel" | "pytorch_half_pixel" if mode == "half_pixel" or axis.size > 1:
            return (o + half) / scale - half
        case "half_pixel_symmetric":
            adjustment = np.float32(axis.size) / (scale * np.float32(axis.extent))
            offset = np.float32(axis.extent) * half * (np.float32(1) - adjustment)
            return offset + (o + half) / scale - half
        case "asymmetric":
            return o / scale
        case "tf_half_pixel_for_nn":
            return (o + half) / scale
    slope, shift = _coordinate(mode, axis)
    return np.array([float(slope * position + shift) for position in range(axis.size)], np.float32)


def _float_nearest(coordinates: Array, nearest: str, axis: _Axis) -> list[int]:
    rounded: dict[str, Callable[[Array], Array]] = {
        "floor": np.floor,
        "ceil": np.ceil,
        "round_prefer_floor": lambda x: np.ceil(x.astype(np.float64) - 0.5 - _TIE),
        "round_prefer_ceil": lambda x: np.floor(x.astype(np.float64) + 0.5 + _TIE),
    }
    if nearest == "simple":
        nearest = "ceil" if axis.scale < 1 else "floor"
    return [int(index) for index in rounded[nearest](coordinates)]


def _nearest_index(o: Expr, axis: _Axis, attrs: Attrs) -> Expr:
    """The source index of `o`: the exact one, corrected where FLOAT32 rounding decides a near tie otherwise."""
    mode, nearest = str(attrs["coordinate_transformation_mode"]), str(attrs["nearest_mode"])
    line = _nearest_line(_line(*_coordinate(mode, axis)), nearest, axis)
    wanted = _float_nearest(_float_coordinates(mode, axis), nearest, axis)
    last = axis.extent - 1
    exact = [line.floor_at(position) for position in range(axis.size)]
    index = line.floor(o)
    if exact and not (min(exact) >= 0 and max(exact) <= last):
        index = clamp(index, axis.extent)
    for position, (ours, theirs) in enumerate(zip(exact, wanted, strict=True)):
        ours, theirs = (min(max(value, 0), last) for value in (ours, theirs))
        if ours != theirs:
            index = select(o.eq(position), theirs, index)
    return index


# --- linear and cubic ---

_Taps = list[tuple[Expr, Expr]]  # (source index, weight)


def _linear_kernel(distance: Expr) -> Expr:
    return maximum(1.0 - distance, 0.0)


def _cubic_kernel(distance: Expr, a: float) -> Expr:
    """Keys' cubic convolution kernel."""
    inner = (distance * (a + 2) - (a + 3)) * distance * distance + 1.0
    outer = ((distance * a - 5 * a) * distance + 8 * a) * distance - 4 * a
    return select(distance <= 1.0, inner, select(distance < 2.0, outer, 0.0))


def _taps(o: Expr, axis: _Axis, attrs: Attrs, dtype: DType) -> _Taps:
    """The source elements of output position `o` along `axis`, with their weights.

    With antialias the kernel is stretched by 1 / scale when shrinking, and the weights made to add up to 1.
    """
    line = _line(*_coordinate(str(attrs["coordinate_transformation_mode"]), axis))
    base, ratio = line.floor(o), line.fraction(o, dtype)
    stretch = min(axis.scale, Fraction(1)) if attrs["antialias"] else Fraction(1)
    reach = 1 if attrs["mode"] == "linear" else 2
    first = floor(-reach / stretch) + 1
    taps = range(first, 2 - first)
    weights = [_weight(tap, ratio, stretch, attrs) for tap in taps]
    indices = [base + tap for tap in taps]
    if attrs["exclude_outside"]:
        weights = _without_outside(indices, weights, axis.extent)
    if attrs["exclude_outside"] or stretch != 1:
        weights = _normalized(weights)
    return [(clamp(index, axis.extent), weight) for index, weight in zip(indices, weights, strict=True)]


def _weight(tap: int, ratio: Expr, stretch: Fraction, attrs: Attrs) -> Expr:
    """The kernel at the distance of element `tap` from the coordinate (counted from its floor)."""
    if stretch == 1 and attrs["mode"] == "linear":
        return ratio if tap else 1.0 - ratio
    distance = (ratio - float(tap) if tap <= 0 else float(tap) - ratio) * float(stretch)
    return (
        _linear_kernel(distance)
        if attrs["mode"] == "linear"
        else _cubic_kernel(distance, float(attrs["cubic_coeff_a"]))
    )


def _without_outside(indices: Sequence[Expr], weights: Sequence[Expr], extent: int) -> list[Expr]:
    pairs = zip(indices, weights, strict=True)
    return [select((index >= 0) & (index < extent), weight, 0.0) for index, weight in pairs]


def _normalized(weights: Sequence[Expr]) -> list[Expr]:
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    return [weight / total for weight in weights]


def _interpolate(x: Tensor, index: Sequence[Expr], taps: dict[int, _Taps], dtype: DType) -> Expr:
    """The weighted sum over the taps of each dim, innermost dim first."""
    if not taps:
        return x[tuple(index)].astype(dtype)
    dim = min(taps)
    rest = {other: value for other, value in taps.items() if other != dim}
    total: Expr | None = None
    for position, weight in taps[dim]:
        line = [*index[:dim], position, *index[dim + 1 :]]
        term = _interpolate(x, line, rest, dtype) * weight
        total = term if total is None else total + term
    assert total is not None
    return total


def _back(value: Expr, dtype: DType) -> Expr:
    """`value` as the input's element type; integers saturate."""
    if dtype.is_integer:
        value = minimum(maximum(value, float(dtype.min_value)), float(dtype.max_value))
    return value.astype(dtype)


# --- the op ---


def _resized_axes(x: Tensor, attrs: Attrs) -> dict[int, _Axis]:
    """The dims that change (all that are named, for a crop)."""
    rank = len(x.shape)
    dims = normalize_axes(attrs["axes"], rank)
    scales, sizes = _scales_and_sizes(x, dims, attrs)
    roi = [Fraction(float(value)) for value in np.asarray(attrs["roi"]).reshape(-1)] if is_given(attrs["roi"]) else []
    crop = attrs["coordinate_transformation_mode"] == "tf_crop_and_resize"
    if crop and len(roi) != 2 * len(dims):
        raise ModelError(f"tf_crop_and_resize needs a roi of {2 * len(dims)} values, got {len(roi)}")
    whole = (Fraction(0), Fraction(1))
    result = {}
    for position, dim in enumerate(dims):
        window = (roi[position], roi[position + len(dims)]) if crop else whole
        axis = _Axis(x.shape[dim], sizes[position], scales[position], window)
        if axis.size != axis.extent or axis.scale != 1 or window != whole:
            result[dim] = axis
    return result


def _scales_and_sizes(x: Tensor, dims: Sequence[int], attrs: Attrs) -> tuple[list[Fraction], list[int]]:
    if is_given(attrs["sizes"]):
        return _from_sizes([x.shape[dim] for dim in dims], ints(attrs["sizes"]), attrs)
    scales = attrs["roi" if attrs["scales_first"] else "scales"]
    if not is_given(scales):
        raise ModelError("Resize needs scales or sizes")
    values = np.asarray(scales, np.float32).reshape(-1)
    if len(values) != len(dims) or not (values > 0).all():
        raise ModelError(f"Resize scales {values.tolist()} must be {len(dims)} positive numbers")
    sizes = [int(value * np.float32(x.shape[dim])) for dim, value in zip(dims, values, strict=True)]
    return [Fraction(float(value)) for value in values], sizes


def _from_sizes(extents: Sequence[int], sizes: Sequence[int], attrs: Attrs) -> tuple[list[Fraction], list[int]]:
    if len(sizes) != len(extents) or 0 in extents:
        raise ModelError(f"Resize sizes {list(sizes)} do not fit dims {list(extents)}")
    scales = [Fraction(size, extent) for size, extent in zip(sizes, extents, strict=True)]
    policy = str(attrs["keep_aspect_ratio_policy"])
    if policy == "stretch":
        return scales, list(sizes)
    if policy not in ("not_larger", "not_smaller"):
        raise ModelError(f"Resize has no keep_aspect_ratio_policy {policy!r}")
    scale = min(scales) if policy == "not_larger" else max(scales)
    return [scale] * len(extents), [int(scale * extent + Fraction(1, 2)) for extent in extents]


def _resize(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x, mode = operand(inputs, 0), str(attrs["mode"])
    if mode not in ("nearest", "linear", "cubic"):
        raise ModelError(f"Resize has no mode {mode!r}")
    axes = _resized_axes(x, attrs)
    shape = [axes[dim].size if dim in axes else extent for dim, extent in enumerate(x.shape)]
    dtype = real(x.dtype)

    def element(*index: Var) -> Expr:
        if mode == "nearest":
            source = [_nearest_index(i, axes[d], attrs) if d in axes else i for d, i in enumerate(index)]
            value = x[tuple(source)]
        else:
            taps = {dim: _taps(index[dim], axis, attrs, dtype) for dim, axis in axes.items()}
            _check_taps(taps)
            value = _back(_interpolate(x, index, taps, dtype), x.dtype)
        return _cropped(value, index, axes, attrs)

    return (compute("resize", shape, element),)


def _check_taps(taps: dict[int, _Taps]) -> None:
    count = prod(len(weights) for weights in taps.values())
    if count > _MOST_TAPS:
        raise Unsupported(
            f"Resize with {count} source elements for each result is not supported (at most {_MOST_TAPS})"
        )


def _cropped(value: Expr, index: Sequence[Expr], axes: dict[int, _Axis], attrs: Attrs) -> Expr:
    """`value`, or the extrapolation value where a crop leaves the input."""
    if attrs["coordinate_transformation_mode"] != "tf_crop_and_resize":
        return value
    inside = []
    for dim, axis in axes.items():
        line = _line(*_crop_coordinate(axis))
        position = index[dim] * line.slope + line.shift
        inside += [position >= 0, position <= (axis.extent - 1) * line.unit]
    return select(all_of(inside), value, Const(attrs["extrapolation_value"], value.dtype)) if inside else value


def _adapt_resize(opset: int, attrs: dict[str, Any]) -> dict[str, Any]:
    """Opset 10 is (X, scales), asymmetric; its nearest mode rounds up when shrinking and down when growing."""
    if opset >= 11:
        return attrs
    return attrs | {"scales_first": 1, "coordinate_transformation_mode": "asymmetric", "nearest_mode": "simple"}


_ATTRS: dict[str, Any] = {
    "roi": None,
    "scales": None,
    "sizes": None,
    "mode": "nearest",
    "coordinate_transformation_mode": "half_pixel",
    "nearest_mode": "round_prefer_floor",
    "cubic_coeff_a": -0.75,
    "exclude_outside": 0,
    "extrapolation_value": 0.0,
    "antialias": 0,
    "axes": None,
    "keep_aspect_ratio_policy": "stretch",
    "scales_first": 0,  # the operand at roi's place holds the scales
}


def _scales(*values: float) -> Array:
    return np.array(values, np.float32)


def _resize_samples() -> Iterator[Sample]:
    x = numbers(1, 2, 4, 5)
    yield Sample((series(1, 2, 3, 4),), {"scales": _scales(1, 1, 2, 3), "mode": "nearest"})
    yield Sample((series(1, 2, 3, 4),), {"roi": _scales(1, 1, 2, 3), "mode": "nearest"}, opset=10)
    yield Sample((numbers(1, 1, 4, 4, dtype="uint8", low=0, high=9),), {"scales": _scales(1, 1, 0.5, 1.5)})
    modes = ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric", "align_corners", "asymmetric")
    for coordinates, mode in product(modes, ("nearest", "linear", "cubic")):
        attrs = {"coordinate_transformation_mode": coordinates, "mode": mode}
        yield Sample((x,), {"scales": _scales(1, 1, 0.8, 2.3), **attrs})
        yield Sample((x,), {"sizes": np.array([1, 2, 7, 3], np.int64), **attrs})
    for nearest in ("floor", "ceil", "round_prefer_ceil"):
        yield Sample((x,), {"sizes": np.array([7, 8], np.int64), "axes": (2, 3), "nearest_mode": nearest})
    for policy in ("not_larger", "not_smaller"):
        sizes = np.array([7, 8], np.int64)
        yield Sample((x,), {"sizes": sizes, "axes": (2, 3), "keep_aspect_ratio_policy": policy})
    roi = _scales(0, 0, 0.4, 0.6, 1, 1, 0.6, 1.3)
    crop = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 10.0}
    yield Sample((x,), {"roi": roi, "sizes": np.array([1, 2, 3, 4], np.int64), "mode": "linear", **crop})
    yield Sample((x,), {"scales": _scales(1, 1, 0.8, 1.2), "mode": "cubic", "exclude_outside": 1})
    for mode in ("linear", "cubic"):
        yield Sample((x,), {"scales": _scales(1, 1, 0.6, 0.6), "mode": mode, "antialias": 1})


define(
    "Resize",
    OpKind.INJECTIVE,
    _resize,
    attrs=_ATTRS,
    operands={1: "roi", 2: "scales", 3: "sizes"},
    adapt=_adapt_resize,
    samples=_resize_samples,
)


def _upsample(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    fixed = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "simple"}
    mode = "linear" if attrs["mode"] in ("linear", "bilinear") else attrs["mode"]
    return _resize(inputs, {**_ATTRS, **fixed, "scales": attrs["scales"], "mode": mode})


define(
    "Upsample",
    OpKind.INJECTIVE,
    _upsample,
    attrs={"scales": None, "mode": "nearest"},
    operands={1: "scales"},
    samples=lambda: iter([Sample((series(1, 1, 2, 3),), {"scales": _scales(1, 1, 2, 3), "mode": "nearest"}, opset=9)]),
)
