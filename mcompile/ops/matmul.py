"""Contractions of matrices: MatMul, Gemm, Einsum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from mcompile.errors import ModelError
from mcompile.ir.expr import Expr, ReduceOp
from mcompile.ir.tensor import Axis, Compute, Tensor, compute, reduce_axis, reduce_over
from mcompile.ops.broadcast import broadcast_shape, load_broadcast
from mcompile.ops.index_math import operand
from mcompile.ops.precision import scaled, widened
from mcompile.ops.registry import REQUIRED, Attrs, Inputs, OpKind, Sample, define, input_at
from mcompile.ops.sampling import numbers, sample


def contraction(
    name: str, shape: Sequence[int], value: Callable[..., Expr], axes: Sequence[Axis], names: Sequence[str] = ()
) -> Compute:
    """The sum of `value`, a product of (widened) loads, over `axes`."""
    return compute(name, shape, lambda *i: reduce_over(ReduceOp.SUM, value(*i), axes), axes, names)


def epilogue(name: str, total: Compute, x: Tensor, function: Callable[..., Expr] | None = None) -> Compute:
    """`function(total, indices)` as a value of the dtype of `x`; `total` itself where there is nothing to do."""
    if function is None and total.dtype is x.dtype:
        return total

    def element(*i: Expr) -> Expr:
        value = total[i] if function is None else function(total[i], i)
        return value.astype(x.dtype)

    return compute(name, total.shape, element)


def _check_inner(name: str, a: Sequence[int], b: Sequence[int], left: int, right: int) -> None:
    if left != right:
        raise ModelError(f"{name}: inner dims differ: {list(a)} and {list(b)}")


def _matmul(inputs: Inputs, _: Attrs) -> tuple[Compute, ...]:
    """numpy's matmul: a 1-d operand counts as a row (left) or column (right), and its dim of 1 is dropped."""
    a, b = operand(inputs, 0), operand(inputs, 1)
    if not a.shape or not b.shape:
        raise ModelError("MatMul: operands must have at least one dim")
    row, column = len(a.shape) > 1, len(b.shape) > 1
    inner = b.shape[-2] if column else b.shape[0]
    _check_inner("MatMul", a.shape, b.shape, a.shape[-1], inner)
    batch = broadcast_shape([a.shape[:-2], b.shape[:-2]])
    k = reduce_axis(inner)

    def product(*i: Expr) -> Expr:
        outer = i[: len(batch)]
        a_index = (i[len(batch)], k.var) if row else (k.var,)
        b_index = (k.var, i[-1]) if column else (k.var,)
        return _load_batched(a, outer, a_index) * _load_batched(b, outer, b_index)

    shape = (*batch, *([a.shape[-2]] if row else []), *([b.shape[-1]] if column else []))
    names = [*(f"b{dim}" for dim in range(len(batch))), *(["i"] if row else []), *(["j"] if column else [])]
    return (epilogue("matmul_result", contraction("matmul", shape, product, [k], names), a),)


def _load_batched(tensor: Tensor, outer: Sequence[Expr], matrix_index: tuple[Expr, ...]) -> Expr:
    batch = tensor.shape[:-2]
    aligned = outer[len(outer) - len(batch) :] if batch else ()
    index = tuple(0 if extent == 1 else i for i, extent in zip(aligned, batch, strict=True))
    return widened(tensor[(*index, *matrix_index)])


def _matmul_samples() -> Iterator[Sample]:
    for a, b in (
        ((3, 4), (4, 5)),
        ((2, 3, 4), (4, 5)),
        ((2, 1, 3, 4), (5, 4, 2)),
        ((4,), (4, 5)),
        ((2, 3, 4), (4,)),
        ((4,), (4,)),
        ((4,), (2, 4, 3)),
        ((1, 3, 4), (2, 4, 1)),
    ):
        yield sample(numbers(*a), numbers(*b, seed=1))
    for dtype in ("int32", "float16", "float64"):
        yield sample(numbers(3, 4, dtype=dtype), numbers(4, 2, dtype=dtype, seed=1))


define("MatMul", OpKind.ANCHOR, _matmul, samples=_matmul_samples)


# --- Gemm ---


