"""Gated residual hyper-connections: `hc_count` residual streams instead of one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import Config
from .norms import RMSNorm


class GatedResidual(nn.Module):
    """Mixes the streams into one block input; `inject` adds the block's output back, weighted per stream."""

    def __init__(self, config: Config, inject: bool = True) -> None:
        super().__init__()
        self.num_streams = config.hc_count
        width = config.hc_count * config.hidden_size
        self.hc_norm = RMSNorm(width, config.hidden_size, config.rms_norm_eps)
        self.input_mix_weight_down = nn.Linear(width, config.hc_lowrank, bias=False)
        self.input_mix_weight_up = nn.Linear(config.hc_lowrank, width, bias=False)
        self.block_inject_weight = nn.Linear(width, config.hc_count, bias=False) if inject else None

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor | None]:
        """streams [..., hc_count * hidden] -> block input [..., hidden], injection weights [..., hc_count]."""
        normed = self.hc_norm(streams)
        low_rank = F.silu(self.input_mix_weight_down(normed) / self.num_streams)
        mix = torch.sigmoid(self.input_mix_weight_up(low_rank))
        block_input = (mix * normed).unflatten(-1, (self.num_streams, -1)).mean(-2)
        if self.block_inject_weight is None:
            return block_input, None
        return block_input, 2 * torch.sigmoid(self.block_inject_weight(normed) / self.num_streams)


def inject(streams: Tensor, block_output: Tensor, weights: Tensor) -> Tensor:
    return streams + (block_output.unsqueeze(-2) * weights.unsqueeze(-1)).flatten(-2)
