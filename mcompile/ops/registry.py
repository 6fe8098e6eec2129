"""The op registry: every operator is declared once, in one paragraph, by `define`.

The canonical form of an op is its newest ONNX form with every *static* operand (axes, shapes, pads, scales, ...)
as an attribute. Importing a node: each operand that `op.operands` names is folded into the attributes as an array and
leaves an absent input (None) in its place, so that positions never shift; absent inputs at the end are dropped. An
operand in `op.scalars` is folded likewise, as a Python number, where it is known, has one element and no more dims
than input 0; otherwise it stays a tensor input. `op.canonical` then gives the attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from numpy.typing import NDArray

from mcompile.dtypes import DType, TensorType
from mcompile.errors import InternalError, McompileError
from mcompile.ir.tensor import Compute, Placeholder, Tensor

Array = NDArray[Any]
Attrs = Mapping[str, Any]
Inputs = Sequence[Tensor | None]  # None: an optional input that is absent


class Unsupported(McompileError):
    """A valid use of an op that its `compute` has no native form for; the text says why. It may run as a host op."""


class OpKind(Enum):
    """All that fusion may look at."""

    ELEMENTWISE = "elementwise"  # out[i] depends on in[i] only, same shape
    BROADCAST = "broadcast"  # as elementwise, some inputs broadcast
    INJECTIVE = "injective"  # each output element loads single input elements: movement, gather, pad, resize
    REDUCTION = "reduction"  # reduces (possibly in several stages): softmax, normalisation, pooling, ReduceX
    ANCHOR = "anchor"  # contraction with data reuse: matmul, convolution
    OPAQUE = "opaque"  # never fused


class LayoutHint(Enum):
    """What memory order an op's kernels like for their tensors."""

    ANY = "any"
    CHANNELS_LAST = "channels_last"  # (N, C, spatial...): C innermost


@dataclass(frozen=True, eq=False)
class Sample:
    """An example of an op for generated tests: input arrays (None where absent) and attributes.

    `attrs` are those of an ONNX node of `opset`, and the static operands under their names in `OpDef.operands`.
    """

    inputs: tuple[Array | None, ...]
    attrs: dict[str, Any]
    opset: int = 0  # 0: the newest


@dataclass(frozen=True, eq=False)
class OpDef:
    """One operator.

    compute: placeholders and attributes -> the output tensors (their shapes and dtypes are the op's shape rule): every
    output the op can have, in ONNX's order; a node may use only some. Trailing absent inputs may be missing from the
    sequence. Raises Unsupported.
    reference: (arrays, attributes) -> output arrays, by numpy; None where `compute` evaluated is the reference.
    adapt: (opset, attrs) -> attrs: turns the attributes as they stand in a node of an older opset (defaults not yet
    filled) into the canonical ones.
    operands: input position -> attribute name, for operands that must be known when compiling (None where absent).
    scalars: likewise for operands that are folded only where they are known scalars.
    """

    name: str
    kind: OpKind
    compute: Callable[[Inputs, Attrs], tuple[Compute, ...]]
    reference: Callable[[Sequence[Array | None], Attrs], tuple[Array, ...]] | None
    attrs: Mapping[str, Any]  # name -> default; REQUIRED where there is none
    operands: Mapping[int, str]
    scalars: Mapping[int, str]
    adapt: Callable[[int, dict[str, Any]], dict[str, Any]] | None
    samples: Callable[[], Iterator[Sample]]
    layout: LayoutHint
    domain: str
    since: int  # first opset whose form `adapt` understands

    def canonical(self, opset: int, attrs: Attrs, operands: Attrs | None = None) -> dict[str, Any]:
        """A node's attributes in the newest form, with the folded operands (by attribute name) and defaults.

        Raises Unsupported if a required one is missing.
        """
        given = dict(attrs) if self.adapt is None else self.adapt(opset, dict(attrs))
        filled = {**self.attrs, **given, **(operands or {})}
        missing = sorted(name for name, value in filled.items() if value is REQUIRED)
        if missing:
            raise Unsupported(f"{self.name}: required attribute or operand missing: {', '.join(missing)}")
        return filled

    def infer(self, types: Sequence[TensorType | None], attrs: Attrs) -> tuple[TensorType, ...]:
        """Output types, derived by running `compute` on placeholders."""
        inputs = [None if t is None else Placeholder(f"x{i}", t.dims, t.dtype) for i, t in enumerate(types)]
        return tuple(output.type for output in self.compute(inputs, attrs))


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = _Required()
_OPS: dict[tuple[str, str], OpDef] = {}


def define(
    name: str,
    kind: OpKind,
    compute: Callable[[Inputs, Attrs], tuple[Compute, ...]],
    *,
    reference: Callable[[Sequence[Array | None], Attrs], tuple[Array, ...]] | None = None,
    attrs: Mapping[str, Any] | None = None,
    operands: Mapping[int, str] | None = None,
    scalars: Mapping[int, str] | None = None,
    adapt: Callable[[int, dict[str, Any]], dict[str, Any]] | None = None,
    samples: Callable[[], Iterator[Sample]] = lambda: iter(()),
    layout: LayoutHint = LayoutHint.ANY,
    domain: str = "",
    since: int = 1,
) -> OpDef:
    """Register an operator. Raises InternalError if (domain, name) is taken."""
    if (domain, name) in _OPS:
        raise InternalError(f"op {name} is defined twice")
    folded = operands or {}
    op = OpDef(
        name, kind, compute, reference, attrs or {}, folded, scalars or {}, adapt, samples, layout, domain, since
    )
    _OPS[domain, name] = op
    return op


_ELEMENT_TYPES = {
    1: DType.FLOAT32,
    2: DType.UINT8,
    3: DType.INT8,
    4: DType.UINT16,
    5: DType.INT16,
    6: DType.INT32,
    7: DType.INT64,
    9: DType.BOOL,
    10: DType.FLOAT16,
    11: DType.FLOAT64,
    12: DType.UINT32,
    13: DType.UINT64,
    16: DType.BFLOAT16,
}


def element_type(code: int) -> DType:
    """The DType of an ONNX TensorProto.DataType number, as attributes like Cast's `to` hold it. Raises Unsupported."""
    if code not in _ELEMENT_TYPES:
        raise Unsupported(f"element type {code} (a string, complex or narrow type) has no native form")
    return _ELEMENT_TYPES[code]


def input_at(inputs: Inputs, position: int) -> Tensor | None:
    """The input at `position`; None if it is absent or the sequence ends before."""
    return inputs[position] if position < len(inputs) else None


def lookup(name: str, domain: str = "") -> OpDef | None:
    return _OPS.get((domain, name))


def registered() -> tuple[OpDef, ...]:
    """All ops, sorted by domain and name."""
    return tuple(op for _, op in sorted(_OPS.items()))
