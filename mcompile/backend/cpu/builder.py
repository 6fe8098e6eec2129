"""Writes the body of one LLVM function as text: values, structured control flow, value numbering, hoisting.

Every open loop and branch is a scope with lines of its own. An instruction without effects is written once, into the
outermost scope where its operands exist (loop-invariant address arithmetic so leaves its loops), but never out of a
branch. Loads stay where they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from mcompile.backend.cpu.llvm_types import BITS, lane_text, literal, splat_text, suffix, type_text
from mcompile.errors import BuildError

CONSTANT = -1


class Value(NamedTuple):
    """An operand: its text, LLVM element type and lanes (0: scalar), and the depth of the scope that defines it.

    `ints` holds an integer constant's value, or its lanes' values.
    """

    text: str
    element: str
    lanes: int
    level: int
    ints: int | tuple[int, ...] | None = None

    @property
    def type(self) -> str:
        return type_text(self.element, self.lanes)

    @property
    def typed(self) -> str:
        return f"{type_text(self.element, self.lanes)} {self.text}"


@dataclass
class _Scope:
    block: str
    lines: list[str] = field(default_factory=list)
    known: dict[str, Value] = field(default_factory=dict)


Operand = Value | int | float


@cache
def _integer(element: str, value: int, lanes: int) -> Value:
    return Value(splat_text(element, literal(element, value), lanes), element, lanes, CONSTANT, value)


class Builder:
    """The text of one function's body; `limit` bounds its instructions, above it BuildError is raised."""

    def __init__(self, entry_block: str, *, has_fma: bool, has_half: bool, limit: int) -> None:
        self.has_fma = has_fma
        self.has_half = has_half  # converts float16 by instructions
        self.declarations: set[str] = set()
        self._scopes = [_Scope(entry_block)]
        self._floor = 0  # depth of the innermost branch
        self._limit = limit
        self._count = 0

    # -- structure ---------------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        return len(self._scopes) - 1

    @property
    def lines(self) -> list[str]:
        """Of the innermost open scope."""
        return self._scopes[-1].lines

    def fresh(self, stem: str) -> str:
        self._count += 1
        if self._count > self._limit:
            raise BuildError(f"the kernel unrolls to more than {self._limit} operations; unroll less")
        return f"{stem}{self._count}"

    def loop(self, start: Value, end: Value, body: Callable[[Value], None]) -> None:
        """`for i in start..end: body(i)`; runs at least once, so start < end must hold."""
        header, exit_block = self.fresh("loop"), self.fresh("after")
        index = Value(f"%{self.fresh('i')}", "i64", 0, len(self._scopes))
        self._scopes.append(_Scope(header))
        body(index)
        inner = self._scopes.pop()
        outer = self._scopes[-1]
        following, test = f"{index.text}.next", f"{index.text}.test"
        outer.lines += [
            f"br label %{header}",
            f"{header}:",
            f"{index.text} = phi i64 [ {start.text}, %{outer.block} ], [ {following}, %{inner.block} ]",
            *inner.lines,
            f"{following} = add nuw nsw i64 {index.text}, 1",
            f"{test} = icmp slt i64 {following}, {end.text}",
            f"br i1 {test}, label %{header}, label %{exit_block}",
            f"{exit_block}:",
        ]
        outer.block = exit_block

    def while_loop(
        self, state: Sequence[Value], body: Callable[[Sequence[Value]], tuple[Value, Sequence[Value]]]
    ) -> list[Value]:
        """Repeat `body(state) -> (scalar condition to go on, next state)` at least once; the last state."""
        header, exit_block = self.fresh("while"), self.fresh("after")
        depth = len(self._scopes)
        inside = [Value(f"%{self.fresh('s')}", value.element, value.lanes, depth) for value in state]
        self._scopes.append(_Scope(header))
        floor, self._floor = self._floor, depth
        go_on, after = body(inside)
        self._floor = floor
        inner = self._scopes.pop()
        outer = self._scopes[-1]
        outer.lines += [f"br label %{header}", f"{header}:"]
        outer.lines += [
            f"{phi.text} = phi {phi.type} [ {first.text}, %{outer.block} ], [ {later.text}, %{inner.block} ]"
            for phi, first, later in zip(inside, state, after, strict=True)
        ]
        outer.lines += inner.lines
        outer.lines += [f"br i1 {go_on.text}, label %{header}, label %{exit_block}", f"{exit_block}:"]
        outer.block = exit_block
        return [value._replace(level=max(depth - 1, CONSTANT)) for value in after]

    def branch(
        self, condition: Value, then: Callable[[], Value | None], otherwise: Callable[[], Value | None] | None = None
    ) -> Value | None:
        """An if; the value of the branch taken, where both give one."""
        then_block, else_block, end = self.fresh("then"), self.fresh("else"), self.fresh("end")
        first, first_scope = self._branch_body(then_block, then)
        second, second_scope = self._branch_body(else_block, otherwise) if otherwise else (None, None)
        outer = self._scopes[-1]
        target = else_block if second_scope else end
        outer.lines += [f"br i1 {condition.text}, label %{then_block}, label %{target}", f"{then_block}:"]
        outer.lines += [*first_scope.lines, f"br label %{end}"]
        if second_scope:
            outer.lines += [f"{else_block}:", *second_scope.lines, f"br label %{end}"]
        outer.lines.append(f"{end}:")
        outer.block = end
        if first is None or second is None or second_scope is None:
            return None
        edges = f"[ {first.text}, %{first_scope.block} ], [ {second.text}, %{second_scope.block} ]"
        return self.effect(f"phi {first.type} {edges}", first.element, first.lanes)

    def _branch_body(self, block: str, body: Callable[[], Value | None]) -> tuple[Value | None, _Scope]:
        scope = _Scope(block)
        self._scopes.append(scope)
        floor, self._floor = self._floor, len(self._scopes) - 1
        result = body()
        self._floor = floor
        self._scopes.pop()
        return result, scope

    # -- instructions ------------------------------------------------------------------------------------------

    def pure(self, operation: str, element: str, lanes: int, level: int, *, hoist: bool = True) -> Value:
        """The value of an instruction without effects, whose operands are defined at `level` and above."""
        scopes = self._scopes
        low = level if level > 0 else 0
        target = max(low, self._floor) if hoist else len(scopes) - 1
        for scope in scopes[low : target + 1]:
            found = scope.known.get(operation)
            if found is not None:
                return found
        name = f"%{self.fresh('v')}"
        value = Value(name, element, lanes, target)
        scopes[target].lines.append(f"{name} = {operation}")
        scopes[target].known[operation] = value
        return value

    def effect(self, operation: str, element: str, lanes: int) -> Value:
        """The value of an instruction that must stay in its place."""
        name = f"%{self.fresh('v')}"
        self._scopes[-1].lines.append(f"{name} = {operation}")
        return Value(name, element, lanes, len(self._scopes) - 1)

    def act(self, operation: str) -> None:
        """An instruction without a value."""
        self.fresh("")
        self._scopes[-1].lines.append(operation)

    def constant(self, element: str, value: int | float, lanes: int = 0) -> Value:
        if isinstance(value, int) and element not in ("float", "double"):
            return _integer(element, value, lanes)
        return Value(splat_text(element, literal(element, value), lanes), element, lanes, CONSTANT)

    def pattern(self, element: str, values: tuple[int, ...]) -> Value:
        """A constant with other lanes each."""
        return Value(lane_text(element, values), element, len(values), CONSTANT, values)

    def like(self, operand: Operand, other: Value) -> Value:
        """`operand` in the type of `other`, numbers and scalars spread over its lanes."""
        if not isinstance(operand, tuple):
            return self.constant(other.element, operand, other.lanes)
        return self.broadcast(operand, other.lanes)

    def broadcast(self, value: Value, lanes: int) -> Value:
        if value.lanes == lanes or lanes == 0:
            return value
        if value.level == CONSTANT:
            return value._replace(text=splat_text(value.element, value.text, lanes), lanes=lanes)
        kind = type_text(value.element, lanes)
        first = self.pure(f"insertelement {kind} poison, {value.typed}, i64 0", value.element, lanes, value.level)
        mask = f"<{lanes} x i32> zeroinitializer"
        return self.pure(f"shufflevector {first.typed}, {kind} poison, {mask}", value.element, lanes, first.level)

    def unify(self, a: Operand, b: Operand) -> tuple[Value, Value]:
        if not isinstance(a, tuple):
            assert isinstance(b, tuple)
            return self.like(a, b), b
        if not isinstance(b, tuple):
            return a, self.like(b, a)
        if a.lanes == b.lanes:
            return a, b
        return self.broadcast(a, b.lanes), self.broadcast(b, a.lanes)

    def binary(self, opcode: str, a: Operand, b: Operand) -> Value:
        x, y = self.unify(a, b)
        return self.pure(f"{opcode} {x.typed}, {y.text}", x.element, x.lanes, max(x.level, y.level))

    def compare(self, predicate: str, a: Operand, b: Operand) -> Value:
        """`predicate` with its opcode: `fcmp olt`."""
        x, y = self.unify(a, b)
        return self.pure(f"{predicate} {x.typed}, {y.text}", "i1", x.lanes, max(x.level, y.level))

    def select(self, condition: Value, a: Operand, b: Operand) -> Value:
        x, y = self.unify(a, b)
        if condition.lanes and not x.lanes:
            x, y = self.broadcast(x, condition.lanes), self.broadcast(y, condition.lanes)
        level = max(condition.level, x.level, y.level)
        return self.pure(f"select {condition.typed}, {x.typed}, {y.typed}", x.element, x.lanes, level)

    def convert(self, opcode: str, value: Value, element: str) -> Value:
        if value.element == element:
            return value
        operation = f"{opcode} {value.typed} to {type_text(element, value.lanes)}"
        return self.pure(operation, element, value.lanes, value.level)

    def intrinsic(self, name: str, *args: Operand, extra: str = "") -> Value:
        """An intrinsic `llvm.name` whose operands and result have one type; `extra` are further operands' texts."""
        first = next(arg for arg in args if isinstance(arg, tuple))
        lanes = max(arg.lanes for arg in args if isinstance(arg, tuple))
        wide = self.broadcast(first, lanes)
        values = [self.like(arg, wide) for arg in args]
        symbol = f"@llvm.{name}.{suffix(wide.element, lanes)}"
        kinds = ", ".join([wide.type] * len(values) + ([extra.split()[0]] if extra else []))
        self.declarations.add(f"declare {wide.type} {symbol}({kinds})")
        operands = ", ".join([value.typed for value in values] + ([extra] if extra else []))
        level = max(value.level for value in values)
        return self.pure(f"call {wide.type} {symbol}({operands})", wide.element, lanes, level)

    def shuffle(self, a: Value, b: Value | None, lanes: Sequence[int]) -> Value:
        """Lanes picked from `a` and then `b`."""
        second = b.typed if b is not None else f"{a.type} poison"
        level = max(a.level, b.level) if b is not None else a.level
        mask = lane_text("i32", tuple(lanes))
        operation = f"shufflevector {a.typed}, {second}, <{len(lanes)} x i32> {mask}"
        return self.pure(operation, a.element, len(lanes), level)

    def extract(self, value: Value, lane: int) -> Value:
        if not value.lanes:
            return value
        return self.pure(f"extractelement {value.typed}, i64 {lane}", value.element, 0, value.level)

    def insert(self, vector: Value | None, scalar: Value, lane: int, lanes: int) -> Value:
        kind = type_text(scalar.element, lanes)
        base = "poison" if vector is None else vector.text
        level = scalar.level if vector is None else max(vector.level, scalar.level)
        operation = f"insertelement {kind} {base}, {scalar.typed}, i64 {lane}"
        return self.pure(operation, scalar.element, lanes, level)

    # -- floats and bits ---------------------------------------------------------------------------------------

    def add(self, a: Operand, b: Operand) -> Value:
        return self.binary("fadd", a, b)

    def sub(self, a: Operand, b: Operand) -> Value:
        return self.binary("fsub", a, b)

    def mul(self, a: Operand, b: Operand) -> Value:
        return self.binary("fmul", a, b)

    def div(self, a: Operand, b: Operand) -> Value:
        return self.binary("fdiv", a, b)

    def neg(self, x: Value) -> Value:
        return self.pure(f"fneg {x.typed}", x.element, x.lanes, x.level)

    def fma(self, a: Operand, b: Operand, c: Operand) -> Value:
        """a * b + c, in one rounding where the target can."""
        if self.has_fma:
            return self.intrinsic("fma", a, b, c)
        return self.add(self.mul(a, b), c)

    def polynomial(self, x: Value, coefficients: Sequence[float]) -> Value:
        """Horner's scheme; the coefficient of the highest power first."""
        result = self.like(coefficients[0], x)
        for coefficient in coefficients[1:]:
            result = self.fma(result, x, coefficient)
        return result

    def least(self, bound: float, x: Value) -> Value:
        """min(bound, x), NaN if x is: one vminps."""
        limit = self.like(bound, x)
        return self.select(self.compare("fcmp olt", limit, x), limit, x)

    def greatest(self, bound: float, x: Value) -> Value:
        """max(bound, x), NaN if x is: one vmaxps."""
        limit = self.like(bound, x)
        return self.select(self.compare("fcmp ogt", limit, x), limit, x)

    def bits(self, x: Value) -> Value:
        """A float's bits as an integer of its width."""
        return self.convert("bitcast", x, f"i{BITS[x.element]}")

    def from_bits(self, x: Value) -> Value:
        return self.convert("bitcast", x, {"i32": "float", "i64": "double"}[x.element])

    def reduce(self, combine: Callable[[Value, Value], Value], x: Value) -> Value:
        """All lanes combined, pairwise by halves."""
        lanes = x.lanes
        if lanes <= 1:
            return self.extract(x, 0)
        half = 1 << (lanes.bit_length() - 1)
        if half == lanes:
            half //= 2
            both = combine(self.shuffle(x, None, range(half)), self.shuffle(x, None, range(half, lanes)))
            return self.reduce(combine, both)
        low = self.reduce(combine, self.shuffle(x, None, range(half)))
        return combine(low, self.reduce(combine, self.shuffle(x, None, range(half, lanes))))

    def any_lane(self, mask: Value) -> Value:
        """Whether a lane of `mask` is set."""
        if not mask.lanes:
            return mask
        symbol = f"@llvm.vector.reduce.or.v{mask.lanes}i1"
        self.declarations.add(f"declare i1 {symbol}({mask.type})")
        return self.pure(f"call i1 {symbol}({mask.typed})", "i1", 0, mask.level)
