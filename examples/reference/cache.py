"""What the model remembers between calls: preallocated tensors that a call updates in place.

An empty cache is not a special case: zeros to the left of a convolution, EOS to the left of the tokens and a zero
recurrent state are what a request starts from, so the first call runs the same graph as any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention import AttentionState
from .delta_net import DeltaNetState
from .ple import PLEState


class LayerState(NamedTuple):
    mixer: DeltaNetState | AttentionState
    ple: PLEState | None


@dataclass
class Cache:
    lengths: Tensor  # [B], how many keys each row holds
    counts: Tensor  # [B, max_length], False where the key is padding or not written yet
    positions: Tensor  # [B, max_length]
    layers: list[LayerState]

    @classmethod
    def empty(cls, layers: Iterable[Any], device: torch.device, batch_size: int, max_length: int) -> Cache:
        states = []
        for layer in layers:
            if hasattr(layer, "linear_attn"):
                mixer = layer.linear_attn.initial_state(batch_size)
            else:
                mixer = layer.self_attn.initial_state(batch_size, max_length)
            states.append(LayerState(mixer, layer.ple.initial_state(batch_size) if layer.ple is not None else None))
        lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        positions = torch.zeros(batch_size, max_length, dtype=torch.int64, device=device)
        return cls(lengths, torch.zeros_like(positions, dtype=torch.bool), positions, states)

    def append(self, index: Tensor, counts: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Note new tokens at `index` [B, S]; returns which keys count and their positions, [B, max_length] each."""
        self.counts.scatter_(1, index, counts)
        self.positions.scatter_(1, index, positions)
        self.lengths.add_(index.shape[1])
        return self.counts, self.positions

    def rows(self, slots: Tensor) -> Cache:
        """Copies of some rows, to run the padded layers on; PLE works on its pool of slots itself and has no part."""
        layers = [LayerState(type(layer.mixer)(*(t[slots] for t in layer.mixer)), None) for layer in self.layers]
        return Cache(self.lengths[slots], self.counts[slots], self.positions[slots], layers)

    def put_rows(self, slots: Tensor, rows: Cache) -> None:
        for mine, theirs in zip(self.tensors(), rows.tensors()):
            mine[slots] = theirs

    def clear(self, slots: Tensor) -> None:
        """Make rows ready for new requests; a PLE slot needs nothing, `has_initial_state` says that it is stale."""
        for tensor in self.tensors():
            tensor[slots] = torch.zeros((), dtype=tensor.dtype, device=tensor.device)

    def tensors(self) -> list[Tensor]:
        """All but PLE's."""
        return [self.lengths, self.counts, self.positions, *(t for layer in self.layers for t in layer.mixer)]
