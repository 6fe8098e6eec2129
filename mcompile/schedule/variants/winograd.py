"""Winograd's minimal filtering F(4x4, 3x3) for 3x3 convolutions of stride 1 (Lavin and Gray, arXiv:1509.09308).

    V[a, b, c, t] = (B^T d B)[a, b]         input tile t (6x6), 36 transformed values
    M[a, b, k, t] = sum_c U[a, b, k, c] * V[a, b, c, t]      36 small matrix products; U = G w G^T, a constant
    y[k, h, w] = (A^T M A)[h % 4, w % 4]    of tile (h // 4, w // 4)

4 times fewer multiplications than the direct sum; the result differs by rounding, about 1e-5 of its scale. Further axes
(batch, depth) and further reduce axes (a 3x3x3 kernel's depth) go along unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcompile.ir.affine import as_affine
from mcompile.ir.expr import (
    Binary,
    BinaryOp,
    Const,
    Expr,
    Load,
    Reduce,
    ReduceOp,
    Select,
    Var,
    all_of,
    select,
    substitute,
    transform,
    var,
)
from mcompile.ir.tensor import Axis, Compute, ComputeDag, Tensor, build_dag, compute

TILE = 4  # outputs of a tile along each side
POINTS = 6  # inputs of a tile along each side
_B_T = ((4, 0, -5, 0, 1, 0), (0, -4, -4, 1, 1, 0), (0, 4, -4, -1, 1, 0), (0, -2, -1, 2, 1, 0), (0, 2, -1, -2, 1, 0),
        (0, 4, 0, -5, 0, 1))  # fmt: skip
_G = ((1 / 4, 0, 0), (-1 / 6, -1 / 6, -1 / 6), (-1 / 6, 1 / 6, -1 / 6), (1 / 24, 1 / 12, 1 / 6),
      (1 / 24, -1 / 12, 1 / 6), (0, 0, 1))  # fmt: skip
_A_T = ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1))


@dataclass(frozen=True)
class Convolution:
    """A 3x3 convolution of stride 1: where its operands are indexed by rows, columns and the kernel's window."""

    compute: Compute
    image: Load
    kernel: Load
    height: Axis
    width: Axis
    window: tuple[Axis, Axis]

    @property
    def others(self) -> tuple[Axis, ...]:
        """Reduce axes besides the window: channels, depth."""
        return tuple(axis for axis in self.compute.reduce_axes if axis not in self.window)


def find_convolution(dag: ComputeDag) -> Convolution | None:
    """The dag's only reduction, if it is such a convolution; its last two axes are the image's rows and columns."""
    reductions = [compute for compute in dag.computes if compute.reduce_axes]
    if len(reductions) != 1 or len(reductions[0].axes) < 3:
        return None
    match reductions[0].body:
        case Reduce(ReduceOp.SUM, Binary(BinaryOp.MUL, Load() as image, Load() as kernel)):
            return _match(reductions[0], image, kernel)
    return None


def _match(conv: Compute, image: Load, kernel: Load) -> Convolution | None:
    height, width = conv.axes[-2:]
    if len(image.indices) < 3 or len(kernel.indices) < 3:
        return None
    rows, columns = _window_axis(conv, image.indices[-2], height), _window_axis(conv, image.indices[-1], width)
    if rows is None or columns is None or rows is columns:
        return None
    window = (rows, columns)
    if kernel.indices[-2:] != (rows.var, columns.var):
        return None
    outside = (*image.indices[:-2], *kernel.indices[:-2])
    used = {axis.var for axis in (height, width, *window)}
    if any(_uses(index, used) for index in outside) or not all(isinstance(index, Var) for index in kernel.indices):
        return None
    found = Convolution(conv, image, kernel, height, width, window)
    channels = [axis for axis in found.others if axis.var in image.indices and axis.var in kernel.indices]
    return found if channels else None


