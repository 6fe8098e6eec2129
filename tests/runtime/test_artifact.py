"""The artifact: round trip, determinism, mapping, and refusal of everything that is not whole."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcompile.dtypes import DType, TensorType
from mcompile.errors import ArtifactError
from mcompile.runtime import Artifact, InferenceSession, ModelMetadata, load, save, to_bytes
from mcompile.runtime.host_cpu import check_target, host_features, required_features
from mcompile.runtime.plan import (
    Argument,
    HostCall,
    KernelCall,
    NativeSegment,
    Repeat,
    Signature,
    Space,
    Tensor,
)
from mcompile.runtime.plan_json import decode_plan, encode_plan
from mcompile.runtime.verify_plan import verify_plan
from tests.runtime.kernels import IN, OUT, arena, chain_answer, chain_artifact, copy, make_artifact, place, signature


def _with_constants(size: int = 5000) -> Artifact:
    constants = np.arange(size, dtype=np.float32)
    calls = (KernelCall("copy", (place(Space.CONSTANTS), OUT), "n"),)
    return make_artifact((copy(1, size),), calls, (), (signature("y", size),), constants=constants)


@pytest.fixture(scope="module")
def chain() -> Artifact:
    return chain_artifact()


@pytest.mark.parametrize("make", [chain_artifact, _with_constants])
@pytest.mark.parametrize("as_file", [True, False])
def test_round_trip(make: Callable[[], Artifact], as_file: bool, tmp_path: Path) -> None:
    artifact = make()
    save(artifact, tmp_path / "m.mcm")
    back = load(tmp_path / "m.mcm" if as_file else to_bytes(artifact), verify=True)
    assert (back.manifest, back.plan) == (artifact.manifest, artifact.plan)
    assert back.kernels == artifact.kernels
    assert np.array_equal(back.constants, artifact.constants)
    assert not back.constants.flags.writeable
    assert back.constants.ctypes.data % 64 == 0 or not back.constants.size


def test_equal_artifacts_have_equal_bytes(tmp_path: Path) -> None:
    save(_with_constants(), tmp_path / "a.mcm")
    assert (tmp_path / "a.mcm").read_bytes() == to_bytes(_with_constants())
    assert os.listdir(tmp_path) == ["a.mcm"]


def test_constants_are_mapped_at_a_page(tmp_path: Path) -> None:
    save(_with_constants(), tmp_path / "a.mcm")
    constants = load(tmp_path / "a.mcm").constants
    assert constants.ctypes.data % 4096 == 0
    base: Any = constants
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)


def test_it_is_a_zip_that_others_read(tmp_path: Path) -> None:
    save(_with_constants(), tmp_path / "a.mcm")
    with zipfile.ZipFile(tmp_path / "a.mcm") as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ["manifest.json", "plan.json", "code/0.o", "constants.bin"]
        manifest = json.loads(archive.read("manifest.json"))
    assert manifest["outputs"] == {"y": "float32[5000]"}
    assert manifest["format_version"] == 1
    assert set(manifest["sha256"]) == {"plan.json", "code/0.o", "constants.bin"}


def test_metadata_and_summary_survive() -> None:
    model = ModelMetadata("pytorch", "g", "ai", "doc", "graph", 3, {"author": "ä"})
    artifact = chain_artifact()
    manifest = dataclasses.replace(artifact.manifest, model=model, summary={"nodes": [3, 1]})
    back = load(to_bytes(dataclasses.replace(artifact, manifest=manifest)))
    assert back.manifest == manifest


def test_every_flipped_byte_outside_the_constants_is_seen() -> None:
    artifact = _with_constants(100)
    data = to_bytes(artifact)
    start = data.index(artifact.constants.tobytes())
    positions = [p for p in range(0, len(data), 37) if not start <= p < start + artifact.constants.nbytes]
    positions += [*range(40), *range(len(data) - 400, len(data))]
    for position in positions:
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        with pytest.raises(ArtifactError):
            load(bytes(damaged))


def test_a_flipped_constant_is_seen_when_asked_for() -> None:
    artifact = _with_constants(100)
    data = bytearray(to_bytes(artifact))
    data[data.index(artifact.constants.tobytes()) + 5] ^= 1
    load(bytes(data))
    with pytest.raises(ArtifactError, match="checksum of the constants"):
        load(bytes(data), verify=True)


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    data = to_bytes(_with_constants(100))
    path = tmp_path / "a.mcm"
    for size in [*range(0, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(ArtifactError, match=r"empty|not an|truncated|damaged"):
            load(path)


def test_appended_bytes_are_refused() -> None:
    with pytest.raises(ArtifactError):
        load(to_bytes(_with_constants(10)) + b"x" * 10)


@pytest.mark.parametrize("data", [b"", b"PK", b"\x08\x07onnx", b"PK\x03\x04" + bytes(200)])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(ArtifactError):
        load(data)


def test_a_missing_file_is_an_artifact_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"none\.mcm: No such file"):
        load(tmp_path / "none.mcm")


def test_another_format_version_is_named() -> None:
    data = to_bytes(_with_constants(10))
    with pytest.raises(ArtifactError, match=r"version 7 \(made by mcompile 0.1.0\); this runtime reads .* version 1"):
        load(_resealed(data, b'"format_version": 1', b'"format_version": 7'))


def _resealed(data: bytes, old: bytes, new: bytes) -> bytes:
    """Change a member's bytes and put all checksums of the zip and the seal right again."""
    from mcompile.runtime import artifact as module

    out = BytesIO()
    with zipfile.ZipFile(BytesIO(data)) as archive, zipfile.ZipFile(out, "w") as copied:
        for info in archive.infolist():
            content = archive.read(info)
            if info.filename == "constants.bin":
                start = module._write_constants(copied, out, memoryview(content))
                size = len(content)
            else:
                copied.writestr(module._member(info.filename), content.replace(old, new))
        copied.comment = module._SEAL + b"0" * 64
    out.seek(0)
    seal = module._sealed_digest(out, start, size)
    out.seek(-64, 2)
    out.write(seal)
    return out.getvalue()


