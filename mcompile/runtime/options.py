"""onnxruntime's options, as far as they mean something here; the rest is accepted, so that programs move over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from mcompile.errors import OptionError
from mcompile.runtime.pool import check_threads
from mcompile.target import available_cores

CPU_PROVIDER = "CPUExecutionProvider"


class GraphOptimizationLevel(IntEnum):
    """Accepted; a model is always optimised."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(IntEnum):
    """Accepted; execution is always sequential."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


@dataclass
class SessionOptions:
    """`intra_op_num_threads` is the number of threads (0: the cores available).

    `free_dimension_overrides` are for a session that compiles its model; the other fields have no effect.
    """

    intra_op_num_threads: int = 0
    inter_op_num_threads: int = 0
    execution_mode: ExecutionMode = ExecutionMode.ORT_SEQUENTIAL
    graph_optimization_level: GraphOptimizationLevel = GraphOptimizationLevel.ORT_ENABLE_ALL
    enable_cpu_mem_arena: bool = True
    enable_mem_pattern: bool = True
    enable_mem_reuse: bool = True
    enable_profiling: bool = False
    log_severity_level: int = 2
    log_verbosity_level: int = 0
    logid: str = ""
    use_deterministic_compute: bool = True
    free_dimension_overrides: dict[str, int] = field(default_factory=dict)
    _config_entries: dict[str, str] = field(default_factory=dict)

    def add_free_dimension_override_by_name(self, name: str, dim: int) -> None:
        """Bind an open dim of a model that is still to be compiled."""
        self.free_dimension_overrides[name] = dim

    def add_session_config_entry(self, name: str, value: str) -> None:
        self._config_entries[name] = value

    def get_session_config_entry(self, name: str) -> str:
        if name not in self._config_entries:
            raise OptionError(f"session configuration has no entry {name!r}")
        return self._config_entries[name]


@dataclass
class RunOptions:
    """Accepted by `run`; without effect."""

    log_severity_level: int = 2
    log_verbosity_level: int = 0
    logid: str = ""
    tag: str = ""


@dataclass(frozen=True)
class ModelMetadata:
    """What the model says of itself (onnxruntime's names)."""

    producer_name: str = ""
    graph_name: str = ""
    domain: str = ""
    description: str = ""
    graph_description: str = ""
    version: int = 0
    custom_metadata_map: dict[str, str] = field(default_factory=dict)


def thread_count(sess_options: Any, threads: int | None) -> int:
    """Of a session: `threads`, else the options' number, else the cores available. Raises OptionError."""
    wanted = threads if threads is not None else getattr(sess_options, "intra_op_num_threads", 0) or available_cores()
    return check_threads(wanted)


def check_providers(providers: Sequence[Any] | None) -> None:
    """Raises OptionError unless the CPU may be used; other providers in the list are passed over."""
    if providers is None:
        return
    names = [provider if isinstance(provider, str) else provider[0] for provider in providers]
    if names and CPU_PROVIDER not in names:
        raise OptionError(f"providers: expected {CPU_PROVIDER} among them, got {', '.join(map(str, names))}")


def get_available_providers() -> list[str]:
    return [CPU_PROVIDER]


def get_device() -> str:
    return "CPU"
