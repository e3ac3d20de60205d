"""What one node of a graph is to a report: its name, whether it is a launch, where it comes from."""

import os
import re
from typing import Any

import torch
from torch.fx import Node

from ple_compile import upstream
from ple_compile.layer_graphs import Source
from ple_compile.matching.graph import aten, is_tensor

_WAITS = ("_c10d_functional.wait_tensor.default", "ple.wait_rows.default", "ple.lookup_wait.default")
_LOOKUP_OPS = ("aten.embedding.", "aten.index_select.", "ple.lookup.", "ple.sharded_lookup.")
_FRAME = re.compile(r'File "(.*)", line (\d+), in (.*)')
_TORCH = os.path.dirname(torch.__file__) + os.sep


def target_name(node: Node) -> str:
    """`aten.mul.Tensor`; of a call that waits for others (`control_deps`), what it calls."""
    target: Any = _called(node)
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def _called(node: Node) -> Any:
    attributes = [arg for arg in node.args if isinstance(arg, Node) and arg.op == "get_attr"]
    if node.target is not upstream.control_deps or not attributes:
        return node.target
    body = getattr(node.graph.owning_module, str(attributes[0].target))
    return next(n.target for n in body.graph.nodes if n.op == "call_function")


def looks_up(node: Node) -> bool:
    """Whether a call reads rows of the table that is its first argument."""
    if not str(node.target).startswith(_LOOKUP_OPS):
        return False
    return isinstance(node.args[0], Node) and is_tensor(node.args[0]) and node.args[0].meta["val"].dim() == 2


def returns_tensors(node: Node) -> bool:
    val = node.meta.get("val")
    return any(isinstance(v, torch.Tensor) for v in (val if isinstance(val, (tuple, list)) else [val]))


def launches(node: Node) -> bool:
    """Whether a call is a kernel where the graph runs op by op."""
    target, val = _called(node), node.meta["val"]
    if not isinstance(target, torch._ops.OpOverload) or str(target) in _WAITS or target is aten._unsafe_view.default:
        return False
    if isinstance(val, torch.Tensor) and val.dim() == 0:
        return False
    aliases = [result.alias_info for result in target._schema.returns if result.alias_info is not None]
    return all(alias.is_write for alias in aliases)


def writes(node: Node, inputs: list[Node]) -> bool:
    """Whether the result is one tensor of new memory. Of a call with several results, each is where it is taken."""
    if not is_tensor(node) or node.meta["val"].dim() == 0:
        return False
    if target_name(node) == "getitem":
        return launches(inputs[0])
    if target_name(node) == "ple.lookup_wait.default":  # into memory that its start has allocated
        return True
    target = _called(node)
    return launches(node) and not any(result.alias_info is not None for result in target._schema.returns)


def innermost_source(trace: str) -> Source | None:
    """The innermost line of a stack trace that is not PyTorch's own."""
    lines = [line.strip() for line in trace.splitlines()]
    frames = [(index, found) for index, line in enumerate(lines) if (found := _FRAME.match(line))]
    theirs = [frame for frame in frames if not frame[1].group(1).startswith(_TORCH)] or frames
    if not theirs:
        return None
    index, found = theirs[-1]
    code = lines[index + 1] if index + 1 < len(lines) else ""
    return Source(found.group(1), int(found.group(2)), found.group(3), "" if _FRAME.match(code) else code[:160])