def test_a_resealed_plan_still_needs_its_digest() -> None:
    with pytest.raises(ArtifactError, match=r"checksum of plan\.json"):
        load(_resealed(to_bytes(_with_constants(10)), b'"arena_bytes":0', b'"arena_bytes":1'))


# --- hostile plans ---


def _hostile_call(artifact: Artifact, **changes: Any) -> Artifact:
    segment = artifact.plan.segments[0]
    assert isinstance(segment, NativeSegment)
    call = dataclasses.replace(segment.calls[0], **changes)  # type: ignore[type-var]
    plan = dataclasses.replace(artifact.plan, segments=(NativeSegment((call, *segment.calls[1:])),))
    return dataclasses.replace(artifact, plan=plan)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (arena(-8), "bytes -8"),
        (arena(1 << 40), "of arena, which has 8192"),
        (place(Space.CONSTANTS, 1), "of constants, which has 0"),
        (place(Space.INPUT, 0, 1), "there is no input 1"),
        (place(Space.INPUT, 0, -1), "there is no input -1"),
        (place(Space.OUTPUT, 4097), "of output, which has 4096"),
    ],
)
def test_addresses_outside_their_space_are_refused(chain: Artifact, argument: Argument, message: str) -> None:
    hostile = _hostile_call(chain, args=(argument, arena(0)))
    with pytest.raises(ArtifactError, match=message):
        InferenceSession(hostile)
    with pytest.raises(ArtifactError, match=message):
        to_bytes(hostile)


def test_a_repeat_is_checked_at_both_its_ends() -> None:
    call = KernelCall("copy", (arena(64, step=-16), OUT))

    def artifact(count: int) -> Artifact:
        return make_artifact((copy(1, 1),), (Repeat(count, (call,)),), (), (signature("y", 1),), arena_bytes=68)

    InferenceSession(artifact(5))
    with pytest.raises(ArtifactError, match="bytes -16 to 64"):
        InferenceSession(artifact(6))
    with pytest.raises(ArtifactError, match="iterations"):
        InferenceSession(artifact(-1))


def test_missing_and_doubled_kernels_are_refused(chain: Artifact) -> None:
    with pytest.raises(ArtifactError, match="there is no kernel 'other'"):
        verify_plan(_hostile_call(chain, kernel="other").plan, chain.kernels)
    with pytest.raises(ArtifactError, match="two kernels have the same name"):
        verify_plan(chain.plan, (*chain.kernels, chain.kernels[0]))


@pytest.mark.parametrize("changes", [{"arena_bytes": -1}, {"arena_bytes": 1 << 60}, {"constants_bytes": -5}])
def test_absurd_sizes_are_refused(chain: Artifact, changes: dict[str, int]) -> None:
    with pytest.raises(ArtifactError, match=r"(arena|constants) of -?\d+ bytes"):
        verify_plan(dataclasses.replace(chain.plan, **changes), chain.kernels)


