"""Streams that a model computes one by one: parts of one tensor, and what joins parts again."""

import operator

from torch.fx import Node

from ple_compile.matching.graph import VIEWS, aten, calls, source, tensor_inputs

_CUTS = {aten.select.int, aten.slice.Tensor}
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
# What cuts streams out of a tensor, and puts them together.
STREAM_OPS = _CUTS | _SPLITS | {operator.getitem, aten.cat.default}


def cut_from(part: Node) -> Node | None:
    """The tensor that `part` was cut from, or None where it was not."""
    if calls(part, _CUTS):
        return part.args[0]
    if calls(part, {operator.getitem}) and calls(part.args[0], _SPLITS):
        return part.args[0].args[0]
    return None


def owner(part: Node) -> Node:
    """What `part` was cut from, without views and lossless casts; itself where it was not."""
    whole = cut_from(part)
    return part if whole is None else source(whole)


def are_streams(first: Node, second: Node) -> bool:
    """Whether both were cut from one tensor."""
    return first is not owner(first) is owner(second) is not second


def joined(parts: list[Node]) -> Node | None:
    """What puts all of `parts` together, in any order, and nothing else."""
    readers = list(parts[0].users)
    for reader in readers:
        if calls(reader, {aten.cat.default}):
            if sorted(source(n, VIEWS) for n in tensor_inputs(reader)) == sorted(parts):
                return reader
        elif calls(reader, VIEWS):
            readers += reader.users
    return None
