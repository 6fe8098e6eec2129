"""Conv and ConvTranspose in any number of spatial dims, written once in ONNX's (N, C, spatial...) axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mcompile.errors import ModelError
from mcompile.ir.expr import Expr, all_of, select
from mcompile.ir.tensor import Axis, Compute, Tensor, compute, reduce_axis
from mcompile.ops.index_math import operand
from mcompile.ops.matmul import contraction, epilogue
from mcompile.ops.precision import widened
from mcompile.ops.registry import Attrs, Inputs, LayoutHint, OpKind, Sample, define, input_at
from mcompile.ops.sampling import numbers, sample
from mcompile.ops.window import (
    WINDOW_ATTRS,
    Window,
    pad_for,
    pad_spatial,
    per_dim,
    positions,
    spatial_names,
    split_padding,
    tap_axes,
    windows,
)


@dataclass(frozen=True)
class Groups:
    """Channels in `count` groups, each a convolution of its own: channels of the input and output per group."""

    count: int
    inputs: int
    outputs: int

    def input_channel(self, oc: Expr, ic: Expr) -> Expr:
        """The input channel that output channel `oc` reads as number `ic` of its group."""
        if self.count == 1:
            return ic
        group = oc // self.outputs
        return group if self.inputs == 1 else group * self.inputs + ic


def _groups(op: str, channels: int, inputs: int, outputs: int, count: int) -> Groups:
    if channels != count * inputs:
        raise ModelError(f"{op}: {channels} input channels, but {count} groups of {inputs} in the weights")
    return Groups(count, inputs, outputs)


def _check_spatial(op: str, x: Tensor, w: Tensor) -> None:
    if len(x.shape) < 3 or len(x.shape) != len(w.shape):
        raise ModelError(f"{op}: expected (N, C, spatial...) and weights of as many dims, got {x.type} and {w.type}")


def _with_bias(name: str, total: Compute, x: Tensor, bias: Tensor | None) -> Compute:
    if bias is None:
        return epilogue(name, total, x)
    return epilogue(name, total, x, lambda value, i: value + widened(bias[i[1]]))


def _conv(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x, w = operand(inputs, 0), operand(inputs, 1)
    _check_spatial("Conv", x, w)
    count = int(attrs["group"])
    if w.shape[0] % count:
        raise ModelError(f"Conv: {w.shape[0]} output channels do not split into {count} groups")
    groups = _groups("Conv", x.shape[1], w.shape[1], w.shape[0] // count, count)
    spatial = windows(x.shape[2:], w.shape[2:], attrs)
    source, taps, ic = pad_for(x, spatial, 0), tap_axes(spatial), reduce_axis(groups.inputs, "ic")
    if count > 1 and groups.inputs > 1 and groups.outputs > 1:
        total = _grouped(source, w, groups, spatial, taps, ic)
        return (_with_bias("conv_bias", total, x, input_at(inputs, 2)),)

    def product(n: Expr, oc: Expr, *placements: Expr) -> Expr:
        place = positions(spatial, placements, taps)
        load = source[(n, groups.input_channel(oc, ic.var), *place)]
        return widened(load) * widened(w[(oc, ic.var, *(tap.var for tap in taps))])

    shape = (x.shape[0], w.shape[0], *(window.extent for window in spatial))
    names = ["n", "oc", *spatial_names("o", len(spatial))]
    return (_with_bias("conv_bias", contraction("conv", shape, product, [*taps, ic], names), x, input_at(inputs, 2)),)


def _grouped(
    source: Tensor, w: Tensor, groups: Groups, spatial: Sequence[Window], taps: Sequence[Axis], ic: Axis
) -> Compute:
    """With an axis for the group: inside one, outputs share their inputs as in a plain convolution."""
    by_group = compute(
        "group_weights",
        (groups.count, groups.outputs, *w.shape[1:]),
        lambda g, oc, *rest: w[(g * groups.outputs + oc, *rest)],
    )

    def product(n: Expr, g: Expr, oc: Expr, *placements: Expr) -> Expr:
        load = source[(n, g * groups.inputs + ic.var, *positions(spatial, placements, taps))]
        return widened(load) * widened(by_group[(g, oc, ic.var, *(tap.var for tap in taps))])

    extents = [window.extent for window in spatial]
    names = ["n", "g", "oc", *spatial_names("o", len(spatial))]
    shape = (source.shape[0], groups.count, groups.outputs, *extents)
    total = contraction("conv", shape, product, [*taps, ic], names)

    def body(n: Expr, oc: Expr, *place: Expr) -> Expr:
        return total[(n, oc // groups.outputs, oc % groups.outputs, *place)]

    return compute("conv_groups", (source.shape[0], w.shape[0], *extents), body)


def _conv_samples() -> Iterator[Sample]:
    x, w, b = numbers(2, 4, 6, 7), numbers(6, 4, 3, 3, seed=1), numbers(6)
    yield sample(x, w)
    yield sample(x, w, b, pads=[1, 1, 1, 1])
    yield sample(x, w, b, pads=[0, 1, 2, 1], strides=[2, 1], dilations=[1, 2], kernel_shape=[3, 3])
    yield sample(x, numbers(6, 2, 3, 2), b, group=2, strides=[2, 2], opset=7)
    yield sample(x, numbers(4, 1, 3, 3), numbers(4), group=4, pads=[1, 1, 1, 1])
    yield sample(x, numbers(8, 1, 3, 3), group=4)
    yield sample(x, numbers(5, 4, 1, 1))
    for auto_pad in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        yield sample(x, numbers(6, 4, 2, 3), auto_pad=auto_pad, strides=[2, 2])
    yield sample(numbers(1, 2, 9), numbers(3, 2, 3), numbers(3), pads=[1, 0], strides=[2])
    yield sample(numbers(1, 2, 4, 5, 4), numbers(3, 2, 2, 3, 2), numbers(3), pads=[1, 1, 0, 0, 1, 0])
    yield sample(
        numbers(1, 2, 5, 5, dtype="float16"), numbers(2, 2, 3, 3, dtype="float16"), numbers(2, dtype="float16")
    )
    # pads are (top, left, bottom, right), on a depthwise convolution with strides and dilations
    yield sample(
        np.arange(50, dtype=np.float32).reshape(1, 2, 5, 5),
        np.ones((2, 1, 2, 2), np.float32),
        group=2,
        strides=[2, 2],
        dilations=[2, 2],
        pads=[0, 1, 1, 0],
    )


define(
    "Conv",
    OpKind.ANCHOR,
    _conv,
    attrs={**WINDOW_ATTRS, "group": 1},
    samples=_conv_samples,
    layout=LayoutHint.CHANNELS_LAST,
)


# --- ConvTranspose ---


@dataclass(frozen=True)
class Upsampling:
    """A transposed convolution along one spatial dim, split by the output's position modulo `stride`.

    With o' = o + crop (`crop` is what the output loses in front), y[o] = sum over i * stride + k = o' of x[i] * w[k].
    Written o' = (first + q) * stride + r with 0 <= r < stride, k is r + stride * t and i is first + q - t: for each r
    an ordinary convolution with `taps` taps over `count` places q. The taps run backwards (t = taps - 1 - tap), so
    that x is read forwards.
    """

    size: int
    kernel: int
    stride: int
    crop: int
    extent: int

    @property
    def taps(self) -> int:
        return -(-self.kernel // self.stride)

    @property
    def first(self) -> int:
        return self.crop // self.stride

    @property
    def count(self) -> int:
        return (self.crop + self.extent - 1) // self.stride - self.first + 1

    @property
    def before(self) -> int:
        """Zeros ahead of x (negative: elements of x never read)."""
        return self.taps - 1 - self.first

    def interleaved(self, o: Expr) -> tuple[Expr, Expr]:
        """q and r of output o."""
        shifted = o + self.crop % self.stride
        return shifted // self.stride, shifted % self.stride


def _upsamplings(x: Tensor, w: Tensor, attrs: Attrs) -> tuple[Upsampling, ...]:
    """Kernel sizes include the dilation. Raises ModelError for an empty output."""
    sizes = x.shape[2:]
    rank = len(sizes)
    strides, dilations = per_dim(attrs, "strides", rank, 1), per_dim(attrs, "dilations", rank, 1)
    pads, extra = per_dim(attrs, "pads", 2 * rank, 0), per_dim(attrs, "output_padding", rank, 0)
    wanted = per_dim(attrs, "output_shape", rank, 0)[-rank:]
    auto_pad = attrs["auto_pad"]
    result = []
    for dim in range(rank):
        stride, reach = strides[dim], (w.shape[2 + dim] - 1) * dilations[dim] + 1
        full = stride * (sizes[dim] - 1) + reach + extra[dim]
        if wanted[dim]:
            extent = wanted[dim]
            crop = split_padding(max(full - extent, 0), auto_pad)[0]
        elif auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            extent = stride * sizes[dim]
            crop = split_padding(max(full - extent, 0), auto_pad)[0]
        else:
            crop = 0 if auto_pad == "VALID" else pads[dim]
            extent = full if auto_pad == "VALID" else full - pads[dim] - pads[rank + dim]
        if extent < 1:
            raise ModelError(f"ConvTranspose: pads {list(pads)} leave nothing of an output of {full}")
        result.append(Upsampling(sizes[dim], reach, stride, crop, extent))
    return tuple(result)


def _dilated(w: Tensor, dilations: Sequence[int]) -> Tensor:
    """The weights with zeros between their taps."""
    if all(dilation == 1 for dilation in dilations):
        return w
    kernel = [(size - 1) * dilation + 1 for size, dilation in zip(w.shape[2:], dilations, strict=True)]

    def element(c: Expr, m: Expr, *k: Expr) -> Expr:
        pairs = list(zip(k, dilations, strict=True))
        on_tap = all_of([(tap % dilation).eq(0) for tap, dilation in pairs if dilation > 1])
        return select(on_tap, w[(c, m, *(tap // dilation for tap, dilation in pairs))], 0)

    return compute("dilate", (*w.shape[:2], *kernel), element)


def _sub_kernels(w: Tensor, groups: Groups, spatial: Sequence[Upsampling]) -> Compute:
    """Weights by output channel, and in each strided dim by (remainder, tap): sub[oc, ic, rh, th, rw, tw]."""
    shape = [groups.count * groups.outputs, groups.inputs]
    for dim in spatial:
        shape += [dim.stride, dim.taps] if dim.stride > 1 else [dim.taps]

    def element(oc: Expr, ic: Expr, *rest: Expr) -> Expr:
        queue, taps = list(rest), list[Expr]()
        inside: list[Expr] = []
        for dim in spatial:
            remainder = queue.pop(0) if dim.stride > 1 else 0
            tap = (dim.taps - 1 - queue.pop(0)) * dim.stride + remainder
            taps.append(tap)
            if dim.taps * dim.stride > dim.kernel:
                inside.append(tap < dim.kernel)
        if groups.count == 1:
            value = w[(ic, oc, *taps)]
        else:
            value = w[((oc // groups.outputs) * groups.inputs + ic, oc % groups.outputs, *taps)]
        return select(all_of(inside), value, 0) if inside else value

    return compute("subkernels", shape, element)


def _sub_pixel(
    source: Tensor, sub: Tensor, groups: Groups, spatial: Sequence[Upsampling], taps: Sequence[Axis], ic: Axis
) -> Compute:
    """The convolutions of all remainders at once: t[n, oc, qh, rh, qw, rw]."""
    shape = [source.shape[0], sub.shape[0]]
    names = ["n", "oc"]
    for dim, q, r in zip(spatial, spatial_names("q", len(spatial)), spatial_names("r", len(spatial)), strict=True):
        shape += [dim.count, dim.stride] if dim.stride > 1 else [dim.count]
        names += [q, r] if dim.stride > 1 else [q]

    def product(n: Expr, oc: Expr, *rest: Expr) -> Expr:
        queue, places = list(rest), list[Expr]()
        sub_index: list[Expr] = []
        for dim, tap in zip(spatial, taps, strict=True):
            places.append(queue.pop(0) + tap.var)
            sub_index += [queue.pop(0), tap.var] if dim.stride > 1 else [tap.var]
        load = source[(n, groups.input_channel(oc, ic.var), *places)]
        return widened(load) * widened(sub[(oc, ic.var, *sub_index)])

    return contraction("convtranspose", shape, product, [*taps, ic], names)


def _interleave(total: Compute, spatial: Sequence[Upsampling]) -> Compute:
    """out[n, oc, oh, ow] = t[n, oc, q(oh), r(oh), q(ow), r(ow)]; `t` itself where nothing is strided."""
    if all(dim.stride == 1 for dim in spatial):
        return total

    def element(n: Expr, oc: Expr, *places: Expr) -> Expr:
        index: list[Expr] = []
        for dim, place in zip(spatial, places, strict=True):
            index += dim.interleaved(place) if dim.stride > 1 else (place,)
        return total[(n, oc, *index)]

    return compute("interleave", (*total.shape[:2], *(dim.extent for dim in spatial)), element)


def _conv_transpose(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    x, w = operand(inputs, 0), operand(inputs, 1)
    _check_spatial("ConvTranspose", x, w)
    count = int(attrs["group"])
    groups = _groups("ConvTranspose", x.shape[1], w.shape[0] // count, w.shape[1], count)
    spatial = _upsamplings(x, w, attrs)
    w = _dilated(w, per_dim(attrs, "dilations", len(spatial), 1))
    source = pad_spatial(x, [dim.before for dim in spatial], [dim.count + dim.taps - 1 for dim in spatial], 0)
    names = spatial_names("k", len(spatial))
    taps = [reduce_axis(dim.taps, name) for dim, name in zip(spatial, names, strict=True)]
    sub = _sub_kernels(w, groups, spatial)
    total = _sub_pixel(source, sub, groups, spatial, taps, reduce_axis(groups.inputs, "ic"))
    return (_with_bias("convtranspose_bias", _interleave(total, spatial), x, input_at(inputs, 2)),)


def _conv_transpose_samples() -> Iterator[Sample]:
    x, w, b = numbers(2, 3, 3, 4), numbers(3, 2, 3, 3, seed=1), numbers(2)
    yield sample(x, w)
    yield sample(x, w, b, strides=[2, 2])
    yield sample(x, w, b, strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1])
    yield sample(x, numbers(3, 2, 4, 4), b, strides=[2, 2], pads=[1, 1, 1, 1])
    yield sample(x, w, strides=[3, 1], pads=[0, 2, 1, 0])
    yield sample(x, w, strides=[1, 1], dilations=[2, 2], pads=[1, 1, 1, 1])
    yield sample(x, w, strides=[2, 3], dilations=[3, 2])
    yield sample(x, w, strides=[3, 2], output_shape=[10, 8])
    yield sample(x, w, strides=[3, 2], output_shape=[8, 7], auto_pad="SAME_UPPER")
    for auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        yield sample(x, w, strides=[2, 2], auto_pad=auto_pad)
    yield sample(x, numbers(3, 2, 2, 2), strides=[4, 3])
    yield sample(numbers(1, 4, 3, 3), numbers(4, 3, 3, 3), numbers(6), group=2, strides=[2, 2])
    yield sample(numbers(1, 4, 3, 3), numbers(4, 1, 2, 2), group=4, strides=[2, 2])
    yield sample(numbers(1, 2, 5), numbers(2, 3, 3), numbers(3), strides=[2], pads=[1, 0])
    yield sample(numbers(1, 2, 3, 2, 3), numbers(2, 2, 2, 3, 2), numbers(2), strides=[2, 1, 2])
    yield sample(
        numbers(1, 1, 3, 3),
        np.ones((1, 1, 3, 3), np.float32),
        strides=[2, 2],
        pads=[1, 1, 1, 1],
        output_padding=[1, 1],
        opset=11,
    )


define(
    "ConvTranspose",
    OpKind.ANCHOR,
    _conv_transpose,
    attrs={**WINDOW_ATTRS, "group": 1, "output_padding": None, "output_shape": None},
    samples=_conv_transpose_samples,
    layout=LayoutHint.CHANNELS_LAST,
)
