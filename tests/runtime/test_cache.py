"""The cache: bounded, least recently used first, whole files only."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from mcompile import config
from mcompile.errors import OptionError
from mcompile.runtime.cache import ArtifactCache, open_cache


def _add(cache: ArtifactCache, key: str, size: int, used: float) -> Path:
    path = cache.add(key, lambda target: target.write_bytes(bytes(size)) and None)
    os.utime(path, (used, used))
    return path


def test_what_is_added_is_found(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path / "c", 1000)
    assert cache.find("ab" * 8) is None
    path = cache.add("ab" * 8, lambda target: target.write_bytes(b"data") and None)
    assert cache.find("ab" * 8) == path
    assert path.read_bytes() == b"data"
    assert os.listdir(tmp_path / "c") == [path.name]
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o700
    cache.remove("ab" * 8)
    assert cache.find("ab" * 8) is None


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path, 250)
    first, second = _add(cache, "a" * 8, 100, 1000), _add(cache, "b" * 8, 100, 2000)
    assert cache.find("a" * 8) == first
    third = _add(cache, "c" * 8, 100, 3000)
    assert first.exists()
    assert third.exists()
    assert not second.exists()
    assert [entry.key for entry in cache.entries()] == ["a" * 8, "c" * 8]


def test_the_newest_stays_even_if_it_is_too_big(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path, 50)
    _add(cache, "a" * 8, 10, 1000)
    _add(cache, "b" * 8, 100, 2000)
    assert [entry.key for entry in cache.entries()] == ["b" * 8]


def test_clear(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path, 1000)
    _add(cache, "a" * 8, 100, 1)
    _add(cache, "b" * 8, 20, 2)
    assert cache.clear() == 120
    assert cache.entries() == []
    assert ArtifactCache(tmp_path / "none", 1).clear() == 0


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path, 1000)

    def fail(target: Path) -> None:
        target.write_bytes(b"half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        cache.add("a" * 8, fail)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("key", ["", "../../etc/passwd", "ABCDEF01", "abc", "g" * 16])
def test_keys_are_hexadecimal(tmp_path: Path, key: str) -> None:
    with pytest.raises(OptionError, match="hexadecimal"):
        ArtifactCache(tmp_path, 1).find(key)


def test_concurrent_use(tmp_path: Path) -> None:
    """Readers see whole files or none while writers replace and evict them."""
    broken: list[bytes] = []

    def work(seed: int) -> None:
        cache = ArtifactCache(tmp_path, 3000)
        for i in range(40):
            key = f"{(seed + i) % 7:08x}"
            cache.add(key, lambda target, key=key: target.write_bytes(key.encode() * 100) and None)  # type: ignore[misc]
            found = cache.find(key)
            try:
                data = found.read_bytes() if found else key.encode() * 100
            except FileNotFoundError:
                continue
            if data != key.encode() * 100:
                broken.append(data)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not broken
    assert sum(entry.size_bytes for entry in ArtifactCache(tmp_path, 0).entries()) <= 3000 + 4 * 800


def test_the_environment_places_it(tmp_path: Path) -> None:
    settings = config.load({"MCOMPILE_CACHE": str(tmp_path), "MCOMPILE_CACHE_BYTES": "123"})
    cache = open_cache(settings)
    assert (cache.folder, cache.max_bytes) == (tmp_path / "artifacts", 123)
