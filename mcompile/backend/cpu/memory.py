"""Loads and stores: an address is a linear sum, and its form over the lanes decides which instructions reach it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import gcd

from mcompile.backend.cpu import half
from mcompile.backend.cpu.builder import Builder, Value
from mcompile.backend.cpu.llvm_types import BITS, MEMORY_TYPES, suffix, type_text
from mcompile.dtypes import DType
from mcompile.ir.stmt import Buffer

MEMORY_ALIGNMENT = 64  # of stack and scratch buffers
ZEROS = "@zeros"
_MAX_SHUFFLED_VECTORS = 4  # of a constant lane pattern; wider patterns are gathered


@dataclass(slots=True)
class Address:
    """Element `const + sum(coefficient * scalar)`, plus for each lane `lanes[l]` and the sum over `vectors`.

    `base` is a pointer that it counts from instead of the buffer's own.
    """

    terms: tuple[tuple[Value, int], ...]
    const: int
    lanes: tuple[int, ...] = ()
    vectors: tuple[tuple[Value, int], ...] = ()
    base: Value | None = None

    @property
    def is_uniform(self) -> bool:
        """The same for all lanes."""
        return not self.vectors and lane_step(self.lanes) == 0

    @property
    def is_contiguous(self) -> bool:
        return not self.vectors and lane_step(self.lanes) == 1


@cache
def lane_step(lanes: tuple[int, ...]) -> int | None:
    """The distance from each lane to the next, None if they differ; 0 for no lanes."""
    steps = {b - a for a, b in pairwise(lanes)}
    return None if len(steps) > 1 else steps.pop() if steps else 0


@dataclass(frozen=True)
class Place:
    """A buffer's memory: `elements` from `pointer` on may be accessed; the start is aligned to `alignment` bytes."""

    pointer: Value
    elements: int
    alignment: int
    read_only: bool = False  # never written while the kernel runs
    may_alias: bool = False
    is_private: bool = False  # a local buffer, perhaps registers


