"""What a compiled model is at run time: pure data, JSON in and out, no IR.

A plan is a list of segments. A native segment is a table of kernel calls that one compiled walker runs without
coming back to Python; a host segment is one operator run by Python. Memory is a set of *spaces*: each call's argument
is a byte offset into one of them. Arena and constants start at multiples of 64; an input or output is only as aligned
as its element type.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mcompile.dtypes import TensorType


class Space(Enum):
    ARENA = "arena"  # scratch of one run: intermediate values and kernels' scratch
    CONSTANTS = "constants"  # the artifact's constants, read-only, mapped
    INPUT = "input"  # the caller's input number `index`
    OUTPUT = "output"  # the caller's output number `index`


@dataclass(frozen=True)
class Argument:
    """Where a kernel's parameter lies: `offset` bytes into a space. In iteration t of a Repeat, `step` * t more."""

    space: Space
    offset: int
    index: int = 0  # which input or output
    step: int = 0


@dataclass(frozen=True)
class Kernel:
    """Native code of one PrimFunc.

    C signature: `void name(uint8_t **buffers, uint8_t *scratch, int64_t begin, int64_t end)`: run iterations
    [begin, end) of the parallel loop (0, 1 for a serial kernel). `buffers` are the parameters in order; `scratch` is
    this thread's own `scratch_bytes`, 64-byte aligned.
    """

    name: str
    target: str
    code: bytes  # relocatable object code holding the function `name`
    parallel_extent: int
    scratch_bytes: int
    flops: int = 0
    moved_bytes: int = 0
    source: str = ""  # LLVM IR or CUDA C, for `inspect`


@dataclass(frozen=True)
class KernelCall:
    kernel: str
    args: tuple[Argument, ...]
    node: str = ""  # the graph nodes it computes, for profiles


@dataclass(frozen=True)
class Repeat:
    """`calls` run `count` times; each argument advances by its `step` from one iteration to the next."""

    count: int
    calls: tuple[KernelCall, ...]


@dataclass(frozen=True)
class Tensor:
    """A dense row-major tensor that Python can see: type and place."""

    name: str
    type: TensorType
    place: Argument


@dataclass(frozen=True)
class NativeSegment:
    calls: tuple[KernelCall | Repeat, ...]


@dataclass(frozen=True)
class HostCall:
    """An operator that Python runs: `model` is a one-node ONNX model (serialised) run by onnx's reference.

    `inputs` and `outputs` are the model's graph inputs and outputs, in their order.
    """

    op: str
    node: str
    model: bytes
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Signature:
    """A model's input or output as the user sees it; open dims keep their names in `declared_shape`."""

    name: str
    type: TensorType
    declared_shape: tuple[int | str, ...]


@dataclass(frozen=True)
class ExecutionPlan:
    inputs: tuple[Signature, ...]
    outputs: tuple[Signature, ...]
    segments: tuple[NativeSegment | HostCall, ...]
    arena_bytes: int
    constants_bytes: int
