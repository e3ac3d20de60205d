"""Whole transformers models small enough for a test."""

from typing import Any

import torch
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig


def tiny_model(ple_layer_ids: tuple[int, ...] = (2,), num_layers: int = 4, **changes: Any) -> Qwen4ExpForCausalLM:
    """A Qwen4Exp with PLE in the given (one-based) layers, three gated delta nets before each attention layer."""
    settings = dict(
        vocab_size=128,
        hidden_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        hc_lowrank=8,
        hc_count=4,
        ple_layer_ids=list(ple_layer_ids),
        ple_embed_dim=48,
        heads_per_ngram=2,
        ngram_vocab_size_base=1000,
        eos_token_id=3,
        pad_token_id=0,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=16,
        indexer_compress_ratio=4,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
    )
    torch.manual_seed(0)
    model = Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**{**settings, **changes})).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def shallow_model(ple_layer_ids: tuple[int, ...] = (1,), **changes: Any) -> Qwen4ExpForCausalLM:
    """The fewest layers that hold each kind: transformers' caches need one with attention."""
    kinds = ["linear_attention"] * max(ple_layer_ids) + ["full_attention"]
    return tiny_model(ple_layer_ids, len(kinds), layer_types=kinds, **changes)


def prompt(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Token ids without EOS."""
    return torch.randint(4, 100, (batch, length), generator=torch.Generator().manual_seed(seed))


def generate(model: Qwen4ExpForCausalLM, ids: torch.Tensor, new_tokens: int = 3, **settings: Any) -> torch.Tensor:
    """Greedy tokens; EOS does not end a sequence, so that forwards can be counted."""
    return model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, **settings)
