"""The whole model on packed batches.

PLE, the residual streams and the experts work on packed tokens. Attention and the delta net run padded code on groups
of requests with equally many new tokens, on copies of their cache rows: simple, and static for a decode step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention import Step
from .cache import Cache
from .model import DecoderLayer, ForCausalLM, TextModel
from .packed import PackedBatch, PackedPLE


class Group(NamedTuple):
    slots: Tensor  # [B]
    tokens: Tensor  # [B, S], which of the packed tokens are theirs


def equal_length_groups(query_start_loc: Sequence[int], slots: Sequence[int], device: torch.device) -> list[Group]:
    """The requests of a batch by number of tokens; those without any are left out."""
    by_length: dict[int, list[int]] = {}
    for request in range(len(slots)):
        by_length.setdefault(query_start_loc[request + 1] - query_start_loc[request], []).append(request)
    groups = []
    for length, requests in by_length.items():
        if length > 0:
            begin = torch.tensor([query_start_loc[r] for r in requests], device=device)
            tokens = begin.unsqueeze(-1) + torch.arange(length, device=device)
            groups.append(Group(torch.tensor([slots[r] for r in requests], device=device), tokens))
    return groups


class PackedDecoderLayer(DecoderLayer):
    ple_class = PackedPLE

    def forward(  # type: ignore[override]
        self,
        streams: Tensor,
        input_ids: Tensor,
        batch: PackedBatch,
        conv_pool: Tensor | None,
        parts: list[tuple[Tensor, Step, Any]],
    ) -> Tensor:
        """`parts`: the tokens, step and mixer state of every group."""
        if self.ple is not None:
            streams = streams + self.ple(streams, input_ids, batch, conv_pool)
        return self.blocks(streams, lambda x: self.mix_groups(x, parts))

    def mix_groups(self, x: Tensor, parts: list[tuple[Tensor, Step, Any]]) -> Tensor:
        out = torch.zeros_like(x)
        for tokens, step, state in parts:
            out[tokens] = self.mix_tokens(x[tokens], step, state)
        return out


class PackedTextModel(TextModel):
    layer_class = PackedDecoderLayer

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, batch: PackedBatch, groups: list[Group], cache: Cache
    ) -> Tensor:
        """[T] -> [T, hidden]; `cache` has a row per slot, and row 0 is scratch for requests without one."""
        rows = [cache.rows(group.slots) for group in groups]
        steps = [self.step(input_ids[group.tokens], None, None, r) for group, r in zip(groups, rows)]
        streams = self.embed(input_ids)
        for i, layer in enumerate(self.layers):
            ple_state = cache.layers[i].ple
            parts = [(g.tokens, step, r.layers[i].mixer) for g, step, r in zip(groups, steps, rows)]
            streams = layer(streams, input_ids, batch, ple_state.conv if ple_state else None, parts)
        for group, r in zip(groups, rows):
            cache.put_rows(group.slots, r)
        cache.lengths[:1].zero_()
        return self.hyper_connection_mixer(streams)[0]


class PackedForCausalLM(ForCausalLM):
    """Same weights as `ForCausalLM`; `new_cache(num_slots, max_length)` makes the pool."""

    text_model_class = PackedTextModel

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, batch: PackedBatch, groups: list[Group], cache: Cache, rows: Tensor | None = None
    ) -> Tensor:
        """Logits [T, vocab], or of the tokens `rows` alone."""
        hidden = self.model(input_ids, batch, groups, cache)
        return self.lm_head(hidden if rows is None else hidden[rows])
