"""Tiny Qwen4Exp configurations and the argument names that differ between transformers 5.17 and 5.24."""

import inspect

import torch
from transformers import DynamicCache, StaticCache
from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

CACHE = "cache" if "cache" in inspect.signature(modeling.Qwen4ExpForCausalLM.forward).parameters else "past_key_values"


def make_config(**changes) -> Qwen4ExpTextConfig:
    settings = dict(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        hc_lowrank=8,
        ple_layer_ids=[2],
        ple_embed_dim=32,
        heads_per_ngram=2,
        ngram_vocab_size_base=50,
        make_ngram_vocab_size_divisible_by=8,
        split_ngram_parts=1,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=8,
        indexer_compress_ratio=4,
        eos_token_id=3,
        pad_token_id=0,
        max_position_embeddings=512,
    )
    return Qwen4ExpTextConfig(**{**settings, **changes})


def make_model(seed: int = 0, **changes) -> torch.nn.Module:
    """A model whose every layer matters: weights large enough, PLE convolutions not zero."""
    torch.manual_seed(seed)
    config = make_config(**changes)
    model = modeling.Qwen4ExpForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3 if "conv1d" in name else 0.15)
    return model


def make_cache(kind: str, config: Qwen4ExpTextConfig, max_cache_len: int = 64):
    """`kind` is "none", "dynamic" or "static"."""
    if kind == "none":
        return None
    return DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=max_cache_len)
