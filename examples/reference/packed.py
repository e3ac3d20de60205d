"""The PLE layer on a packed batch, as servers run it: the requests' new tokens one after the other, no padding.

Requests keep their convolution columns in a pool of slots. A batch may mix prefill chunks, single decode tokens and
speculative queries; no tensor here has a dimension of requests times longest request.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .ple import PLE, PLEState


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


def locate(query_start_loc: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """The request of each of the batch's tokens, given by number, and the token's place in it."""
    starts = query_start_loc.long()
    # Requests that begin at or before the token; tokens after the last request's end count as its own. Not in
    # `starts[1:]`: PyTorch 2.11 generates no code for a search in a slice.
    request = (torch.searchsorted(starts, token, right=True) - 1).clamp(0, starts.shape[0] - 2)
    return request, token - starts[request]


def older_tokens(tokens: Tensor, batch: PackedBatch) -> list[Tensor]:
    """For every token the ones 1, 2, ... steps before it, from the batch or from the request's context."""
    token, context = torch.arange(tokens.shape[0], device=tokens.device), batch.ngram_context.long()
    request, place = locate(batch.query_start_loc, token)
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
    token = torch.arange(columns.shape[0], device=columns.device)
    request, place = locate(batch.query_start_loc, token)
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


def history_and_tokens(
    columns: Tensor, reach: int, pool: Tensor, batch: PackedBatch, request: Tensor, source: Tensor
) -> Tensor:
    """[len(request), C, S]: of each request's history and tokens, laid end to end, those numbered `source` [.., S]."""
    slot = batch.state_indices.long()[request]
    has_state = batch.has_initial_state[request] & (slot != 0)
    in_history = (first_columns(batch)[request].unsqueeze(-1) + source).clamp(max=pool.shape[-1] - 1)
    history = pool[slot].gather(-1, in_history.unsqueeze(1).expand(-1, pool.shape[1], -1))
    history = torch.where(has_state.view(-1, 1, 1), history, 0)
    begin = batch.query_start_loc.long()[request]
    tokens = columns[(begin.unsqueeze(-1) + source - reach).clamp(0, columns.shape[0] - 1)].mT
    return torch.where((source < reach).unsqueeze(1), history, tokens)


def store_columns(columns: Tensor, reach: int, pool: Tensor, batch: PackedBatch) -> None:
    """Writes each request's newest columns into its slot; a request without tokens or slot leaves the pool as it is.

    The window's first `reach` columns become what the next token looks back on. A speculative request of q tokens
    fills `reach - 1 + q`: its history less one column, then its tokens, so that n accepted ones are read from n - 1 on.
    """
    window = pool.shape[-1]
    slot, length = batch.state_indices.long(), batch.query_start_loc.long().diff()
    first_kept = length  # an index into history and tokens laid end to end
    if batch.num_accepted_tokens is not None:
        fits = reach - 1 + length <= window
        speculative = batch.has_initial_state & (batch.num_accepted_tokens > 0) & fits
        first_kept = torch.where(speculative, 1, length)

    request = torch.arange(slot.shape[0], device=pool.device)
    source = first_kept.unsqueeze(-1) + torch.arange(window, device=pool.device)  # [R, window]
    new = history_and_tokens(columns, reach, pool, batch, request, source)
    active = ((slot != 0) & (length > 0)).unsqueeze(-1)
    written = active & (source < reach + length.unsqueeze(-1))
    # Several requests may name slot 0: all of them write back what it holds.
    pool[slot] = torch.where(written.unsqueeze(1), new, pool[slot])


def columns_at(columns: Tensor, reach: int, pool: Tensor, batch: PackedBatch, boundaries: Tensor) -> Tensor:
    """[P, C, reach]: what a token following the batch's first `boundary` tokens would look back on, for P boundaries.

    A boundary belongs to the request of the token before it; 0 is the first request's beginning. Only reads the pool,
    and must do so before `store_columns`.
    """
    request, place = locate(batch.query_start_loc, boundaries.long() - 1)
    source = place.unsqueeze(-1) + 1 + torch.arange(reach, device=pool.device)
    return history_and_tokens(columns, reach, pool, batch, request, source)


def context_at(tokens: Tensor, batch: PackedBatch, boundaries: Tensor) -> Tensor:
    """[P, ngram_size - 1]: the `ngram_context` that goes with `columns_at`."""
    last, context = boundaries.long() - 1, batch.ngram_context.long()
    request, place = (x.unsqueeze(-1) for x in locate(batch.query_start_loc, last))
    size = context.shape[1]
    back = torch.arange(size - 1, -1, -1, device=tokens.device)
    from_batch = tokens[(last.unsqueeze(-1) - back).clamp(min=0)]
    from_context = context[request, (size + place - back).clamp(0, size - 1)]
    return torch.where(place >= back, from_batch, from_context)


class PackedPLE(PLE):
    def forward(  # type: ignore[override]
        self,
        streams: Tensor,
        input_ids: Tensor,
        batch: PackedBatch,
        conv_pool: Tensor,
        boundaries: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, PLEState]:
        """What to add to `streams` [T, C]; updates `conv_pool` [slots, C, window]. C = hc_count * hidden.

        With `boundaries` [P], numbers of tokens of the batch, also the states there, for a prefix cache: a request
        that begins with the same tokens may start from them, in a slot of its own.
        """
        tokens = input_ids.long()
        if tokens.shape[0] == 0:
            if boundaries is not None:
                raise ValueError("a batch without tokens has no boundaries")
            return torch.zeros_like(streams)
        gated, normed = self.gate(streams, self.ple_embedding(tokens, older_tokens(tokens, batch)))
        convolved = short_conv(normed, self.conv1d.weight, self.ngram_size, conv_pool, batch)
        exported = None
        if boundaries is not None:
            columns = columns_at(normed, self.reach, conv_pool, batch, boundaries)
            exported = PLEState(columns, context_at(tokens, batch, boundaries))
        store_columns(normed, self.reach, conv_pool, batch)
        out = gated + convolved
        return out if exported is None else (out, exported)
