"""The PLE layer on a packed batch, as servers run it: the requests' new tokens one after the other, no padding.

Requests keep their convolution columns in a pool of slots. A batch may mix prefill chunks, single decode tokens and
speculative queries; no tensor here has a dimension of requests times longest request.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .ple import PLE


class PackedBatch(NamedTuple):
    """R requests; request r owns tokens `query_start_loc[r]` up to `query_start_loc[r + 1]`, possibly none.

    Slot 0 stands for "no state": the request's convolution term is zero and nothing is stored. No two requests share
    another slot. `ngram_context` holds the last accepted tokens, oldest first, with EOS before the start; the caller
    keeps placeholders and rejected drafts out of it, for every id in it is hashed.

    With `num_accepted_tokens`, a request that has state and a number of at least 1 is speculative: the pool keeps all
    of its tokens, and the number in the *next* batch says how many of them stand (at least 1: the verified one). A
    request with the number 0, without earlier state, or with more tokens than the window can keep is final: all of its
    tokens stand, and the next number is 0, or 1 if a speculative query follows.
    """

    query_start_loc: Tensor  # [R + 1], from 0
    ngram_context: Tensor  # [R, ngram_size - 1]
    state_indices: Tensor  # [R]
    has_initial_state: Tensor  # [R] bool, False for a request's first tokens: its slot holds someone else's columns
    num_accepted_tokens: Tensor | None = None  # [R]


def locate(query_start_loc: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The request of every token and the token's place in it, [T] each."""
    token = torch.arange(num_tokens, device=query_start_loc.device)
    starts = query_start_loc.long()
    # Requests that end at or before the token; tokens after the last request's end count as its own.
    request = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp(max=starts.shape[0] - 2)
    return request, token - starts[request]


def older_tokens(tokens: Tensor, batch: PackedBatch) -> list[Tensor]:
    """For every token the ones 1, 2, ... steps before it, from the batch or from the request's context."""
    request, place = locate(batch.query_start_loc, tokens.shape[0])
    token, context = torch.arange(tokens.shape[0], device=tokens.device), batch.ngram_context.long()
    size = context.shape[1]
    older = []
    for shift in range(1, size + 1):
        from_batch = tokens[(token - shift).clamp(min=0)]
        from_context = context[request, (size + place - shift).clamp(max=size - 1)]
        older.append(torch.where(place >= shift, from_batch, from_context))
    return older


def first_columns(batch: PackedBatch) -> Tensor:
    """Where in its window each request's history begins: rejected drafts stand to the right of it."""
    if batch.num_accepted_tokens is None:
        return torch.zeros_like(batch.state_indices, dtype=torch.int64)
    return (batch.num_accepted_tokens.long() - 1).clamp(min=0)


def short_conv(columns: Tensor, weight: Tensor, dilation: int, pool: Tensor, batch: PackedBatch) -> Tensor:
    """silu of the causal dilated depthwise convolution: columns [T, C], weight [C, 1, taps], pool [slots, C, window].

    Only reads the pool. Sums in float32 and rounds once, as a convolution does.
    """
    taps = weight.shape[-1]
    reach = (taps - 1) * dilation
    request, place = locate(batch.query_start_loc, columns.shape[0])
    token = torch.arange(columns.shape[0], device=columns.device)
    slot, first = batch.state_indices.long()[request], first_columns(batch)[request]
    has_state = batch.has_initial_state[request].unsqueeze(-1)

    total = columns.float() * weight[:, 0, -1].float()
    for tap in range(taps - 1):
        lag = (taps - 1 - tap) * dilation
        from_batch = columns[(token - lag).clamp(min=0)]
        from_pool = pool[slot, :, first + (reach + place - lag).clamp(max=reach - 1)]
        earlier = torch.where(has_state, from_pool, 0)
        total = (
            total + torch.where((place >= lag).unsqueeze(-1), from_batch, earlier).float() * weight[:, 0, tap].float()
        )
    return torch.where((slot != 0).unsqueeze(-1), F.silu(total.to(columns.dtype)), 0)


def store_columns(columns: Tensor, reach: int, pool: Tensor, batch: PackedBatch) -> None:
    """Writes each request's newest columns into its slot; a request without tokens or slot leaves the pool as it is.

    The window's first `reach` columns become what the next token looks back on. A speculative request of q tokens
    fills `reach - 1 + q`: its history less one column, then its tokens, so that n accepted ones are read from n - 1 on.
    """
    window = pool.shape[-1]
    starts, slot = batch.query_start_loc.long(), batch.state_indices.long()
    begin, length = starts[:-1], starts.diff()
    first_kept = length  # an index into history and tokens laid end to end
    if batch.num_accepted_tokens is not None:
        fits = reach - 1 + length <= window
        speculative = batch.has_initial_state & (batch.num_accepted_tokens > 0) & fits
        first_kept = torch.where(speculative, 1, length)

    old = pool[slot]  # [R, C, window]
    source = first_kept.unsqueeze(-1) + torch.arange(window, device=pool.device)  # [R, window]
    in_history = (first_columns(batch).unsqueeze(-1) + source).clamp(max=window - 1)
    history = old.gather(-1, in_history.unsqueeze(1).expand_as(old))
    history = torch.where(batch.has_initial_state.view(-1, 1, 1), history, 0)
    tokens = columns[(begin.unsqueeze(-1) + source - reach).clamp(0, columns.shape[0] - 1)].mT
    new = torch.where((source < reach).unsqueeze(1), history, tokens)

    active = ((slot != 0) & (length > 0)).unsqueeze(-1)
    written = active & (source < reach + length.unsqueeze(-1))
    # Several requests may name slot 0: all of them write back what it holds.
    pool[slot] = torch.where(written.unsqueeze(1), new, old)


class PackedPLE(PLE):
    def forward(self, streams: Tensor, input_ids: Tensor, batch: PackedBatch, conv_pool: Tensor) -> Tensor:  # type: ignore[override]
        """What to add to `streams` [T, C]; updates `conv_pool` [slots, C, window]. C = hc_count * hidden."""
        if input_ids.shape[0] == 0:
            return torch.zeros_like(streams)
        tokens = input_ids.long()
        gated, normed = self.gate(streams, self.ple_embedding(tokens, older_tokens(tokens, batch)))
        convolved = short_conv(normed, self.conv1d.weight, self.ngram_size, conv_pool, batch)
        store_columns(normed, self.reach, conv_pool, batch)
        return gated + convolved
