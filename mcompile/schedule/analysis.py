"""What constructed schedules need to know of a task: roles of its stages, and how loads move along axes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from mcompile.ir.affine import as_affine
from mcompile.ir.expr import Binary, BinaryOp, Const, Expr, Load, Reduce, Select, Unary, UnaryOp, Var, as_expr, walk
from mcompile.ir.tensor import Compute, Tensor
from mcompile.schedule.state import Stage
from mcompile.schedule.task import Task

_CHEAP = {UnaryOp.NEG, UnaryOp.NOT, UnaryOp.ABS, UnaryOp.SIGN, UnaryOp.IS_NAN, UnaryOp.IS_INF, UnaryOp.SQRT}
_CHEAP |= {UnaryOp.FLOOR, UnaryOp.CEIL, UnaryOp.ROUND, UnaryOp.TRUNC}


@dataclass(frozen=True)
class TaskAnalysis:
    """Roles of the stages of a task."""

    task: Task

    @cached_property
    def constant(self) -> frozenset[str]:
        """Constants, and stages computed from constants only (evaluated when compiling)."""
        found = set(self.task.constants)
        outputs = {output.name for output in self.task.dag.outputs}
        for compute in self.task.dag.computes:
            inputs = compute.inputs
            if inputs and all(source.name in found for source in inputs) and compute.name not in outputs:
                found.add(compute.name)
        return frozenset(found)

    @cached_property
    def stages(self) -> tuple[Compute, ...]:
        """The computes that run, in topological order."""
        return tuple(compute for compute in self.task.dag.computes if compute.name not in self.constant)

    @cached_property
    def reductions(self) -> tuple[Compute, ...]:
        return tuple(stage for stage in self.stages if stage.reduce_axes)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        return tuple(output.name for output in self.task.dag.outputs)

    def consumers(self, stage: Tensor) -> tuple[Compute, ...]:
        return tuple(compute for compute in self.stages if stage in compute.inputs)

    def strides_of(self, tensor: Tensor) -> tuple[int, ...] | None:
        """Strides of a placeholder or output; None for a stage, whose layout follows its loops."""
        return self.task.strides.get(tensor.name)


def loads_of(compute: Compute) -> tuple[Load, ...]:
    return tuple(node for node in walk(compute.body) if isinstance(node, Load))


def axis_names(compute: Compute) -> dict[Var, str]:
    """The iterator name of each axis variable, as a Stage gives them."""
    stage = Stage.of(compute)
    return {axis.var: name for name, axis in stage.axes.items()}


def address(load: Load, strides: tuple[int, ...]) -> Expr:
    """The element offset a load reads at."""
    total: Expr = as_expr(0)
    for index, stride in zip(load.indices, strides, strict=True):
        total = total + index * stride
    return total


def stride_along(expr: Expr, variable: Var) -> int | None:
    """How far an offset moves when `variable` grows by one; None if it is not affine in it."""
    affine = as_affine(expr)
    for term in affine.terms:
        if term is not variable and any(node is variable for node in walk(term)):
            return None
    return affine.terms.get(variable, 0)


def is_transcendental(compute: Compute) -> bool:
    """Whether the body computes a transcendental function: worth computing once, not in each reader."""
    return any(isinstance(node, Unary) and node.op not in _CHEAP for node in walk(compute.body)) or any(
        isinstance(node, Binary) and node.op is BinaryOp.POW for node in walk(compute.body)
    )


def is_plain_copy(compute: Compute) -> bool:
    """One load with no arithmetic on the value."""
    return isinstance(compute.body, Load)


def is_padding(compute: Compute) -> bool:
    """An element of one tensor inside some bounds, a constant outside."""
    body = compute.body
    return isinstance(body, Select) and isinstance(body.a, Load) and isinstance(body.b, Const)


def operations(expr: Expr) -> int:
    """Arithmetic operations of an expression on values (index arithmetic is not counted), transcendental ones as 12."""
    count = 0
    stack, seen = [expr], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, Load):
            continue
        if isinstance(node, Unary):
            count += 1 if node.op in _CHEAP else 12
        elif not isinstance(node, Const | Var):
            count += 1
        stack.extend(node.children)
    return count


def dag_flops(task: Task) -> int:
    """Floating-point operations of a task: 2 a multiply-add, 1 any other operation."""
    return sum(compute_flops(compute) for compute in TaskAnalysis(task).stages)


def compute_flops(compute: Compute) -> int:
    body = compute.body
    size = prod(compute.shape)
    if isinstance(body, Reduce):
        return size * prod(axis.extent for axis in compute.reduce_axes) * (1 + operations(body.value))
    return size * operations(body)


def moved_bytes(task: Task) -> int:
    """Bytes of all arguments of the task, each read or written once."""
    tensors = (*task.dag.placeholders, *task.dag.outputs)
    return sum(prod(tensor.shape) * tensor.dtype.bytes for tensor in tensors)
