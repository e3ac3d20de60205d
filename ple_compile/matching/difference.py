"""Where a candidate that is nearly an op leaves it: told from the values of both on the same inputs."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.fx import Node

from ple_compile.matching.graph import LAYOUT, depends_on


class Parting(NamedTuple):
    """How many stages they have in common, how to say it, and the first node that differs."""

    stage: int
    text: str
    node: Node | None


def where_they_part(
    nodes: list[Node],
    values: dict[Node, object],
    stages: dict[str, torch.Tensor],
    failed: str,
    same: Callable[[torch.Tensor, torch.Tensor], bool],
) -> Parting:
    """Of a candidate, given as its `nodes` in graph order, whose result `failed` differs from the op's.

    `stages` are the op's own intermediate results by name, in order.
    """
    names = list(stages)
    for stage in reversed(range(names.index(failed))):
        wanted = stages[names[stage]].reshape(-1)
        for node in nodes:
            actual = values.get(node)
            if isinstance(actual, torch.Tensor) and actual.numel() and same(actual.reshape(-1), wanted):
                onward = sorted(n for n in depends_on(nodes, {node}) if n.target not in LAYOUT)
                if onward:
                    text = f": they agree up to the {names[stage]}, and part at {onward[0].name}"
                    return Parting(stage, text, onward[0])
    return Parting(-1, "", None)
