"""Aligned memory, and where it lies."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

ALIGNMENT = 64  # a cache line, and the widest vector


def address(array: Array) -> int:
    """Of the first element."""
    return int(array.__array_interface__["data"][0])


def aligned_empty(size_bytes: int) -> Bytes:
    """Uninitialised bytes that start at a multiple of 64. Raises MemoryError."""
    raw: Bytes = np.empty(size_bytes + ALIGNMENT, np.uint8)
    start = -address(raw) % ALIGNMENT
    return raw[start : start + size_bytes]


def round_up(size_bytes: int) -> int:
    """To a multiple of 64."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
