"""Whether this machine can run an artifact's code."""

from __future__ import annotations

import re
from functools import cache

from mcompile.errors import ArtifactError
from mcompile.runtime.artifact import Manifest

# LLVM features that only say what an operating system, a compiler's intrinsic or a kernel may use: code generated from
# plain IR never depends on them.
_NEVER_GENERATED = re.compile(
    "64bit|amx-.*|ccmp|cldemote|clflushopt|clwb|clzero|cmpccxadd|cx8|enqcmd|fsgsbase|fxsr|hreset|invpcid|kl|lwp|mmx|"
    "mov(dir64b|diri|rs)|mwaitx|pconfig|pku|prefetch.*|prfchw|ptwrite|raoint|rdpid|rdpru|rdrnd|rdseed|rtm|serialize|"
    "sgx|sha|sha512|shstk|sm3|sm4|tsxldtrk|uintr|usermsr|waitpkg|wbnoinvd|widekl|x87|xsave.*"
)
_SAME_ARCHITECTURE = {"arm64": "aarch64", "amd64": "x86_64"}


@cache
def host_features() -> frozenset[str]:
    """LLVM's names of what this processor and its operating system can do."""
    import llvmlite.binding as llvm

    return frozenset(name for name, on in llvm.get_host_cpu_features().items() if on)


def required_features(manifest: Manifest) -> frozenset[str]:
    """The features that the artifact's code may use."""
    return frozenset(name for name in manifest.features if not _NEVER_GENERATED.fullmatch(name))


def check_target(manifest: Manifest) -> None:
    """Raises ArtifactError that says what this machine lacks."""
    import llvmlite.binding as llvm

    expected, actual = _platform(manifest.triple), _platform(llvm.get_process_triple())
    if expected != actual:
        raise ArtifactError(f"built for {' '.join(expected)}; this machine is {' '.join(actual)}")
    missing = sorted(required_features(manifest) - host_features())
    if missing:
        raise ArtifactError(
            f"built for {manifest.cpu}; this machine ({llvm.get_host_cpu_name()}) lacks the CPU features "
            f"{', '.join(missing)}: compile the model here, or for a common target such as x86-64-v3"
        )


def _platform(triple: str) -> tuple[str, str]:
    """(architecture, operating system)."""
    parts = triple.split("-")
    system = next((name for name in ("linux", "darwin", "windows") if name in triple), "unknown")
    return _SAME_ARCHITECTURE.get(parts[0], parts[0]), system
