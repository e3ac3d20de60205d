"""A packed step in tensors that stay where they are, as a CUDA graph replays it, with other contents every time."""

from collections.abc import Callable

import torch
from torch import Tensor

from examples.reference import tiny
from examples.reference.packed import PackedBatch, PackedPLE

EOS = 3
SPARE = 3  # columns for drafts


class ReplayedStep:
    """The layer, its inputs, and two pools: one for what is tested and one for eager.

    `decode`: as many requests as tokens, mostly one each; else few requests with many. Slot 0 is NaN throughout.
    """

    def __init__(self, device: str, *, decode: bool, seed: int = 0):
        torch.manual_seed(seed)
        config = tiny(hidden_size=256, ple_embed_dim=64)
        self.decode, self.generator = decode, torch.Generator().manual_seed(seed)
        self.tokens, self.requests = (16, 16) if decode else (64, 8)
        with torch.device(device):
            self.layer = PackedPLE(config, 0).eval()
            for parameter in self.layer.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
            width = self.layer.conv1d.weight.shape[0]
            self.streams = torch.zeros(self.tokens, width)
            self.ids = torch.zeros(self.tokens, dtype=torch.int32)
            self.batch = PackedBatch(
                torch.zeros(self.requests + 1, dtype=torch.int32),
                torch.zeros(self.requests, config.ngram_size - 1, dtype=torch.int64),
                torch.zeros(self.requests, 3, dtype=torch.int32)[:, 1],  # a column of a server's table
                torch.zeros(self.requests, dtype=torch.bool),
                torch.zeros(self.requests, dtype=torch.int32),
            )
            self.boundaries = torch.zeros(0 if decode else 5, dtype=torch.int64)
            self.pool = torch.zeros(self.requests + 5, width, self.layer.reach + SPARE)
        self.pool[0] = float("nan")
        self.eager_pool = self.pool.clone()

    def arguments(self, pool: Tensor) -> tuple:
        return self.streams, self.ids, self.batch, pool, None if self.decode else self.boundaries

    def fill(self) -> None:
        """Another batch: requests of other lengths, some empty, some tokens of nobody; other slots and histories."""
        if self.decode and self._draw(10, 1) < 7:
            starts = torch.arange(self.requests + 1)
        else:
            starts = torch.cat([torch.tensor([0]), self._draw(self.tokens + 1, self.requests).sort().values])
            starts[-1] = self.tokens - self._draw(3, 1) * (starts[-2] < self.tokens - 3)
        slots = torch.randperm(self.pool.shape[0] - 1, generator=self.generator)[: self.requests] + 1
        slots[self._draw(8, self.requests) == 0] = 0
        context = self._draw(90, *self.batch.ngram_context.shape)
        self.batch.query_start_loc.copy_(starts)
        self.batch.ngram_context.copy_(torch.where(context < 20, EOS, context))
        self.batch.state_indices.copy_(slots)
        self.batch.has_initial_state.copy_(self._draw(10, self.requests) < 8)
        self.batch.num_accepted_tokens.copy_(self._draw(SPARE + 2, self.requests))
        ids = self._draw(90, self.tokens) - 2  # negative ones hash like any token
        self.ids.copy_(torch.where(ids < 10, EOS, ids))
        self.streams.copy_(torch.randn(self.streams.shape, generator=self.generator))
        self.boundaries.copy_(1 + self._draw(self.tokens, len(self.boundaries)))

    def check(self, out: Tensor | tuple) -> None:
        """`out` and the pool, every row and column of them, against eager on a pool of its own."""
        expected = self.layer(*self.arguments(self.eager_pool))
        close = {"rtol": 1e-3, "atol": 1e-3, "equal_nan": True}
        for mine, eager in zip(tensors(out), tensors(expected), strict=True):
            torch.testing.assert_close(mine, eager, **close)
            assert not mine.isnan().any()
        torch.testing.assert_close(self.pool, self.eager_pool, **close)
        assert self.pool[0].isnan().all()

    def run(self, call: Callable[[], Tensor | tuple], replays: int) -> None:
        """`call` leaves its results in the same tensors every time; they are overwritten before."""
        out = None
        for _ in range(replays):
            self.fill()
            for tensor in tensors(out):
                tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
            out = call()
            self.check(out)

    def _draw(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator)


def tensors(out: Tensor | tuple | None) -> list[Tensor]:
    """The output, and what is exported beside it."""
    if out is None or isinstance(out, Tensor):
        return [] if out is None else [out]
    first, exported = out
    return [first, *exported]