def _window_axis(conv: Compute, index: Expr, output: Axis) -> Axis | None:
    """The reduce axis k of extent 3 in an index `output + k`."""
    affine = as_affine(index)
    if (
        affine.const != 0
        or len(affine.terms) != 2
        or set(affine.terms.values()) != {1}
        or output.var not in affine.terms
    ):
        return None
    return next((axis for axis in conv.reduce_axes if axis.var in affine.terms and axis.extent == 3), None)


def _uses(index: Expr, variables: set[Var]) -> bool:
    return any(term in variables for term in as_affine(index).terms) or (
        not isinstance(index, Var) and any(_uses(child, variables) for child in index.children)
    )


def tile_grid(conv: Convolution) -> tuple[int, int]:
    """Tiles along the rows' and columns' direction."""
    return -(-conv.height.extent // TILE), -(-conv.width.extent // TILE)


def winograd_dag(dag: ComputeDag) -> ComputeDag | None:
    """`dag` with its convolution computed by F(4x4, 3x3); None if it has none that fits."""
    conv = find_convolution(dag)
    if conv is None:
        return None
    new = _rebuilt_convolution(conv)
    replaced: dict[str, Compute] = {conv.compute.name: new}
    for tensor in dag.computes[dag.computes.index(conv.compute) + 1 :]:
        replaced[tensor.name] = _with_sources(tensor, replaced)
    return build_dag([replaced.get(output.name, output) for output in dag.outputs])


def _with_sources(tensor: Compute, replaced: dict[str, Compute]) -> Compute:
    def change(node: Expr) -> Expr | None:
        if isinstance(node, Load) and replaced.get(node.source.name, node.source) is not node.source:
            return Load(replaced[node.source.name], node.indices)
        return None

    return Compute(
        tensor.name, tensor.shape, tensor.dtype, tensor.axes, tensor.reduce_axes, transform(tensor.body, change)
    )


def _combination(weights: Sequence[float], values: Sequence[Expr]) -> Expr:
    """sum_i weights[i] * values[i], without the zeros."""
    total: Expr | None = None
    for weight, value in zip(weights, values, strict=True):
        if weight == 0:
            continue
        term = value if abs(weight) == 1 else value * abs(weight)
        if total is None:
            total = term if weight > 0 else -term
        else:
            total = total + term if weight > 0 else total - term
    assert total is not None
    return total


def _rows(matrix: Sequence[Sequence[float]], row: Expr, values: Sequence[Expr]) -> Expr:
    """The combination that row `row` of `matrix` makes of `values`: where `row` is unrolled, a plain sum."""
    result = _combination(matrix[-1], values)
    for number in range(len(matrix) - 2, -1, -1):
        result = select(row.eq(number), _combination(matrix[number], values), result)
    return result


def _padded_image(conv: Convolution) -> Tensor:
    """The image, grown by zeros to whole tiles where it has to be."""
    image: Tensor = conv.image.source
    down, across = tile_grid(conv)
    need = (down * TILE + 2, across * TILE + 2)
    if image.shape[-2:] == need:
        return image
    height, width = image.shape[-2:]
    shape = (*image.shape[:-2], *need)

    def body(*index: Expr) -> Expr:
        inside = [index[-2] < height, index[-1] < width]
        if isinstance(image, Compute) and isinstance(image.body, Select) and isinstance(image.body.b, Const):
            names: dict[Var, Expr] = {axis.var: value for axis, value in zip(image.axes, index, strict=True)}
            padding = substitute(image.body, names)
            assert isinstance(padding, Select)
            return select(all_of([*inside, padding.condition]), padding.a, padding.b)
        return select(all_of(inside), image[index], 0)

    names = tuple(f"p{dim}" for dim in range(len(shape)))
    return compute(f"{conv.compute.name}_image", shape, body, axis_names=names)


def _rebuilt_convolution(conv: Convolution) -> Compute:
    name = conv.compute.name
    image = _padded_image(conv)
    down, across = tile_grid(conv)
    tiles = down * across
    outer = image.shape[:-2]
    lead = tuple(f"p{dim}" for dim in range(len(outer)))

    def half(*index: Expr) -> Expr:
        *place, t, a, j = index
        row, column = t // across * TILE, t % across * TILE + j
        return _rows(_B_T, a, [image[(*place, row + i, column)] for i in range(POINTS)])

    first = compute(f"{name}_bd", (*outer, tiles, POINTS, POINTS), half, axis_names=(*lead, "t", "a", "j"))

    def whole(*index: Expr) -> Expr:
        a, b, *place, t = index
        return _rows(_B_T, b, [first[(*place, t, a, j)] for j in range(POINTS)])

    v = compute(f"{name}_v", (POINTS, POINTS, *outer, tiles), whole, axis_names=("a", "b", *lead, "t"))
    products = _products(conv, v, _transformed_kernel(conv), tiles)
    return _output(conv, products, across)


def _transformed_kernel(conv: Convolution) -> Compute:
    kernel: Tensor = conv.kernel.source
    name = conv.compute.name
    outer = kernel.shape[:-2]
    lead = tuple(f"q{dim}" for dim in range(len(outer)))

    def half(*index: Expr) -> Expr:
        a, *place, k = index
        return _rows(_G, a, [kernel[(*place, i, k)] for i in range(3)])

    first = compute(f"{name}_gw", (POINTS, *outer, 3), half, axis_names=("a", *lead, "k"))

    def whole(*index: Expr) -> Expr:
        a, b, *place = index
        return _rows(_G, b, [first[(a, *place, k)] for k in range(3)])

    return compute(f"{name}_u", (POINTS, POINTS, *outer), whole, axis_names=("a", "b", *lead))


def _products(conv: Convolution, v: Compute, u: Compute, tiles: int) -> Compute:
    """The sums over channels (and whatever else is reduced) for each of the 36 points of each tile."""
    fresh = {axis: Axis(var(axis.var.name), axis.extent) for axis in conv.others}
    spatial = conv.compute.axes[:-2]

    def body(*index: Expr) -> Expr:
        a, b, *place, t = index
        names: dict[Var, Expr] = {axis.var: value for axis, value in zip(spatial, place, strict=True)}
        names |= {axis.var: new.var for axis, new in fresh.items()}
        left = tuple(substitute(i, names) for i in conv.image.indices[:-2])
        right = tuple(substitute(i, names) for i in conv.kernel.indices[:-2])
        return Reduce(ReduceOp.SUM, v[(a, b, *left, t)] * u[(a, b, *right)], tuple(axis.var for axis in fresh.values()))

    shape = (POINTS, POINTS, *(axis.extent for axis in spatial), tiles)
    names = ("a", "b", *(axis.var.name for axis in spatial), "t")
    return compute(f"{conv.compute.name}_m", shape, body, tuple(fresh.values()), names)


def _output(conv: Convolution, products: Compute, across: int) -> Compute:
    name = conv.compute.name
    spatial = conv.compute.axes[:-2]
    lead = tuple(axis.var.name for axis in spatial)
    outer = tuple(axis.extent for axis in spatial)
    tiles = products.shape[-1]

    def half(*index: Expr) -> Expr:
        *place, t, r, b = index
        return _rows(_A_T, r, [products[(a, b, *place, t)] for a in range(POINTS)])

    first = compute(f"{name}_am", (*outer, tiles, TILE, POINTS), half, axis_names=(*lead, "t", "r", "b"))

    def whole(*index: Expr) -> Expr:
        *place, h, w = index
        t = h // TILE * across + w // TILE
        return _rows(_A_T, w % TILE, [first[(*place, t, h % TILE, b)] for b in range(POINTS)])

    return compute(name, conv.compute.shape, whole, axis_names=(*lead, conv.height.var.name, conv.width.var.name))
