"""A model against onnxruntime: accuracy and latency in one run, and the first value that differs if one does."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from mcompile.compare.accuracy import OutputError, Tolerance, output_error, worst_of
from mcompile.compare.latency import Race, race
from mcompile.compare.localise import Feeds, FirstDifference, Localiser
from mcompile.compare.side import Side, SideSpec
from mcompile.driver import CompileOptions, compile_model, is_artifact_file, save_artifact
from mcompile.errors import OptionError
from mcompile.feeds import random_feeds, read_feeds
from mcompile.frontend.submodel import index_limits
from mcompile.runtime.artifact import Artifact, load
from mcompile.runtime.plan import Signature

Array = NDArray[Any]
Progress = Callable[[str], None]

_INPUTS_TRIED = 3


@dataclass(frozen=True)
class CompareOptions:
    """What to compare. `repeat` is the least number of timed runs of each side; 0 leaves latency out."""

    compile: CompileOptions
    repeat: int = 40
    tolerance: Tolerance = field(default_factory=Tolerance)
    inputs: Path | None = None  # .npz; without it three inputs are made from `seed`
    seed: int = 0
    reference: Path | None = None  # the ONNX model of an artifact, where it does not lie beside it
    localise: bool = True


@dataclass(frozen=True)
class Comparison:
    """The result. `compile_seconds` is None for an artifact, `race` None without latency."""

    model: str
    threads: int
    outputs: tuple[OutputError, ...]
    race: Race | None
    compile_seconds: float | None
    host_ops: tuple[str, ...]
    segments: int
    peak_bytes: dict[str, int]
    load_seconds: dict[str, float]
    settings: dict[str, Any]
    first_difference: FirstDifference | None = None

    @property
    def ok(self) -> bool:
        return all(output.ok for output in self.outputs)

    def to_json(self) -> dict[str, Any]:
        timed = self.race
        return {
            "model": self.model,
            "threads": self.threads,
            "ok": self.ok,
            "max_abs_error": max((output.max_abs_error for output in self.outputs), default=0.0),
            "max_scaled_error": max((output.max_scaled_error for output in self.outputs), default=0.0),
            "outside_share": max((output.outside_share for output in self.outputs), default=0.0),
            "outputs": [asdict(output) for output in self.outputs],
            "mcompile_ms": timed.ours.median_ms if timed else None,
            "onnxruntime_ms": timed.theirs.median_ms if timed else None,
            "speedup": timed.speedup if timed else None,
            "speedup_interval": [timed.speedup_low, timed.speedup_high] if timed else None,
            "latency": {"mcompile": asdict(timed.ours), "onnxruntime": asdict(timed.theirs)} if timed else None,
            "compile_seconds": self.compile_seconds,
            "host_ops": list(self.host_ops),
            "segments": self.segments,
            "peak_bytes": self.peak_bytes,
            "load_seconds": self.load_seconds,
            "settings": self.settings,
            "first_difference": asdict(self.first_difference) if self.first_difference else None,
        }


def compare(source: Path, options: CompareOptions, progress: Progress = lambda text: None) -> Comparison:
    """Compile (unless `source` is an artifact), then run both engines, each in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="mcompile-") as folder:
        work = Path(folder)
        if is_artifact_file(source):
            artifact_path, model_path, compile_seconds = source, _reference_of(source, options.reference), None
            artifact = load(source)
        else:
            progress(f"compiling {source.name}")
            start = time.perf_counter()
            artifact = compile_model(source, options.compile, progress)
            compile_seconds = time.perf_counter() - start
            artifact_path, model_path = work / "model.mcm", source
            save_artifact(artifact, artifact_path)
        result = _Contest(artifact, artifact_path, model_path, options, work, progress).run()
    return replace(result, model=source.stem, compile_seconds=compile_seconds)


