"""Ops that move elements by static indices: each is one injective Compute with one Load (Concat: one per input).

Indices are kept affine in the output's axes wherever the op allows it, which is what makes a node a view.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, prod
from typing import Any

import numpy as np

from mcompile.dtypes import DType
from mcompile.errors import ModelError
from mcompile.ir.expr import Const, Expr, Var, all_of, select
from mcompile.ir.tensor import Compute, Tensor, compute
from mcompile.ops.index_math import clamp, ints, is_given, normalize_axes, normalize_axis, operand, reshape_indices
from mcompile.ops.registry import REQUIRED, Array, Attrs, Inputs, OpKind, Sample, Unsupported, define, input_at
from mcompile.ops.sampling import series

Shape = tuple[int, ...]
Arrays = Sequence[Array | None]


def _array(arrays: Arrays, position: int = 0) -> Array:
    array = arrays[position]
    assert array is not None
    return array


def _reshape_to(name: str, x: Tensor, shape: Sequence[int]) -> Compute:
    if prod(x.shape) != prod(shape):
        raise ModelError(f"cannot reshape {list(x.shape)} into {list(shape)}: the sizes differ")
    return compute(name, shape, lambda *index: x[reshape_indices(index, x.shape, shape)])


# --- Reshape and its kin ---


def _reshaped(source: Shape, target: Shape, allow_zero: bool) -> Shape:
    """ONNX's rule: 0 copies a dim of the source (unless `allow_zero`), one -1 is what is left."""
    if not allow_zero:
        if any(dim == 0 and position >= len(source) for position, dim in enumerate(target)):
            raise ModelError(f"shape {list(target)} copies a dim that {list(source)} does not have")
        target = tuple(source[position] if dim == 0 else dim for position, dim in enumerate(target))
    if -1 not in target:
        return target
    known = prod(dim for dim in target if dim != -1)
    if target.count(-1) > 1 or known == 0 or prod(source) % known:
        raise ModelError(f"cannot reshape {list(source)} into {list(target)}")
    return tuple(prod(source) // known if dim == -1 else dim for dim in target)


def _reshape(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x = operand(inputs, 0)
    return (_reshape_to("reshape", x, _reshaped(x.shape, ints(attrs["shape"]), bool(attrs["allowzero"]))),)


def _reshape_reference(arrays: Arrays, attrs: Attrs) -> tuple[Array, ...]:
    x = _array(arrays)
    return (x.reshape(_reshaped(x.shape, ints(attrs["shape"]), bool(attrs["allowzero"]))),)


def _reshape_samples() -> Iterator[Sample]:
    shapes = [((2, 3, 4), (2, -1)), ((2, 3, 4), (0, 4, 3)), ((2, 12), (2, 3, 2, 2)), ((6, 4), (4, 6)), ((1, 6), (6,))]
    for source, target in shapes:
        yield Sample((series(*source),), {"shape": np.array(target, np.int64)})
    yield Sample((series(0, 3),), {"shape": np.array([3, 0], np.int64), "allowzero": 1})


define(
    "Reshape",
    OpKind.INJECTIVE,
    _reshape,
    reference=_reshape_reference,
    attrs={"shape": REQUIRED, "allowzero": 0},
    operands={1: "shape"},
    samples=_reshape_samples,
)


def _flatten(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x = operand(inputs, 0)
    return (_reshape_to("flatten", x, _flattened(x.shape, attrs)),)


def _flattened(shape: Shape, attrs: Attrs) -> Shape:
    axis, rank = int(attrs["axis"]), len(shape)
    if not -rank <= axis <= rank:
        raise ModelError(f"axis {axis} is out of range for rank {rank}")
    axis = axis + rank if axis < 0 else axis
    return prod(shape[:axis]), prod(shape[axis:])


define(
    "Flatten",
    OpKind.INJECTIVE,
    _flatten,
    reference=lambda arrays, attrs: (_array(arrays).reshape(_flattened(_array(arrays).shape, attrs)),),
    attrs={"axis": 1},
    samples=lambda: (Sample((series(2, 3, 4),), {"axis": axis}) for axis in (0, 1, 2, 3, -1)),
)


def _squeeze(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x = operand(inputs, 0)
    return (_reshape_to("squeeze", x, _squeezed(x.shape, attrs)),)


def _squeezed(shape: Shape, attrs: Attrs) -> Shape:
    ones = tuple(dim for dim, extent in enumerate(shape) if extent == 1)
    axes = ones if attrs["axes"] is None else normalize_axes(attrs["axes"], len(shape))
    if not set(axes) <= set(ones):
        raise ModelError(f"cannot squeeze axes {list(axes)} of shape {list(shape)}: only dims of 1 can go")
    return tuple(extent for dim, extent in enumerate(shape) if dim not in axes)


def _squeeze_samples() -> Iterator[Sample]:
    yield Sample((series(1, 3, 1, 4),), {})
    yield Sample((series(1, 3, 1, 4),), {"axes": np.array([-2], np.int64)})
    yield Sample((series(1, 3, 1, 4),), {"axes": (0, 2)}, opset=11)


define(
    "Squeeze",
    OpKind.INJECTIVE,
    _squeeze,
    reference=lambda arrays, attrs: (_array(arrays).reshape(_squeezed(_array(arrays).shape, attrs)),),
    attrs={"axes": None},
    operands={1: "axes"},
    samples=_squeeze_samples,
)


def _unsqueeze(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x = operand(inputs, 0)
    return (_reshape_to("unsqueeze", x, _unsqueezed(x.shape, attrs)),)


def _unsqueezed(shape: Shape, attrs: Attrs) -> Shape:
    rank = len(shape) + len(ints(attrs["axes"]))
    axes = normalize_axes(attrs["axes"], rank)
    extents = iter(shape)
    return tuple(1 if dim in axes else next(extents) for dim in range(rank))


def _unsqueeze_samples() -> Iterator[Sample]:
    yield Sample((series(3, 4),), {"axes": np.array([0, -1], np.int64)})
    yield Sample((series(3, 4),), {"axes": (1,)}, opset=11)


define(
    "Unsqueeze",
    OpKind.INJECTIVE,
    _unsqueeze,
    reference=lambda arrays, attrs: (_array(arrays).reshape(_unsqueezed(_array(arrays).shape, attrs)),),
    attrs={"axes": REQUIRED},
    operands={1: "axes"},
    samples=_unsqueeze_samples,
)


# --- permutations ---


def _transpose(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x = operand(inputs, 0)
    rank = len(x.shape)
    perm = tuple(reversed(range(rank))) if attrs["perm"] is None else normalize_axes(attrs["perm"], rank)
    if len(perm) != rank:
        raise ModelError(f"perm {list(perm)} does not permute rank {rank}")
    shape = [x.shape[dim] for dim in perm]
    return (compute("transpose", shape, lambda *index: x[tuple(index[perm.index(dim)] for dim in range(rank))]),)


def _transpose_reference(arrays: Arrays, attrs: Attrs) -> tuple[Array, ...]:
    """Row-major, copied in blocks of rows: numpy alone walks a large matrix against its cache lines."""
    source = np.transpose(_array(arrays), attrs["perm"])
    result = np.empty(source.shape, source.dtype)
    rows = int(np.argmax(source.strides)) if source.ndim else 0
    for start in range(0, source.shape[rows] if source.ndim else 0, 64):
        block = (slice(None),) * rows + (slice(start, start + 64),)
        result[block] = source[block]
    return (result if source.ndim else source,)


def _transpose_samples() -> Iterator[Sample]:
    yield Sample((series(2, 3, 4),), {})
    yield Sample((series(2, 3, 4, 5),), {"perm": (0, 2, 3, 1)})


define(
    "Transpose",
    OpKind.INJECTIVE,
    _transpose,
    reference=_transpose_reference,
    attrs={"perm": None},
    samples=_transpose_samples,
)


def _check_blocks(size: int, block: int, what: str) -> None:
    if block < 1 or size % block:
        raise ModelError(f"{what} of {size} is not divisible by {block}")


def _depth_to_space(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x, block = operand(inputs, 0), int(attrs["blocksize"])
    batch, channels, height, width = x.shape
    _check_blocks(channels, block * block, "channel count")
    depth = channels // (block * block)

    def element(n: Expr, c: Expr, h: Expr, w: Expr) -> Expr:
        position = (h % block) * block + w % block
        channel = position * depth + c if attrs["mode"] == "DCR" else c * (block * block) + position
        return x[n, channel, h // block, w // block]

    return (compute("depth_to_space", (batch, depth, height * block, width * block), element),)


define(
    "DepthToSpace",
    OpKind.INJECTIVE,
    _depth_to_space,
    attrs={"blocksize": REQUIRED, "mode": "DCR"},
    samples=lambda: (Sample((series(2, 8, 2, 3),), {"blocksize": 2, "mode": mode}) for mode in ("DCR", "CRD")),
)


def _space_to_depth(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x, block = operand(inputs, 0), int(attrs["blocksize"])
    batch, channels, height, width = x.shape
    _check_blocks(height, block, "height")
    _check_blocks(width, block, "width")

    def element(n: Expr, c: Expr, h: Expr, w: Expr) -> Expr:
        if attrs["mode"] == "DCR":
            position, channel = c // channels, c % channels
        else:
            position, channel = c % (block * block), c // (block * block)
        return x[n, channel, h * block + position // block, w * block + position % block]

    shape = (batch, channels * block * block, height // block, width // block)
    return (compute("space_to_depth", shape, element),)


define(
    "SpaceToDepth",
    OpKind.INJECTIVE,
    _space_to_depth,
    attrs={"blocksize": REQUIRED, "mode": "DCR"},
    samples=lambda: iter([Sample((series(2, 3, 4, 6),), {"blocksize": 2})]),
)


# --- joining and cutting ---


def _concat(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    tensors = [operand(inputs, position) for position in range(len(inputs))]
    first = operand(tensors, 0)
    axis = normalize_axis(int(attrs["axis"]), len(first.shape))
    for tensor in tensors:
        if tensor.shape[:axis] + tensor.shape[axis + 1 :] != first.shape[:axis] + first.shape[axis + 1 :]:
            raise ModelError(f"cannot concatenate {list(first.shape)} and {list(tensor.shape)} along axis {axis}")
    parts = [tensor for tensor in tensors if tensor.shape[axis]] or [first]
    starts = [sum(part.shape[axis] for part in parts[:position]) for position in range(len(parts) + 1)]

    def element(*index: Var) -> Expr:
        value: Expr | None = None
        for part, start, stop in reversed(list(zip(parts, starts, starts[1:], strict=False))):
            load = part[(*index[:axis], index[axis] - start, *index[axis + 1 :])]
            value = load if value is None else select(index[axis] < stop, load, value)
        assert value is not None
        return value

    shape = (*first.shape[:axis], starts[-1], *first.shape[axis + 1 :])
    return (compute("concat", shape, element),)


def _concat_samples() -> Iterator[Sample]:
    yield Sample((series(2, 3), series(2, 1), series(2, 4)), {"axis": -1})
    yield Sample((series(2, 3),), {"axis": 0})


def _concat_reference(arrays: Arrays, attrs: Attrs) -> tuple[Array, ...]:
    return (np.concatenate([array for array in arrays if array is not None], int(attrs["axis"])),)


define(
    "Concat",
    OpKind.INJECTIVE,
    _concat,
    reference=_concat_reference,
    attrs={"axis": REQUIRED},
    samples=_concat_samples,
)


def _offset(x: Tensor, name: str, starts: Shape, steps: Shape, shape: Sequence[int]) -> Compute:
    """The elements of `x` from `starts`, `steps` apart."""

    def element(*index: Var) -> Expr:
        return x[tuple(i * step + start for i, start, step in zip(index, starts, steps, strict=True))]

    return compute(name, shape, element)


def _split_sizes(extent: int, attrs: Attrs) -> Shape:
    if attrs["split"] is not None:
        sizes = ints(attrs["split"])
        if sum(sizes) != extent:
            raise ModelError(f"split sizes {list(sizes)} do not add up to {extent}")
        return sizes
    count = attrs["num_outputs"]
    if count is None:
        raise Unsupported("Split needs sizes or num_outputs")
    chunk = ceil(extent / count)
    return tuple(max(0, min(chunk, extent - part * chunk)) for part in range(count))


def _split(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x = operand(inputs, 0)
    axis = normalize_axis(int(attrs["axis"]), len(x.shape))
    outputs = []
    start = 0
    for number, size in enumerate(_split_sizes(x.shape[axis], attrs)):
        starts = tuple(start if dim == axis else 0 for dim in range(len(x.shape)))
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        outputs.append(_offset(x, f"split{number}", starts, (1,) * len(shape), shape))
        start += size
    return tuple(outputs)


def _split_reference(arrays: Arrays, attrs: Attrs) -> tuple[Array, ...]:
    x, axis = _array(arrays), int(attrs["axis"])
    cuts = np.cumsum(_split_sizes(x.shape[axis], attrs))[:-1]
    return tuple(np.ascontiguousarray(part) for part in np.split(x, cuts, axis))


def _split_samples() -> Iterator[Sample]:
    yield Sample((series(2, 7),), {"axis": 1, "num_outputs": 3})
    yield Sample((series(2, 7),), {"axis": -1, "split": np.array([2, 5], np.int64)})
    yield Sample((series(6, 2),), {"split": (1, 2, 3)}, opset=11)


define(
    "Split",
    OpKind.INJECTIVE,
    _split,
    reference=_split_reference,
    attrs={"axis": 0, "split": None, "num_outputs": None},
    operands={1: "split"},
    samples=_split_samples,
)


def _cuts(rank: int, attrs: Attrs) -> list[slice]:
    """A Python slice for each dim: ONNX clamps as Python does."""
    starts, ends = ints(attrs["starts"]), ints(attrs["ends"])
    axes = normalize_axes(range(len(starts)) if attrs["axes"] is None else attrs["axes"], rank)
    steps = (1,) * len(axes) if attrs["steps"] is None else ints(attrs["steps"])
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise ModelError("starts, ends, axes and steps differ in length")
    if 0 in steps:
        raise ModelError("a Slice step is 0")
    cuts = [slice(None)] * rank
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        cuts[axis] = slice(start, end, step)
    return cuts


def _slice(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x = operand(inputs, 0)
    ranges = [range(extent)[cut] for extent, cut in zip(x.shape, _cuts(len(x.shape), attrs), strict=True)]
    starts = tuple(indices.start if len(indices) else 0 for indices in ranges)
    shape = [len(indices) for indices in ranges]
    return (_offset(x, "slice", starts, tuple(indices.step for indices in ranges), shape),)


def _slice_reference(arrays: Arrays, attrs: Attrs) -> tuple[Array, ...]:
    x = _array(arrays)
    return (np.ascontiguousarray(x[tuple(_cuts(x.ndim, attrs))]),)


def _int64(*values: int) -> Array:
    return np.array(values, np.int64)


def _slice_samples() -> Iterator[Sample]:
    big = 2**63 - 1
    yield Sample((series(4, 6),), {"starts": _int64(1, 0), "ends": _int64(3, big)})
    yield Sample((series(4, 6),), {"starts": _int64(-3), "ends": _int64(-1), "axes": _int64(-1)})
    for start, end, step in ((-1, -big, -1), (5, 0, -2), (100, 1, -3), (0, 6, 4), (-100, 100, 2), (4, 2, 1)):
        attrs = {"starts": _int64(start), "ends": _int64(end), "axes": _int64(1), "steps": _int64(step)}
        yield Sample((series(4, 6),), attrs)
    yield Sample((series(4, 6),), {"starts": (1,), "ends": (-1,), "axes": (1,)}, opset=9)


define(
    "Slice",
    OpKind.INJECTIVE,
    _slice,
    reference=_slice_reference,
    attrs={"starts": REQUIRED, "ends": REQUIRED, "axes": None, "steps": None},
    operands={1: "starts", 2: "ends", 3: "axes", 4: "steps"},
    samples=_slice_samples,
)


# --- Pad ---


def _pad_widths(attrs: Attrs, rank: int) -> tuple[tuple[int, int], ...]:
    axes, pads = normalize_axes(attrs["axes"], rank), ints(attrs["pads"])
    if len(pads) != 2 * len(axes):
        raise ModelError(f"pads {list(pads)} must have two values for each of {len(axes)} axes")
    widths = [(0, 0)] * rank
    for position, axis in enumerate(axes):
        widths[axis] = pads[position], pads[position + len(axes)]
    return tuple(widths)


def _reflected(index: Expr, extent: int, before: int, after: int) -> Expr:
    """`index` mirrored at the first and the last element, as often as it takes."""
    last = extent - 1
    if extent == 1:
        return index * 0
    if before <= last and after <= last:
        index = select(index < 0, -index, index) if before > 0 else index
        return select(index > last, 2 * last - index, index) if after > 0 else index
    index = index % (2 * last)
    return select(index > last, 2 * last - index, index)


def _outside_index(mode: str, index: Expr, extent: int, before: int, after: int) -> Expr:
    """Where the padded element `index` (0 is the first kept one) comes from."""
    if before <= 0 and after <= 0:
        return index
    match mode:
        case "reflect":
            return _reflected(index, extent, before, after)
        case "edge":
            return clamp(index, extent)
        case "wrap":
            return index % extent
    raise ModelError(f"Pad has no mode {mode!r}; expected constant, reflect, edge or wrap")


def _pad(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x, mode = operand(inputs, 0), str(attrs["mode"])
    widths = _pad_widths(attrs, len(x.shape))
    crops = [(max(0, -before), max(0, -after)) for before, after in widths]
    kept = [extent - sum(crop) for extent, crop in zip(x.shape, crops, strict=True)]
    shape = [extent + before + after for extent, (before, after) in zip(x.shape, widths, strict=True)]
    if min([*kept, *shape], default=0) < 0:
        raise ModelError(f"pads {widths} remove more than there is of {list(x.shape)}")
    if mode == "constant":
        return (_pad_constant(x, shape, widths, _fill(inputs, attrs)),)

    def element(*index: Var) -> Expr:
        source = []
        for i, (before, after), (crop, _), extent in zip(index, widths, crops, kept, strict=True):
            source.append(_outside_index(mode, i - max(before, 0), extent, before, after) + crop)
        return x[tuple(source)]

    return (compute("pad", shape, element),)


def _fill(inputs: Inputs, attrs: Attrs) -> Expr:
    """The constant that Pad fills with: folded, or an element of input 2."""
    tensor = input_at(inputs, 2)
    if tensor is not None:
        return tensor[(0,) * len(tensor.shape)]
    value = attrs["constant_value"]
    return Const(np.asarray(value).reshape(-1)[0].item() if is_given(value) else 0, operand(inputs, 0).dtype)


def _pad_constant(x: Tensor, shape: Sequence[int], widths: Sequence[tuple[int, int]], fill: Expr) -> Compute:
    def element(*index: Var) -> Expr:
        guards = []
        for i, (before, after), extent in zip(index, widths, x.shape, strict=True):
            guards += [i >= before] if before > 0 else []
            guards += [i < before + extent] if after > 0 else []
        load = x[tuple(i - before for i, (before, _) in zip(index, widths, strict=True))]
        return select(all_of(guards), load, fill) if guards else load

    return compute("pad", shape, element)


def _adapt_pad(opset: int, attrs: dict[str, Any]) -> dict[str, Any]:
    if opset < 11 and "value" in attrs:
        attrs = dict(attrs)
        attrs["constant_value"] = attrs.pop("value")
    return attrs


def _pad_samples() -> Iterator[Sample]:
    for mode in ("constant", "reflect", "edge", "wrap"):
        yield Sample((series(3, 4),), {"pads": _int64(1, 2, 0, 3), "mode": mode})
    yield Sample((series(3, 4), None, np.array(2.5, np.float32)), {"pads": _int64(1, 1), "axes": _int64(-1)})
    yield Sample((series(3, 4),), {"pads": (0, 1, 2, 0), "value": 1.5}, opset=10)


define(
    "Pad",
    OpKind.INJECTIVE,
    _pad,
    attrs={"pads": REQUIRED, "constant_value": None, "axes": None, "mode": "constant"},
    operands={1: "pads", 3: "axes"},
    scalars={2: "constant_value"},
    adapt=_adapt_pad,
    samples=_pad_samples,
)


def _center_crop_pad(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x = operand(inputs, 0)
    target = list(x.shape)
    for axis, extent in zip(normalize_axes(attrs["axes"], len(x.shape)), ints(attrs["shape"]), strict=True):
        target[axis] = extent
    widths = []
    for extent, size in zip(x.shape, target, strict=True):
        before = (size - extent) // 2 if size >= extent else -((extent - size) // 2)
        widths.append((before, size - extent - before))
    return (_pad_constant(x, target, widths, Const(0, x.dtype)),)


define(
    "CenterCropPad",
    OpKind.INJECTIVE,
    _center_crop_pad,
    attrs={"shape": REQUIRED, "axes": None},
    operands={1: "shape"},
    samples=lambda: (Sample((series(5, 4, 3),), {"shape": _int64(*shape)}) for shape in ((3, 7, 3), (8, 3, 2))),
)


# --- repeating ---


def _expand(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x, target = operand(inputs, 0), ints(attrs["shape"])
    try:
        shape = tuple(int(dim) for dim in np.broadcast_shapes(x.shape, target))
    except ValueError as error:
        raise ModelError(f"cannot expand {list(x.shape)} to {list(target)}") from error
    lead = len(shape) - len(x.shape)

    def element(*index: Var) -> Expr:
        zero = Const(0, DType.INT64)
        return x[tuple(zero if dim == 1 else i for i, dim in zip(index[lead:], x.shape, strict=True))]

    return (compute("expand", shape, element),)


def _expand_reference(arrays: Arrays, attrs: Attrs) -> tuple[Array, ...]:
    x = _array(arrays)
    return (np.broadcast_to(x, np.broadcast_shapes(x.shape, ints(attrs["shape"]))).copy(),)


define(
    "Expand",
    OpKind.INJECTIVE,
    _expand,
    reference=_expand_reference,
    attrs={"shape": REQUIRED},
    operands={1: "shape"},
    samples=lambda: (Sample((series(3, 1),), {"shape": _int64(*shape)}) for shape in ((2, 3, 4), (1, 2), (3, 1))),
)


def _tile(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x, repeats = operand(inputs, 0), ints(attrs["repeats"])
    if len(repeats) != len(x.shape):
        raise ModelError(f"repeats {list(repeats)} must have one value for each dim of {list(x.shape)}")

    def element(*index: Var) -> Expr:
        source = []
        for i, extent, repeat in zip(index, x.shape, repeats, strict=True):
            source.append(Const(0, DType.INT64) if extent == 1 else i if repeat == 1 else i % max(extent, 1))
        return x[tuple(source)]

    shape = [extent * repeat for extent, repeat in zip(x.shape, repeats, strict=True)]
    return (compute("tile", shape, element),)


define(
    "Tile",
    OpKind.INJECTIVE,
    _tile,
    attrs={"repeats": REQUIRED},
    operands={1: "repeats"},
    samples=lambda: iter([Sample((series(2, 1, 3),), {"repeats": _int64(1, 4, 2)})]),
)


# --- facts of the type ---


def _int64_vector(name: str, values: Sequence[int], shape: Sequence[int]) -> Compute:
    def element(*index: Var) -> Expr:
        value: Expr = Const(values[-1] if values else 0, DType.INT64)
        for position in range(len(values) - 2, -1, -1):
            value = select(index[0].eq(position), values[position], value)
        return value

    return compute(name, shape, element)


def _shape(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    dims = operand(inputs, 0).shape[slice(attrs["start"], attrs["end"])]
    return (_int64_vector("shape", dims, (len(dims),)),)


def _shape_samples() -> Iterator[Sample]:
    yield Sample((series(2, 3, 4),), {})
    yield Sample((series(2, 3, 4),), {"start": -2, "end": 2})


define("Shape", OpKind.INJECTIVE, _shape, attrs={"start": 0, "end": None}, samples=_shape_samples)


def _size(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    return (_int64_vector("size", (prod(operand(inputs, 0).shape),), ()),)


define("Size", OpKind.INJECTIVE, _size, samples=lambda: iter([Sample((series(2, 3, 4),), {})]))
