"""vLLM's whole PLE layer, for benchmarks/layer.py: its ids, `index_select`, one kv GEMM, its gate and its conv."""

from collections.abc import Callable

import peer
import torch
import torch.nn.functional as F
from torch import Tensor

from ple_compile.measuring.layer import DILATION, EOS, EPS, HEADS, WholeLayer

Set = tuple[Tensor, ...]  # hidden [B, S, C], tokens [B, S]; decoding also context [B, 2] and state [B, C, window]


def step(model: WholeLayer, folder: str, pdl: bool, sets: list[Set]) -> Callable[[int], Tensor]:
    """The layer on the i-th set, whose tokens and states it keeps in a form of its own."""
    kernels, behind, rows = peer.load(folder, pdl), model.behind, model.rows
    norms = {"norm_key": behind.norm_key, "norm_query": behind.norm_query, "norm_conv": behind.norm_conv}
    theirs = peer.Layer(kernels, {**norms, "conv": behind.conv[:, 0]}, EPS, DILATION)
    hashes, table = (rows.multipliers, rows.head_sizes, rows.offsets), rows.table.weight
    merged = torch.cat([model.key_proj.weight, model.value_proj.weight])

    decoding, count = len(sets[0]) == 4, sets[0][1].numel()
    hiddens = [s[0].view(count, -1) for s in sets]
    channels, device = hiddens[0].shape[1], hiddens[0].device
    # One sequence, or one token for each of `count` requests, whose slots are 1 to count.
    bounds = torch.tensor(range(count + 1) if decoding else [0, count], dtype=torch.int32, device=device)
    slots = bounds[1:].contiguous()
    start = torch.full((1, 2), EOS, dtype=torch.int32, device=device)
    pool = hiddens[0].new_zeros(2, channels, (behind.sizes.kernel - 1) * DILATION)
    tokens = [s[1].view(-1).int() for s in sets]
    contexts = [s[2].int() if decoding else start for s in sets]
    pools = [torch.cat([torch.zeros_like(s[3][:1]), s[3]]) if decoding else pool for s in sets]

    def run(i: int) -> Tensor:
        ids = kernels.ple_ngram_ids(tokens[i], bounds, contexts[i], *hashes, EOS, HEADS // 2)
        kv = F.linear(table.index_select(0, ids.view(-1)).view(count, -1), merged)
        tensors = kv[:, :channels], kv[:, channels:], hiddens[i], pools[i]
        return theirs.decode(*tensors, slots) if decoding else theirs.prefill(*tensors, bounds)

    return run
