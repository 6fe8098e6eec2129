"""Let convolutions pad by themselves.

Conv(Pad(x, zeros around the spatial dims), pads=p)    ->   Conv(x, pads=p + the widths)
"""

from __future__ import annotations

from mcompile.graph.graph import Graph, Node
from mcompile.graph.infer import become
from mcompile.graph.passes.pattern import Any, Binding, Rule, apply_rules, op

X = Any("x")


def fold_pad(graph: Graph) -> Graph:
    """The graph with zero padding moved into the convolutions that use it."""
    return apply_rules(graph, RULES)


def _fold(graph: Graph, node: Node, bound: Binding) -> bool:
    pad = graph.producer(bound["padded"])
    assert pad is not None
    rank = len(graph.types[bound["x"]].shape)
    widths = _zero_widths(pad, rank)
    if widths is None or node.attrs["auto_pad"] not in ("NOTSET", "VALID"):
        return False
    before, after = widths[:rank], widths[rank:]
    if any((*before[:2], *after[:2])):
        return False
    own = node.attrs["pads"] if node.attrs["auto_pad"] == "NOTSET" else None
    pads = tuple(int(pad) for pad in own) if own is not None and len(own) else (0,) * (2 * (rank - 2))
    total = tuple(a + b for a, b in zip(pads, (*before[2:], *after[2:]), strict=True))
    attrs = {**node.attrs, "auto_pad": "NOTSET", "pads": total}
    become(graph, node, node.op, (bound["x"], *node.inputs[1:]), attrs)
    return True


def _zero_widths(pad: Node, rank: int) -> tuple[int, ...] | None:
    """What a Pad with zeros puts before, then after each dim; None for another filling or a crop."""
    value = pad.attrs["constant_value"]
    if pad.attrs["mode"] != "constant" or (value is not None and float(value) != 0):
        return None
    given = [int(width) for width in pad.attrs["pads"]]
    axes = range(rank) if pad.attrs["axes"] is None else [int(axis) % rank for axis in pad.attrs["axes"]]
    widths = [0] * (2 * rank)
    for position, axis in enumerate(axes):
        widths[axis], widths[rank + axis] = given[position], given[position + len(given) // 2]
    return tuple(widths) if min(widths) >= 0 else None


_PADDED = op("Pad", X, bind="padded")
RULES = (
    Rule("pad_conv", op("Conv", _PADDED, Any("w")), _fold),
    Rule("pad_conv", op("Conv", _PADDED, Any("w"), Any("bias")), _fold),
)
