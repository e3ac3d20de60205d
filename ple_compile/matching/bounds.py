"""Ops that pass numbers on up to a bound and change them beyond: probes that stay within prove nothing about them."""

import torch
from torch.fx import Node

from ple_compile.matching import probe
from ple_compile.matching.candidates import Declined
from ple_compile.matching.graph import aten, calls, dims, is_tensor, tensor_inputs, value

_BOUNDS = {
    aten.clamp.default,
    aten.clamp.Tensor,
    aten.clamp_min.default,
    aten.clamp_min.Tensor,
    aten.clamp_max.default,
    aten.clamp_max.Tensor,
    aten.minimum.default,
    aten.maximum.default,
    aten.fmin.default,
    aten.fmax.default,
    aten.relu.default,
    aten.hardtanh.default,
    aten.nan_to_num.default,
}


class Bounds:
    """The bounds on floating-point numbers among the nodes of a candidate, until a probe has gone beyond each."""

    def __init__(self, nodes: list[Node]):
        inside = set(nodes)
        self._untested = {node for node in nodes if _is_bound(node, inside)}

    def saw(self, values: dict[Node, object]) -> None:
        """These are the values of a probe."""
        self._untested -= {node for node in self._untested if _acted(node, values)}

    def check(self) -> None:
        """Raise `Declined` for a bound within which all probes stayed."""
        if self._untested:
            node = min(self._untested)
            raise Declined(f"no probe goes beyond the bound at {node.name}", node)


def _is_bound(node: Node, inside: set[Node]) -> bool:
    if not is_tensor(node) or not value(node).is_floating_point():
        return False
    return calls(node, _BOUNDS) or (calls(node, {aten.where.self}) and _depends_on_numbers(node.args[0], inside))


def _depends_on_numbers(condition: Node, inside: set[Node]) -> bool:
    """Whether a choice is made by floating-point numbers, rather than by a mask."""
    seen, stack = {condition}, [condition]
    for node in stack:
        for source in tensor_inputs(node) if node in inside else ():
            if value(source).is_floating_point():
                return True
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return False


def _acted(node: Node, values: dict[Node, object]) -> bool:
    """Whether the result is none of the inputs."""
    result = values.get(node)
    if not isinstance(result, torch.Tensor) or not result.numel():
        return False
    inputs = [values.get(source) for source in tensor_inputs(node) if dims(source) == dims(node)]
    return not any(isinstance(x, torch.Tensor) and probe.identical(x, result) for x in inputs)
