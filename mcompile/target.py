"""The machine that code is generated for: everything a schedule or a backend may ask about it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mcompile.errors import OptionError


@dataclass(frozen=True)
class Target:
    """A CPU or GPU. Sizes are in bytes. `features` are LLVM feature names that are on, sorted (CPU only)."""

    kind: str  # "cpu" or "cuda"
    triple: str
    cpu: str
    features: tuple[str, ...]
    threads: int
    vector_bytes: int
    vector_registers: int
    l1_bytes: int
    l2_bytes: int
    l3_bytes: int
    exact: bool = False  # no algorithm that rounds otherwise than the direct sum in another order

    def lanes(self, element_bytes: int) -> int:
        """Elements of a full vector register."""
        return self.vector_bytes // element_bytes

    @property
    def feature_string(self) -> str:
        """In the form LLVM takes: `+avx2,+fma`."""
        return ",".join(f"+{feature}" for feature in self.features)


_X86_LEVELS: dict[str, tuple[str, ...]] = {
    "x86-64-v2": ("cx16", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3"),
    "x86-64-v3": ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"),
    "x86-64-v4": ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"),
}
_CACHES = {"l1_bytes": 32 << 10, "l2_bytes": 1 << 20, "l3_bytes": 16 << 20}


def parse_target(text: str, threads: int | None = None) -> Target:
    """`cpu` is this machine; `x86-64-v2|v3|v4` and `aarch64` are baselines; `cuda:sm_80` a GPU."""
    count = threads if threads is not None else available_cores()
    if count < 1:
        raise OptionError(f"threads: expected a number >= 1, got {count}")
    if text == "cpu":
        return _host_target(count)
    if text in _X86_LEVELS:
        levels = list(_X86_LEVELS)
        features = [f for level in levels[: levels.index(text) + 1] for f in _X86_LEVELS[level]]
        width = {"x86-64-v2": 16, "x86-64-v3": 32, "x86-64-v4": 64}[text]
        registers = 32 if width == 64 else 16
        triple = "x86_64-unknown-linux-gnu"
        return _cpu_target(triple, text, tuple(sorted(features)), count, width, registers, _CACHES)
    if text == "aarch64":
        return _cpu_target("aarch64-unknown-linux-gnu", "generic", ("neon",), count, 16, 32, _CACHES)
    if text.startswith("cuda:sm_"):
        return Target("cuda", "nvptx64-nvidia-cuda", text.removeprefix("cuda:"), (), 1, 16, 255, 48 << 10, 4 << 20, 0)
    known = ", ".join(["cpu", *_X86_LEVELS, "aarch64", "cuda:sm_80"])
    raise OptionError(f"--target {text}: unknown target; expected one of {known}")


def _cpu_target(
    triple: str,
    cpu: str,
    features: tuple[str, ...],
    threads: int,
    vector_bytes: int,
    vector_registers: int,
    caches: Mapping[str, int],
) -> Target:
    return Target(
        kind="cpu",
        triple=triple,
        cpu=cpu,
        features=features,
        threads=threads,
        vector_bytes=vector_bytes,
        vector_registers=vector_registers,
        l1_bytes=caches["l1_bytes"],
        l2_bytes=caches["l2_bytes"],
        l3_bytes=caches["l3_bytes"],
    )


@cache
def _host_description() -> tuple[str, str, tuple[str, ...]]:
    import llvmlite.binding as llvm  # heavy: only when a host target is asked for

    flags = llvm.get_host_cpu_features()
    names = tuple(sorted(name for name, on in flags.items() if on))
    return llvm.get_process_triple(), llvm.get_host_cpu_name(), names


def _host_target(threads: int) -> Target:
    triple, cpu, features = _host_description()
    if "avx512f" in features:
        width, registers = 64, 32
    elif "avx" in features:
        width, registers = 32, 16
    else:
        width, registers = 16, 32 if platform.machine() == "aarch64" else 16
    return _cpu_target(triple, cpu, features, threads, width, registers, host_caches())


@cache
def host_caches() -> dict[str, int]:
    """Data cache sizes of core 0 from sysfs, with common values where it is absent."""
    sizes = dict(_CACHES)
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind = (index / "level").read_text().strip(), (index / "type").read_text().strip()
            text = (index / "size").read_text().strip()
        except OSError:
            continue
        scale = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        if kind != "Instruction" and text.rstrip("KM").isdigit():
            sizes[f"l{level}_bytes"] = int(text.rstrip("KM")) * scale
    return {name: sizes[name] for name in _CACHES}


def available_cores() -> int:
    """Cores that the affinity mask and the cgroup's CPU quota allow this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
