"""Index tensors of packed batches for probes: every composition that a server may put together."""

from collections.abc import Iterable

import torch
from torch.fx import Node

from ple_compile import upstream
from ple_compile.matching import probe
from ple_compile.matching.graph import value

MANY_TOKENS = 40  # more than any history reaches back


def sizes_of_batches(nodes: Iterable[Node], tokens: Node, states: Iterable[Node]) -> list[dict]:
    """Values for symbolic sizes, among them (the guards permitting) requests longer than any history."""
    found = probe.size_assignments(nodes, states)
    size = value(tokens).shape[0]
    symbols = list(upstream.free_symbols(size))
    if len(symbols) == 1:
        more = {**found[0], symbols[0]: MANY_TOKENS}
        if upstream.guards_hold(size, more):
            found.insert(0, more)
    return found


def draw_starts(num_tokens: int, num_requests: int, generator: torch.Generator, kind: int) -> torch.Tensor:
    """`query_start_loc` of a batch: cut anywhere, one token each, all tokens in one request, or tokens left over."""

    def draw(high: int, count: int) -> torch.Tensor:
        return torch.randint(0, high + 1, (count,), generator=generator)

    if num_requests == 0:
        return torch.zeros(1, dtype=torch.int64)
    if kind % 4 == 1:
        starts = torch.arange(num_requests + 1).clamp(max=num_tokens)
    elif kind % 4 == 2:
        starts = torch.where(torch.arange(num_requests + 1) > draw(num_requests - 1, 1), num_tokens, 0)
    else:
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), draw(num_tokens, num_requests).sort().values])
    if kind % 4 != 3:
        starts[-1] = num_tokens
    return starts


def draw_slots(num_requests: int, num_slots: int, generator: torch.Generator) -> torch.Tensor:
    """Slots of a pool, no two alike but the zeros."""
    slots = torch.zeros(num_requests, dtype=torch.int64)
    order = torch.randperm(max(num_slots - 1, 0), generator=generator)[:num_requests] + 1
    slots[: len(order)] = order
    slots = torch.where(torch.rand(num_requests, generator=generator) < 0.2, 0, slots)
    return slots[torch.randperm(num_requests, generator=generator)]
