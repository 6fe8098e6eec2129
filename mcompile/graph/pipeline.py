"""optimize: the graph passes, as a list one can read."""

from __future__ import annotations

from dataclasses import replace

from mcompile.config import Config, load
from mcompile.graph.expand_recurrent import expand_recurrent
from mcompile.graph.graph import Graph
from mcompile.graph.passes.canonicalize import canonicalize
from mcompile.graph.passes.eliminate_common_subexpressions import eliminate_common_subexpressions
from mcompile.graph.passes.eliminate_dead import eliminate_dead
from mcompile.graph.passes.eliminate_identity import eliminate_identity
from mcompile.graph.passes.fold_affine import fold_affine
from mcompile.graph.passes.fold_constants import fold_constants
from mcompile.graph.passes.fold_pad import fold_pad
from mcompile.graph.passes.merge_matmuls import merge_matmuls
from mcompile.graph.passes.merge_movement import merge_movement
from mcompile.graph.passes.recognize_activations import recognize_activations
from mcompile.graph.passes.recognize_normalization import recognize_normalization
from mcompile.graph.printer import print_graph
from mcompile.graph.verify import verify_graph
from mcompile.passes import Pass, PassManager, Repeat, as_pass
from mcompile.target import Target

Step = Pass[Graph] | Repeat[Graph]


def pipeline(target: Target, config: Config) -> list[Step]:
    """The passes for a target: all of them rewrite the graph's meaning alone, so every target has the same."""
    return [
        as_pass(eliminate_dead),
        as_pass(expand_recurrent),
        Repeat(
            "simplify",
            (
                as_pass(fold_constants),
                as_pass(eliminate_identity),
                as_pass(canonicalize),
                as_pass(merge_movement),
                as_pass(eliminate_common_subexpressions),
                as_pass(recognize_normalization),
                as_pass(recognize_activations),
                as_pass(fold_pad),
                as_pass(fold_affine),
                as_pass(eliminate_dead),
            ),
        ),
        as_pass(merge_matmuls),
        as_pass(eliminate_dead),
        Pass("optimize_bodies", lambda graph: optimize_bodies(graph, target, config)),
    ]


def optimize_bodies(graph: Graph, target: Target, config: Config) -> Graph:
    """The graph with the bodies of its loops optimised."""
    new = graph
    for node in graph.topological():
        body = node.attrs.get("body")
        if not isinstance(body, Graph):
            continue
        better = optimize(body, target, config)
        if better is not body:
            new = graph.copy() if new is graph else new
            types = [graph.types[output] for output in node.outputs]
            new.replace(replace(node, attrs={**node.attrs, "body": better}), types)
    return new


def optimize(graph: Graph, target: Target, config: Config | None = None) -> Graph:
    """The graph after all passes; `graph` itself is left as it was. Raises InternalError naming a faulty pass."""
    config = load() if config is None else config
    manager: PassManager[Graph] = PassManager(f"graph {graph.name}", verify_graph, print_graph, config)
    return manager.run(pipeline(target, config), graph)