def _gemm(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    a, b, c = operand(inputs, 0), operand(inputs, 1), input_at(inputs, 2)
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise ModelError(f"Gemm: expected two matrices, got {list(a.shape)} and {list(b.shape)}")
    trans_a, trans_b = bool(attrs["transA"]), bool(attrs["transB"])
    rows, inner = reversed(a.shape) if trans_a else a.shape
    other, columns = reversed(b.shape) if trans_b else b.shape
    _check_inner("Gemm", a.shape, b.shape, inner, other)
    k = reduce_axis(inner)

    def product(i: Expr, j: Expr) -> Expr:
        left = a[k.var, i] if trans_a else a[i, k.var]
        right = b[j, k.var] if trans_b else b[k.var, j]
        return widened(left) * widened(right)

    total = contraction("gemm", (rows, columns), product, [k], ("i", "j"))
    alpha, beta = attrs["alpha"], attrs["beta"]
    if alpha == 1 and (c is None or beta == 0):
        return (epilogue("gemm_result", total, a),)
    if c is not None:
        broadcast_shape([(rows, columns), c.shape])

    def element(value: Expr, i: Sequence[Expr]) -> Expr:
        value = scaled(value, alpha)
        return value if c is None or beta == 0 else value + scaled(widened(load_broadcast(c, i)), beta)

    return (epilogue("gemm_result", total, a, element),)


def _gemm_samples() -> Iterator[Sample]:
    a, b = numbers(3, 4), numbers(4, 5, seed=1)
    yield sample(a, b)
    yield sample(a, b, alpha=0.5)
    yield sample(a.T.copy(), b, numbers(5), transA=1)
    yield sample(a, b.T.copy(), numbers(3, 1), transB=1, beta=0.25)
    yield sample(a.T.copy(), b.T.copy(), numbers(), transA=1, transB=1, alpha=2.0, beta=0.0)
    yield sample(a, b, numbers(3, 5), opset=7)
    yield sample(a, b, numbers(1, 5), opset=9, alpha=0.1, beta=2.0)
    yield sample(*(numbers(*s, dtype="float16") for s in ((3, 4), (4, 5), (5,))))
    yield sample(*(numbers(*s, dtype="int32") for s in ((3, 4), (4, 5), (5,))))


define(
    "Gemm",
    OpKind.ANCHOR,
    _gemm,
    attrs={"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0},
    samples=_gemm_samples,
)


# --- Einsum ---


def _terms(equation: str, ranks: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """The labels of each operand's dims and of the result's; an ellipsis' dims are "0", "1", ... from the right."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    if len(operands) != len(ranks):
        raise ModelError(f"Einsum: equation {equation!r} has {len(operands)} terms, got {len(ranks)} inputs")
    terms = [_labels(term, rank, equation) for term, rank in zip(operands, ranks, strict=True)]
    dots = sorted({label for term in terms for label in term if label.isdigit()}, key=int, reverse=True)
    if not arrow:
        letters = sorted(label for label in left if label.isalpha())
        return terms, dots + [label for label in letters if letters.count(label) == 1]
    before, ellipsis, after = right.partition("...")
    return terms, [*before, *(dots if ellipsis else []), *after]


def _labels(term: str, rank: int, equation: str) -> list[str]:
    before, ellipsis, after = term.partition("...")
    hidden = rank - len(before) - len(after)
    if hidden < 0 or (hidden and not ellipsis):
        raise ModelError(f"Einsum: term {term!r} of {equation!r} does not fit an input of {rank} dims")
    return [*before, *(str(position) for position in reversed(range(hidden))), *after]


def _extents(terms: Sequence[Sequence[str]], tensors: Sequence[Tensor]) -> dict[str, int]:
    extents: dict[str, int] = {}
    for term, tensor in zip(terms, tensors, strict=True):
        for label, extent in zip(term, tensor.shape, strict=True):
            known = extents.setdefault(label, extent)
            if known != extent and 1 not in (known, extent):
                raise ModelError(f"Einsum: dim {label!r} is {known} and {extent}")
            extents[label] = max(known, extent)
    return extents


def _einsum(inputs: Inputs, attrs: Attrs) -> tuple[Compute, ...]:
    tensors = [operand(inputs, position) for position in range(len(inputs))]
    terms, result = _terms(attrs["equation"], [len(tensor.shape) for tensor in tensors])
    extents = _extents(terms, tensors)
    unknown = [label for label in result if label not in extents]
    if unknown:
        raise ModelError(f"Einsum: {attrs['equation']!r}: result dim {unknown[0]!r} is in no term")
    summed = {label: reduce_axis(extent, f"k_{label}") for label, extent in extents.items() if label not in result}

    def product(*i: Expr) -> Expr:
        values = {**dict(zip(result, i, strict=True)), **{label: axis.var for label, axis in summed.items()}}
        loads = [_load_term(tensor, term, values) for tensor, term in zip(tensors, terms, strict=True)]
        total = loads[0]
        for load in loads[1:]:
            total = total * load
        return total

    shape = [extents[label] for label in result]
    if not summed:
        return (compute("einsum", shape, lambda *i: product(*i).astype(tensors[0].dtype)),)
    return (epilogue("einsum_result", contraction("einsum", shape, product, list(summed.values())), tensors[0]),)


def _load_term(tensor: Tensor, term: Sequence[str], values: Mapping[str, Expr]) -> Expr:
    pairs = zip(term, tensor.shape, strict=True)
    return widened(tensor[tuple(0 if extent == 1 else values[label] for label, extent in pairs)])


def _einsum_samples() -> Iterator[Sample]:
    for equation, *shapes in (
        ("ij,jk->ik", (3, 4), (4, 2)),
        ("ij,jk", (3, 4), (4, 2)),
        ("bhqd,bhkd->bhqk", (2, 2, 3, 4), (2, 2, 5, 4)),
        ("bhqk,bkhd->bqhd", (2, 2, 3, 5), (2, 5, 2, 4)),
        ("...ij,...jk->...ik", (2, 3, 4), (1, 4, 5)),
        ("i,j->ij", (3,), (4,)),
        ("ij->ji", (3, 4)),
        ("ii->i", (4, 4)),
        ("ij->", (3, 4)),
        ("ij->i", (3, 4)),
        ("ij,jk,kl->il", (2, 3), (3, 4), (4, 2)),
        (" b i j , b j -> b i", (2, 3, 4), (2, 4)),
    ):
        yield sample(*(numbers(*shape, seed=n) for n, shape in enumerate(shapes)), equation=equation)
    yield sample(*(numbers(3, 3, dtype="float16", seed=n) for n in range(2)), equation="ij,jk->ik")


define("Einsum", OpKind.ANCHOR, _einsum, attrs={"equation": REQUIRED}, samples=_einsum_samples)
