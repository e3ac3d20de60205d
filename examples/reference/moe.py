"""Mixture of experts with a shared expert.

Every expert sees every token and the router's weight zeroes those that were not chosen. That costs
num_experts / num_experts_per_tok times the arithmetic, and in return no shape depends on the data.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import Config


class Router(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.normalize = config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size).normal_(std=0.02))

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> weights [..., num_experts], zero where not chosen."""
        logits = F.linear(x, self.weight)
        chosen = logits.softmax(-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        weights = chosen.values / chosen.values.sum(-1, keepdim=True) if self.normalize else chosen.values
        return torch.zeros_like(logits).scatter(-1, chosen.indices, weights.to(logits.dtype))


class Experts(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden).normal_(std=0.02))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner).normal_(std=0.02))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("...h,eih->...ei", x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.einsum("...ei,ehi->...h", F.silu(gate) * up * weights.unsqueeze(-1), self.down_proj)


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.shared_expert_intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SparseMoE(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_expert = MLP(config)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        shared = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return self.experts(x, self.gate(x)) + shared
