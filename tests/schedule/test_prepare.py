"""Constants as a schedule wants them: packed in tiles, computed, or both."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcompile.ir.tensor import ComputeDag, build_dag, compute, placeholder
from mcompile.schedule.lower import Preparation
from mcompile.schedule.prepare import constant_inputs, pack, preparation_key, prepare
from mcompile.schedule.steps import LayoutRewrite
from tests.schedule.programs import F32


def matrix(rows: int, columns: int) -> np.ndarray:
    return np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)


def test_pack_transposes() -> None:
    array = matrix(3, 4)
    np.testing.assert_array_equal(pack(array, LayoutRewrite("w", (0, 0), ((1, 0), (0, 0)))), array.T)


def test_pack_fills_the_last_tile_with_zeros() -> None:
    """W[n, k] -> W'[n // 2, k, n % 2]"""
    packed = pack(matrix(3, 2), LayoutRewrite("w", (2, 0), ((0, 0), (1, 0), (0, 1))))
    np.testing.assert_array_equal(packed, [[[0, 2], [1, 3]], [[4, 0], [5, 0]]])


def test_pack_cuts_both_dims() -> None:
    packed = pack(matrix(4, 4), LayoutRewrite("w", (2, 2), ((0, 0), (1, 0), (0, 1), (1, 1))))
    assert packed.shape == (2, 2, 2, 2)
    np.testing.assert_array_equal(packed[1, 0], [[8, 9], [12, 13]])


def test_pack_keeps_the_dtype() -> None:
    assert pack(matrix(3, 2).astype(np.int8), LayoutRewrite("w", (2, 0), ((0, 0), (1, 0), (0, 1)))).dtype == np.int8


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], LayoutRewrite]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    tiles = tuple(draw(st.sampled_from([0, 1, 2, 3, 8])) for _ in shape)
    parts = [(dim, part) for dim, tile in enumerate(tiles) for part in range(2 if tile else 1)]
    return shape, LayoutRewrite("w", tiles, tuple(draw(st.permutations(parts))))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(layouts())
def test_every_element_is_where_the_layout_says(drawn: tuple[tuple[int, ...], LayoutRewrite]) -> None:
    shape, layout = drawn
    array = np.arange(1, 1 + np.prod(shape), dtype=np.int64).reshape(shape)
    packed = pack(array, layout)
    for index in np.ndindex(*shape):
        place = tuple(
            index[dim] if not (tile := layout.tiles[dim]) else index[dim] % tile if part else index[dim] // tile
            for dim, part in layout.order
        )
        assert packed[place] == array[index]
    assert packed.sum() == array.sum()  # and zeros elsewhere


def scaled() -> ComputeDag:
    v, w = placeholder("v", (3,), F32), placeholder("w", (3, 2), F32)
    return build_dag([compute("scaled", (3, 2), lambda i, j: w[i, j] * v[i], axis_names=("i", "j"))])


def test_prepare_evaluates_then_packs() -> None:
    layout = LayoutRewrite("scaled", (0, 0), ((1, 0), (0, 0)))
    constants = {"v": np.array([1, 2, 3], np.float32), "w": matrix(3, 2)}
    preparation = Preparation("scaled", scaled(), layout)
    result = prepare(preparation, constants)
    np.testing.assert_array_equal(result, (matrix(3, 2) * [[1], [2], [3]]).T)
    assert result.flags.c_contiguous
    np.testing.assert_array_equal(prepare(Preparation("scaled", scaled(), None), constants).T, result)


def test_prepare_of_a_constant() -> None:
    preparation = Preparation("w", None, LayoutRewrite("w", (2, 0), ((0, 0), (1, 0), (0, 1))))
    result = prepare(preparation, {"w": matrix(3, 2), "unused": matrix(1, 1)})
    assert result.shape == (2, 2, 2)
    assert result.flags.c_contiguous


def test_constant_inputs() -> None:
    assert set(constant_inputs(Preparation("scaled", scaled(), None))) == {"v", "w"}
    assert constant_inputs(Preparation("w", None, None)) == ("w",)


_TILES = LayoutRewrite("w", (2, 0), ((0, 0), (1, 0), (0, 1)))


@pytest.mark.parametrize(
    "other",
    [
        Preparation("w", None, LayoutRewrite("w", (4, 0), ((0, 0), (1, 0), (0, 1)))),
        Preparation("w", None, LayoutRewrite("w", (2, 0), ((1, 0), (0, 0), (0, 1)))),
        Preparation("scaled", scaled(), None),
    ],
)
def test_keys_differ_by_what_is_done(other: Preparation) -> None:
    assert preparation_key(Preparation("w", None, _TILES)) != preparation_key(other)


def test_keys_of_equal_work_are_equal() -> None:
    """Dags made anew have variables of their own."""
    assert preparation_key(Preparation("w", None, _TILES)) == preparation_key(Preparation("w", None, _TILES))
    assert preparation_key(Preparation("scaled", scaled(), None)) == preparation_key(
        Preparation("scaled", scaled(), None)
    )
