"""Requests of a packed batch: what a server knows of them, and what the layer makes of their whole history."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from examples.reference.packed import PackedPLE
from tests.oracle import ngram_ids


@dataclass
class Request:
    """Its tokens with their streams, how many of the last ones are drafts, and what its slot holds of them.

    `number`: what `num_accepted_tokens` says of the columns in the slot.
    """

    slot: int
    tokens: list[int] = field(default_factory=list)
    streams: list[Tensor] = field(default_factory=list)
    drafts: int = 0
    has_state: bool = False
    number: int = 0

    def accept(self, count: int) -> None:
        """Of the drafts that a step left, `count` stand, at least one."""
        if self.drafts:
            self.number = min(max(count, 1), self.drafts)
            rejected = self.drafts - self.number
            del self.tokens[len(self.tokens) - rejected :], self.streams[len(self.streams) - rejected :]
            self.drafts = 0


@dataclass
class Part:
    """A request in one batch, whose new tokens follow its `past`; `speculative`: the slot keeps all of them."""

    request: Request
    new: list[int]
    number: int
    speculative: bool

    @property
    def past(self) -> list[int]:
        return self.request.tokens

    def commit(self, streams: Tensor) -> None:
        """After the step all new tokens stand, or are drafts. One without tokens leaves its request as it was."""
        if self.new:
            request = self.request
            request.tokens, request.streams = self.past + self.new, [*request.streams, *streams.double().cpu()]
            request.drafts = len(self.new) if self.speculative else 0
            request.has_state, request.number = True, 0

    def exact(self, layer: PackedPLE, streams: Tensor, heads_per_ngram: int) -> tuple[Tensor, Tensor]:
        """(what the layer adds to the new tokens' streams, its normed value of all tokens) in float64.

        A request without a slot has no past but the tokens of its context, and no convolution.
        """
        table, eos = layer.ple_embedding, layer.eos
        hashes = (table.layer_multipliers, table.ngram_heads_vocab_sizes, table.ngram_heads_offsets)
        hidden = torch.stack([*self.request.streams, *streams.double().cpu()])
        ids = ngram_ids(self.past + self.new, *(h.tolist() for h in hashes), eos, heads_per_ngram)[-len(hidden) :]
        with torch.no_grad():
            rows = table.ngram_embedding(torch.tensor(ids, device=layer.key_proj.weight.device)).flatten(-2)
            gated, normed = layer.gate(hidden.to(rows.device), rows)
            convolved = F.silu(layer.conv1d(F.pad(normed.mT, (layer.reach, 0)))).mT
        out = gated + convolved if self.request.slot else gated
        return out[-len(self.new) :], normed

    def context_after(self, count: int, size: int, eos: int) -> list[int]:
        """The last `size` tokens once `count` of the new ones are taken in."""
        return ([eos] * size + self.past + self.new[:count])[-size:]
