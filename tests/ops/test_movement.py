"""Movement ops beyond their registry samples: which of them are views, and what malformed uses say."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mcompile.ops  # noqa: F401  (registers the ops)
from mcompile.dtypes import DType
from mcompile.errors import ModelError
from mcompile.ir.affine import as_affine
from mcompile.ir.evaluate import evaluate
from mcompile.ir.expr import Expr, Load, Var
from mcompile.ir.simplify import simplify
from mcompile.ir.tensor import Compute, build_dag, placeholder
from mcompile.ops.registry import Array, lookup


def apply(name: str, *arrays: Array, **attrs: Any) -> tuple[Array, ...]:
    op = lookup(name)
    assert op is not None
    tensors = [placeholder(f"x{i}", a.shape, DType.from_numpy(a.dtype)) for i, a in enumerate(arrays)]
    outputs = op.compute(tensors, {**op.attrs, **attrs})
    values = evaluate(build_dag(outputs), {f"x{i}": array for i, array in enumerate(arrays)})
    return tuple(values[output.name] for output in outputs)


def compute_of(name: str, *shapes: tuple[int, ...], **attrs: Any) -> Compute:
    op = lookup(name)
    assert op is not None
    tensors = [placeholder(f"x{i}", shape, DType.FLOAT32) for i, shape in enumerate(shapes)]
    return op.compute(tensors, {**op.attrs, **attrs})[0]


def source_indices(output: Compute) -> tuple[Expr, ...]:
    """The simplified indices of the only load."""
    ranges = {axis.var: (0, axis.extent - 1) for axis in output.axes}
    body = simplify(output.body, ranges)
    assert isinstance(body, Load)
    return body.indices


def is_affine(output: Compute) -> bool:
    return all(isinstance(term, Var) for index in source_indices(output) for term in as_affine(index).terms)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((2, 3, 4), (6, 4)),  # the merged dim comes from one of the source's dims by // and %, the rest is kept
        ((2, 12), (2, 3, 4)),
        ((2, 3, 4), (2, 1, 3, 4, 1)),
        ((4, 1, 6), (4, 6)),
        ((8, 6), (2, 4, 3, 2)),
    ],
)
def test_reshape_keeps_untouched_dims(source: tuple[int, ...], target: tuple[int, ...]) -> None:
    output = compute_of("Reshape", source, shape=np.array(target))
    splits_only = len([dim for dim in target if dim != 1]) >= len([dim for dim in source if dim != 1])
    assert is_affine(output) == splits_only


SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)


@given(SHAPES, st.randoms(use_true_random=False))
def test_reshape_keeps_row_major_order(shape: list[int], random: Any) -> None:
    factors = [factor for dim in shape for factor in ([2, 3] if dim == 6 else [2, 2] if dim == 4 else [dim])]
    random.shuffle(factors)
    cut = random.randrange(len(factors) + 1)
    target = [prod(factors[:cut]), *factors[cut:]]
    x = np.arange(prod(shape), dtype=np.float32).reshape(shape)
    np.testing.assert_array_equal(apply("Reshape", x, shape=np.array(target))[0], x.reshape(target))


@pytest.mark.parametrize(
    "output",
    [
        compute_of("Transpose", (2, 3, 4), perm=(2, 0, 1)),
        compute_of("Slice", (8, 6), starts=(6, 1), ends=(0, 5), axes=(0, 1), steps=(-2, 1)),
        compute_of("Split", (8, 6), axis=1, num_outputs=3),
        compute_of("Unsqueeze", (8, 6), axes=(0, 2)),
        compute_of("Squeeze", (1, 6)),
        compute_of("Expand", (1, 6), shape=(4, 6)),
        compute_of("Flatten", (6, 1, 5)),
        compute_of("Pad", (5, 6), pads=(-1, -2, 0, -1)),
    ],
    ids=lambda output: output.name,
)
def test_is_a_view(output: Compute) -> None:
    assert is_affine(output)


def test_uneven_split() -> None:
    parts = apply("Split", np.arange(7), num_outputs=4)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4, 5], [6]]


def test_concat_skips_empty_inputs() -> None:
    x = np.ones((2, 3), np.float32)
    output = compute_of("Concat", (2, 0), (2, 3), axis=1)
    assert len(output.inputs) == 1
    np.testing.assert_array_equal(apply("Concat", x[:, :0], x, axis=1)[0], x)


@given(st.integers(1, 5), st.integers(0, 12), st.integers(0, 12), st.sampled_from(["reflect", "edge", "wrap"]))
def test_pad_as_numpy(extent: int, before: int, after: int, mode: Any) -> None:
    x = np.arange(extent, dtype=np.float32)
    expected = np.pad(x, (before, after), mode=mode)
    np.testing.assert_array_equal(apply("Pad", x, pads=(before, after), mode=mode)[0], expected)


def test_pad_crops_before_it_pads() -> None:
    x = np.arange(6, dtype=np.float32)
    assert apply("Pad", x, pads=(-2, 1), mode="reflect")[0].tolist() == [2, 3, 4, 5, 4]
    assert apply("Pad", x, pads=(2, -3), mode="edge")[0].tolist() == [0, 0, 0, 1, 2]


@given(st.integers(0, 5), st.integers(-9, 9), st.integers(-9, 9), st.integers(-3, 3).filter(bool))
def test_slice_as_python(extent: int, start: int, stop: int, step: int) -> None:
    x = np.arange(extent, dtype=np.float32)
    bounds = {"starts": (start,), "ends": (stop,), "axes": (0,), "steps": (step,)}
    np.testing.assert_array_equal(apply("Slice", x, **bounds)[0], x[slice(start, stop, step)])


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("Reshape", {"shape": (7,)}),
        ("Reshape", {"shape": (-1, -1)}),
        ("Reshape", {"shape": (2, 3, 4, 0)}),
        ("Flatten", {"axis": 4}),
        ("Squeeze", {"axes": (0,)}),
        ("Unsqueeze", {"axes": (0, 0)}),
        ("Transpose", {"perm": (0, 1)}),
        ("Transpose", {"perm": (0, 1, 1)}),
        ("Split", {"split": (1, 2)}),
        ("Slice", {"starts": (0,), "ends": (1, 2)}),
        ("Slice", {"starts": (0,), "ends": (1,), "steps": (0,)}),
        ("Pad", {"pads": (1, 1)}),
        ("Pad", {"pads": (0, 0, -3, 0, 0, -2)}),
        ("Pad", {"pads": (1,) * 6, "mode": "mirror"}),
        ("Expand", {"shape": (5, 1, 1)}),
        ("Tile", {"repeats": (2,)}),
        ("Concat", {"axis": 3}),
    ],
)
def test_malformed_use(op: str, attrs: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        compute_of(op, (2, 3, 4), **attrs)
