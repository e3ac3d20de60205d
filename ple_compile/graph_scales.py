"""Scales of the quantised tables in a graph: compiled code does not look at their values by itself."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ple_compile.ops.mapped_lookup import mapped_lookup
from ple_compile.ops.sharded_lookup import sharded_lookup
from ple_compile.tables.formats import E4M3
from ple_compile.tables.scales import check_once

_LOOKUPS = {torch.nn.functional.embedding, sharded_lookup, sharded_lookup.overloadpacket}
_MAPPED_LOOKUPS = {mapped_lookup, mapped_lookup.overloadpacket}


class GraphScales:
    """Which inputs of a Dynamo graph are the scales of a quantised table that it looks rows up in.

    Scales are known by their names, those that parameters of our modules and of transformers' have.
    """

    def __init__(self, gm: GraphModule, example_inputs: Sequence[Any], names: Sequence[str]):
        modules = {_module(node) for node in gm.graph.nodes if node.target in _MAPPED_LOOKUPS}
        for name, value, node in zip(names, example_inputs, gm.graph.find_nodes(op="placeholder")):
            looked_up = isinstance(value, Tensor) and any(user.target in _LOOKUPS for user in node.users)
            if looked_up and value.dtype in (E4M3, torch.uint8):
                modules.add(name.removesuffix(".weight"))
        wanted = {f"{module}.{key}": (key, module) for module in modules for key in ("weight_scale", "weight_scale_2")}
        self._inputs = [
            (index, f"the {wanted[name][0]} of {wanted[name][1]}.weight")
            for index, (name, value) in enumerate(zip(names, example_inputs))
            if name in wanted and isinstance(value, Tensor)
        ]

    def check(self, inputs: Sequence[Any]) -> None:
        """Raise ValueError for a wrong scale; costs next to nothing for one that has not changed."""
        for index, what in self._inputs:
            check_once(what, inputs[index])


def _module(node: Node) -> str:
    """The module in whose forward a node is, as its parameters' names begin; the compiled one has no entry."""
    stack = node.meta.get("nn_module_stack")
    return list(stack.values())[-1][0] if stack else "L['self']"
