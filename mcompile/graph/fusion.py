"""Fusion: the nodes that one kernel computes together, chosen by OpKind alone.

    groups = fuse(layouts)

A group has at most one node that is expensive (an ANCHOR or a REDUCTION). Element by element work joins it: after it
(epilogue), as long as every use of its value lies inside the group, which immediate post-dominators tell; and before it
(prologue), where a cheap node's value has no user outside. Every node with a kernel is in exactly one group; a view
is in one only where it lies between fused nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from math import prod

import networkx as nx

from mcompile.errors import InternalError
from mcompile.graph.graph import Graph, Node
from mcompile.graph.layout import Layouts, definition, loop_body
from mcompile.graph.views import computes_of, placeholders_of, tensors_of, view_map
from mcompile.ir.tensor import Compute
from mcompile.ops.registry import OpKind

MAX_NODES = 32
_POINTWISE = (OpKind.ELEMENTWISE, OpKind.BROADCAST)
_HEAVY = (OpKind.ANCHOR, OpKind.REDUCTION)
_GROWTH = 2.5  # an injective node that reads elements more often than this does not compute its input anew
_EXIT = "\0exit"


class GroupKind(Enum):
    TASK = "task"  # a kernel computes it
    LOOP = "loop"  # a node whose body is a Graph, run again and again
    HOST = "host"  # Python computes it


@dataclass(frozen=True)
class Group:
    """`nodes` in topological order; `anchor` is the one a schedule is made for, the rest joins it.

    `inputs` are the values from outside, in order of first use (also those that are constants); `outputs` the values
    that others use, in order.
    """

    kind: GroupKind
    nodes: tuple[str, ...]
    anchor: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def fuse(layouts: Layouts, *, prologues: bool = True, multiple_outputs: bool = True) -> tuple[Group, ...]:
    """The groups in an order in which they can run.

    `prologues`: let pointwise nodes join an ANCHOR that reads them. `multiple_outputs`: let a pointwise node that feeds
    a REDUCTION join it even if others use its value too.
    """
    fusion = _Fusion(layouts, prologues, multiple_outputs)
    fusion.absorb_epilogues()
    fusion.absorb_prologues()
    try:
        return fusion.groups()
    except nx.NetworkXUnfeasible:  # two groups of several outputs that need each other
        if not multiple_outputs:
            raise InternalError(f"graph {layouts.graph.name}: fusion groups depend on each other") from None
        return fuse(layouts, prologues=prologues, multiple_outputs=False)


@dataclass(eq=False)
class _Cluster:
    """A group in the making. `before` are the nodes that feed the anchor (its prologue)."""

    kind: OpKind
    anchor: str
    nodes: set[str]
    sink: str
    before: set[str]


class _Fusion:
    def __init__(self, layouts: Layouts, prologues: bool, multiple_outputs: bool) -> None:
        self.layouts = layouts
        self.graph: Graph = layouts.graph
        self.prologues = prologues
        self.multiple_outputs = multiple_outputs
        self.order = self.graph.topological()
        self.position = {node.name: index for index, node in enumerate(self.order)}
        self.post_dominators = _post_dominators(self.graph)
        self.clusters: dict[str, _Cluster] = {}
        for node in self.order:
            if node.name not in layouts.views:
                op = definition(node)
                kind = OpKind.OPAQUE if op is None else op.kind
                self.clusters[node.name] = _Cluster(kind, node.name, {node.name}, node.name, set())

    # --- facts ---

    def kind(self, name: str) -> OpKind:
        op = definition(self.graph.nodes[name])
        return OpKind.OPAQUE if op is None else op.kind

    def values(self, name: str) -> list[str]:
        """A node's outputs that somebody uses; the first one if there is none."""
        outputs = [value for value in self.graph.nodes[name].outputs if value]
        return [value for value in outputs if self.graph.users.get(value) or value in self.graph.outputs] or outputs[:1]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.graph.types[self.values(name)[0]].dims

    def users(self, name: str) -> list[str]:
        return [user.name for output in self.graph.nodes[name].outputs for user in self.graph.consumers(output)]

    def is_result(self, name: str) -> bool:
        return any(output in self.graph.outputs for output in self.graph.nodes[name].outputs)

    def is_rearrangement(self, name: str) -> bool:
        """Whether a node is a view that only permutes dims and adds or drops dims of 1."""
        if name not in self.layouts.views:
            return False
        node = self.graph.nodes[name]
        inputs = placeholders_of(self.graph, node)
        maps = [view_map(output, inputs) for output in computes_of(self.graph, node, inputs)]
        return len(maps) == 1 and maps[0] is not None and maps[0].is_rearrangement

    def memory_order(self, name: str) -> list[int]:
        """The large dims of a node's value from outermost to innermost."""
        value = self.values(name)[0]
        shape, strides = self.graph.types[value].dims, self.layouts.storage[value].strides
        return sorted((dim for dim in range(len(shape)) if shape[dim] > 1), key=lambda dim: -strides[dim])

    # --- epilogues ---

    def absorb_epilogues(self) -> None:
        """Anchors first, then reductions, then the rest: the most expensive value is the one best not written out."""
        for kinds in ((OpKind.ANCHOR,), (OpKind.REDUCTION,), (*_POINTWISE, OpKind.INJECTIVE)):
            for node in self.order:
                cluster = self.clusters.get(node.name)
                if cluster is not None and cluster.anchor == node.name and cluster.kind in kinds:
                    self.grow(cluster)

    def grow(self, cluster: _Cluster) -> None:
        """Add what follows, one post-dominator after the other, then take back trailing views."""
        if len(self.values(cluster.anchor)) > 1:
            return
        sink, pending = cluster.sink, set[str]()
        while not self.is_result(sink):
            target = self.post_dominators.get(sink, _EXIT)
            if target == _EXIT:
                break
            region = self.between(sink, target)
            if not self.can_follow(cluster, sink, region, len(pending)):
                break
            pending |= region
            sink = target
            if sink not in self.layouts.views:
                self.join(cluster, pending)
                cluster.sink, pending = sink, set()

    def between(self, source: str, target: str) -> set[str]:
        """The nodes on paths from `source` (left out) to its post-dominator `target`; gives up when there are many."""
        found = {target}
        stack = [name for name in self.users(source) if name != target]
        while stack and len(found) <= MAX_NODES:
            name = stack.pop()
            if name not in found:
                found.add(name)
                stack += self.users(name)
        return found

    def can_follow(self, cluster: _Cluster, sink: str, region: set[str], pending: int) -> bool:
        if len(cluster.nodes) + len(region) + pending > MAX_NODES:
            return False
        if region <= self.layouts.views:
            return len(region) == 1 and self.is_rearrangement(next(iter(region)))
        if sink in self.layouts.views and any(self.memory_order(name) != self.memory_order(sink) for name in region):
            return False  # the kernel would have to write across its own order
        return all(self.can_absorb(cluster, name, self.shape(sink)) for name in region)

    def can_absorb(self, cluster: _Cluster, name: str, shape: tuple[int, ...]) -> bool:
        if name in self.layouts.views or self.kind(name) not in _POINTWISE or len(self.values(name)) > 1:
            return False
        if _without_ones(self.shape(name)) != _without_ones(shape):
            return False
        if name in self.layouts.copies and cluster.kind in _HEAVY:
            return False  # the copy is there so that the kernel need not write that order
        other = self.clusters.get(name)
        return other is None or other.nodes == {name}

    def join(self, cluster: _Cluster, names: Iterable[str]) -> None:
        for name in names:
            cluster.nodes.add(name)
            self.clusters[name] = cluster

    # --- prologues ---

    def absorb_prologues(self) -> None:
        for node in reversed(self.order):
            cluster = self.clusters.get(node.name)
            if cluster is not None and cluster.sink == node.name and cluster.kind in (*_POINTWISE, OpKind.INJECTIVE):
                self.feed(cluster)

    def feed(self, cluster: _Cluster) -> None:
        """Let a cheap cluster join the one that uses its value."""
        sink = cluster.sink
        users = [name for name in self.users(sink) if name in self.clusters]
        others = {id(self.clusters[name]): self.clusters[name] for name in users}
        outside = len(users) < len(self.users(sink)) or self.is_result(sink)
        if len(self.values(sink)) > 1 or not others:
            return
        if len(others) == 1 and not outside:
            consumer = next(iter(others.values()))
            if all(self.can_precede(cluster, consumer, user) for user in users):
                self.merge(cluster, consumer, users)
        elif self.multiple_outputs:
            self.feed_reduction(cluster, users)

    def can_precede(self, cluster: _Cluster, consumer: _Cluster, user: str) -> bool:
        """Whether `user`, in `consumer`, may compute the elements of the cluster's value as it needs them."""
        if len(cluster.nodes) + len(consumer.nodes) > MAX_NODES or consumer.kind is OpKind.OPAQUE:
            return False
        injective = any(self.kind(name) is OpKind.INJECTIVE for name in cluster.nodes)
        match self.kind(user):
            case OpKind.ANCHOR:
                single = len(self.users(cluster.sink)) == 1
                return self.prologues and single and not injective and not self.is_moved(cluster)
            case OpKind.REDUCTION:
                return not self.is_moved(cluster) and self.growth(cluster, user) <= _GROWTH
            case OpKind.INJECTIVE:
                cheap = cluster.kind in _POINTWISE and self.growth(cluster, user) <= _GROWTH
                return cheap and consumer.kind not in _HEAVY
            case kind if kind in _POINTWISE:
                if user in consumer.before and consumer.kind is OpKind.ANCHOR and (injective or not self.prologues):
                    return False
                return self.shape(user) == self.shape(cluster.sink)
        return False

    def is_moved(self, cluster: _Cluster) -> bool:
        """Whether the cluster was added to copy a value to another place."""
        return not cluster.nodes.isdisjoint(self.layouts.copies)

    def growth(self, cluster: _Cluster, user: str) -> float:
        """How often, at the worst, `user` reads an element of the cluster's value."""
        node = self.graph.nodes[user]
        tensors = tensors_of(computes_of(self.graph, node, placeholders_of(self.graph, node)))
        computes = [tensor for tensor in tensors if isinstance(tensor, Compute)]
        reads = [prod(tensor.shape) * prod(axis.extent for axis in tensor.reduce_axes) for tensor in computes]
        return max(reads) / max(1, prod(self.shape(cluster.sink)))

    def merge(self, cluster: _Cluster, consumer: _Cluster, users: list[str]) -> None:
        if any(user == consumer.anchor or user in consumer.before for user in users) and consumer.kind in _HEAVY:
            consumer.before |= cluster.nodes
        self.join(consumer, cluster.nodes)

    def feed_reduction(self, cluster: _Cluster, users: list[str]) -> None:
        """x + residual -> LayerNormalization, where others use the sum too: it becomes a second output."""
        for user in users:
            consumer = self.clusters[user]
            if self.may_have_two_outputs(cluster, consumer, user):
                self.merge(cluster, consumer, [user])
                return

    def may_have_two_outputs(self, cluster: _Cluster, consumer: _Cluster, user: str) -> bool:
        """A pointwise cluster and a reduction of the same shape, with no path out of the group and back into it."""
        if cluster.kind not in _POINTWISE or self.kind(user) is not OpKind.REDUCTION or consumer.sink != user:
            return False
        if self.shape(user) != self.shape(cluster.sink) or len(cluster.nodes) + len(consumer.nodes) > MAX_NODES:
            return False
        if consumer.nodes != {user} or any(self.kind(name) is OpKind.INJECTIVE for name in cluster.nodes):
            return False
        others = [name for name in self.users(cluster.sink) if name not in consumer.nodes]
        return not any(nx.has_path(self.graph.nx, name, user) for name in others)

    # --- result ---

    def groups(self) -> tuple[Group, ...]:
        clusters = list(dict.fromkeys(self.clusters[node.name] for node in self.order if node.name in self.clusters))
        return tuple(self.group(cluster) for cluster in self.sorted(clusters))

    def sorted(self, clusters: list[_Cluster]) -> list[_Cluster]:
        """In an order in which they can run, as near to the graph's as there is."""
        quotient = nx.DiGraph()
        label = {name: index for index, cluster in enumerate(clusters) for name in cluster.nodes}
        nodes = {name: label.get(name, name) for name in self.position}
        quotient.add_nodes_from(nodes.values())
        quotient.add_edges_from((nodes[a], nodes[b]) for a, b in self.graph.nx.edges if nodes[a] != nodes[b])
        last = {index: max(self.position[name] for name in cluster.nodes) for index, cluster in enumerate(clusters)}
        key = {item: last[item] if isinstance(item, int) else self.position[item] for item in quotient}
        order = nx.lexicographical_topological_sort(quotient, key=key.__getitem__)
        return [clusters[item] for item in order if isinstance(item, int)]

    def group(self, cluster: _Cluster) -> Group:
        names = sorted(cluster.nodes, key=self.position.__getitem__)
        nodes = [self.graph.nodes[name] for name in names]
        made = {output for node in nodes for output in node.outputs}
        inputs = dict.fromkeys(value for node in nodes for value in node.inputs if value and value not in made)
        outputs = tuple(output for node in nodes for output in node.outputs if self.is_used(output, cluster))
        return Group(_group_kind(nodes[0]), tuple(names), cluster.anchor, tuple(inputs), outputs)

    def is_used(self, value: str, cluster: _Cluster) -> bool:
        """Whether anything outside of the cluster uses the value (a kernel's only output always counts)."""
        if not value:
            return False
        node = self.graph.producers[value]
        lonely = node == cluster.sink and self.values(node) == [value]
        users = self.graph.users.get(value, ())
        return lonely or value in self.graph.outputs or any(user not in cluster.nodes for user in users)


def _group_kind(node: Node) -> GroupKind:
    if loop_body(node) is not None:
        return GroupKind.LOOP
    return GroupKind.TASK if definition(node) is not None else GroupKind.HOST


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(extent for extent in shape if extent != 1)


def _post_dominators(graph: Graph) -> dict[str, str]:
    """Each node's immediate post-dominator: the first node that every path from it to a graph output goes through."""
    backward = graph.nx.reverse()
    results = {graph.producers[value] for value in graph.outputs if value in graph.producers}
    results |= {name for name in graph.nx if not graph.nx.out_degree(name)}
    backward.add_node(_EXIT)
    backward.add_edges_from((_EXIT, name) for name in graph.nodes if name in results)
    return dict(nx.immediate_dominators(backward, _EXIT))