@pytest.mark.parametrize("shape", [(-1,), (1 << 50,), ("n",), (0, 1 << 61), (1,) * 65])
def test_absurd_signatures_are_refused(chain: Artifact, shape: tuple[int | str, ...]) -> None:
    inputs = (Signature("x", TensorType(shape, DType.FLOAT32), shape),)
    with pytest.raises(ArtifactError, match="input 'x' of type"):
        verify_plan(dataclasses.replace(chain.plan, inputs=inputs), chain.kernels)


@pytest.mark.parametrize("changes", [{"scratch_bytes": -1}, {"scratch_bytes": 1 << 50}, {"parallel_extent": -1}])
def test_absurd_kernels_are_refused(chain: Artifact, changes: dict[str, int]) -> None:
    with pytest.raises(ArtifactError, match="kernel 'parallel'"):
        verify_plan(chain.plan, (dataclasses.replace(chain.kernels[0], **changes), *chain.kernels[1:]))


# --- the plan as JSON ---


def test_a_plan_survives_json() -> None:
    tensor = Tensor("t", TensorType((2, 3), DType.INT64), arena(0))
    host = HostCall("Unique", "node", b"\x00\xffmodel", (tensor,), (tensor,))
    plan = dataclasses.replace(
        chain_artifact().plan,
        segments=(NativeSegment((Repeat(3, (KernelCall("k", (IN, arena(4, 8)), "n"),)),)), host),
        outputs=(Signature("y", TensorType((1, 2), DType.BOOL), ("batch", 2)),),
    )
    assert decode_plan(json.loads(json.dumps(encode_plan(plan)))) == plan


def _mutations(value: Any) -> list[Any]:
    """The JSON value with each of its parts replaced by something of another form."""
    if isinstance(value, dict):
        return [
            *({**value, key: new} for key, inner in value.items() for new in _mutations(inner)),
            *({k: v for k, v in value.items() if k != key} for key in value),
        ]
    if isinstance(value, list):
        return [*([*value[:i], new, *value[i + 1 :]] for i, inner in enumerate(value) for new in _mutations(inner)), 3]
    return [[], None, 1.5, True, "?" if isinstance(value, int) else 7]


def test_plans_of_another_form_never_get_through() -> None:
    tensor = Tensor("t", TensorType((2,), DType.INT64), arena(0))
    plan = dataclasses.replace(
        chain_artifact(1).plan,
        segments=(NativeSegment((KernelCall("k", (IN,)),)), HostCall("o", "n", b"m", (tensor,), ())),
    )
    for mutated in _mutations(encode_plan(plan)):
        try:
            decoded = decode_plan(mutated)
        except ArtifactError:
            continue
        assert decoded != plan  # a name or a dim turned into another legal one


# --- targets ---


def test_missing_features_are_named(chain: Artifact) -> None:
    manifest = dataclasses.replace(chain.manifest, cpu="future", features=(*chain.manifest.features, "avx9", "sgx"))
    assert "sgx" not in required_features(manifest)
    with pytest.raises(ArtifactError, match=r"built for future; this machine .* lacks the CPU features avx9:"):
        check_target(manifest)
    with pytest.raises(ArtifactError, match="avx9"):
        InferenceSession(dataclasses.replace(chain, manifest=manifest))


def test_another_architecture_is_named(chain: Artifact) -> None:
    manifest = dataclasses.replace(chain.manifest, triple="riscv64-unknown-linux-gnu")
    with pytest.raises(ArtifactError, match="built for riscv64 linux; this machine is"):
        check_target(manifest)


def test_the_host_can_run_what_it_builds(chain: Artifact) -> None:
    check_target(chain.manifest)
    assert required_features(chain.manifest) <= host_features()


def test_loading_an_artifact_of_another_machine_is_no_error(chain: Artifact) -> None:
    manifest = dataclasses.replace(chain.manifest, triple="aarch64-unknown-linux-gnu", features=("neon",))
    assert load(to_bytes(dataclasses.replace(chain, manifest=manifest))).manifest == manifest


def test_a_loaded_artifact_runs(chain: Artifact, tmp_path: Path) -> None:
    save(chain, tmp_path / "m.mcm")
    x = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    for source in (tmp_path / "m.mcm", os.fspath(tmp_path / "m.mcm"), to_bytes(chain)):
        assert np.array_equal(InferenceSession(source).run(None, {"x": x})[0], chain_answer(x))
