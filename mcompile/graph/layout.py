"""Layout: where each value lies in memory.

    layouts = assign_layouts(graph, target)

`layouts.graph` is the graph to go on with: copies (Identity nodes) were added where a value must lie in two places.
`layouts.storage[value]` names the value that owns the memory and the strides and offset in it: a value that owns its
memory lies in a dense buffer whose dims are ordered as its kernel likes; the others are views (Reshape, Transpose,
Slice, a slice of a Concat's result, ...). `layouts.views` are the nodes that need no kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.lib.stride_tricks import as_strided

from mcompile.graph.graph import Array, Graph, Node
from mcompile.graph.infer import is_host
from mcompile.graph.views import (
    Strides,
    ViewMap,
    canonical_strides,
    computes_of,
    concat_boxes,
    dense_strides,
    is_dense,
    memory_order,
    placeholders_of,
    view_map,
)
from mcompile.ops.registry import LayoutHint, OpDef, OpKind, lookup
from mcompile.target import Target

Order = tuple[int, ...]


@dataclass(frozen=True)
class Storage:
    """Element i of a value lies at `offset + sum(i * strides)` elements into the buffer that the value `base` owns."""

    base: str
    strides: Strides
    offset: int = 0


@dataclass(frozen=True)
class Layouts:
    """Where the values of `graph` lie, which nodes are only views, and which are copies added for the layout.

    A base is a graph input or output, a constant, or a node's output; its buffer is dense and has its value's size.
    Graph inputs, graph outputs and constants are row-major unless `assign_layouts` was told otherwise.
    """

    graph: Graph
    storage: Mapping[str, Storage]
    views: frozenset[str]
    copies: frozenset[str]
    _arrays: dict[str, Array] = field(default_factory=dict, repr=False, compare=False)

    def is_constant(self, value: str) -> bool:
        """Whether the value is a constant or a view of one."""
        return self.storage[value].base in self.graph.constants

    def constant(self, value: str) -> Array:
        """The dense array of a constant or of a view of one; the same array whenever it is asked for."""
        if value not in self._arrays:
            self._arrays[value] = np.ascontiguousarray(self._view(value))
        return self._arrays[value]

    def _view(self, value: str) -> Array:
        storage, shape = self.storage[value], self.graph.types[value].dims
        array = self.graph.constants[storage.base]
        if storage.base == value or 0 in shape:
            return array.reshape(shape)
        flat = array.reshape(-1)[storage.offset :]
        return as_strided(flat, shape, tuple(flat.itemsize * stride for stride in storage.strides), writeable=False)


def loop_body(node: Node) -> Graph | None:
    """The body of a node that repeats a Graph (Scan); None for any other node."""
    body = node.attrs.get("body")
    return body if isinstance(body, Graph) and not is_host(node) else None


def stacked_outputs(node: Node) -> tuple[str, ...]:
    """The outputs of a loop of which each iteration writes a slice (the others are its final states)."""
    states = 0 if loop_body(node) is None else len(node.inputs) - int(node.attrs["num_scan_inputs"])
    return node.outputs[states:] if loop_body(node) is not None else ()


def definition(node: Node) -> OpDef | None:
    """The OpDef that gives the node's kernel; None for a host op and for a loop."""
    return None if is_host(node) or loop_body(node) is not None else lookup(node.op, node.domain)


def assign_layouts(
    graph: Graph,
    target: Target,
    input_strides: Sequence[Strides] | None = None,
    output_strides: Sequence[Strides] | None = None,
) -> Layouts:
    """Choose a memory order for each value, find the views, and place concatenated values in their result.

    `input_strides` and `output_strides`, by position, are for a graph whose ends lie in somebody else's memory (a loop
    body); by default they are row-major. All present targets like the same orders.
    """
    assignment = _Assignment(graph.copy())
    ends = [tuple(strides) for strides in output_strides or [assignment.row_major(v) for v in graph.outputs]]
    assignment.choose_orders(input_strides or [assignment.row_major(value) for value in graph.inputs])
    assignment.settle_outputs(ends)
    assignment.place_concats()
    assignment.straighten_host_inputs()
    return Layouts(
        assignment.rebuilt_graph(),
        assignment.storage,
        frozenset(assignment.views),
        frozenset(assignment.copies),
    )


