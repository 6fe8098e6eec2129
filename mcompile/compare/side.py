"""One engine in a process of its own: `python -m mcompile.compare.side` answers JSON lines; `Side` talks to it.

Both engines keep threads that spin for a while after a run, so whoever is not being measured is stopped (SIGSTOP).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from mcompile.errors import ArtifactError, BuildError, McompileError, ModelError, OptionError

Array = NDArray[Any]
Feeds = Mapping[str, Array]

_KINDS: dict[str, type[McompileError]] = {
    kind.__name__: kind for kind in (ArtifactError, BuildError, OptionError)
}  # errors that cross the process border under their own name; others become a ModelError


@dataclass(frozen=True)
class SideSpec:
    """What a side loads. `dims` are values for named dims that the engine may specialise to."""

    engine: str  # "mcompile" (an artifact) or "onnxruntime" (an ONNX file)
    model: str
    threads: int
    dims: dict[str, int] = field(default_factory=dict)


# --- the parent's end ---


class Side:
    """A running child process. Use as a context manager: it never outlives the block."""

    def __init__(self, spec: SideSpec) -> None:
        package_root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH", "")]))
        self._engine = spec.engine
        self._child = subprocess.Popen(
            [sys.executable, "-m", "mcompile.compare.side", json.dumps(asdict(spec))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        try:
            ready = self._answer()
        except BaseException:
            self.close()
            raise
        self.load_seconds: float = ready["load_seconds"]
        self.settings: dict[str, Any] = ready["settings"]

    def run(self, feeds: Path, outputs: Path) -> None:
        """Run once on the arrays of `feeds` (.npz) and write the outputs, in order, to `outputs` (.npz)."""
        self._ask({"do": "run", "feeds": str(feeds), "outputs": str(outputs)})

    def time(self, feeds: Path, warmup: int, repeat: int) -> list[float]:
        """Seconds of each of `repeat` runs."""
        seconds: list[float] = self._ask({"do": "time", "feeds": str(feeds), "warmup": warmup, "repeat": repeat})
        return seconds

    def peak_bytes(self) -> int:
        """The most memory the process has held so far."""
        size: int = self._ask({"do": "peak"})
        return size

    def stop(self) -> None:
        self._child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._child.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self._child.poll() is None:
            self._child.kill()  # also ends a stopped process
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, request: Mapping[str, Any]) -> Any:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(request) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # the reason is in the exit status, which _answer reports
        return self._answer()

    def _answer(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            status = self._child.wait()
            reason = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            raise BuildError(f"{self._engine}'s process ended without an answer ({reason})")
        answer = json.loads(line)
        if "error" in answer:
            kind = _KINDS.get(answer["kind"], ModelError)
            raise kind(f"{self._engine}: {answer['error']}")
        return answer["result"]


# --- the child's end ---

Run = Callable[[Feeds], list[Array]]


def _load_mcompile(spec: SideSpec) -> tuple[Run, dict[str, Any]]:
    from mcompile.runtime import InferenceSession

    session = InferenceSession(spec.model, threads=spec.threads)
    return lambda feeds: session.run(None, feeds), {"threads": spec.threads}


def _load_onnxruntime(spec: SideSpec) -> tuple[Run, dict[str, Any]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = spec.threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    for name, size in spec.dims.items():
        options.add_free_dimension_override_by_name(name, size)
    session = onnxruntime.InferenceSession(spec.model, options, providers=["CPUExecutionProvider"])
    settings = {
        "version": onnxruntime.__version__,
        "intra_op_num_threads": spec.threads,
        "inter_op_num_threads": 1,
        "execution_mode": "sequential",
        "graph_optimization_level": "all",
        "free_dimension_overrides": spec.dims,
    }
    return lambda feeds: session.run(None, feeds), settings


_LOADERS = {"mcompile": _load_mcompile, "onnxruntime": _load_onnxruntime}


def read_feeds(path: Path) -> dict[str, Array]:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _time(run: Run, feeds: Feeds, warmup: int, repeat: int) -> list[float]:
    for _ in range(warmup):
        run(feeds)
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        run(feeds)
        seconds.append(time.perf_counter() - start)
    return seconds


def _peak_bytes() -> int:
    # Not getrusage: its maximum includes what the parent held when it started this process.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _serve(run: Run, request: Mapping[str, Any]) -> Any:
    match request["do"]:
        case "run":
            results = run(read_feeds(Path(request["feeds"])))
            np.savez(request["outputs"], *results)
            return None
        case "time":
            return _time(run, read_feeds(Path(request["feeds"])), request["warmup"], request["repeat"])
        case "peak":
            return _peak_bytes()
        case other:
            raise OptionError(f"unknown request {other!r}")


def _guarded(out: IO[str], action: Callable[[], Any]) -> bool:
    """Write the action's result, or its error as a value. True if there was a result."""
    try:
        answer = {"result": action()}
    except Exception as error:  # every failure goes to the parent, which knows what to tell the user
        answer = {"error": str(error), "kind": type(error).__name__}
    out.write(json.dumps(answer) + "\n")
    out.flush()
    return "result" in answer


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    spec = SideSpec(**json.loads(sys.argv[1]))
    loaded: list[Run] = []

    def load() -> dict[str, Any]:
        start = time.perf_counter()
        run, settings = _LOADERS[spec.engine](spec)
        loaded.append(run)
        return {"load_seconds": time.perf_counter() - start, "settings": settings}

    if not _guarded(answers, load):
        return
    for line in sys.stdin:
        request = json.loads(line)
        _guarded(answers, lambda request=request: _serve(loaded[0], request))  # type: ignore[misc]


if __name__ == "__main__":
    main()
