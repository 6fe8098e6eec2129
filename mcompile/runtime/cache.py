"""The cache of compiled models: files named by a key, the least recently used dropped when they take too much."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mcompile import config
from mcompile.errors import OptionError

_SUFFIX = ".mcm"
_KEY = re.compile(r"[0-9a-f]{8,128}")


@dataclass(frozen=True)
class CacheEntry:
    key: str
    path: Path
    size_bytes: int
    used_seconds: float  # when it was last used, since the epoch


class ArtifactCache:
    """A folder of artifacts. Processes may share it: files appear and disappear whole."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    def find(self, key: str) -> Path | None:
        """The artifact's path if it is there; marks it as used."""
        path = self._path(key)
        try:
            os.utime(path)
        except OSError:
            return None
        return path

    def add(self, key: str, write: Callable[[Path], None]) -> Path:
        """Store what `write` puts into the path it is given, then make room. An older file of that key is replaced."""
        import tempfile  # 5 ms, for the compiler only

        path = self._path(key)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".part-") as part:
            written = Path(part) / path.name
            write(written)
            os.replace(written, path)
        self._make_room(keep=key)
        return path

    def remove(self, key: str) -> None:
        """Forget an artifact, as when it turned out to be damaged."""
        self._path(key).unlink(missing_ok=True)

    def entries(self) -> list[CacheEntry]:
        """All of them, the most recently used first."""
        found = []
        for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
            try:
                status = path.stat()
            except OSError:
                continue  # another process dropped it
            found.append(CacheEntry(path.stem, path, status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: -entry.used_seconds)

    def clear(self) -> int:
        """Drop all; returns the bytes set free."""
        entries = self.entries()
        for entry in entries:
            entry.path.unlink(missing_ok=True)
        return sum(entry.size_bytes for entry in entries)

    def _make_room(self, keep: str) -> None:
        total = 0
        for entry in self.entries():
            total += entry.size_bytes
            if total > self.max_bytes and entry.key != keep:
                entry.path.unlink(missing_ok=True)
                total -= entry.size_bytes

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise OptionError(f"cache key: expected 8 to 128 hexadecimal digits, got {key!r}")
        return self.folder / f"{key}{_SUFFIX}"


def open_cache(settings: config.Config | None = None) -> ArtifactCache:
    """The user's cache, where MCOMPILE_CACHE and MCOMPILE_CACHE_BYTES put it."""
    settings = settings if settings is not None else config.load()
    return ArtifactCache(settings.cache / "artifacts", settings.cache_bytes)
