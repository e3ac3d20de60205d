"""The whole text model, padded layout: token ids [B, S] to logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .attention import Attention, Rotary, Step
from .cache import Cache, LayerState
from .config import Config
from .delta_net import GatedDeltaNet
from .moe import SparseMoE
from .ple import PLE
from .residual import GatedResidual, inject


class DecoderLayer(nn.Module):
    ple_class: type[PLE] = PLE

    def __init__(self, config: Config, layer_index: int) -> None:
        super().__init__()
        assert config.layer_types is not None
        if config.layer_types[layer_index] == "linear_attention":
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config)
        self.mlp = SparseMoE(config)
        ple_layers = sorted(config.ple_layer_ids)
        has_ple = layer_index + 1 in ple_layers
        self.ple = self.ple_class(config, ple_layers.index(layer_index + 1)) if has_ple else None
        self.attn_hyper_connection = GatedResidual(config)
        self.mlp_hyper_connection = GatedResidual(config)

    def forward(self, streams: Tensor, input_ids: Tensor, step: Step, state: LayerState | None = None) -> Tensor:
        if self.ple is not None:
            streams = streams + self.ple(streams, input_ids, step.mask, state.ple if state else None)
        return self.blocks(streams, lambda x: self.mix_tokens(x, step, state.mixer if state else None))

    def blocks(self, streams: Tensor, mix_tokens: Callable[[Tensor], Tensor]) -> Tensor:
        x, weights = self.attn_hyper_connection(streams)
        streams = inject(streams, mix_tokens(x), weights)
        x, weights = self.mlp_hyper_connection(streams)
        return inject(streams, self.mlp(x), weights)

    def mix_tokens(self, x: Tensor, step: Step, state) -> Tensor:
        if hasattr(self, "linear_attn"):
            return self.linear_attn(x, step.mask, state)
        return self.self_attn(x, step, state)


class TextModel(nn.Module):
    layer_class: type[DecoderLayer] = DecoderLayer

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.layer_class(config, i) for i in range(config.num_hidden_layers))
        self.hyper_connection_mixer = GatedResidual(config, inject=False)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Every stream starts as the token's embedding."""
        return torch.cat([self.embed_tokens(input_ids)] * self.config.hc_count, dim=-1)

    def step(self, input_ids: Tensor, mask: Tensor | None, position_ids: Tensor | None, cache: Cache | None) -> Step:
        """Place the new tokens among the keys; a cache takes note of them."""
        index = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
        if cache is not None:
            index = index + cache.lengths.unsqueeze(-1)
        counts = torch.ones_like(index, dtype=torch.bool) if mask is None else mask
        positions = index if position_ids is None else position_ids
        key_counts, key_positions = (counts, positions) if cache is None else cache.append(index, counts, positions)
        earlier = torch.arange(key_counts.shape[1], device=index.device) <= index.unsqueeze(-1)
        dtype = self.embed_tokens.weight.dtype
        return Step(
            mask=mask,
            key_index=index,
            key_counts=key_counts,
            visible=earlier & key_counts.unsqueeze(1),
            query_rotary=Rotary.at(positions, self.config, dtype),
            key_rotary=Rotary.at(key_positions, self.config, dtype),
        )

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """[B, S] -> [B, S, hidden].

        attention_mask is 0 where a token is padding. It may cover the cached tokens too: the last S columns count.
        """
        mask = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :].bool()
        step = self.step(input_ids, mask, position_ids, cache)
        streams = self.embed(input_ids)
        for i, layer in enumerate(self.layers):
            streams = layer(streams, input_ids, step, cache.layers[i] if cache else None)
        return self.hyper_connection_mixer(streams)[0]


class ForCausalLM(nn.Module):
    """`load_state_dict(hf.state_dict())` is strict for transformers' `Qwen4ExpForCausalLM`."""

    text_model_class: type[TextModel] = TextModel

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = self.text_model_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Logits [B, S, vocab], or of the last `logits_to_keep` tokens."""
        hidden = self.model(input_ids, attention_mask, position_ids, cache)
        return self.lm_head(hidden[:, -logits_to_keep:])

    def new_cache(self, batch_size: int, max_length: int) -> Cache:
        """An empty cache in the weights' type and place."""
        return Cache.empty(self.model.layers, self.lm_head.weight.device, batch_size, max_length)


def text_weights(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """The text side of a `Qwen4ExpForConditionalGeneration` state dict, under `ForCausalLM`'s names."""
    renamed = {name.replace("model.language_model.", "model."): weight for name, weight in state_dict.items()}
    return {name: weight for name, weight in renamed.items() if not name.startswith("model.visual.")}
