"""`Qwen4ExpTextQSAIndexer.forward` in tensor operations: no loop over queries, no data-dependent shapes.

Contract, against the original loop:
- the same tokens for every query whose k-th and (k+1)-th block scores differ by more than float32 rounding (in bf16
  and fp16: by more than that rounding can change, since one float32 ulp may flip a rounding of a pooled key);
- on ties the lowest block numbers of the query's own visible blocks, whatever the padding and the cache's length
  (`topk` in the original leaves ties open);
- queries with no complete block, or whose blocks all fit the budget, select exactly the same tokens;
- never a token that the mask hides; a fully masked query selects nothing.

A row's key list is the keys that any query of the call sees. Where a query's visible keys are contiguous in it, keys
are pooled once per row. The masks that the model builds (causal, padded on any side, packed) always are, and are
known to be when the graph is traced: `Layout`. A single query is contiguous by definition, so decode never asks. Only
a prepared mask (4-D, or a dict of them) with several queries is looked at, inside the op and at the cost of one host
synchronisation; one that is not contiguous there is pooled query by query, as the original does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ple_compile.ops.select_tokens import rotate, select_rows, select_tokens


@dataclass
class Layout:
    """What the text model knows about the running call; its layers read it. For names see `ops.select_tokens`."""

    name: str = "any"
    single_query: bool = False


def make_forward(layout: Layout, additive: bool) -> Callable[..., Tensor]:
    """An indexer's `forward`; `additive`: a float mask gets a float selection (5.17), else always bool (5.24)."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        cache: Any,
    ) -> Tensor:
        num_queries = hidden_states.shape[1]
        heads = self.index_qk_proj(hidden_states).unflatten(-1, (-1, self.index_head_dim))
        cos, sin = position_embeddings
        query = self.q_layernorm(heads[:, :, : self.index_n_heads])
        query = rotate(query, cos[:, -num_queries:].unsqueeze(2), sin[:, -num_queries:].unsqueeze(2))
        keys = heads[:, :, self.index_n_heads]
        if cache is not None:
            keys = cache.update_indexer(keys, self.layer_idx)

        visible = (attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0)[:, 0]
        # A selection has no gradient: the original's ends at its top-k.
        query, keys, cos, sin = query.detach(), keys.detach(), cos.detach(), sin.detach()
        weight = self.k_layernorm.weight.detach()
        settings = (weight, self.k_layernorm.eps, self.compress_ratio, self.block_topk)
        if num_queries == 1:
            selected = select_rows(query[:, 0], keys, cos, sin, visible[:, 0], *settings).unsqueeze(1)
        else:
            selected = select_tokens(query, keys, cos, sin, visible, *settings, layout.name)
        selected = selected.unsqueeze(1)
        if additive and attention_mask.is_floating_point():
            least = torch.finfo(attention_mask.dtype).min
            return torch.zeros_like(attention_mask).masked_fill(~selected, least)
        return selected

    return forward
