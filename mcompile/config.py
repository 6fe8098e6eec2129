"""Every environment knob: name, type, default and one sentence each. Nothing else reads `os.environ` for MCOMPILE_*."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mcompile.errors import OptionError

PREFIX = "MCOMPILE_"


@dataclass(frozen=True)
class Config:
    """The knobs' values. `load()` reads them from the environment; field NAME is MCOMPILE_NAME."""

    debug: int = 0
    dump: Path | None = None
    verify: int = 1
    pass_limit: int | None = None
    skip_passes: frozenset[str] = frozenset()
    seed: int = 0
    cache: Path = Path("~/.cache/mcompile")
    cache_bytes: int = 4 << 30
    workers: int | None = None
    spin_us: int = 100


@dataclass(frozen=True)
class Knob:
    """What a field of Config means, and how its text is read."""

    sentence: str
    parse: Callable[[str], Any]


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("expected a number >= 0")
    return value


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


KNOBS: Mapping[str, Knob] = {
    "debug": Knob("How much to say on stderr: 0 nothing, 1 stages and their times, 2 every pass.", _natural),
    "dump": Knob("Folder that receives the program's text before the first and after every pass.", Path),
    "verify": Knob(
        "How much to check: 0 nothing, 1 each pass's result once per pipeline, 2 after every pass.", _natural
    ),
    "pass_limit": Knob("Run only so many passes, then leave the program as it is: bisects a wrong pass.", _natural),
    "skip_passes": Knob("Passes to leave out, by name, separated by commas.", _names),
    "seed": Knob("Seed of every random choice: made-up inputs and search.", _natural),
    "cache": Knob("Folder of compiled models and tuning records.", lambda text: Path(text).expanduser()),
    "cache_bytes": Knob("Size that the cache of compiled models is kept under, in bytes.", _natural),
    "workers": Knob("Processes that build kernels at the same time (default: the cores available).", _natural),
    "spin_us": Knob("How long an idle thread of the runtime's pool stays awake, in microseconds.", _natural),
}


def load(environment: Mapping[str, str] | None = None) -> Config:
    """The knobs as the environment sets them. Raises OptionError for a value that cannot be read."""
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {"cache": Config.cache.expanduser()}
    for field in fields(Config):
        text = environment.get(PREFIX + field.name.upper(), "")
        if not text:
            continue
        try:
            values[field.name] = KNOBS[field.name].parse(text)
        except ValueError as error:
            raise OptionError(f"{PREFIX}{field.name.upper()}={text}: {error}") from error
    return Config(**values)