@dataclass(frozen=True)
class _Contest:
    """One artifact against one ONNX model, with files in the folder `work`."""

    artifact: Artifact
    artifact_path: Path
    model_path: Path
    options: CompareOptions
    work: Path
    progress: Progress

    def run(self) -> Comparison:
        inputs = self.artifact.plan.inputs
        feeds = self._write_feeds(inputs)
        threads = self.options.compile.resolved_threads
        ours = SideSpec("mcompile", str(self.artifact_path), threads)
        theirs = SideSpec("onnxruntime", str(self.model_path), threads, _open_dims(inputs))
        with Side(theirs) as their_side, Side(ours) as our_side:
            self.progress("comparing outputs")
            errors, failing = self._check(our_side, their_side, feeds)
            timed = None
            if self.options.repeat:
                self.progress("comparing latency")
                timed = race(our_side, their_side, feeds[0], self.options.repeat)
            sides = {"mcompile": our_side, "onnxruntime": their_side}
            peaks = {name: side.peak_bytes() for name, side in sides.items()}
            loads = {name: side.load_seconds for name, side in sides.items()}
            settings: dict[str, Any] = {name: side.settings for name, side in sides.items()}
        settings |= {"inputs": len(feeds), "seed": self.options.seed, "tolerance": asdict(self.options.tolerance)}
        first = None
        if failing is not None and self.options.localise:
            first = self._localise(failing)
        return Comparison(
            self.model_path.stem,
            threads,
            tuple(errors),
            timed,
            None,
            self.artifact.host_ops,
            len(self.artifact.plan.segments),
            peaks,
            loads,
            settings,
            first,
        )

    def _write_feeds(self, inputs: Sequence[Signature]) -> list[Path]:
        if self.options.inputs is not None:
            arrays = [read_feeds(self.options.inputs, inputs)]
        else:
            limits = index_limits(onnx.load(self.model_path, load_external_data=False))
            seeds = range(self.options.seed, self.options.seed + _INPUTS_TRIED)
            arrays = [random_feeds(inputs, seed, limits) for seed in seeds]
        paths = []
        for number, feeds in enumerate(arrays):
            paths.append(self.work / f"feeds{number}.npz")
            np.savez(paths[-1], **feeds)  # type: ignore[arg-type]
        return paths

    def _check(self, ours: Side, theirs: Side, feeds: Sequence[Path]) -> tuple[list[OutputError], Path | None]:
        """The worst errors of each output, and the first feeds for which one was not acceptable."""
        names = [signature.name for signature in self.artifact.plan.outputs]
        rows: list[list[OutputError]] = []
        failing = None
        for path in feeds:
            got, expected = _outputs(ours, path, self.work), _outputs(theirs, path, self.work)
            pairs = zip(names, got, expected, strict=True)
            rows.append([output_error(name, a, b, self.options.tolerance) for name, a, b in pairs])
            if failing is None and not all(error.ok for error in rows[-1]):
                failing = path
        return [worst_of(errors) for errors in zip(*rows, strict=True)], failing

    def _localise(self, feeds_path: Path) -> FirstDifference | None:
        self.progress("outputs differ: looking for the first value that does")
        localiser = Localiser(self._run_ours, self._run_reference, self.options.tolerance, self.progress)
        return localiser.find(onnx.load(self.model_path), read_feeds(feeds_path, self.artifact.plan.inputs))

    def _run_ours(self, model: onnx.ModelProto, feeds: Feeds) -> list[Array]:
        fixed = {name: tuple(array.shape) for name, array in feeds.items()}
        artifact = compile_model(model, replace(self.options.compile, shapes=fixed, dims={}))
        path = self.work / "part.mcm"
        save_artifact(artifact, path)
        return self._run_part(SideSpec("mcompile", str(path), self.options.compile.resolved_threads), feeds)

    def _run_reference(self, model: onnx.ModelProto, feeds: Feeds) -> list[Array]:
        path = self.work / "part.onnx"
        onnx.save(model, path)
        return self._run_part(SideSpec("onnxruntime", str(path), self.options.compile.resolved_threads), feeds)

    def _run_part(self, spec: SideSpec, feeds: Feeds) -> list[Array]:
        path = self.work / "part_feeds.npz"
        np.savez(path, **feeds)  # type: ignore[arg-type]
        with Side(spec) as side:
            return _outputs(side, path, self.work)


def _outputs(side: Side, feeds: Path, work: Path) -> list[Array]:
    path = work / "outputs.npz"
    side.run(feeds, path)
    with np.load(path, allow_pickle=False) as arrays:
        return [arrays[name] for name in arrays.files]


def _open_dims(inputs: Sequence[Signature]) -> dict[str, int]:
    """The values that the artifact was compiled for, of the dims that the model leaves open."""
    return {
        name: size
        for signature in inputs
        for name, size in zip(signature.declared_shape, signature.type.dims, strict=True)
        if isinstance(name, str) and name != "?"
    }


def _reference_of(artifact: Path, given: Path | None) -> Path:
    path = given or artifact.with_suffix(".onnx")
    if not path.is_file():
        raise OptionError(f"{artifact}: compare needs its ONNX model; {path} is not there: give --reference MODEL.onnx")
    if is_artifact_file(path):
        raise OptionError(f"{path}: expected the ONNX model, this is an artifact: give --reference MODEL.onnx")
    return path
