"""The layer that the kernel benchmarks time: released widths, bf16, random weights, rotating inputs."""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from measure import num_sets
from torch import Tensor

from ple_compile.ops.gate_conv import Inputs

WIDTH, STREAMS, KERNEL, DILATION, EPS = 2560, 4, 4, 3, 1e-6
CHANNELS, WINDOW = WIDTH * STREAMS, (KERNEL - 1) * DILATION
DTYPE = torch.bfloat16


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(DTYPE)


@dataclass(eq=False)
class Layer:
    """The weights behind the projections, and eager's way through them."""

    norm_key: Tensor = field(default_factory=lambda: random(CHANNELS, scale=0.1))
    norm_query: Tensor = field(default_factory=lambda: random(CHANNELS, scale=0.1))
    norm_conv: Tensor = field(default_factory=lambda: random(CHANNELS, scale=0.1))
    conv: Tensor = field(default_factory=lambda: random(CHANNELS, 1, KERNEL, scale=0.5))

    def inputs(self, key: Tensor, value: Tensor, hidden: Tensor, state: Tensor | None = None) -> Inputs:
        return Inputs(
            key, value, hidden, self.norm_key, self.norm_query, self.norm_conv, self.conv, None, state, [EPS] * 3, [],
            DTYPE, DILATION, True,
        )  # fmt: skip

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        groups = x.float().unflatten(-1, (STREAMS, WIDTH))
        groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + EPS)
        return (groups.flatten(-2) * (1.0 + weight.float())).type_as(x)

    def eager(self, key: Tensor, value: Tensor, hidden: Tensor, state: Tensor | None = None) -> Tensor:
        """As transformers spells it, with the decoder layer's residual add; `state` is updated in place."""
        kn = self.norm(key, self.norm_key).unflatten(-1, (STREAMS, WIDTH))
        qn = self.norm(hidden, self.norm_query).unflatten(-1, (STREAMS, WIDTH))
        gate = (kn * qn).sum(dim=-1, keepdim=True) / math.sqrt(WIDTH)
        gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
        gated = (torch.sigmoid(gate) * value.unsqueeze(-2)).flatten(-2)
        columns = self.norm(gated, self.norm_conv).transpose(1, 2)
        length = columns.shape[-1]
        if state is not None:
            columns = torch.cat([state, columns], dim=-1)
            state.copy_(columns[..., -WINDOW:])
        columns = F.pad(columns, (WINDOW, 0))[..., -(WINDOW + length) :]
        convolved = F.silu(F.conv1d(columns, self.conv, groups=CHANNELS, dilation=DILATION))
        return hidden + (gated + convolved.transpose(1, 2))


def draw(batch: int, tokens: int, state: bool = False) -> list[tuple[Tensor, ...]]:
    """Sets of (key, value, hidden[, state]), enough of them that none is in L2 when its turn comes again."""
    per_call = batch * (tokens * (2 * CHANNELS + WIDTH) + (CHANNELS * WINDOW if state else 0)) * 2
    shapes = [(batch, tokens, CHANNELS), (batch, tokens, WIDTH), (batch, tokens, CHANNELS)]
    if state:
        shapes.append((batch, CHANNELS, WINDOW))
    return [tuple(random(*shape) for shape in shapes) for _ in range(num_sets(per_call))]
