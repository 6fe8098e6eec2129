"""Open dims: declared input shapes, with the user's `shapes` and `dims` put in, as static types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx

from mcompile.dtypes import TensorType
from mcompile.errors import ModelError, OptionError
from mcompile.frontend.tensors import check_size, dtype_of
from mcompile.runtime.plan import Signature

Declared = tuple[int | str, ...]


def declared_type(value: onnx.ValueInfoProto, what: str) -> tuple[int, Declared | None]:
    """Element type number and shape as declared ("?" for an unknown dim, None for an unknown rank).

    Raises ModelError for sequences, maps, optionals and sparse tensors.
    """
    if not value.type.HasField("tensor_type"):
        kind = value.type.WhichOneof("value") or "nothing"
        raise ModelError(f"{what}: expected a tensor, it is declared as {kind}")
    tensor = value.type.tensor_type
    return tensor.elem_type, _shape(tensor.shape) if tensor.HasField("shape") else None


def _shape(shape: onnx.TensorShapeProto) -> Declared:
    return tuple(
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param or "?" for dim in shape.dim
    )


def bind_inputs(
    values: Sequence[onnx.ValueInfoProto], shapes: Mapping[str, Sequence[int]], dims: Mapping[str, int]
) -> tuple[Signature, ...]:
    """The inputs with static types. Raises ModelError listing every input with open dims and what to pass.

    Raises OptionError where `shapes` or `dims` name something the model lacks or contradict it.
    """
    problems: list[str] = []
    declared: dict[str, tuple[int, Declared | None]] = {}
    for value in values:
        try:
            declared[value.name] = declared_type(value, f"input {value.name!r}")
        except ModelError as error:
            problems.append(str(error))
    bound = _bindings({name: shape for name, (_, shape) in declared.items()}, shapes, dims)
    signatures: list[Signature] = []
    opens: list[str] = []
    for name, (code, shape) in declared.items():
        actual = tuple(shapes[name]) if name in shapes else shape and tuple(_bind(dim, bound) for dim in shape)
        try:
            dtype = dtype_of(code, f"input {name!r}")
            if actual is None or any(isinstance(dim, str) for dim in actual):
                opens.append(_open_text(name, shape))
                continue
            check_size(tuple(int(dim) for dim in actual), f"input {name!r}")
        except ModelError as error:
            problems.append(str(error))
            continue
        signatures.append(Signature(name, TensorType(actual, dtype), actual if shape is None else shape))
    if opens:
        raise ModelError("the model's inputs have open dims; bind them", (*opens, *problems))
    if problems:
        raise ModelError("the model's inputs cannot be used", tuple(problems))
    return tuple(signatures)


def _bind(dim: int | str, bound: Mapping[str, int]) -> int | str:
    return bound.get(dim, dim) if isinstance(dim, str) else dim


def _bindings(
    declared: Mapping[str, Declared | None], shapes: Mapping[str, Sequence[int]], dims: Mapping[str, int]
) -> dict[str, int]:
    """Values of the named dims, from `dims` and from where `shapes` meets a named dim."""
    named = {dim for shape in declared.values() for dim in shape or () if isinstance(dim, str) and dim != "?"}
    for name, value in dims.items():
        if name not in named:
            raise OptionError(f"--dim {name}={value}: the inputs have no such dim; {_known(sorted(named))}")
        if value < 0:
            raise OptionError(f"--dim {name}={value}: expected a number >= 0")
    bound = dict(dims)
    for name, given in shapes.items():
        text = f"--shape {name}={','.join(map(str, given))}"
        if name not in declared:
            raise OptionError(f"{text}: the model has no such input; {_known(sorted(declared))}")
        shape = declared[name]
        if shape is None:
            continue
        if len(shape) != len(given):
            raise OptionError(f"{text}: expected {len(shape)} dims as {_text(shape)} has, got {len(given)}")
        for dim, value in zip(shape, given, strict=True):
            if isinstance(dim, int) and dim != value:
                raise OptionError(f"{text}: the model declares {_text(shape)}, so {dim} cannot become {value}")
            if isinstance(dim, str) and dim != "?" and bound.setdefault(dim, value) != value:
                raise OptionError(f"{text}: dim {dim} is {bound[dim]} elsewhere, here {value}")
    return bound


def _known(names: Iterable[str]) -> str:
    text = ", ".join(names)
    return f"known are {text}" if text else "there are none"


def _text(shape: Declared) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _open_text(name: str, shape: Declared | None) -> str:
    if shape is None:
        return f"input {name!r} has no declared shape: pass --shape {name}=DIM,DIM,..."
    example = ",".join(str(dim) if isinstance(dim, int) else "1" for dim in shape)
    names = list(dict.fromkeys(dim for dim in shape if isinstance(dim, str) and dim != "?"))
    ways = [" ".join(f"--dim {dim}=1" for dim in names)] if names and "?" not in shape else []
    ways.append(f"--shape {name}={example}")
    return f"input {name!r} is {_text(shape)}: pass {' or '.join(ways)} (with your sizes)"
