"""The variants by name. Each maps a dag to an equivalent one, or to None where it does not apply."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mcompile.errors import ScheduleError
from mcompile.ir.tensor import ComputeDag
from mcompile.schedule.variants.winograd import winograd_dag

_VARIANTS: Mapping[str, Callable[[ComputeDag], ComputeDag | None]] = {"winograd4": winograd_dag}


def variant_names() -> tuple[str, ...]:
    return tuple(_VARIANTS)


def make_variant(dag: ComputeDag, name: str) -> ComputeDag:
    """The dag of variant `name`. Raises ScheduleError if there is none, or it does not apply to this dag."""
    if name not in _VARIANTS:
        raise ScheduleError(f"no variant {name}; variants: {', '.join(_VARIANTS)}")
    variant = _VARIANTS[name](dag)
    if variant is None:
        raise ScheduleError(f"variant {name} does not apply to this dag")
    return variant
