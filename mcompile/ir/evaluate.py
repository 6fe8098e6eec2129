"""Values of tensor computes with numpy: all elements of a Compute at once, in pieces that bound the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from mcompile.dtypes import DType
from mcompile.errors import InternalError
from mcompile.ir import semantics
from mcompile.ir.affine import as_affine
from mcompile.ir.bounds import bounds
from mcompile.ir.expr import (
    Binary,
    BinaryOp,
    Call,
    Cast,
    Compare,
    Const,
    Expr,
    Load,
    Reduce,
    ReduceOp,
    Select,
    Unary,
    Var,
    walk,
)
from mcompile.ir.tensor import Axis, Compute, ComputeDag, Tensor

Array = np.ndarray[Any, np.dtype[Any]]
LoadFunction = Callable[[Load, "Lanes"], Any]
_PIECE = 1 << 18  # elements of the largest array of a piece: many may be alive at once
_CONTRACTION_PIECE = 4 << 20  # of a contraction: only a few are


class Lanes:
    """Evaluates expressions for many values of the variables at once.

    `env` gives each variable an array; all of them broadcast together. `mask` says which lanes count: on the others
    a load may be out of bounds, and its value is arbitrary. `load` reads a Load's source.
    """

    def __init__(
        self, env: Mapping[Var, Any], load: LoadFunction, mask: Any = None, outer: Lanes | None = None
    ) -> None:
        self.env = env
        self.mask = mask
        self._load = load
        self._outer = outer
        self._memo: dict[Expr, Any] = {}

    def masked(self, mask: Any) -> Lanes:
        """The same lanes where `mask` holds too."""
        return Lanes(self.env, self._load, mask if self.mask is None else self.mask & mask, self)

    def __call__(self, expr: Expr) -> Any:
        known = self._known(expr)
        if known is not None:
            return known
        stack = [(expr, False)]  # a long chain must not recurse
        while stack:
            node, ready = stack.pop()
            if self._known(node) is not None:
                continue
            if ready:
                self._memo[node] = self._value(node)
            else:
                stack.append((node, True))
                needed = (node.condition,) if isinstance(node, Select) else node.children
                stack.extend((child, False) for child in needed)
        return self._memo[expr]

    def _known(self, expr: Expr) -> Any:
        """The value, if these lanes or a superset of them have it."""
        lanes: Lanes | None = self
        while lanes is not None:
            if expr in lanes._memo:
                return lanes._memo[expr]
            lanes = lanes._outer
        return None

    def _value(self, expr: Expr) -> Any:
        match expr:
            case Var():
                return self.env[expr]
            case Const(value, dtype):
                return semantics.constant(value, dtype)
            case Unary(op, x):
                return semantics.UNARY[op](self(x))
            case Binary(op, a, b):
                return semantics.BINARY[op](self(a), self(b))
            case Compare(op, a, b):
                return semantics.COMPARE[op](self(a), self(b))
            case Select(condition, a, b):
                return self._select(self(condition), a, b)
            case Cast(dtype, x):
                return semantics.cast(self(x), dtype)
            case Call(function, args, _):
                return semantics.INTRINSIC[function](*map(self, args))
            case Load():
                return self._load(expr, self)
        raise InternalError(f"no value for {type(expr).__name__} inside an expression")

    def _select(self, condition: Any, a: Expr, b: Expr) -> Any:
        if np.all(condition):
            return self(a)
        if not np.any(condition):
            return self(b)
        return np.where(condition, self.masked(condition)(a), self.masked(~condition)(b))[()]

    def checked(self, index: Any, extent: int, what: str) -> Any:
        """`index` clamped to [0, extent). Raises InternalError if it is out of bounds on a lane that counts."""
        if index.size == 0 or (index.min() >= 0 and index.max() < extent):
            return index
        outside = (index < 0) | (index >= extent)
        if self.mask is None or np.any(outside & self.mask):
            raise InternalError(f"{what}: index {_extreme(index, outside, self.mask)} is outside [0, {extent})")
        return np.clip(index, 0, max(extent - 1, 0))


def _extreme(index: Any, outside: Any, mask: Any) -> int:
    active = outside if mask is None else outside & mask
    return int(np.broadcast_to(index, active.shape)[active].flat[0])


def evaluate(dag: ComputeDag, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The value of every Compute of `dag`, by name, given its placeholders' values by name.

    Sums and products of floats are accumulated in float64. Raises InternalError for an index out of bounds.
    """
    values: dict[Tensor, Array] = {}
    for tensor in dag.placeholders:
        array = np.asarray(arrays[tensor.name])
        if array.shape != tensor.shape or array.dtype != tensor.dtype.numpy:
            raise InternalError(f"{tensor.name}: expected {tensor.type}, got {array.dtype}{list(array.shape)}")
        values[tensor] = array
    with np.errstate(all="ignore"):
        for compute in dag.computes:
            values[compute] = _Evaluator(compute, values).result()
    return {compute.name: values[compute] for compute in dag.computes}


