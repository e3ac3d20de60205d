"""The text side of a Qwen4Exp configuration; fields are named as in transformers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Config:
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    # "linear_attention" (gated delta net) or "full_attention" (QSA-indexed); None = every fourth layer attends.
    layer_types: tuple[str, ...] | None = None
    eos_token_id: int
    rms_norm_eps: float = 1e-6

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool = False
    rope_theta: float = 10_000_000.0
    partial_rotary_factor: float = 0.25
    indexer_n_heads: int
    indexer_kv_heads: int = 1
    indexer_head_dim: int
    indexer_budget: int
    indexer_compress_ratio: int

    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    output_gate_type: str = "silu"

    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = True
    moe_intermediate_size: int
    shared_expert_intermediate_size: int

    hc_count: int = 4
    hc_lowrank: int

    ple_layer_ids: tuple[int, ...] = (2,)  # one-based
    ple_embed_dim: int
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_vocab_size_base: int  # every head has a prime number of rows, just above this
    make_ngram_vocab_size_divisible_by: int = 128
    seed: int = 1234

    def __post_init__(self) -> None:
        if self.layer_types is None:
            types = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(self.num_hidden_layers)]
            object.__setattr__(self, "layer_types", tuple(types))
        if self.output_gate_type not in ("silu", "sigmoid"):
            raise ValueError(f"output_gate_type must be 'silu' or 'sigmoid', got {self.output_gate_type!r}")

    @classmethod
    def from_transformers(cls, hf: Any) -> Config:
        """From a `Qwen4ExpTextConfig` (of the whole model: `hf_config.text_config`)."""
        if hf.hidden_act != "silu":
            raise ValueError(f"hidden_act must be 'silu', got {hf.hidden_act!r}")
        values: dict[str, Any] = {field.name: getattr(hf, field.name, None) for field in dataclasses.fields(cls)}
        values |= {
            # Releases differ in what they call an attention layer: "indexed_attention", "qwen_sparse_attention".
            "layer_types": tuple(t if t == "linear_attention" else "full_attention" for t in hf.layer_types),
            "eos_token_id": hf.eos_token_id[0] if isinstance(hf.eos_token_id, list) else hf.eos_token_id,
            "rope_theta": hf.rope_parameters["rope_theta"],
            "partial_rotary_factor": hf.rope_parameters.get("partial_rotary_factor", 1.0),
            "output_gate_type": hf.output_gate_type or hf.hidden_act,
            "ple_layer_ids": tuple(hf.ple_layer_ids),
        }
        return cls(**values)

    def to_transformers(self) -> dict[str, Any]:
        """Keyword arguments for `Qwen4ExpTextConfig`."""
        values = dataclasses.asdict(self)
        rotary_pairs = int(self.head_dim * self.partial_rotary_factor) // 2
        values["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": values.pop("rope_theta"),
            "partial_rotary_factor": values.pop("partial_rotary_factor"),
            # Three position grids share the pairs; they are equal in text, so the split does not matter here.
            "mrope_section": [rotary_pairs - 2 * (rotary_pairs // 3), rotary_pairs // 3, rotary_pairs // 3],
        }
        return values | {"layer_types": list(self.layer_types or ()), "ple_layer_ids": list(self.ple_layer_ids)}


def tiny(**overrides: Any) -> Config:
    """Every part of the model at a size for a CPU test, the PLE layer among them."""
    values: dict[str, Any] = dict(
        vocab_size=96,
        hidden_size=24,
        num_hidden_layers=4,
        eos_token_id=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        partial_rotary_factor=0.5,
        indexer_n_heads=8,
        indexer_head_dim=16,
        indexer_budget=8,
        indexer_compress_ratio=2,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
        hc_count=2,
        hc_lowrank=8,
        ple_embed_dim=32,
        heads_per_ngram=2,
        ngram_vocab_size_base=101,
    )
    return Config(**values | overrides)


def flash_next(num_hidden_layers: int = 4, ngram_vocab_size_base: int = 1_000_000, **overrides: Any) -> Config:
    """The released widths (Qwen3.8-Flash-Next) with as many layers and table rows as fit your machine.

    The release has 48 layers and `ngram_vocab_size_base=20_000_000`: a table of 95 GiB in bf16. Head counts and the
    indexer are transformers' defaults and a plausible budget; `Config.from_transformers` takes a checkpoint's own.
    """
    values: dict[str, Any] = dict(
        vocab_size=248_320,
        hidden_size=2560,
        num_hidden_layers=num_hidden_layers,
        eos_token_id=248_046,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        indexer_n_heads=4,
        indexer_head_dim=128,
        indexer_budget=2048,
        indexer_compress_ratio=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        hc_lowrank=320,
        ple_embed_dim=2560,
        ngram_vocab_size_base=ngram_vocab_size_base,
    )
    return Config(**values | overrides)
