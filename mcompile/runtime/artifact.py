"""The artifact: one `.mcm` file, a zip of uncompressed members.

- `manifest.json`: versions, target, model metadata, sha256 of every other member;
- `plan.json`: the ExecutionPlan and the kernels' facts;
- `code/N.o`: kernel N's object code;
- `constants.bin`: starts at a multiple of 4096 in the file, so that it is mapped, not read.

The zip's comment holds the sha256 of all bytes before it but the constants', so no damage to what runs goes unseen.
Equal artifacts have equal bytes: order, dates and padding are fixed.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np

from mcompile.errors import ArtifactError
from mcompile.runtime.host import host_calls
from mcompile.runtime.memory import ALIGNMENT, Bytes, address, aligned_empty
from mcompile.runtime.options import ModelMetadata
from mcompile.runtime.plan import ExecutionPlan, Kernel
from mcompile.runtime.plan_json import decode_kernel, decode_plan, encode_kernel, encode_plan
from mcompile.runtime.verify_plan import verify_plan

FORMAT = "mcompile-artifact"
FORMAT_VERSION = 1
PAGE_BYTES = 4096
_MANIFEST, _PLAN, _CONSTANTS = "manifest.json", "plan.json", "constants.bin"
_DATE = (1980, 1, 1, 0, 0, 0)
_SEAL = b"mcompile-sha256:"
_SEAL_BYTES = len(_SEAL) + 64
_PADDING_ID = 0xD935  # the extra field that zipalign uses: id, length, alignment, zeros
_ZIP64_EXTRA_BYTES = 20
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


@dataclass(frozen=True)
class Manifest:
    """What an artifact says of itself. `features` are the LLVM feature names its code was generated for."""

    compiler_version: str
    triple: str
    cpu: str
    features: tuple[str, ...]
    threads: int  # that schedules were made for; a session may use others
    model: ModelMetadata = field(default_factory=ModelMetadata)
    summary: Mapping[str, Any] = field(default_factory=dict)  # JSON of the compiler's: nodes, tasks, options, ...


@dataclass(frozen=True)
class Artifact:
    """A compiled model. `constants` is one array of bytes, mapped from the file where it was loaded from one."""

    manifest: Manifest
    plan: ExecutionPlan
    kernels: tuple[Kernel, ...]
    constants: Bytes

    @property
    def host_ops(self) -> tuple[str, ...]:
        """Operators that run on the host, as `op (node)`."""
        return tuple(f"{call.op} ({call.node})" for call in host_calls(self.plan))


def verify_artifact(artifact: Artifact) -> None:
    """Raises ArtifactError unless the plan can be run with these kernels and constants."""
    expected, size = artifact.plan.constants_bytes, artifact.constants.nbytes
    if size != expected:
        raise ArtifactError(f"{size} bytes of constants; the plan says {expected}")
    verify_plan(artifact.plan, artifact.kernels)


def align_constants(constants: Bytes) -> Bytes:
    """As kernels want them: at a multiple of 64. A copy only where they are not."""
    if address(constants) % ALIGNMENT == 0 or not len(constants):
        return constants
    copy = aligned_empty(len(constants))
    copy[:] = constants
    copy.flags.writeable = False
    return copy


# --- writing ---


def save(artifact: Artifact, path: str | os.PathLike[str]) -> None:
    """Write the file, whole or not at all. Raises OSError, and ArtifactError for a plan that cannot be run."""
    import tempfile  # 5 ms, for the compiler only

    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():  # a device or a pipe must not become a file
        path.write_bytes(to_bytes(artifact))
        return
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(descriptor, "w+b") as file:
            _write(artifact, file)
            os.fchmod(file.fileno(), 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def to_bytes(artifact: Artifact) -> bytes:
    """The file's bytes."""
    file = BytesIO()
    _write(artifact, file)
    return file.getvalue()


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _write(artifact: Artifact, file: IO[bytes]) -> None:
    verify_artifact(artifact)
    constants = np.ascontiguousarray(artifact.constants).view(np.uint8).reshape(-1).data
    members = _members(artifact)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in members.items()}
    digests[_CONSTANTS] = hashlib.sha256(constants).hexdigest()
    manifest = _dump(_manifest_json(artifact, digests), indent=1)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in {_MANIFEST: manifest, **members}.items():
            archive.writestr(_member(name), data)
        start = _write_constants(archive, file, constants)
        archive.comment = _SEAL + b"0" * 64
    file.seek(0)
    seal = _sealed_digest(file, start, len(constants))
    file.seek(-64, os.SEEK_END)
    file.write(seal)


def _members(artifact: Artifact) -> dict[str, bytes]:
    """All files but the manifest and the constants."""
    kernels = [encode_kernel(kernel) for kernel in artifact.kernels]
    plan = _dump({"plan": encode_plan(artifact.plan), "kernels": kernels})
    return {_PLAN: plan, **{f"code/{i}.o": kernel.code for i, kernel in enumerate(artifact.kernels)}}


def _manifest_json(artifact: Artifact, digests: Mapping[str, str]) -> dict[str, Any]:
    plan = artifact.plan
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **asdict(artifact.manifest),
        "inputs": {signature.name: str(signature.type) for signature in plan.inputs},
        "outputs": {signature.name: str(signature.type) for signature in plan.outputs},
        "host_ops": list(artifact.host_ops),
        "sha256": digests,
    }


def _dump(value: Any, indent: int | None = None) -> bytes:
    separators = None if indent else (",", ":")
    return json.dumps(value, indent=indent, separators=separators, sort_keys=True).encode()


def _member(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _DATE)
    info.create_system = 3  # Unix, wherever it is written
    info.external_attr = 0o644 << 16
    return info


