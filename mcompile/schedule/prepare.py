"""Constant preparation: what a schedule wants of a constant (a transform, a packing), done once at link time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcompile.ir.interpret import evaluate
from mcompile.ir.printer import print_dag
from mcompile.schedule.lower import Preparation
from mcompile.schedule.steps import LayoutRewrite, trace_to_json

Array = NDArray[Any]


def preparation_key(preparation: Preparation) -> str:
    """Text that is equal for preparations that do the same to their constants."""
    dag = "" if preparation.dag is None else print_dag(preparation.dag)
    layout = "" if preparation.layout is None else trace_to_json((preparation.layout,))
    return f"{preparation.tensor if preparation.dag else ''}|{dag}|{layout}"


def constant_inputs(preparation: Preparation) -> tuple[str, ...]:
    """Names of the constants it needs."""
    if preparation.dag is None:
        return (preparation.tensor,)
    return tuple(placeholder.name for placeholder in preparation.dag.placeholders)


def prepare(preparation: Preparation, constants: Mapping[str, Array]) -> Array:
    """The prepared array, dense, in the order in which it lies in memory."""
    if preparation.dag is None:
        array = constants[preparation.tensor]
    else:
        inputs = {name: constants[name] for name in constant_inputs(preparation)}
        array = evaluate(preparation.dag, inputs)[preparation.tensor]
    return np.ascontiguousarray(array if preparation.layout is None else pack(array, preparation.layout))


def pack(array: Array, layout: LayoutRewrite) -> Array:
    """Cut dims in tiles (the last one zero-filled) and reorder: see LayoutRewrite."""
    padding: list[tuple[int, int]] = []
    shape: list[int] = []
    axes: list[tuple[int, int]] = []
    for extent, tile in zip(array.shape, layout.tiles, strict=True):
        count = -(-extent // tile) if tile else extent
        padding.append((0, count * tile - extent if tile else 0))
        axes.append((len(shape), len(shape) + 1))
        shape.extend([count, tile] if tile else [count])
    padded = np.pad(array, padding) if any(after for _, after in padding) else array
    return padded.reshape(shape).transpose([axes[dim][part] for dim, part in layout.order])
