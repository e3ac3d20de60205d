"""RMS norms: float32 inside, rounded once to the input's type."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight), over the last dim or over groups of it."""

    def __init__(self, dim: int, group_size: int | None = None, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.group_size = group_size or dim
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        groups = x.float().unflatten(-1, (-1, self.group_size))
        scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return ((groups * scale).flatten(-2) * (1.0 + self.weight.float())).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """weight * x / rms(x) * activation(gate)."""

    def __init__(self, dim: int, activation: str, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.activation = activation
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        normed = self.weight * (x.float() * scale).to(x.dtype)
        return (normed * ACTIVATIONS[self.activation](gate.float())).to(x.dtype)
