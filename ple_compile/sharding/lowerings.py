"""The ways in which rows travel from the ranks that hold them to the ranks that want them.

Each is a plain function of tensors, run eagerly by `ple::sharded_lookup` and traced into a graph by `lower_lookup`.
Which collectives it issues, and in which order, depends on the layout only, never on this rank's number of tokens. Rows
travel as integers: a sum in which all but one are zero is then exact, -0.0, NaN payloads and float8 included.

`all_reduce`      sums every row over all ranks: what every backend can do
`reduce_scatter`  sums, and leaves each rank the rows of its own tokens
`all_to_all`      sends every id to its owner and every row back; counts are read on the host
`peer`            reads the owner's memory
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import ple_compile.ops.all_to_all_lookup
import ple_compile.ops.local_ids
import ple_compile.ops.lookup
import ple_compile.ops.pack_ids
import ple_compile.ops.peer_lookup
import ple_compile.ops.too_many_ids
import ple_compile.ops.wait_rows  # noqa: F401
from ple_compile.sharding.topology import Layout

ple = torch.ops.ple
c10d = torch.ops._c10d_functional


def all_reduce(
    shard: Tensor, ids: Tensor, peers: Tensor | None, layout: Layout, max_tokens: int, what: str = ""
) -> Tensor:
    what = what or describe("all_reduce", layout, max_tokens)
    if layout.num_sources == 1:
        words = _own_words(shard, ids.reshape(-1), layout, 0, what)
        first = 0
    else:
        limit = max_tokens * ids.shape[-1]
        gathered = _gather_ids(ids, layout, limit, what)
        if ids.numel() > limit:
            return ple.too_many_ids(gathered, ids, shard, limit, what)
        words = _own_words(shard, gathered, layout, limit, what)
        first = layout.source * limit
    total = _wait(c10d.all_reduce(words, "sum", layout.group), what, "all-reduce of rows")
    return _rows(total, ids, shard, first)


def reduce_scatter(shard: Tensor, ids: Tensor, peers: Tensor | None, layout: Layout, max_tokens: int) -> Tensor:
    """Every rank receives the sum of its copy's share of the tokens; copies then exchange their shares."""
    what = describe("reduce_scatter", layout, max_tokens)
    heads, copies = ids.shape[-1], layout.num_copies
    if layout.num_sources == 1:
        share, limit = ids.numel() // heads // copies + 1, 0
        wanted = ple.pack_ids(ids, share * copies * heads, False, layout.group, what)
    else:
        share, limit = -(-max_tokens // copies), max_tokens * heads
        wanted = _gather_ids(ids, layout, share * copies * heads, what)
        if ids.numel() > limit:
            return ple.too_many_ids(wanted, ids, shard, limit, what)
    words = _own_words(shard, wanted, layout, limit, what)
    received = c10d.reduce_scatter_tensor(words, "sum", layout.num_ranks, layout.group)
    return _rows(_join_copies(_wait(received, what, "reduce-scatter of rows"), layout, what), ids, shard)


def all_to_all(shard: Tensor, ids: Tensor, peers: Tensor | None, layout: Layout, max_tokens: int) -> Tensor:
    """Every copy fetches its share of the tokens; copies then exchange their shares."""
    what = describe("all_to_all", layout)
    heads, copies = ids.shape[-1], layout.num_copies
    wanted = ids.reshape(-1)
    if copies > 1:
        share = (ids.numel() // heads // copies + 1) * heads
        wanted = ple.pack_ids(ids, share * copies, False, layout.group, what)
        wanted = wanted[layout.copy * share : (layout.copy + 1) * share]
    rows = ple.all_to_all_lookup(shard, wanted, layout.num_rows, layout.rank, layout.num_ranks, layout.group, what)
    return _rows(_join_copies(_words(rows), layout, what), ids, shard)


def peer(shard: Tensor, ids: Tensor, peers: Tensor | None, layout: Layout, max_tokens: int) -> Tensor:
    return ple.peer_lookup(shard, ids, peers, layout.num_rows, layout.group, describe("peer", layout))


LOWERINGS: dict[str, Callable[[Tensor, Tensor, Tensor | None, Layout, int], Tensor]] = {
    function.__name__: function for function in (all_reduce, reduce_scatter, all_to_all, peer)
}


def describe(name: str, layout: Layout, max_tokens: int | None = None) -> str:
    """What a rank is about to do, in words that are the same on every rank. `max_tokens`: the size of the buffers."""
    padded = f", up to {max_tokens} tokens" if max_tokens is not None and layout.num_sources > 1 else ""
    return f"{name} lookup of {layout.table}{padded}"


def _gather_ids(ids: Tensor, layout: Layout, size: int, what: str) -> Tensor:
    """The ids of every source behind their number, padded to one size: [num_sources * (1 + size)]."""
    packed = ple.pack_ids(ids, size, True, layout.group, what)
    gathered = c10d.all_gather_into_tensor(packed, layout.num_sources, layout.source_group)
    return _wait(gathered, what, "all-gather of ids")


def _own_words(shard: Tensor, ids: Tensor, layout: Layout, limit: int, what: str) -> Tensor:
    """Rows of this rank, zeros in the places of other ranks' rows; `limit` is 0 for ids that come without counts."""
    local, mine = ple.local_ids(
        ids,
        layout.num_sources,
        limit > 0,
        limit,
        layout.first_row,
        layout.num_local_rows,
        layout.group,
        what,
    )
    if layout.on_host:
        rows = _words(ple.lookup(shard, local))
    else:  # Inductor makes one kernel of the gather and the mask
        rows = F.embedding(local, _words(shard))
    return torch.where(mine.unsqueeze(-1), rows, 0)


def _words(rows: Tensor) -> Tensor:
    width = rows.shape[-1] * rows.element_size()
    return rows.view(torch.int32 if width % 4 == 0 else torch.uint8)


def _join_copies(words: Tensor, layout: Layout, what: str) -> Tensor:
    if layout.num_copies == 1:
        return words
    joined = c10d.all_gather_into_tensor(words, layout.num_copies, layout.copy_group)
    return _wait(joined, what, "all-gather of rows")


def _rows(words: Tensor, ids: Tensor, shard: Tensor, first: int = 0) -> Tensor:
    """The rows of `ids` [*ids.shape, D], which lie at `first` in `words`."""
    return words.narrow(0, first, ids.numel()).view(shard.dtype).reshape(*ids.shape, shard.shape[1])


def _wait(pending: Tensor, what: str, collective: str) -> Tensor:
    return ple.wait_rows(pending, f"{what}: {collective}")
