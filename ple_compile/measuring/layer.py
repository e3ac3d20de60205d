"""The layer that is timed: random weights, rotating inputs; the released widths in bf16 unless told otherwise."""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ple_compile.measuring.timing import num_sets
from ple_compile.ops import ngram_ids
from ple_compile.ops.gate_conv import Inputs

WIDTH, STREAMS, KERNEL, DILATION, EPS = 2560, 4, 4, 3, 1e-6
CHANNELS, WINDOW = WIDTH * STREAMS, (KERNEL - 1) * DILATION
DTYPE = torch.bfloat16
HEADS, EOS, VOCABULARY = 16, 3, 32_000  # heads of all orders together
MULTIPLIERS = (23703573157769, 9876543210987, 1357913579135)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Widths of a PLE layer, rows of its table, and where it lies."""

    hidden: int = WIDTH
    streams: int = STREAMS
    kernel: int = KERNEL
    dilation: int = DILATION
    rows: int = 8_000_000
    dtype: torch.dtype = DTYPE
    device: str = "cuda"

    def __post_init__(self) -> None:
        for name in ("hidden", "streams", "kernel", "dilation", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a number from 1 on")
        if self.hidden % HEADS:
            raise ValueError(f"hidden is {self.hidden}; it is a multiple of {HEADS}, the heads that share its width")
        if self.rows < HEADS * HEADS:
            raise ValueError(f"rows is {self.rows}; a table of {HEADS} heads has at least {HEADS * HEADS}")

    @property
    def channels(self) -> int:
        return self.hidden * self.streams

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(self.dtype)


RELEASED = Sizes()


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return RELEASED.random(*shape, scale=scale)


@dataclass(eq=False)
class Layer:
    """The weights behind the projections, and eager's way through them."""

    sizes: Sizes = RELEASED
    norm_key: Tensor = field(init=False)
    norm_query: Tensor = field(init=False)
    norm_conv: Tensor = field(init=False)
    conv: Tensor = field(init=False)

    def __post_init__(self) -> None:
        channels = self.sizes.channels
        self.norm_key, self.norm_query, self.norm_conv = (self.sizes.random(channels, scale=0.1) for _ in range(3))
        self.conv = self.sizes.random(channels, 1, self.sizes.kernel, scale=0.5)

    def inputs(self, key: Tensor, value: Tensor, hidden: Tensor, state: Tensor | None = None) -> Inputs:
        return Inputs(
            key, value, hidden, self.norm_key, self.norm_query, self.norm_conv, self.conv, None, state, [EPS] * 3, [],
            self.sizes.dtype, self.sizes.dilation, True,
        )  # fmt: skip

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        groups = x.float().unflatten(-1, (self.sizes.streams, self.sizes.hidden))
        groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + EPS)
        return (groups.flatten(-2) * (1.0 + weight.float())).type_as(x)

    def eager(self, key: Tensor, value: Tensor, hidden: Tensor, state: Tensor | None = None) -> Tensor:
        """As transformers spells it, with the decoder layer's residual add; `state` is updated in place."""
        split, window = (self.sizes.streams, self.sizes.hidden), (self.sizes.kernel - 1) * self.sizes.dilation
        kn = self.norm(key, self.norm_key).unflatten(-1, split)
        qn = self.norm(hidden, self.norm_query).unflatten(-1, split)
        gate = (kn * qn).sum(dim=-1, keepdim=True) / math.sqrt(self.sizes.hidden)
        gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
        gated = (torch.sigmoid(gate) * value.unsqueeze(-2)).flatten(-2)
        columns = self.norm(gated, self.norm_conv).transpose(1, 2)
        length = columns.shape[-1]
        if state is not None:
            columns = torch.cat([state, columns], dim=-1)
            state.copy_(columns[..., -window:])
        columns = F.pad(columns, (window, 0))[..., -(window + length) :]
        convolved = F.silu(F.conv1d(columns, self.conv, groups=self.sizes.channels, dilation=self.sizes.dilation))
        return hidden + (gated + convolved.transpose(1, 2))


def draw(batch: int, tokens: int, state: bool = False, sizes: Sizes = RELEASED) -> list[tuple[Tensor, ...]]:
    """Sets of (key, value, hidden[, state]), enough of them that none is in L2 when its turn comes again."""
    channels, window = sizes.channels, (sizes.kernel - 1) * sizes.dilation
    per_call = batch * (tokens * (2 * channels + sizes.hidden) + (channels * window if state else 0))
    shapes = [(batch, tokens, channels), (batch, tokens, sizes.hidden), (batch, tokens, channels)]
    if state:
        shapes.append((batch, channels, window))
    return [tuple(sizes.random(*shape) for shape in shapes) for _ in range(num_sets(per_call * sizes.dtype.itemsize))]


class NGramRows(nn.Module):
    """The table and the hash that finds a token's rows in it."""

    multipliers: Tensor
    head_sizes: Tensor
    offsets: Tensor

    def __init__(self, sizes: Sizes):
        super().__init__()
        head_sizes = torch.tensor([sizes.rows // HEADS - head for head in range(HEADS)], device=sizes.device)
        self.register_buffer("multipliers", torch.tensor(MULTIPLIERS, device=sizes.device))
        self.register_buffer("head_sizes", head_sizes)
        self.register_buffer("offsets", head_sizes.cumsum(0) - head_sizes)
        self.table = nn.Embedding(sizes.rows, sizes.hidden // HEADS, device=sizes.device, dtype=sizes.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        ids = ngram_ids.reference(tokens, None, self.multipliers, self.head_sizes, self.offsets, EOS)
        return self.table(ids).flatten(-2)


class WholeLayer(nn.Module):
    """Ids, lookup and projections before a `Layer`: all of a PLE layer, without a cache."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.rows = NGramRows(sizes)
        on = {"device": sizes.device, "dtype": sizes.dtype}
        self.key_proj = nn.Linear(sizes.hidden, sizes.channels, bias=False, **on)
        self.value_proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False, **on)
        self.behind = Layer(sizes)

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        rows = self.rows(tokens)
        return self.behind.eager(self.key_proj(rows), self.value_proj(rows), hidden)


class Stack(nn.Module):
    """PLE layers one after another."""

    def __init__(self, sizes: Sizes, num_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(WholeLayer(sizes) for _ in range(num_layers))

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, tokens)
        return hidden


def floor_bytes(sizes: Sizes, num_layers: int, tokens: int) -> int:
    """What a stack must move: weights and table rows once, hidden in and out; keys and values stay on the chip."""
    projections = sizes.hidden * (sizes.channels + sizes.hidden)
    per_channel = sizes.channels * (3 + sizes.kernel)
    per_token = sizes.hidden + 2 * sizes.channels
    return num_layers * (projections + per_channel + tokens * per_token) * sizes.dtype.itemsize
