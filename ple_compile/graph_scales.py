"""Scales of the quantised tables in a graph that is compiled: compiled code does not look at their values first."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ple_compile import upstream
from ple_compile.ops.sharded_lookup import sharded_lookup
from ple_compile.tables.formats import E4M3, check_scale

_LOOKUPS = {torch.nn.functional.embedding, sharded_lookup, sharded_lookup.overloadpacket}


def check_graph_scales(gm: GraphModule, example_inputs: Sequence[Any], names: Sequence[str]) -> None:
    """Raise ValueError for a wrong scale beside a quantised table that a Dynamo graph looks rows up in.

    Scales are known by their names, those that parameters of our modules and of transformers' have.
    """
    inputs = dict(zip(names, example_inputs))
    for name, node in zip(names, gm.graph.find_nodes(op="placeholder")):
        if not any(user.target in _LOOKUPS for user in node.users) or inputs[name].dtype not in (E4M3, torch.uint8):
            continue
        for key in ("weight_scale", "weight_scale_2"):
            scale = inputs.get(f"{name.removesuffix('weight')}{key}")
            if isinstance(scale, Tensor) and not isinstance(scale, upstream.FakeTensor) and not scale.is_meta:
                check_scale(f"the {key} of {name}", scale)
