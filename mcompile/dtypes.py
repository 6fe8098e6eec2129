"""Element types and tensor types: one table for every fact about a dtype."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod

import numpy as np


class Kind(Enum):
    BOOL = "bool"
    INT = "int"
    UINT = "uint"
    FLOAT = "float"


class DType(str, Enum):
    """An element type; the value is numpy's (or ml_dtypes') name for it."""

    BOOL = "bool"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    UINT8 = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"

    @property
    def numpy(self) -> np.dtype[np.generic]:
        return _bfloat16() if self is DType.BFLOAT16 else np.dtype(self.value)

    @property
    def bytes(self) -> int:
        """Size of one element in memory, in bytes (a bool takes one)."""
        return self.numpy.itemsize

    @property
    def bits(self) -> int:
        return 8 * self.bytes

    @property
    def kind(self) -> Kind:
        if self is DType.BOOL:
            return Kind.BOOL
        if "float" in self.value:
            return Kind.FLOAT
        return Kind.UINT if self.value.startswith("uint") else Kind.INT

    @property
    def is_float(self) -> bool:
        return self.kind is Kind.FLOAT

    @property
    def is_integer(self) -> bool:
        return self.kind in (Kind.INT, Kind.UINT)

    @property
    def min_value(self) -> int | float:
        """The lowest finite value (False counts as 0)."""
        return _limits(self)[0]

    @property
    def max_value(self) -> int | float:
        """The highest finite value (True counts as 1)."""
        return _limits(self)[1]

    @staticmethod
    def from_numpy(dtype: np.dtype[np.generic] | type[np.generic]) -> DType:
        """The DType of a numpy dtype. Raises ValueError for strings, objects and complex numbers."""
        return DType(np.dtype(dtype).name)


def _bfloat16() -> np.dtype[np.generic]:
    import ml_dtypes  # not needed by a runtime that never meets a bfloat16

    bfloat16: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16


def _limits(dtype: DType) -> tuple[int | float, int | float]:
    if dtype is DType.BOOL:
        return 0, 1
    if dtype is DType.BFLOAT16:
        return -float(2**128 - 2**120), float(2**128 - 2**120)
    if dtype.is_float:
        info = np.finfo(dtype.value)
        return float(info.min), float(info.max)
    limits = np.iinfo(dtype.value)
    return int(limits.min), int(limits.max)


@dataclass(frozen=True)
class TensorType:
    """Shape (each dim an int, or the name of an open dim) and element type."""

    shape: tuple[int | str, ...]
    dtype: DType

    @property
    def is_static(self) -> bool:
        return all(isinstance(dim, int) for dim in self.shape)

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape as ints; only for a static type."""
        return tuple(int(dim) for dim in self.shape)

    @property
    def size(self) -> int:
        """Number of elements of a static type."""
        return prod(self.dims)

    @property
    def size_bytes(self) -> int:
        return self.size * self.dtype.bytes

    def __str__(self) -> str:
        return f"{self.dtype.value}[{', '.join(map(str, self.shape))}]"
