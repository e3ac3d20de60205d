"""A small stack of decoder-like layers, some with a lookup in an n-gram table that may lie on the host."""

import torch
from torch import Tensor, nn


class NGrams(nn.Module):
    """Ids that no pass fuses, a table that `offload_tables` finds, and transformers' way around the GPU."""

    def __init__(self, rows: int, width: int, heads: int):
        super().__init__()
        self.register_buffer("multipliers", torch.arange(3))
        self.register_buffer("sizes", torch.full((heads,), rows // heads))
        self.register_buffer("offsets", torch.arange(heads) * (rows // heads))
        self.table = nn.Embedding(rows, width)

    def ids(self, tokens: Tensor) -> Tensor:
        return (tokens[..., None] * 7919).remainder(self.sizes) + self.offsets

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(self.ids(tokens).to(self.table.weight.device)).to(tokens.device).flatten(-2)


class Layer(nn.Module):
    def __init__(self, hidden: int, ngrams: NGrams | None):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.ngrams = ngrams
        if ngrams is not None:
            self.proj = nn.Linear(ngrams.table.embedding_dim * len(ngrams.sizes), hidden, bias=False)

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        if self.ngrams is not None:
            hidden = hidden + self.proj(self.ngrams(tokens))
        return hidden + self.down(torch.relu(self.up(hidden)))


class Stack(nn.Module):
    """Each layer runs two products; those in `with_tables` a lookup and a third product before them."""

    def __init__(
        self,
        *with_tables: int,
        num_layers: int = 4,
        hidden: int = 64,
        rows: int = 1000,
        width: int = 24,
        heads: int = 4,
    ):
        super().__init__()
        torch.manual_seed(0)
        self.hidden = hidden
        self.layers = nn.ModuleList(
            Layer(hidden, NGrams(rows, width, heads) if i in with_tables else None) for i in range(num_layers)
        )
        self.eval().requires_grad_(False)

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, tokens)
        return hidden

    def inputs(self, length: int = 20, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Hidden states and tokens."""
        generator = torch.Generator().manual_seed(seed)
        weight = self.layers[0].up.weight
        hidden = torch.randn(1, length, self.hidden, generator=generator)
        tokens = torch.randint(0, 97, (1, length), generator=generator)
        return hidden.to(weight), tokens.to(weight.device)
