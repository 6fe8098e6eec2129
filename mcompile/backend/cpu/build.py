"""PrimFunc to Kernel."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from mcompile.backend.cpu import llvm
from mcompile.backend.cpu.codegen import emit_module
from mcompile.errors import BuildError
from mcompile.ir.stmt import PrimFunc
from mcompile.runtime.plan import Kernel
from mcompile.target import Target


def build_kernel(func: PrimFunc, target: Target) -> Kernel:
    """Object code for `target`. Raises BuildError if the kernel is too large or would need a library."""
    module = emit_module(func, target)
    code = llvm.object_code(module.text, target)
    missing = sorted(undefined_symbols(code))
    if missing:
        raise BuildError(f"{func.name}: the code needs {', '.join(missing)}", source=module.text)
    return Kernel(
        name=func.name,
        target=target.triple,
        code=code,
        parallel_extent=func.parallel_extent,
        scratch_bytes=module.scratch_bytes,
        moved_bytes=sum(buffer.size_bytes for buffer in func.params),
        source=module.text,
    )


def assembly(func: PrimFunc, target: Target) -> str:
    """What `build_kernel` assembles, as text."""
    return llvm.assembly(emit_module(func, target).text, target)


def undefined_symbols(code: bytes) -> Iterator[str]:
    """Names that an ELF64 object leaves to a linker; nothing for other formats."""
    if code[:5] != b"\x7fELF\x02":
        return
    table_offset, entry_size, count = (
        struct.unpack_from("<Q", code, 0x28)[0],
        struct.unpack_from("<H", code, 0x3A)[0],
        struct.unpack_from("<H", code, 0x3C)[0],
    )
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, table_offset + entry_size * index) for index in range(count)]
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        names = sections[link][4]
        for place in range(offset + 24, offset + size, 24):  # the first symbol is none
            name, _, _, section = struct.unpack_from("<IBBH", code, place)
            if section == 0:
                start = names + name
                yield code[start : code.index(b"\0", start)].decode()
