"""How many bytes each lowering moves, and which one "auto" picks.

The bytes are those that one rank receives in one lookup, on average over the ranks; every rank sends as many. An
all-reduce, a reduce-scatter and an all-gather count as rings, which no algorithm without in-network reduction beats.
"""

from typing import NamedTuple

from ple_compile.sharding.topology import Layout

ID_BYTES = 8
# A lookup whose counts are read on the host must pay for its wait; this many times fewer bytes does, in "auto".
HOST_READ_FACTOR = 4


class Step(NamedTuple):
    """One collective: what it is, over how many ranks, and how many bytes a rank receives in it."""

    collective: str
    num_ranks: int
    received: float


def steps(lowering: str, layout: Layout, tokens: int, max_tokens: int, heads: int, row_bytes: int) -> list[Step]:
    """The collectives of one lookup of `tokens` tokens on every source, in order."""
    ranks, sources, copies = layout.num_ranks, layout.num_sources, layout.num_copies
    token_bytes = heads * row_bytes
    if lowering == "peer":
        return [Step("reads", ranks, (ranks - 1) / ranks * tokens * token_bytes)]
    found = []
    if lowering == "all_to_all":
        share = tokens // copies + 1 if copies > 1 else tokens
        remote = (ranks - 1) / ranks
        found.append(Step("all_to_all", ranks, remote * ranks * ID_BYTES))
        found.append(Step("all_to_all", ranks, remote * tokens / copies * heads * ID_BYTES))
        found.append(Step("all_to_all", ranks, remote * tokens / copies * token_bytes))
        if copies > 1:
            found.append(Step("all_gather", copies, (copies - 1) * share * token_bytes))
        return found
    if sources > 1:
        padded = max_tokens if lowering == "all_reduce" else -(-max_tokens // copies) * copies
        found.append(Step("all_gather", sources, (sources - 1) * (padded * heads + 1) * ID_BYTES))
    elif lowering == "reduce_scatter":
        padded = (tokens // copies + 1) * copies
    else:
        padded = tokens
    rows = sources * padded * token_bytes
    if lowering == "all_reduce":
        found.append(Step("all_reduce", ranks, 2 * (ranks - 1) / ranks * rows))
    else:
        found.append(Step("reduce_scatter", ranks, (ranks - 1) / ranks * rows))
        if copies > 1:
            found.append(Step("all_gather", copies, (copies - 1) / copies * padded * token_bytes))
    return found


def received(lowering: str, layout: Layout, tokens: int, max_tokens: int, heads: int, row_bytes: int) -> float:
    return sum(step.received for step in steps(lowering, layout, tokens, max_tokens, heads, row_bytes))


def choose(layout: Layout, can_read_peers: bool, max_tokens: int, heads: int, row_bytes: int) -> str:
    """What "auto" picks: the owner's memory where it can be read; else the sum that moves fewer bytes; else, where even
    that moves four times what is needed, the all-to-all. The same on every rank, since it knows only what all know."""
    if can_read_peers:
        return "peer"

    def cost(lowering: str) -> float:
        return received(lowering, layout, max_tokens, max_tokens, heads, row_bytes)

    summed = "all_reduce" if layout.num_sources == 1 else "reduce_scatter"
    return "all_to_all" if HOST_READ_FACTOR * cost("all_to_all") <= cost(summed) else summed
