"""What a lookup sends, counted: a run on a fake process group, each of its collectives expanded into messages.

A collective becomes its messages between ranks, by the algorithm that NCCL and gloo use: rings for all-reduce,
reduce-scatter and all-gather, one message for each pair in an all-to-all. The run is one rank's; the others issue the
same collectives with the same sizes, which is what the tests on real ranks establish.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ple_compile.ops import local_ids, lookup
from ple_compile.ops.all_to_all_lookup import all_to_all_lookup, exchange
from ple_compile.sharding.lowerings import LOWERINGS
from ple_compile.sharding.topology import Layout


def _no_rows(*args):
    """Ids that lie on another rank."""
    return tuple(output.zero_() for output in local_ids.fake(*args))


_READERS = {lookup.lookup: lookup.fake, local_ids.local_ids: _no_rows}


class Messages:
    """Bytes that every rank receives, in all and from other nodes."""

    def __init__(self, num_ranks: int, ranks_per_node: int):
        self.received = torch.zeros(num_ranks, dtype=torch.float64)
        self.between_nodes = torch.zeros(num_ranks, dtype=torch.float64)
        self.ranks_per_node = ranks_per_node

    def send(self, sources: torch.Tensor, targets: torch.Tensor, nbytes: float) -> None:
        sent = torch.full(targets.shape, nbytes, dtype=torch.float64)
        self.received.index_add_(0, targets, sent)
        crosses = sources // self.ranks_per_node != targets // self.ranks_per_node
        self.between_nodes.index_add_(0, targets, sent * crosses)

    def ring(self, group: torch.Tensor, steps: int, nbytes: float) -> None:
        for _ in range(steps):
            self.send(group, group.roll(-1), nbytes)

    def pairs(self, sources: torch.Tensor, targets: torch.Tensor, nbytes: float) -> None:
        for source in sources:
            others = targets[targets != source]
            self.send(source.expand(len(others)), others, nbytes)


class _Recorder(TorchDispatchMode):
    """(collective, name of its group, bytes) of every collective, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func._schema.name, kwargs or {}
        if func is all_to_all_lookup:  # look inside
            with self:
                return exchange(*args, **kwargs)
        if func in _READERS:  # of data that a fake group never delivers
            return _READERS[func](*args, **kwargs)
        if name == "c10d::alltoall_base_":
            # Up to torch 2.11 the fake group delivers no counts, and the side that they size is empty.
            self.collectives.append(("all_to_all", "", max(args[0].nbytes, args[1].nbytes)))
        elif name.startswith("_c10d_functional::") and not name.endswith("wait_tensor"):
            self.collectives.append((name.split("::")[1], args[-1], args[0].nbytes))
        return func(*args, **kwargs)


def simulate(lowering: str, layout: Layout, tokens: int, heads: int, row_bytes: int, ranks_per_node: int) -> Messages:
    """The messages of one lookup of `tokens` tokens on every source, padded to as many."""
    shard = torch.zeros(layout.rows_per_rank, row_bytes, dtype=torch.uint8)
    ids = torch.randint(0, layout.num_rows, (tokens, heads), generator=torch.Generator().manual_seed(0))
    messages, everyone = Messages(layout.num_ranks, ranks_per_node), torch.arange(layout.num_ranks)
    if lowering == "peer":  # every id is read by each rank from its owner
        messages.pairs(everyone, everyone, ids.numel() * row_bytes / layout.num_ranks)
        return messages
    grid = everyone.view(layout.num_sources, layout.num_copies)
    for copy in range(layout.num_copies):
        with _Recorder() as recorder:
            LOWERINGS[lowering](shard, ids, None, layout._replace(rank=copy), tokens)
        for collective, name, nbytes in recorder.collectives:
            if collective == "all_to_all":  # copies ask for different tokens
                messages.pairs(grid[:, copy], everyone, nbytes / layout.num_ranks)
            elif copy > 0:
                continue  # rings take all ranks along
            elif collective == "all_reduce":
                messages.ring(everyone, 2 * (layout.num_ranks - 1), nbytes / layout.num_ranks)
            elif collective == "reduce_scatter_tensor":
                messages.ring(everyone, layout.num_ranks - 1, nbytes / layout.num_ranks)
            elif collective == "all_gather_into_tensor":
                for group in grid.T if name == layout.source_group else grid:
                    messages.ring(group, len(group) - 1, nbytes)
            else:
                raise AssertionError(f"no messages known for {collective}")
    return messages