class Memory:
    """Emits accesses; remembers what was loaded since the last store, so that each element is loaded once."""

    def __init__(self, builder: Builder, *, has_gather: bool) -> None:
        self._b = builder
        self._has_gather = has_gather
        self._places: dict[Buffer, Place] = {}
        self._loaded: dict[Buffer, dict[str, Value]] = {}
        self.zero_bytes = 0  # of the constant ZEROS

    def bind(self, buffer: Buffer, place: Place) -> None:
        self._places[buffer] = place

    def elements(self, buffer: Buffer) -> int:
        return self._places[buffer].elements

    def forget(self) -> None:
        """What was loaded may have changed."""
        self._loaded = {}

    @contextmanager
    def branch(self) -> Iterator[None]:
        """What is loaded inside is not there afterwards."""
        saved = {buffer: dict(loads) for buffer, loads in self._loaded.items()}
        yield
        self._loaded = saved

    def redirected(self, buffer: Buffer, condition: Value, outer: Address, low: int, size: int) -> Value:
        """A pointer to `outer` where `condition` holds, else into zeros, of which [low, low + size) may be read."""
        element = MEMORY_TYPES[buffer.dtype]
        self.zero_bytes = max(self.zero_bytes, size * BITS[element] // 8)
        zeros = self._offset(element, Value(ZEROS, "ptr", 0, 0), self._b.constant("i64", -low))
        return self._b.select(condition, self._pointer(buffer, outer, 0), zeros)

    # -- loads -------------------------------------------------------------------------------------------------

    def load(self, buffer: Buffer, address: Address, mask: Value | None) -> Value:
        """The element, or the lanes; lanes where `mask` is not set are undefined or 0."""
        return self._unpacked(buffer.dtype, self._load(buffer, address, mask))

    def _load(self, buffer: Buffer, address: Address, mask: Value | None) -> Value:
        if self._places[buffer].is_private and not address.terms:
            mask = None  # it holds whole vectors; a masked load would keep it out of registers
        if address.is_uniform:
            offset = address.lanes[0] if address.lanes else 0
            pointer = self._pointer(buffer, address, offset)
            if mask is not None:
                pointer = self._b.select(self._b.any_lane(mask), pointer, self._places[buffer].pointer)
            return self._plain(buffer, pointer, 0, self._alignment(buffer, address, offset))
        if address.is_contiguous:
            return self._contiguous(buffer, address, mask)
        if address.vectors or mask is not None or not self._can_shuffle(address):
            return self._gather(buffer, address, mask)
        return self._shuffled(buffer, address)

    def _plain(self, buffer: Buffer, pointer: Value, lanes: int, alignment: int) -> Value:
        element = MEMORY_TYPES[buffer.dtype]
        operation = f"load {type_text(element, lanes)}, {pointer.typed}, align {alignment}"
        return self._remembered(buffer, operation, element, lanes, pointer.level)

    def _remembered(self, buffer: Buffer, operation: str, element: str, lanes: int, level: int) -> Value:
        if self._places[buffer].read_only:
            invariant = f"{operation}, !invariant.load !0" if operation.startswith("load") else operation
            return self._b.pure(invariant, element, lanes, level, hoist=False)
        loaded = self._loaded.setdefault(buffer, {})
        if operation not in loaded:
            loaded[operation] = self._b.effect(operation, element, lanes)
        return loaded[operation]

    def _contiguous(self, buffer: Buffer, address: Address, mask: Value | None) -> Value:
        lanes, offset = len(address.lanes), address.lanes[0]
        pointer = self._pointer(buffer, address, offset)
        alignment = self._alignment(buffer, address, offset)
        if mask is None:
            return self._plain(buffer, pointer, lanes, alignment)
        element = MEMORY_TYPES[buffer.dtype]
        kind = type_text(element, lanes)
        symbol = f"@llvm.masked.load.{suffix(element, lanes)}.p0"
        self._b.declarations.add(f"declare {kind} {symbol}(ptr, i32, <{lanes} x i1>, {kind})")
        wide = self._b.broadcast(mask, lanes)
        operation = f"call {kind} {symbol}({pointer.typed}, i32 {alignment}, {wide.typed}, {kind} zeroinitializer)"
        return self._remembered(buffer, operation, element, lanes, max(pointer.level, wide.level))

    def _can_shuffle(self, address: Address) -> bool:
        span = max(address.lanes) - min(address.lanes) + 1
        return span <= _MAX_SHUFFLED_VECTORS * len(address.lanes)

    def _shuffled(self, buffer: Buffer, address: Address) -> Value:
        """Lanes at constant distances: the vectors that cover them (never beyond the outermost), then shuffles."""
        low = min(address.lanes)
        wanted = [lane - low for lane in address.lanes]
        width = min(len(wanted), max(wanted) + 1)
        last = max(wanted) + 1 - width
        starts = [*range(0, last, width), last]
        result: Value | None = None
        for start in starts:
            pointer = self._pointer(buffer, address, low + start)
            part = self._plain(buffer, pointer, width, self._alignment(buffer, address, low + start))
            if result is None:
                result = self._b.shuffle(part, None, [max(0, min(lane, width - 1)) for lane in wanted])
                continue
            part = self._b.shuffle(part, None, [max(0, min(lane - start, width - 1)) for lane in wanted])
            count = len(wanted)
            pick = [count + i if start <= lane < start + width else i for i, lane in enumerate(wanted)]
            result = self._b.shuffle(result, part, pick)
        assert result is not None
        return result

    def _gather(self, buffer: Buffer, address: Address, mask: Value | None) -> Value:
        b, element = self._b, MEMORY_TYPES[buffer.dtype]
        pointer = self._pointer(buffer, address, 0)
        index = self._lane_index(address)
        lanes = index.lanes
        if self._has_gather and BITS[element] >= 32:
            pointers = self._lane_pointers(element, pointer, index)
            wide = b.broadcast(mask if mask is not None else b.constant("i1", 1), lanes)
            kind = type_text(element, lanes)
            symbol = f"@llvm.masked.gather.{suffix(element, lanes)}.v{lanes}p0"
            b.declarations.add(f"declare {kind} {symbol}(<{lanes} x ptr>, i32, <{lanes} x i1>, {kind})")
            operands = f"{pointers.typed}, i32 {BITS[element] // 8}, {wide.typed}, {kind} zeroinitializer"
            level = max(pointers.level, wide.level)
            return self._remembered(buffer, f"call {kind} {symbol}({operands})", element, lanes, level)
        if mask is not None:
            # a lane that is not wanted reads the buffer's first element
            base = self._places[buffer].pointer
            pointers = b.select(b.broadcast(mask, lanes), self._lane_pointers(element, pointer, index), base)
            places = [b.extract(pointers, lane) for lane in range(lanes)]
        else:
            places = [self._offset(element, pointer, self._lane(index, lane)) for lane in range(lanes)]
        result: Value | None = None
        for lane, place in enumerate(places):
            result = b.insert(result, self._plain(buffer, place, 0, BITS[element] // 8), lane, lanes)
        assert result is not None
        return result

    def _unpacked(self, dtype: DType, value: Value) -> Value:
        if dtype is DType.BOOL:
            return self._b.compare("icmp ne", value, 0)
        return half.unpack(self._b, dtype, value) if dtype in half.HALF_DTYPES else value

    # -- stores ------------------------------------------------------------------------------------------------

    def store(self, buffer: Buffer, address: Address, value: Value, mask: Value | None) -> None:
        """Store a scalar at a uniform address, else lanes; where `mask` is given and not set nothing is written."""
        value = self._packed(buffer.dtype, value)
        if address.is_uniform:
            offset = address.lanes[0] if address.lanes else 0
            pointer = self._pointer(buffer, address, offset)
            text = f"store {value.typed}, {pointer.typed}, align {self._alignment(buffer, address, offset)}"
            if mask is None:
                self._b.act(text)
            else:
                self._b.branch(self._b.any_lane(mask), lambda: self._b.act(text))
        else:
            lanes = len(address.lanes) or address.vectors[0][0].lanes
            self._store_lanes(buffer, address, self._b.broadcast(value, lanes), mask)
        self._changed(buffer)

    def _store_lanes(self, buffer: Buffer, address: Address, value: Value, mask: Value | None) -> None:
        b, lanes = self._b, value.lanes
        if address.is_contiguous:
            pointer = self._pointer(buffer, address, address.lanes[0])
            alignment = self._alignment(buffer, address, address.lanes[0])
            if mask is not None and self._places[buffer].is_private and not address.terms:
                # a whole store, so that the buffer can live in registers
                value, mask = b.select(mask, value, self._plain(buffer, pointer, lanes, alignment)), None
            if mask is None:
                b.act(f"store {value.typed}, {pointer.typed}, align {alignment}")
            else:
                self._store_masked("store", f"{suffix(value.element, lanes)}.p0", value, pointer, alignment, mask)
            return
        pointer, index = self._pointer(buffer, address, 0), self._lane_index(address)
        alignment = buffer.dtype.bytes
        if mask is not None:
            pointers = self._lane_pointers(value.element, pointer, index)
            names = f"{suffix(value.element, lanes)}.v{lanes}p0"
            self._store_masked("scatter", names, value, pointers, alignment, mask)
            return
        for lane in range(lanes):
            place = self._offset(value.element, pointer, self._lane(index, lane))
            b.act(f"store {b.extract(value, lane).typed}, {place.typed}, align {alignment}")

    def _store_masked(self, kind: str, names: str, value: Value, pointer: Value, alignment: int, mask: Value) -> None:
        symbol = f"@llvm.masked.{kind}.{names}"
        wide = self._b.broadcast(mask, value.lanes)
        self._b.declarations.add(f"declare void {symbol}({value.type}, {pointer.type}, i32, {wide.type})")
        self._b.act(f"call void {symbol}({value.typed}, {pointer.typed}, i32 {alignment}, {wide.typed})")

    def _packed(self, dtype: DType, value: Value) -> Value:
        if dtype is DType.BOOL:
            return self._b.convert("zext", value, "i8")
        return half.pack(self._b, dtype, value) if dtype in half.HALF_DTYPES else value

    def _changed(self, buffer: Buffer) -> None:
        self._loaded.pop(buffer, None)
        if self._places[buffer].may_alias:
            self._loaded = {key: loads for key, loads in self._loaded.items() if not self._places[key].may_alias}

    def prefetch(self, buffer: Buffer, address: Address) -> None:
        """Into the second-level cache."""
        self._b.declarations.add("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
        pointer = self._pointer(buffer, address, 0)
        self._b.act(f"call void @llvm.prefetch.p0({pointer.typed}, i32 0, i32 2, i32 1)")

    # -- addresses ---------------------------------------------------------------------------------------------

    def _pointer(self, buffer: Buffer, address: Address, extra: int) -> Value:
        """Of the lanes' common part plus `extra`: outer loops' terms first, constants last."""
        element, pointer = MEMORY_TYPES[buffer.dtype], address.base or self._places[buffer].pointer
        for value, coefficient in sorted(address.terms, key=_defined_at):
            pointer = self._offset(
                element, pointer, self._b.binary("mul", value, coefficient) if coefficient != 1 else value
            )
        offset = address.const + extra
        return self._offset(element, pointer, self._b.constant("i64", offset)) if offset else pointer

    def _offset(self, element: str, pointer: Value, index: Value) -> Value:
        level = max(pointer.level, index.level)
        return self._b.pure(f"getelementptr {element}, {pointer.typed}, {index.typed}", "ptr", 0, level)

    def _lane_index(self, address: Address) -> Value:
        """What the lanes add to the common part."""
        b = self._b
        total: Value | None = None
        for value, coefficient in address.vectors:
            term = b.binary("mul", value, coefficient) if coefficient != 1 else value
            total = term if total is None else b.binary("add", total, term)
        if total is None:
            return b.pattern("i64", address.lanes)
        return b.binary("add", total, b.pattern("i64", address.lanes)) if any(address.lanes) else total

    def _lane(self, index: Value, lane: int) -> Value:
        if isinstance(index.ints, tuple):
            return self._b.constant("i64", index.ints[lane])
        return self._b.extract(index, lane)

    def _lane_pointers(self, element: str, pointer: Value, index: Value) -> Value:
        """One for each lane; the lanes' distances fit 32 bits."""
        if isinstance(index.ints, tuple):
            narrow = self._b.pattern("i32", index.ints)
        else:
            narrow = self._b.convert("trunc", index, "i32")
        level = max(pointer.level, index.level)
        return self._b.pure(f"getelementptr {element}, {pointer.typed}, {narrow.typed}", "ptr", index.lanes, level)

    def _alignment(self, buffer: Buffer, address: Address, extra: int) -> int:
        """In bytes, as far as the coefficients tell."""
        size = BITS[MEMORY_TYPES[buffer.dtype]] // 8
        if address.base is not None:
            return size
        step = gcd(address.const + extra, *(coefficient for _, coefficient in address.terms))
        return max(size, gcd(self._places[buffer].alignment, step * size))


def _defined_at(term: tuple[Value, int]) -> int:
    return term[0].level
