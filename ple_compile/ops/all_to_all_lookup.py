"""Rows of a sharded table, fetched from their owners with three all-to-alls: counts, ids, rows.

    rows[i] = row ids[i] of the table, of whatever rank; zeros for an id outside it

shard [rows_per_rank, D]; ids int32 or int64 [n], any n on any rank, zero too; rows [n, D]. Every rank sends each id
once and receives each of its rows once, whatever the number of ranks. The counts are read on the host, since NCCL wants
to know its message sizes there: the op waits for the device, and cannot be captured in a CUDA graph (Inductor is told
so and splits its graphs around it).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ple_compile.ops.lookup import lookup
from ple_compile.sharding import _upstream
from ple_compile.sharding.agreement import agree

_LIBRARY = torch.library.Library("ple", "FRAGMENT")


def exchange(shard: Tensor, ids: Tensor, num_rows: int, rank: int, num_ranks: int, group: str, what: str) -> Tensor:
    agree(group, what)
    members = _upstream.resolve_group(group)
    rows_per_rank = shard.shape[0]
    inside = (ids >= 0) & (ids < num_rows)
    owner = torch.where(inside, ids // rows_per_rank, num_ranks)  # ids outside the table come last and stay here
    order = owner.argsort(stable=True)
    # Not `bincount`, which waits for the device and is not deterministic there.
    send = (owner[order, None] == torch.arange(num_ranks, device=ids.device)).sum(0)
    try:
        receive = torch.zeros_like(send)
        dist.all_to_all_single(receive, send, group=members)
        send_counts, receive_counts = torch.stack([send, receive]).tolist()
        order = order[: sum(send_counts)]
        asked = ids.new_empty(sum(receive_counts))
        dist.all_to_all_single(asked, ids[order], receive_counts, send_counts, group=members)
        # Float rows are moved, not summed, so every byte survives; but not every backend knows float8.
        answer = lookup(shard, asked - rank * rows_per_rank).view(torch.uint8)
        rows = answer.new_empty((len(order), answer.shape[1]))
        dist.all_to_all_single(rows, answer, send_counts, receive_counts, group=members)
    except RuntimeError as error:
        raise RuntimeError(f"{what} failed; a rank of the group has ended or did not come: {error}") from error
    result = rows.new_zeros((ids.numel(), rows.shape[1]))
    result[order] = rows
    return result.view(shard.dtype)


def fake(shard: Tensor, ids: Tensor, num_rows: int, rank: int, num_ranks: int, group: str, what: str) -> Tensor:
    return ids.new_empty((*ids.shape, shard.shape[1]), dtype=shard.dtype)


_LIBRARY.define(
    "all_to_all_lookup(Tensor shard, Tensor ids, int num_rows, int rank, int num_ranks, str group, str what) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order, torch.Tag.cudagraph_unsafe),
)
_LIBRARY.impl("all_to_all_lookup", exchange, "CPU")
_LIBRARY.impl("all_to_all_lookup", exchange, "CUDA")
torch.library.register_fake("ple::all_to_all_lookup", fake, lib=_LIBRARY)
all_to_all_lookup = torch.ops.ple.all_to_all_lookup.default