_Piece = tuple[tuple[int, int], ...]  # begin and end of each axis


class _Evaluator:
    """One Compute. A *grid* is the product of its axes, then its reduce axes."""

    def __init__(self, compute: Compute, values: Mapping[Tensor, Array]) -> None:
        self._compute = compute
        self._values = values
        self._axes: tuple[Axis, ...] = (*compute.axes, *compute.reduce_axes)
        self._position = {axis.var: dim for dim, axis in enumerate(self._axes)}
        self._rank = len(compute.axes)

    def result(self) -> Array:
        compute = self._compute
        body = compute.body
        if isinstance(body, Reduce):
            return self._reduced(body)
        result: Array = np.empty(compute.shape, compute.dtype.numpy)
        everything = [set(range(len(self._axes)))]
        for piece in self._pieces(everything, _PIECE):
            result[_slices(piece)] = self._lanes(piece)(body)
        return result

    def _reduced(self, body: Reduce) -> Array:
        compute = self._compute
        identity = body.op.identity(compute.dtype)
        assert isinstance(identity, Const)
        dtype = semantics.accumulator(body.op, compute.dtype)
        total: Array = np.full(compute.shape, identity.value, dtype)
        factors = self._factors(body)
        used = [self._used(factor) for factor in factors]
        pieces = self._pieces(used, _CONTRACTION_PIECE) if used else self._pieces([set(range(len(self._axes)))], _PIECE)
        for piece in pieces:
            lanes = self._lanes(piece)
            if used:
                part = self._contract([lanes(factor) for factor in factors], used, piece)
            else:
                value = np.broadcast_to(lanes(body.value), [end - begin for begin, end in piece])
                part = semantics.reduce_last(body.op, value, len(body.axes), compute.dtype)
            where = _slices(piece[: self._rank])
            total[where] = semantics.BINARY[body.op.combiner](total[where], part.astype(dtype))
        return total.astype(compute.dtype.numpy)

    # pieces of the grid

    def _pieces(self, arrays: Sequence[set[int]], limit: int) -> Iterator[_Piece]:
        """The grid cut so that no array over any of the sets of dims has more than `limit` elements."""
        if any(axis.extent == 0 for axis in self._axes):
            return
        stack: list[_Piece] = [tuple((0, axis.extent) for axis in self._axes)]
        while stack:
            piece = stack.pop()
            sizes = [end - begin for begin, end in piece]
            largest = max(arrays, key=lambda dims: prod(sizes[dim] for dim in dims))
            if prod(sizes[dim] for dim in largest) <= limit:
                yield piece
                continue
            dim = next(dim for dim in sorted(largest) if sizes[dim] > 1)
            begin, end = piece[dim]
            middle = (begin + end) // 2
            stack += [_replaced(piece, dim, (middle, end)), _replaced(piece, dim, (begin, middle))]

    def _lanes(self, piece: _Piece) -> Lanes:
        env = {}
        for dim, (axis, (begin, end)) in enumerate(zip(self._axes, piece, strict=True)):
            shape = [1] * len(self._axes)
            shape[dim] = end - begin
            env[axis.var] = np.arange(begin, end, dtype=np.int64).astype(axis.var.dtype.numpy).reshape(shape)

        def load(expr: Load, lanes: Lanes) -> Any:
            return self._load(expr, lanes, piece)

        return Lanes(env, load)

    # loads

    def _load(self, expr: Load, lanes: Lanes, piece: _Piece) -> Any:
        array = self._values[expr.source]
        view = self._strided(expr, array, piece)
        if view is not None:
            return view
        indices = []
        for index, extent in zip(expr.indices, array.shape, strict=True):
            what = f"{self._compute.name} loads {expr.source.name}"
            indices.append(lanes.checked(lanes(index), extent, what))
        if 0 in array.shape:  # every lane is masked out
            return array.dtype.type(0)
        return array[tuple(indices)]

    def _strided(self, expr: Load, array: Array, piece: _Piece) -> Array | None:
        """The loaded elements as a view of `array`, if the indices are affine in the axes and within bounds."""
        strides = [0] * len(self._axes)
        first = []
        for index, extent, stride in zip(expr.indices, array.shape, array.strides, strict=True):
            affine = as_affine(index)
            low = high = start = affine.const
            for term, k in affine.terms.items():
                dim = self._position.get(term)  # type: ignore[call-overload]
                if dim is None:
                    return None
                begin, end = piece[dim]
                strides[dim] += k * stride
                start += k * begin
                low += k * (begin if k > 0 else end - 1)
                high += k * (end - 1 if k > 0 else begin)
            if low < 0 or high >= extent:
                return None
            first.append(start)
        shape = [end - begin if stride else 1 for (begin, end), stride in zip(piece, strides, strict=True)]
        origin = array[tuple(slice(start, None) for start in first)]
        return np.lib.stride_tricks.as_strided(origin, shape, strides, writeable=False)

    # contractions

    def _used(self, expr: Expr) -> set[int]:
        """Dims of the grid that `expr` depends on."""
        return {self._position[node] for node in walk(expr) if isinstance(node, Var)}

    def _factors(self, body: Reduce) -> tuple[Expr, ...]:
        """a and b of a sum of a * b that float64 computes without loss (or with less than the sum's dtype)."""
        match body:
            case Reduce(ReduceOp.SUM, Binary(BinaryOp.MUL, a, b), _):
                if body.dtype.is_float or self._is_exact(a, b):
                    return a, b
        return ()

    def _is_exact(self, a: Expr, b: Expr) -> bool:
        if a.dtype is DType.INT64 or not a.dtype.is_integer:
            return False
        terms = prod(axis.extent for axis in self._compute.reduce_axes)
        x, y = bounds(a), bounds(b)
        return x is not None and y is not None and max(map(abs, x)) * max(map(abs, y)) * terms < 1 << 53

    def _contract(self, factors: list[Any], used: list[set[int]], piece: _Piece) -> Array:
        """sum(a * b) over the reduce dims of a piece, as a batched matrix product in float64."""
        rank = len(self._axes)
        sizes = [end - begin for begin, end in piece]
        a, b = (_spread(factor, dims, sizes) for factor, dims in zip(factors, used, strict=True))
        reduced = set(range(self._rank, rank))
        scale = prod(sizes[dim] for dim in reduced - used[0] - used[1])
        a = _summed(a, reduced & used[0] - used[1])
        b = _summed(b, reduced & used[1] - used[0])
        both, outer = used[0] & used[1], set(range(self._rank))
        batch, k = sorted(both & outer), sorted(both & reduced)
        m, n = sorted((used[0] - both) & outer), sorted((used[1] - both) & outer)
        count = [prod(sizes[dim] for dim in dims) for dims in (batch, m, k, n)]
        rest_a = sorted(set(range(rank)) - set(batch) - set(m) - set(k))
        rest_b = sorted(set(range(rank)) - set(batch) - set(n) - set(k))
        left = a.transpose([*batch, *m, *k, *rest_a]).reshape(count[0], count[1], count[2])
        right = b.transpose([*batch, *k, *n, *rest_b]).reshape(count[0], count[2], count[3])
        unused = sorted(outer - set(batch) - set(m) - set(n))
        order = [*batch, *m, *n, *unused]
        product = (left @ right * scale).reshape([1 if dim in unused else sizes[dim] for dim in order])
        return np.broadcast_to(product.transpose(np.argsort(order)), sizes[: self._rank])


def _spread(value: Any, dims: set[int], sizes: Sequence[int]) -> Array:
    """`value` in float64, at its full size along `dims` and 1 along the others."""
    shape = [size if dim in dims else 1 for dim, size in enumerate(sizes)]
    return np.broadcast_to(np.asarray(value, np.float64), shape)


def _summed(value: Array, dims: set[int]) -> Array:
    return value.sum(axis=tuple(dims), keepdims=True) if dims else value


def _slices(piece: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(begin, end) for begin, end in piece)


def _replaced(piece: _Piece, dim: int, bounds: tuple[int, int]) -> _Piece:
    return (*piece[:dim], bounds, *piece[dim + 1 :])