def _write_constants(archive: zipfile.ZipFile, file: IO[bytes], constants: memoryview) -> int:
    """Returns where in the file they start."""
    info = _member(_CONSTANTS)
    head = file.tell() + _LOCAL_HEADER.size + len(_CONSTANTS) + _ZIP64_EXTRA_BYTES
    padding = -(head + 6) % PAGE_BYTES
    info.extra = struct.pack("<HHH", _PADDING_ID, padding + 2, PAGE_BYTES) + bytes(padding)
    info.file_size = len(constants)
    with archive.open(info, "w", force_zip64=True) as member:
        start = file.tell()
        member.write(constants)
    return start


def _sealed_digest(file: IO[bytes], start: int, size: int) -> bytes:
    """Of all before the comment's digest but the constants, as hexadecimal text."""
    digest = hashlib.sha256(file.read(start))
    file.seek(start + size)
    digest.update(file.read()[:-64])
    return digest.hexdigest().encode()


# --- reading ---


def load(source: str | os.PathLike[str] | bytes, *, verify: bool = False) -> Artifact:
    """Read an artifact from a file (the constants are mapped) or from bytes; `verify` checks the constants too.

    Raises ArtifactError for anything damaged or of another format version; whether this machine can run it is
    `check_target`'s question.
    """
    name = f"artifact of {len(source)} bytes" if isinstance(source, bytes) else os.fspath(source)
    try:
        if isinstance(source, bytes):
            return _read(BytesIO(source), np.frombuffer(source, np.uint8), verify)
        with open(source, "rb") as file:
            return _read(file, _map(file), verify)
    except ArtifactError as error:
        raise ArtifactError(f"{name}: {error}") from error
    except OSError as error:
        raise ArtifactError(f"{name}: {error.strerror or error}") from error
    except _DAMAGE as error:
        raise ArtifactError(f"{name}: damaged: {error}") from error


_DAMAGE = (
    zipfile.BadZipFile,
    struct.error,
    AttributeError,  # this and the next two: JSON of another form
    LookupError,
    TypeError,
    ValueError,
    EOFError,
    NotImplementedError,
    RecursionError,
)


def is_artifact(data: bytes) -> bool:
    """Whether a file that begins with these bytes (four are enough) is meant as an artifact."""
    return data[:4] == b"PK\x03\x04"


def _map(file: IO[bytes]) -> Bytes:
    if os.fstat(file.fileno()).st_size == 0:
        raise ArtifactError("an empty file")
    return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def _read(file: IO[bytes], data: Bytes, verify: bool) -> Artifact:
    if not is_artifact(data[:4].tobytes()):
        raise ArtifactError("not an mcompile artifact")
    if data[-_SEAL_BYTES:-64].tobytes() != _SEAL:
        raise ArtifactError("not a whole mcompile artifact: its end is missing (truncated?)")
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: info for info in archive.infolist()}
        if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()) or _CONSTANTS not in members:
            raise ArtifactError("damaged: its members are not those of an mcompile artifact")
        constants = _stored_data(data, members[_CONSTANTS])
        _check_seal(data, constants)
        files = {name: archive.read(info) for name, info in members.items() if name != _CONSTANTS}
    digests, manifest = _read_manifest(files)
    plan, kernels = _read_plan(files, digests)
    content = data[constants]
    if verify and hashlib.sha256(content.data).hexdigest() != digests.get(_CONSTANTS):
        raise ArtifactError("damaged: the checksum of the constants is wrong")
    artifact = Artifact(manifest, plan, kernels, align_constants(content))
    verify_artifact(artifact)
    return artifact


def _stored_data(data: Bytes, info: zipfile.ZipInfo) -> slice:
    header = _LOCAL_HEADER.unpack_from(data.data, info.header_offset)
    start = info.header_offset + _LOCAL_HEADER.size + header[-2] + header[-1]
    if start + info.file_size > len(data):
        raise ArtifactError("damaged: the constants end behind the file's end (truncated?)")
    return slice(start, start + info.file_size)


def _check_seal(data: Bytes, constants: slice) -> None:
    digest = hashlib.sha256(data[: constants.start].data)
    digest.update(data[constants.stop : -64].data)
    if digest.hexdigest().encode() != data[-64:].tobytes():
        raise ArtifactError("damaged: the checksum over manifest, plan and code is wrong")


def _read_manifest(files: Mapping[str, bytes]) -> tuple[Mapping[str, str], Manifest]:
    """The members' digests, and the manifest. Raises ArtifactError for another format or version."""
    fields = json.loads(files[_MANIFEST])
    version = fields.get("format_version")
    if fields.get("format") != FORMAT or version != FORMAT_VERSION:
        made_by = fields.get("compiler_version", "an unknown version")
        raise ArtifactError(
            f"format {fields.get('format')} version {version} (made by mcompile {made_by}); this runtime reads "
            f"{FORMAT} version {FORMAT_VERSION}: compile the model again"
        )
    digests: Mapping[str, str] = fields["sha256"]
    manifest = Manifest(
        fields["compiler_version"],
        fields["triple"],
        fields["cpu"],
        tuple(map(str, fields["features"])),
        fields["threads"],
        ModelMetadata(**fields["model"]),
        fields["summary"],
    )
    return digests, manifest


def _read_plan(files: Mapping[str, bytes], digests: Mapping[str, str]) -> tuple[ExecutionPlan, tuple[Kernel, ...]]:
    for name, data in files.items():
        if name != _MANIFEST and hashlib.sha256(data).hexdigest() != digests.get(name):
            raise ArtifactError(f"damaged: the checksum of {name} is wrong")
    fields = json.loads(files[_PLAN])
    kernels = tuple(decode_kernel(kernel, files[f"code/{i}.o"]) for i, kernel in enumerate(fields["kernels"]))
    return decode_plan(fields["plan"]), kernels
