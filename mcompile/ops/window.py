"""Windows that slide over spatial dims: what convolution and pooling share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcompile.errors import ModelError
from mcompile.ir.expr import Const, Expr, all_of, select
from mcompile.ir.tensor import Axis, Tensor, compute, reduce_axis
from mcompile.ops.index_math import ints
from mcompile.ops.registry import Attrs

WINDOW_ATTRS = {"auto_pad": "NOTSET", "dilations": None, "kernel_shape": None, "pads": None, "strides": None}


@dataclass(frozen=True)
class Window:
    """A kernel along one spatial dim: `extent` placements over `size` elements and `before` + `after` of padding."""

    size: int
    kernel: int
    stride: int
    dilation: int
    before: int
    after: int
    extent: int

    @property
    def span(self) -> int:
        """Padded elements from the first to the last that any placement reads."""
        return (self.extent - 1) * self.stride + (self.kernel - 1) * self.dilation + 1

    def position(self, placement: Expr, tap: Expr) -> Expr:
        """The padded element that a placement's tap reads."""
        return placement * self.stride + tap * self.dilation


def per_dim(attrs: Attrs, name: str, rank: int, default: int) -> tuple[int, ...]:
    """An attribute of one integer a spatial dim. Raises ModelError on another count."""
    values = (default,) * rank if attrs[name] is None or len(attrs[name]) == 0 else ints(attrs[name])
    if len(values) != rank:
        raise ModelError(f"{name}: expected {rank} values, got {list(values)}")
    return values


def split_padding(total: int, auto_pad: str) -> tuple[int, int]:
    """Before and after; the odd one goes after for SAME_UPPER, else before."""
    half = total // 2
    return (half, total - half) if auto_pad == "SAME_UPPER" else (total - half, half)


def windows(sizes: Sequence[int], kernel: Sequence[int], attrs: Attrs, ceil_mode: bool = False) -> tuple[Window, ...]:
    """The window of each spatial dim. Raises ModelError where no placement fits."""
    rank = len(sizes)
    if len(kernel) != rank:
        raise ModelError(f"kernel: expected {rank} dims, got {list(kernel)}")
    strides, dilations = per_dim(attrs, "strides", rank, 1), per_dim(attrs, "dilations", rank, 1)
    pads = per_dim(attrs, "pads", 2 * rank, 0)
    result = []
    for dim in range(rank):
        placed = _place(
            sizes[dim], kernel[dim], strides[dim], dilations[dim], pads[dim], pads[rank + dim], attrs, ceil_mode
        )
        if placed.extent < 1:
            raise ModelError(f"a kernel of {list(kernel)} does not fit spatial dims {list(sizes)}")
        result.append(placed)
    return tuple(result)


def _place(
    size: int, kernel: int, stride: int, dilation: int, before: int, after: int, attrs: Attrs, ceil_mode: bool
) -> Window:
    reach = (kernel - 1) * dilation + 1
    auto_pad = attrs["auto_pad"]
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        extent = -(-size // stride)
        before, after = split_padding(max((extent - 1) * stride + reach - size, 0), auto_pad)
    elif auto_pad == "VALID":
        before, after, extent = 0, 0, (size - reach) // stride + 1
    else:
        room = size + before + after - reach
        extent = (-(-room // stride) if ceil_mode else room // stride) + 1
        if ceil_mode and (extent - 1) * stride >= size + before:
            extent -= 1  # a placement that would start in the padding behind is dropped
    return Window(size, kernel, stride, dilation, before, after, extent)


def pad_spatial(x: Tensor, before: Sequence[int], spans: Sequence[int], fill: float) -> Tensor:
    """`x` with `before` elements of `fill` ahead of each spatial dim (negative: cut off) and `spans` in all.

    `x` itself where no element of `fill` is needed.
    """
    sizes = x.shape[2:]
    if all(ahead == 0 and span <= size for ahead, span, size in zip(before, spans, sizes, strict=True)):
        return x

    def element(n: Expr, c: Expr, *spatial: Expr) -> Expr:
        places = [index - ahead for index, ahead in zip(spatial, before, strict=True)]
        value = x[(n, c, *places)]
        inside = inside_conditions(places, before, spans, sizes)
        return select(all_of(inside), value, Const(fill, x.dtype)) if inside else value

    return compute("pad", (*x.shape[:2], *spans), element)


def inside_conditions(
    places: Sequence[Expr], before: Sequence[int], spans: Sequence[int], sizes: Sequence[int]
) -> list[Expr]:
    """What must hold for `places`, each of [-before, span - before), to lie in [0, size)."""
    conditions = []
    for place, ahead, span, size in zip(places, before, spans, sizes, strict=True):
        if ahead > 0:
            conditions.append(place >= 0)
        if span - ahead > size:
            conditions.append(place < size)
    return conditions


def pad_for(x: Tensor, spatial: Sequence[Window], fill: float) -> Tensor:
    """`x` padded as far as the windows read."""
    return pad_spatial(x, [window.before for window in spatial], [window.span for window in spatial], fill)


_SPATIAL = ("d", "h", "w")


def spatial_names(prefix: str, rank: int) -> list[str]:
    """oh, ow for two dims; od, oh, ow for three; numbered for more."""
    if rank > len(_SPATIAL):
        return [f"{prefix}{dim}" for dim in range(rank)]
    return [prefix + letter for letter in _SPATIAL[len(_SPATIAL) - rank :]]


def tap_axes(spatial: Sequence[Window]) -> list[Axis]:
    """The reduce axes over the kernel: kh, kw, ..."""
    names = spatial_names("k", len(spatial))
    return [reduce_axis(window.kernel, name) for window, name in zip(spatial, names, strict=True)]


def positions(spatial: Sequence[Window], placements: Sequence[Expr], taps: Sequence[Axis]) -> list[Expr]:
    triples = zip(spatial, placements, taps, strict=True)
    return [window.position(placement, tap.var) for window, placement, tap in triples]
