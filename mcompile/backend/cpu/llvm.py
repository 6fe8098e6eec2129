"""LLVM: target machines, the passes that kernels need, object code."""

from __future__ import annotations

from functools import cache

import llvmlite.binding as llvm

from mcompile.errors import BuildError
from mcompile.target import Target


@cache
def _initialize(is_native: bool) -> None:
    if is_native:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
    else:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()


@cache
def target_machine(target: Target) -> llvm.TargetMachine:
    """Position-independent code, small code model."""
    _initialize(target.triple == llvm.get_process_triple())
    backend = llvm.Target.from_triple(target.triple)
    return backend.create_target_machine(
        cpu=target.cpu, features=target.feature_string, opt=3, reloc="pic", codemodel="small"
    )


def optimize(text: str, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    """The module of `text` after few passes.

    The generator leaves no redundant arithmetic, no invariant address in a loop and nothing to vectorise, so promoting
    stack slots to registers and peephole rules do what the O3 pipeline does, in a fifth of its time.
    """
    try:
        module = llvm.parse_assembly(text, context=llvm.create_context())
        module.verify()
    except RuntimeError as error:
        raise BuildError("LLVM refused a generated kernel: a fault of mcompile", source=text, log=str(error)) from error
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes = llvm.create_new_function_pass_manager()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    for function in module.functions:
        if not function.is_declaration:
            passes.run(function, builder)
    return module


def object_code(text: str, target: Target) -> bytes:
    machine = target_machine(target)
    return bytes(machine.emit_object(optimize(text, machine)))


def assembly(text: str, target: Target) -> str:
    machine = target_machine(target)
    return str(machine.emit_assembly(optimize(text, machine)))
