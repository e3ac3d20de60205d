"""Rows of a table whose rows are split over ranks: equal to the lookup in the whole table, bit for bit.

    rows[..., :] = table[ids[...], :]           table = the ranks' shards one after the other, without their padding

shard [rows_per_rank, D] is this rank's, on the device or page-locked on the host; ids int32 or int64 [..., heads]; rows
[*ids.shape, D]. `peers` holds the addresses of all shards where they are symmetric memory. The other arguments are the
fields of `ple_compile.sharding.topology.Layout`. An id outside the table gives a row of zeros.

This op is what a sharded embedding calls, and what eager code runs: masked lookup and all-reduce, padded to the largest
number of tokens of any rank, which is read on the host. `lower_lookup` replaces it in compiled graphs. A collective:
every rank of `group` must call it, with or without tokens.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ple_compile.ops import lookup
from ple_compile.ops._library import define
from ple_compile.sharding import _upstream, lowerings
from ple_compile.sharding.agreement import agree
from ple_compile.sharding.topology import Layout


def run(shard: Tensor, ids: Tensor, peers: Tensor | None, *fields: int | str) -> Tensor:
    layout = Layout(*fields)  # type: ignore[arg-type]
    if layout.num_ranks == 1:
        return torch.ops.ple.lookup(shard, ids)
    group = _upstream.resolve_group(layout.group)
    if not _upstream.supports(group, ids.device):
        # A plain model brings its ids to a host table; the collectives of its group run on the device.
        return run(shard, ids.to("cuda"), peers, *fields).to(ids.device)
    what = lowerings.describe("eager", layout)
    agree(layout.group, what)
    max_tokens = 1 if layout.num_sources == 1 else _largest(ids, layout)
    return lowerings.all_reduce(shard, ids, peers, layout, max_tokens, what)


def _largest(ids: Tensor, layout: Layout) -> int:
    counts = torch.tensor([ids.numel() // ids.shape[-1]], device=ids.device)
    everyone = counts.new_empty(layout.num_sources)
    dist.all_gather_into_tensor(everyone, counts, group=_upstream.resolve_group(layout.source_group))
    return max(1, int(everyone.max()))


def fake(shard: Tensor, ids: Tensor, peers: Tensor | None, *fields: int | str) -> Tensor:
    return lookup.fake(shard, ids)


sharded_lookup = define(
    "sharded_lookup(Tensor shard, Tensor ids, Tensor? peers, int num_rows, int rank, int num_ranks, int num_copies, "
    "str table, str group, str source_group, str copy_group, bool on_host) -> Tensor",
    cpu=run,
    cuda=run,
    fake=fake,
)
