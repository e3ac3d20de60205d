"""Which keys each query of a QSA layer attends to: the best-scoring blocks of `ratio` visible keys, plus the rest.

    block b of query t  = its visible keys number b * ratio ... b * ratio + ratio - 1
    key of a block      = rope(rms_norm(mean of its keys), at the position of its first key)
    score[t, b]         = sum over heads of relu(query[t, h] . key[b]) / sqrt(head_dim)
    selected            = keys of the num_selected best complete blocks, and the visible keys after the last one

query `[B, S, H, D]` (rotated), keys `[B, K, D]` (raw, one head), cos and sin `[B, L, E]` of every key position,
visible `[B, S, K]` bool; returns bool `[B, S, K]`, always a subset of `visible`. Means, norms and scores accumulate
in float32; the pooled and the normalised key are rounded to the keys' type, as transformers does. Equal scores keep
the lowest block numbers, which depends neither on padding nor on the cache's length. Scores must not be NaN.

`layout` is what is known about `visible` beforehand; a row's key list is the keys that any of its queries sees:
    "prefix"    every query sees the first keys of the list: causal masks with padding on any side
    "interval"  every query sees a contiguous part of the list: packed sequences, sliding windows
    "any"       nothing is known: looked up (one host synchronisation), and a mask that is neither runs query by query

Memory beside the result: one block key per block ("prefix") or per key ("interval"), and `_MAX_ELEMENTS` scores.
Key lists are never empty. One query per row needs no layout and no loop: `select_rows`, which is traceable.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ple_compile.ops._library import define

# Elements of the largest temporary of one step over queries: 64 MiB of float32 scores.
_MAX_ELEMENTS = 1 << 24


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the leading `cos.shape[-1]` features of `x`, rounded where transformers rounds."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


def _key_order(listed: Tensor, rank: Tensor, ratio: int) -> Tensor:
    """Positions of the listed keys in ascending order, filled up with zeros to whole blocks.

    There are at least two blocks: a width of one would be a graph of its own under `torch.compile`.
    """
    num_rows, num_keys = listed.shape
    width = (num_keys // ratio + 2) * ratio
    positions = torch.arange(num_keys, device=listed.device).expand(num_rows, -1)
    order = torch.zeros(num_rows, width + 1, dtype=torch.int64, device=listed.device)
    return order.scatter(1, torch.where(listed, rank, width), positions)[:, :width]


def _block_keys(keys: Tensor, cos: Tensor, sin: Tensor, blocks: Tensor, norm_weight: Tensor, norm_eps: float) -> Tensor:
    """Pooled, normalised and rotated keys, float32, of `blocks [R, N, ratio]` (positions in `keys [R, K, D]`)."""
    num_rows, num_blocks, ratio = blocks.shape
    head_dim = keys.shape[-1]
    members = keys.gather(1, blocks.reshape(num_rows, num_blocks * ratio, 1).expand(-1, -1, head_dim))
    pooled = members.view(num_rows, num_blocks, ratio, head_dim).float().mean(dim=2).to(keys.dtype).float()
    normed = pooled * torch.rsqrt(pooled.pow(2).mean(-1, keepdim=True) + norm_eps) * (1.0 + norm_weight.float())
    starts = blocks[:, :, :1].expand(-1, -1, cos.shape[-1])
    return rotate(normed.to(keys.dtype), cos.gather(1, starts), sin.gather(1, starts)).float()


def _best_blocks(scores: Tensor, num_complete: Tensor, num_selected: int) -> Tensor:
    """The `num_selected` highest of the first `num_complete` scores, the lower number first among equals."""
    num_blocks = scores.shape[-1]
    number = torch.arange(num_blocks, device=scores.device)
    complete = number < num_complete
    if num_selected == 0:
        return torch.zeros_like(complete)
    # Non-negative floats order as their bits do, so score and block number make one integer without ties. `abs` turns
    # -0.0 into 0.0. Under autocast the scores come out of the matrix product in 16 bits, as the original's do.
    merit = (scores.float().abs().view(torch.int32).long() << 32) + ((1 << 31) - 1 - number)
    merit = torch.where(complete, merit, -1)
    # Padded so that there are always `num_selected` to choose from, whatever the length.
    least = F.pad(merit, (0, num_selected), value=-1).topk(num_selected, sorted=False).values.amin(-1, keepdim=True)
    return complete & (merit >= least)


def select_rows(
    query: Tensor,
    keys: Tensor,
    cos: Tensor,
    sin: Tensor,
    visible: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    ratio: int,
    num_selected: int,
) -> Tensor:
    """One query per row, under any mask: query `[R, H, D]`, keys `[R, K, D]`, visible `[R, K]`; bool `[R, K]`."""
    rank = visible.long().cumsum(-1) - 1
    num_complete = (rank[:, -1:] + 1) // ratio
    order = _key_order(visible, rank, ratio)
    blocks = order.view(order.shape[0], order.shape[1] // ratio, ratio)
    block_keys = _block_keys(keys, cos, sin, blocks, norm_weight, norm_eps)
    scores = torch.relu(query.float() @ block_keys.transpose(-1, -2)).sum(dim=1) / math.sqrt(query.shape[-1])
    best = _best_blocks(scores, num_complete, num_selected)
    block = rank.clamp(min=0) // ratio
    return visible & (best.gather(1, block) | (block >= num_complete))


def _select_shared(
    query: Tensor,
    keys: Tensor,
    cos: Tensor,
    sin: Tensor,
    visible: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    ratio: int,
    num_selected: int,
    prefix: bool,
) -> Tensor:
    """Queries that see contiguous parts of their row's key list: keys are pooled once per row, not per query."""
    num_rows, num_queries, num_heads, head_dim = query.shape
    num_keys = keys.shape[1]
    listed = visible.any(dim=1)
    rank = listed.long().cumsum(-1) - 1
    order = _key_order(listed, rank, ratio)
    num_blocks = order.shape[1] // ratio
    blocks = order.view(num_rows, num_blocks, ratio) if prefix else order.unfold(1, ratio, 1)
    block_keys = _block_keys(keys, cos, sin, blocks, norm_weight, norm_eps)

    selected = visible.new_empty(visible.shape)
    widest = max(num_heads * block_keys.shape[1], num_keys)
    step = max(1, _MAX_ELEMENTS // (num_rows * widest))
    for start in range(0, num_queries, step):
        sees = visible[:, start : start + step]
        part = query[:, start : start + step].float().transpose(1, 2)
        scores = torch.relu_(part @ block_keys.unsqueeze(1).transpose(-1, -2)).sum(dim=1) / math.sqrt(head_dim)
        if prefix:
            first = rank.new_zeros(())
        else:
            first = torch.where(sees, rank.unsqueeze(1), num_keys).amin(-1, keepdim=True)
            starts = first + ratio * torch.arange(num_blocks, device=rank.device)
            scores = scores.gather(-1, starts.clamp(max=blocks.shape[1] - 1))
        num_complete = sees.sum(-1, keepdim=True) // ratio
        best = _best_blocks(scores, num_complete, num_selected)
        block = (rank.unsqueeze(1) - first).clamp(min=0) // ratio
        chosen = best.gather(-1, block.clamp(max=num_blocks - 1).expand(sees.shape)) | (block >= num_complete)
        torch.logical_and(sees, chosen, out=selected[:, start : start + step])
    return selected


def _is_interval(visible: Tensor) -> bool:
    """Whether every query sees a contiguous part of its row's key list; reads the answer back from the device."""
    num_rows, num_queries, num_keys = visible.shape
    rank = (visible.any(dim=1).long().cumsum(-1) - 1).unsqueeze(1)
    contiguous = torch.ones((), dtype=torch.bool, device=visible.device)
    step = max(1, _MAX_ELEMENTS // (num_rows * num_keys))
    for start in range(0, num_queries, step):
        sees = visible[:, start : start + step]
        first = torch.where(sees, rank, num_keys).amin(-1)
        last = torch.where(sees, rank, -1).amax(-1)
        count = sees.sum(-1)
        contiguous &= ((count == 0) | (last - first + 1 == count)).all()
    return bool(contiguous)


def reference(
    query: Tensor,
    keys: Tensor,
    cos: Tensor,
    sin: Tensor,
    visible: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    ratio: int,
    num_selected: int,
    layout: str,
) -> Tensor:
    """The op, in plain torch."""
    if layout not in ("prefix", "interval", "any"):
        raise ValueError(f"layout={layout!r}: one of 'prefix', 'interval', 'any'")
    rest = (norm_weight, norm_eps, ratio, num_selected)
    if layout != "any" or _is_interval(visible):
        return _select_shared(query, keys, cos, sin, visible, *rest, prefix=layout == "prefix")
    selected = visible.new_empty(visible.shape)
    num_keys, head_dim = keys.shape[1:]
    step = max(1, _MAX_ELEMENTS // (num_keys * head_dim))
    for row in range(query.shape[0]):
        for start in range(0, query.shape[1], step):
            sees = visible[row, start : start + step]
            part = query[row, start : start + step]
            row_keys, row_cos, row_sin = (x[row].expand(len(sees), -1, -1) for x in (keys, cos, sin))
            selected[row, start : start + step] = select_rows(part, row_keys, row_cos, row_sin, sees, *rest)
    return selected


def fake(query, keys, cos, sin, visible, norm_weight, norm_eps, ratio, num_selected, layout):
    return visible.new_empty(visible.shape)


select_tokens = define(
    "select_tokens(Tensor query, Tensor keys, Tensor cos, Tensor sin, Tensor visible, Tensor norm_weight, "
    "float norm_eps, int ratio, int num_selected, str layout) -> Tensor",
    cpu=reference,
    cuda=reference,
    fake=fake,
)
