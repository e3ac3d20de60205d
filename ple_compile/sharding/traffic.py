"""How many bytes each lowering moves, over which links, and which one "auto" picks.

Bytes are those that one rank receives in one lookup, on average over the ranks; every rank sends as many. All-reduce,
reduce-scatter and all-gather count as rings, which no algorithm without in-network reduction beats; ids are taken to
be spread evenly over the rows, as hashes are. Nodes hold `ranks_per_node` neighbouring ranks: inside one, bytes go over
NVLink; between two, over each rank's share of the network.
"""

from typing import NamedTuple, Protocol

from ple_compile.sharding.topology import Layout

ID_BYTES = 8
# A lookup whose counts are read on the host must pay for its wait; this many times fewer bytes does, in "auto".
HOST_READ_FACTOR = 4


class Ranks(Protocol):
    """What the bytes depend on: how many ranks share the table, and how many neighbours look up the same ids."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def num_copies(self) -> int: ...


class Step(NamedTuple):
    """One exchange: between `num_ranks` ranks, each `stride` ranks from the next, of `received` bytes for a rank."""

    exchange: str
    num_ranks: int
    stride: int
    received: float

    def between_nodes(self, ranks_per_node: int) -> float:
        """How many of the bytes come from another node."""
        neighbours = min(self.num_ranks, max(1, ranks_per_node // self.stride))  # ranks of the exchange in one node
        if neighbours == self.num_ranks:
            return 0.0
        if self.exchange in ("all_to_all", "reads"):
            return self.received * (self.num_ranks - neighbours) / (self.num_ranks - 1)
        return self.received / neighbours  # a ring enters every node once


def steps(lowering: str, shared_by: Ranks, tokens: int, max_tokens: int, heads: int, row_bytes: int) -> list[Step]:
    """The exchanges of one lookup of `tokens` tokens on every source, in order."""
    ranks, copies = shared_by.num_ranks, shared_by.num_copies
    sources, token_bytes, remote = ranks // copies, heads * row_bytes, (ranks - 1) / ranks
    if lowering == "peer":
        return [Step("reads", ranks, 1, remote * tokens * token_bytes)]
    found = []
    if lowering == "all_to_all":
        share = tokens // copies + 1 if copies > 1 else tokens
        found.append(Step("all_to_all", ranks, 1, remote * ranks * ID_BYTES))
        found.append(Step("all_to_all", ranks, 1, remote * tokens / copies * heads * ID_BYTES))
        found.append(Step("all_to_all", ranks, 1, remote * tokens / copies * token_bytes))
    elif sources > 1:
        share = -(-max_tokens // copies)
        padded = max_tokens if lowering == "all_reduce" else share * copies
        found.append(Step("all_gather", sources, copies, (sources - 1) * (padded * heads + 1) * ID_BYTES))
    else:
        share = tokens // copies + 1
        padded = tokens if lowering == "all_reduce" else share * copies
    if lowering == "all_reduce":
        return [*found, Step("all_reduce", ranks, 1, 2 * remote * sources * padded * token_bytes)]
    if lowering == "reduce_scatter":
        found.append(Step("reduce_scatter", ranks, 1, remote * sources * padded * token_bytes))
    if copies > 1:
        found.append(Step("all_gather", copies, 1, (copies - 1) * share * token_bytes))
    return found


def received(lowering: str, shared_by: Ranks, tokens: int, max_tokens: int, heads: int, row_bytes: int) -> float:
    return sum(step.received for step in steps(lowering, shared_by, tokens, max_tokens, heads, row_bytes))


def choose(layout: Layout, can_read_peers: bool, max_tokens: int, heads: int, row_bytes: int) -> str:
    """What "auto" picks: the owner's memory where it can be read; else the sum that moves fewer bytes; else, where even
    that moves four times what is needed, the all-to-all. The same on every rank, since it knows only what all know."""
    if can_read_peers:
        return "peer"

    def cost(lowering: str) -> float:
        return received(lowering, layout, max_tokens, max_tokens, heads, row_bytes)

    summed = "all_reduce" if layout.num_sources == 1 else "reduce_scatter"
    return "all_to_all" if HOST_READ_FACTOR * cost("all_to_all") <= cost(summed) else summed
