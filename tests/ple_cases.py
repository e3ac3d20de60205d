"""PLE layers, inputs and caches in every combination of the support matrix."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextPLELayer

from examples.reference.config import Config as ReferenceConfig
from examples.reference.ple import PLE

EOS = 3
LAYER = 1

# Values of every dimension of the matrix; the first of each is what a single test uses.
MATRIX: dict[str, list[Any]] = {
    "model": ["transformers", "reference"],
    "dtype": ["float32", "bfloat16", "float16", "autocast"],
    "cache": ["none", "dynamic", "dynamic_filled", "static", "static_filled", "static_reset"],
    "length": [7, 1, 2, 24],
    "shapes": ["static", "dynamic", "mark_dynamic"],
    "batch": [2, 1, 3],
    "mask": [False, True],
    "ngram_size": [3, 2, 4],
    "heads_per_ngram": [2, 1, 8],
    "kernel": [4, 3, 2],
    "hc_count": [4, 2],
    "hidden_size": [32, 24],
    "embed_per_head": [8, 5],
    "expanded": [False, True],
}


@dataclass(frozen=True)
class Case:
    """One point of the matrix."""

    model: str = "transformers"
    dtype: str = "float32"
    cache: str = "none"
    length: int = 7
    shapes: str = "static"
    batch: int = 2
    mask: bool = False
    ngram_size: int = 3
    heads_per_ngram: int = 2
    kernel: int = 4
    hc_count: int = 4
    hidden_size: int = 32
    embed_per_head: int = 8
    expanded: bool = False  # the graph that Inductor gets on a CPU, rather than the one with fused ops
    seed: int = 0

    @property
    def storage_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "autocast" else getattr(torch, self.dtype)

    @property
    def width(self) -> int:
        return self.hc_count * self.hidden_size

    def hf_config(self) -> Qwen4ExpTextConfig:
        return Qwen4ExpTextConfig(
            vocab_size=128,
            hidden_size=self.hidden_size,
            num_hidden_layers=2,
            layer_types=["linear_attention"] * 2,
            ple_layer_ids=[LAYER + 1],
            ple_embed_dim=self.embed_per_head * self.heads_per_ngram * (self.ngram_size - 1),
            ple_conv_kernel_size=self.kernel,
            ngram_size=self.ngram_size,
            heads_per_ngram=self.heads_per_ngram,
            ngram_vocab_size_base=1000,
            hc_count=self.hc_count,
            eos_token_id=EOS,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        )

    def layer(self) -> nn.Module:
        """The PLE layer with random weights in the case's dtype."""
        torch.manual_seed(self.seed)
        config = self.hf_config()
        if self.model == "transformers":
            layer: nn.Module = Qwen4ExpTextPLELayer(config, LAYER, 0)
        else:
            layer = PLE(ReferenceConfig.from_transformers(config), 0)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.5)
        return layer.to(self.storage_dtype).eval()

    def inputs(self, length: int | None = None, seed: int = 1) -> tuple[Tensor, Tensor, Tensor | None]:
        """(streams, EOS-dense token ids, mask or None)."""
        generator = torch.Generator().manual_seed(self.seed * 100 + seed)
        length = self.length if length is None else length
        streams = torch.randn(self.batch, length, self.width, generator=generator).to(self.storage_dtype)
        ids = torch.randint(0, 9, (self.batch, length), generator=generator)
        mask = torch.rand(self.batch, length, generator=generator) > 0.3 if self.mask else None
        return streams, ids, mask

    def new_cache(self, layer: nn.Module) -> Any:
        """The cache that the case starts from, filled by an eager call where it says so."""
        if self.cache == "none":
            return None
        if self.model == "reference":
            cache: Any = layer.initial_state(self.batch)
        elif self.cache.startswith("dynamic"):
            cache = DynamicCache(config=self.hf_config())
        else:
            cache = StaticCache(config=self.hf_config(), max_cache_len=64)
        if self.cache.endswith(("filled", "reset")):
            streams, ids, mask = self.inputs(length=4, seed=2)
            with torch.no_grad():
                self.call(layer, streams, ids, mask, cache)
        if self.cache.endswith("reset"):
            if self.model == "reference":
                cache.conv.zero_()
                cache.context.fill_(EOS)
            else:
                cache.reset()
        return cache

    def call(self, layer: nn.Module, streams: Tensor, ids: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """What the decoder layer does with its PLE layer."""
        if self.model == "reference":
            return streams + layer(streams, ids, mask, cache)
        masked = ids if mask is None else torch.where(mask, ids, EOS)
        return streams + layer(streams, masked, cache, conv_mask=mask)

    def states(self, cache: Any) -> list[Tensor]:
        """The state tensors of a cache: convolution, then context."""
        if cache is None:
            return []
        if self.model == "reference":
            return [cache.conv, cache.context]
        return [cache.layers[LAYER].conv_states[i] for i in (1, 2)]

    def autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "autocast")

    def with_(self, **changes: Any) -> "Case":
        return dataclasses.replace(self, **changes)


class Layers(torch.nn.Module):
    """PLE layers with different weights."""

    def __init__(self, case: Case, count: int = 2):
        super().__init__()
        self.case = case
        self.layers = torch.nn.ModuleList(Case(seed=seed).layer() for seed in range(count))

    def forward(self, streams: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            streams = self.case.call(layer, streams, ids, None, None)
        return streams