@dataclass
class _Assignment:
    """The state of `assign_layouts`."""

    graph: Graph
    storage: dict[str, Storage] = field(default_factory=dict)
    orders: dict[str, Order] = field(default_factory=dict)  # the order wanted for each value that owns its memory
    channels_last: set[str] = field(default_factory=set)  # those whose order a kernel asked for, or that follow one
    views: set[str] = field(default_factory=set)
    copies: dict[str, str] = field(default_factory=dict)  # copy node -> the node that it must precede, or ""
    maps: dict[str, tuple[ViewMap, ...] | None] = field(default_factory=dict)
    boxes: dict[str, tuple[tuple[int, ...] | None, ...] | None] = field(default_factory=dict)

    # --- facts ---

    def shape(self, value: str) -> tuple[int, ...]:
        return self.graph.types[value].dims

    def row_major(self, value: str) -> Strides:
        shape = self.shape(value)
        return dense_strides(shape, range(len(shape)))

    def analyse(self, node: Node) -> None:
        """Find out once whether the node can be a view or a concatenation."""
        self.maps[node.name] = self.boxes[node.name] = None
        op = definition(node)
        if op is None or op.kind not in (OpKind.ELEMENTWISE, OpKind.BROADCAST, OpKind.INJECTIVE):
            return
        inputs = placeholders_of(self.graph, node)
        outputs = computes_of(self.graph, node, inputs)
        maps = [view_map(output, inputs) for output in outputs]
        if all(maps):
            self.maps[node.name] = tuple(found for found in maps if found is not None)
        elif op.kind is OpKind.INJECTIVE and len(outputs) == 1 and 0 not in outputs[0].shape:
            self.boxes[node.name] = concat_boxes(outputs[0], inputs)

    # --- orders ---

    def choose_orders(self, input_strides: Sequence[Strides]) -> None:
        """First round: every value that is no view owns a dense buffer."""
        for value, strides in zip(self.graph.inputs, input_strides, strict=True):
            self.storage[value] = Storage(value, canonical_strides(self.shape(value), strides))
        for value in self.graph.constants:
            self.storage[value] = Storage(value, self.row_major(value))
        for node in self.graph.topological():
            if node.name not in self.maps:
                self.analyse(node)
            found = self.viewed(node, self.storage)
            if found is not None:
                self.storage.update(found)
                self.views.add(node.name)
                continue
            for value in filter(None, node.outputs):
                self.own(value, self.preferred_order(node, value))
            if len(node.outputs) == 1:
                self.look_ahead(node.outputs[0])

    def own(self, value: str, order: Order) -> None:
        self.orders[value] = order
        self.storage[value] = Storage(value, dense_strides(self.shape(value), order))

    def preferred_order(self, node: Node, value: str) -> Order:
        op, rank = definition(node), len(self.shape(value))
        identity = tuple(range(rank))
        if op is None or op.kind is OpKind.OPAQUE:
            return identity
        if op.layout is LayoutHint.CHANNELS_LAST and rank > 2:
            self.channels_last.add(value)
            return (0, *range(2, rank), 1)
        leader = None if op.kind is OpKind.ANCHOR else self.leading_input(node, rank)
        if leader is None:
            return identity
        if self.is_channels_last(leader):
            self.channels_last.add(value)
        strides = self.storage[leader].strides
        return self.orders.get(leader) or memory_order(self.shape(leader), strides) or identity

    def is_channels_last(self, value: str) -> bool:
        return self.storage[value].base in self.channels_last

    def leading_input(self, node: Node, rank: int) -> str | None:
        """The input whose order the node follows: of the same rank, not constant, the largest.

        A concatenation would rather follow one that a kernel wants channels-last, as only the others can adapt.
        """
        inputs = [value for value in node.inputs if value and self.storage[value].base not in self.graph.constants]
        inputs = [value for value in inputs if len(self.shape(value)) == rank]
        if self.boxes[node.name] is not None:
            inputs = [value for value in inputs if self.is_channels_last(value)] or inputs
        return max(inputs, key=lambda value: self.graph.types[value].size, default=None)

    def look_ahead(self, value: str) -> None:
        """Give `value` another order if that saves its consumer a copy: Transpose, then Reshape of a row-major tensor.

        MatMul (B, H, S, D) -> Transpose (B, S, H, D) -> Reshape (B, S, H * D): written in the order (0, 2, 1, 3),
        both are views.
        """
        if self.orders[value] != tuple(range(len(self.shape(value)))) or 0 in self.shape(value):
            return
        storage = {value: self.storage[value]}
        chain = self.view_chain(value, storage)
        end = chain[-1].outputs[0] if chain else None
        following = self.only_consumer(end) if end else None
        if end is None or following is None or not self.maps_one(following):
            return
        order = self.order_from(value, self.shape(end), storage[end].strides)
        if order is None:
            return
        trial = {value: Storage(value, dense_strides(self.shape(value), order))}
        if following in self.view_chain(value, trial):
            self.own(value, order)

    def view_chain(self, value: str, storage: dict[str, Storage]) -> list[Node]:
        """The views, one the only consumer of the other, that start at `value`; adds their storage to `storage`."""
        chain: list[Node] = []
        node = self.only_consumer(value)
        while node is not None and node.inputs[0] in storage and self.maps_one(node):
            found = self.viewed(node, storage)
            if found is None:
                break
            storage.update(found)
            chain.append(node)
            node = self.only_consumer(node.outputs[0])
        return chain

    def only_consumer(self, value: str) -> Node | None:
        consumers = self.graph.consumers(value)
        return consumers[0] if len(consumers) == 1 and value not in self.graph.outputs else None

    def maps_one(self, node: Node) -> bool:
        """Whether the node only moves elements of its first input into one output."""
        if node.name not in self.maps:
            self.analyse(node)
        maps = self.maps[node.name]
        return maps is not None and len(maps) == 1 and maps[0].source == 0 and len(node.outputs) == 1

    def order_from(self, value: str, shape: tuple[int, ...], strides: Strides) -> Order | None:
        """The order of `value`'s dims that makes its view of `shape` and `strides` row-major."""
        own_shape, own = self.shape(value), self.storage[value].strides
        dims = {stride: dim for dim, (stride, extent) in enumerate(zip(own, own_shape, strict=True)) if extent > 1}
        wanted = [stride for stride, extent in zip(strides, shape, strict=True) if extent > 1]
        if sorted(wanted) != sorted(dims):
            return None
        ones = [dim for dim, extent in enumerate(own_shape) if extent <= 1]
        return (*ones, *(dims[stride] for stride in wanted))

    # --- views and moves ---

    def viewed(self, node: Node, storage: Mapping[str, Storage]) -> dict[str, Storage] | None:
        """The storage of the node's outputs as views of its input; None if it needs a kernel."""
        maps = self.maps[node.name]
        if maps is None:
            return None
        found: dict[str, Storage] = {}
        for output, moved in zip(node.outputs, maps, strict=False):
            source = storage[node.inputs[moved.source]]
            place = moved.strides(source.strides)
            if place is None:
                return None
            found[output] = Storage(source.base, place[0], source.offset + place[1])
        return found

    def moved(self, value: str, storage: Storage) -> dict[str, Storage] | None:
        """What changes if `value` lies at `storage`: its views move with it. None if one of them could not."""
        changes = {value: storage}
        pending = [value]
        while pending:
            for node in self.graph.consumers(pending.pop()):
                if node.name not in self.views:
                    continue
                found = self.viewed(node, {**self.storage, **changes})
                if found is None:
                    return None
                changes.update(found)
                pending += found
        return changes

    def is_movable(self, value: str) -> bool:
        """Whether kernels produce the value and they are free to choose where it lies."""
        node = self.graph.producer(value)
        if node is None or self.storage[value].base != value or value in self.graph.outputs:
            return False
        return definition(node) is not None or value in stacked_outputs(node)

    def place(self, value: str, wanted: Storage) -> bool:
        """Make `value` lie at `wanted` by moving the value that owns its memory; False if that is impossible."""
        current = self.storage[value]
        if current == wanted:
            return True
        owner = current.base
        if not self.is_movable(owner):
            return False
        moved = wanted if owner == value else self.pull_back(value, owner, wanted)
        if moved is None or not self.keeps_channels_last(owner, moved.strides):
            return False
        changes = self.moved(owner, moved)
        if changes is None or changes.get(value) != wanted:
            return False
        self.storage.update(changes)
        return True

    def pull_back(self, value: str, owner: str, wanted: Storage) -> Storage | None:
        """Where `owner` must lie for its view `value` to lie at `wanted`.

        A step along a dim of `owner` is some address in its dense buffer, hence an index of `value`, hence an address
        in the new place. (The caller checks the result: a dim may span several of the view's.)
        """
        shape, own_shape = self.shape(value), self.shape(owner)
        current, own = self.storage[value], self.storage[owner]
        if current.offset or not (is_dense(shape, current.strides) and is_dense(own_shape, own.strides)):
            return None
        if self.graph.types[value].size != self.graph.types[owner].size:
            return None
        dims = sorted((dim for dim in range(len(shape)) if shape[dim] > 1), key=lambda dim: -current.strides[dim])
        strides = []
        for step in own.strides:
            address, rest = 0, step
            for dim in dims:
                address += rest // current.strides[dim] * wanted.strides[dim]
                rest %= current.strides[dim]
            strides.append(address)
        return Storage(wanted.base, canonical_strides(own_shape, strides), wanted.offset)

    def keeps_channels_last(self, value: str, strides: Strides) -> bool:
        """False if a value whose order was chosen for its kernel would get another one."""
        shape, order = self.shape(value), self.orders[value]
        if value not in self.channels_last:
            return True
        large = [dim for dim in order if shape[dim] > 1]
        return large == sorted(large, key=lambda dim: -strides[dim])

    # --- graph outputs, concatenations, host ops ---

    def settle_outputs(self, wanted_strides: Sequence[Strides]) -> None:
        """Make each graph output own its buffer, in the wanted order; a copy is added where it cannot."""
        outputs = self.graph.outputs
        for position, (value, strides) in enumerate(zip(outputs, wanted_strides, strict=True)):
            wanted = Storage(value, canonical_strides(self.shape(value), strides))
            if value in outputs[:position] or not self.settle(value, wanted):
                copy = self.add_copy(value, replace(wanted, base=""), before="")
                self.graph.outputs = (*self.graph.outputs[:position], copy, *self.graph.outputs[position + 1 :])

    def settle(self, value: str, wanted: Storage) -> bool:
        node = self.graph.producer(value)
        if node is None:
            return False
        if self.storage[value] == wanted:
            return True
        if node.name in self.views:
            return self.place(value, wanted)
        if not self.is_free_to_reorder(node, value):
            return False
        changes = self.moved(value, wanted)
        self.storage.update(changes or {})
        return changes is not None

    def is_free_to_reorder(self, node: Node, value: str) -> bool:
        """Whether the node's kernel may as well write another order than the one chosen for it."""
        op = definition(node)
        if op is None or op.layout is not LayoutHint.ANY or self.boxes[node.name]:
            return False
        pointwise = op.kind in (OpKind.ELEMENTWISE, OpKind.BROADCAST) and value not in self.channels_last
        return pointwise or op.kind is OpKind.INJECTIVE

    def place_concats(self) -> None:
        """Last first, so that a concatenation that lies in another one's result is placed before its inputs."""
        for node in reversed(self.graph.topological()):
            boxes = self.boxes.get(node.name)
            if boxes is not None and not self.adopt(node, boxes):
                self.place_inputs(node, boxes)
                self.views.add(node.name)

    def adopt(self, node: Node, boxes: Sequence[tuple[int, ...] | None]) -> bool:
        """Make the result a view of the place where its inputs lie already side by side in a larger one."""
        result = node.outputs[0]
        wanted = {self.place_of_result(node, position, box) for position, box in enumerate(boxes) if box is not None}
        if len(wanted) != 1 or not self.is_movable(result):
            return False
        place = wanted.pop()
        changes = None if place is None else self.moved(result, place)
        if changes is None:
            return False
        self.storage.update(changes)
        self.views.add(node.name)
        return True

    def place_of_result(self, node: Node, position: int, box: tuple[int, ...]) -> Storage | None:
        """Where the result would begin, judging by where this input lies; None if its strides cannot tell."""
        value = node.inputs[position]
        storage = self.storage[value]
        owner = self.shape(storage.base)
        shape = self.shape(node.outputs[0])
        if storage.base == value or len(owner) != len(shape) or storage.base in self.graph.constants:
            return None
        strides = canonical_strides(shape, self.storage[storage.base].strides)
        if canonical_strides(self.shape(value), strides) != storage.strides:
            return None
        offset = storage.offset - sum(start * stride for start, stride in zip(box, strides, strict=True))
        return Storage(storage.base, strides, offset) if offset >= 0 else None

    def place_split(self, node: Node, boxes: Sequence[tuple[int, ...] | None]) -> None:
        """Move values of which the inputs are slices that lie in the result as they do in the value."""
        result = self.storage[node.outputs[0]]
        parts: dict[tuple[str, tuple[int, ...]], int] = {}  # (owner, where its origin comes to lie) -> elements
        for value, box in zip(node.inputs, boxes, strict=True):
            start = None if box is None else self.start_in_owner(value)
            if box is not None and start is not None:
                origin = tuple(i - j for i, j in zip(box, start, strict=True))
                key = self.storage[value].base, origin
                parts[key] = parts.get(key, 0) + self.graph.types[value].size
        for (owner, origin), size in parts.items():
            if size == self.graph.types[owner].size:
                offset = result.offset + sum(i * stride for i, stride in zip(origin, result.strides, strict=True))
                self.place(owner, Storage(result.base, canonical_strides(self.shape(owner), result.strides), offset))

    def start_in_owner(self, value: str) -> tuple[int, ...] | None:
        """Where the first element of a slice (not a whole) lies in the value that owns its memory; else None."""
        storage, shape = self.storage[value], self.shape(value)
        owner, own_shape = self.storage[storage.base], self.shape(storage.base)
        if storage.base == value or len(shape) != len(own_shape) or 0 in shape or shape == own_shape:
            return None
        if canonical_strides(shape, owner.strides) != storage.strides or not is_dense(own_shape, owner.strides):
            return None
        start, rest = [0] * len(shape), storage.offset
        for dim in sorted(range(len(shape)), key=lambda dim: -owner.strides[dim]):
            if own_shape[dim] > 1:
                start[dim], rest = divmod(rest, owner.strides[dim])
        return tuple(start)

    def place_inputs(self, node: Node, boxes: Sequence[tuple[int, ...] | None]) -> None:
        self.place_split(node, boxes)
        result = self.storage[node.outputs[0]]
        inputs = list(node.inputs)
        for position, box in enumerate(boxes):
            if box is None:
                continue
            value = inputs[position]
            start = result.offset + sum(i * stride for i, stride in zip(box, result.strides, strict=True))
            wanted = Storage(result.base, canonical_strides(self.shape(value), result.strides), start)
            if not self.place(value, wanted):
                inputs[position] = self.add_copy(value, wanted, before=node.name)
        if tuple(inputs) != node.inputs:
            types = [self.graph.types[output] for output in node.outputs]
            self.graph.replace(replace(node, inputs=tuple(inputs)), types)

    def straighten_host_inputs(self) -> None:
        """Python sees dense row-major tensors only."""
        for node in self.graph.topological():
            if definition(node) is not None or loop_body(node) is not None:
                continue
            inputs = list(node.inputs)
            for position, value in enumerate(inputs):
                if value and self.storage[value].strides != self.row_major(value):
                    inputs[position] = self.add_copy(value, Storage("", self.row_major(value)), before=node.name)
            if tuple(inputs) != node.inputs:
                types = [self.graph.types[output] for output in node.outputs]
                self.graph.replace(replace(node, inputs=tuple(inputs)), types)

    def add_copy(self, value: str, storage: Storage, before: str) -> str:
        """An Identity node that writes `value` to `storage` (base "": a buffer of its own); its output's name."""
        name = self.graph.fresh(f"{value}.copy")
        self.graph.add(Node(name, "Identity", (value,), (name,)), [self.graph.types[value]])
        self.storage[name] = replace(storage, base=storage.base or name)
        self.copies[name] = before
        return name

    def rebuilt_graph(self) -> Graph:
        """The graph with its nodes in topological order: copies after what they copy, or else before their user."""
        old = self.graph
        early: dict[str, list[Node]] = {}
        late: dict[str, list[Node]] = {}
        for name, before in self.copies.items():
            producer = old.producer(old.nodes[name].inputs[0])
            if producer is not None:
                late.setdefault(producer.name, []).append(old.nodes[name])
            else:
                early.setdefault(before, []).append(old.nodes[name])
        order = [node for node in old.topological() if node.name not in self.copies]
        new = Graph(old.name, old.inputs, old.outputs, constants=dict(old.constants))
        new.types = {value: old.types[value] for value in (*old.inputs, *old.constants)}

        def add(node: Node) -> None:
            new.add(node, [old.types[output] for output in node.outputs])

        for node in order:
            for each in (*early.get(node.name, ()), node, *late.get(node.name, ())):
                add(each)
        for each in early.get("", ()):
            add(each)
        return new
