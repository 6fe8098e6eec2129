"""The operators: importing this package registers all of them."""

from mcompile.ops import (
    activation,
    binary,
    convolution,
    elementwise,
    generators,
    grid_sample,
    indexing,
    matmul,
    movement,
    normalization,
    pooling,
    reduction,
    resize,
    scatter,
)

__all__ = [
    "activation",
    "binary",
    "convolution",
    "elementwise",
    "generators",
    "grid_sample",
    "indexing",
    "matmul",
    "movement",
    "normalization",
    "pooling",
    "reduction",
    "resize",
    "scatter",
]
