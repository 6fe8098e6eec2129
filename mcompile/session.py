"""mcompile.InferenceSession: the runtime's, which also takes an ONNX model, compiles it and keeps the result.

A start from the cache must be fast, so nothing of the compiler is imported until something has to be compiled.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcompile import __version__, config, runtime
from mcompile.errors import ArtifactError, ModelError, OptionError
from mcompile.runtime.artifact import Artifact, is_artifact, load, save
from mcompile.runtime.cache import open_cache
from mcompile.runtime.options import thread_count
from mcompile.target import parse_target

if TYPE_CHECKING:
    import onnx

_SETTLED_SECONDS = 2.0  # a file changed less than this ago may change again without its date showing it


class InferenceSession(runtime.InferenceSession):
    """A model ready to run, with onnxruntime's methods.

    `model` is the path or the bytes of an ONNX model or of an artifact, or a ModelProto. An ONNX model is compiled for
    this machine, `threads` and the given `shapes` and `dims` (free dimension overrides of the options count too), and
    the result is kept in the cache. Raises ModelError, OptionError, BuildError or ArtifactError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes | onnx.ModelProto | Artifact,
        sess_options: runtime.SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        *,
        threads: int | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        dims: Mapping[str, int] | None = None,
    ) -> None:
        overrides = sess_options.free_dimension_overrides if sess_options is not None else {}
        bound: dict[str, dict[str, Any]] = {
            "shapes": {name: tuple(shape) for name, shape in (shapes or {}).items()},
            "dims": overrides | dict(dims or {}),
        }
        artifact = _artifact_of(model, thread_count(sess_options, threads), bound)
        super().__init__(artifact, sess_options, providers, provider_options, threads=threads)


def _artifact_of(model: Any, threads: int, bound: Mapping[str, Mapping[str, Any]]) -> Artifact:
    if isinstance(model, Artifact):
        return model
    source: Any = model
    if isinstance(model, str | os.PathLike):
        source = Path(model)
        head = _read_head(source)
    elif isinstance(model, bytes | bytearray | memoryview):
        source = bytes(model)
        head = source[:4]
    elif hasattr(model, "SerializeToString"):
        source = model.SerializeToString(deterministic=True)
        head = b""
    else:
        raise OptionError(f"model: expected a path, bytes, a ModelProto or an Artifact, got {type(model).__name__}")
    if is_artifact(head):
        return load(source)
    return _cached(source, threads, bound)


def _read_head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error


def _cached(source: Path | bytes, threads: int, bound: Mapping[str, Mapping[str, Any]]) -> Artifact:
    """The compiled model from the cache, or compiled now and put there."""
    store = open_cache()
    content = hashlib.sha256(source).hexdigest() if isinstance(source, bytes) else _content_digest(source)
    target = asdict(parse_target("cpu", threads))
    facts = {"content": content, "target": target, "compiler": _compiler_digest(), **bound}
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    path = store.find(key)
    if path is not None:
        try:
            return load(path)
        except ArtifactError:
            store.remove(key)  # damaged: compile it again
    from mcompile.driver import CompileOptions, compile_model  # heavy: only when there is something to compile

    artifact = compile_model(source, CompileOptions(threads=threads, **bound))  # type: ignore[arg-type]
    with suppress(OSError):  # a full or read-only disk must not keep the model from running
        store.add(key, lambda written: save(artifact, written))
    return artifact


# --- what a model's files hold, without reading them each time ---


def _content_digest(path: Path) -> str:
    """Digest of a model's file and its external data.

    It is remembered, with the files' sizes and dates, so that the next start need not read them again.
    """
    path = path.resolve()
    name = hashlib.sha256(str(path).encode()).hexdigest()[:32]
    memo = config.load().cache / "sources" / f"{name}.json"
    remembered = _remembered(memo)
    if remembered is not None:
        return remembered
    from mcompile.frontend.external import model_files  # heavy

    files = model_files(path)
    stats = [_stat(file) for file in files]
    digest = hashlib.sha256()
    for file in files:
        digest.update(_file_digest(file))
    if all(time.time() - changed_ns * 1e-9 > _SETTLED_SECONDS for _, _, changed_ns in stats):
        _remember(memo, {"files": stats, "digest": digest.hexdigest()})
    return digest.hexdigest()


def _remembered(memo: Path) -> str | None:
    try:
        known = json.loads(memo.read_text())
        current = [list(_stat(Path(name))) for name, _, _ in known["files"]]
        return str(known["digest"]) if current == known["files"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(memo: Path, known: Mapping[str, Any]) -> None:
    with suppress(OSError):  # then the files are read again next time
        memo.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = memo.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(known))
        part.replace(memo)


def _stat(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


@cache
def _compiler_digest() -> str:
    """Of the version and of this package's files, so that a changed compiler compiles again."""
    facts = [__version__, *map(str, _package_files())]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _package_files() -> Iterator[tuple[str, int, int]]:
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        name, size, changed_ns = _stat(path)
        yield name, size, changed_ns
