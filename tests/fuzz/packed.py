"""Random packed batches, as a server puts them together, through a compiled PLE layer.

Each step is compared with eager on a pool of its own, and each request's tokens with the padded layer's mathematics in
float64 over the request's whole history, its ids from plain integers.
"""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from examples.reference import Config, tiny
from examples.reference.packed import PackedBatch, PackedPLE
from tests.fuzz.requests import Part, Request
from tests.fuzz.shared import Run, assert_right, recompiles, updates, weighted
from tests.test_packed_matrix import Case

EOS = 3
REQUESTS = 6
SLOTS = REQUESTS + 3


@dataclass(frozen=True)
class Row:
    """One request of a step. `accept`: how many of its last drafts stand; `stateless`: one without slot, made up."""

    request: int
    length: int
    draft: bool = False
    accept: int = 0
    stateless: bool = False


@dataclass(frozen=True)
class Step:
    """A batch of rows, then empty requests, then tokens of nobody. `fork`: a request that goes on at a boundary."""

    rows: tuple[Row, ...]
    seed: int
    empty: int = 0
    padding: int = 0
    fork: int | None = None


@dataclass(frozen=True)
class Free:
    """A request ends; its slot serves another, with what it left there."""

    request: int


rows = st.builds(
    Row,
    st.integers(0, REQUESTS - 1),
    st.one_of(st.just(1), st.integers(0, 4), st.integers(0, 14)),
    draft=st.booleans(),
    accept=st.integers(0, 4),
    stateless=st.sampled_from([False, False, False, True]),
)
steps = st.builds(
    Step,
    st.lists(rows, min_size=1, max_size=REQUESTS).map(tuple),
    st.integers(0, 999),
    empty=st.sampled_from([0, 0, 1, 3]),
    padding=st.sampled_from([0, 0, 2]),
    fork=st.one_of(st.none(), st.integers(0, REQUESTS - 1)),
)
frees = st.builds(Free, st.integers(0, REQUESTS - 1))
actions = weighted((30, steps), (3, frees), (1, updates), (1, recompiles))


@dataclass(frozen=True)
class PackedCase(Case):
    """A packed layer of any widths; types and strides of what a server passes. `rows`: of the context, beside those."""

    context_dtype: torch.dtype = torch.int64
    pool: str = "dense"
    rows: int = 0
    heads_per_ngram: int = 2
    hidden_size: int = 24
    embed_per_head: int = 6
    seed: int = 0

    def config(self) -> Config:
        return tiny(
            ngram_size=self.ngram_size,
            ple_conv_kernel_size=self.kernel,
            hc_count=self.streams,
            heads_per_ngram=self.heads_per_ngram,
            hidden_size=self.hidden_size,
            ple_embed_dim=self.embed_per_head * self.heads_per_ngram * (self.ngram_size - 1),
        )

    def layer(self) -> PackedPLE:
        torch.manual_seed(self.seed)
        layer = PackedPLE(self.config(), 0)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.5)
        return layer.to(self.storage_dtype).eval()

    def with_(self, **changes: Any) -> "PackedCase":
        return dataclasses.replace(self, **changes)


cases = st.builds(
    PackedCase,
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "autocast"]),
    accepted=st.booleans(),
    boundaries=st.booleans(),
    index_dtype=st.sampled_from([torch.int64, torch.int32]),
    residual=st.booleans(),
    ngram_size=st.integers(2, 4),
    kernel=st.integers(2, 5),
    streams=st.integers(2, 4),
    spare=st.integers(0, 4),
    context_dtype=st.sampled_from([torch.int64, torch.int32]),
    pool=st.sampled_from(["dense", "channels", "view"]),
    rows=st.sampled_from([0, 0, 5]),
    heads_per_ngram=st.integers(1, 4),
    hidden_size=st.sampled_from([8, 20, 32]),
    embed_per_head=st.integers(1, 8),
    seed=st.integers(0, 99),
)


class Packed(Run):
    """A server with a pool for each form of the layer."""

    first = Step((Row(0, 5), Row(1, 7), Row(2, 2), Row(3, 3, stateless=True)), 0)

    def __init__(self, case: PackedCase, **settings: Any):
        super().__init__(case, **settings)
        self.requests = [Request(slot + 1) for slot in range(REQUESTS)]
        self.pools = [self._new_pool(), self._new_pool()]

    def step(self, action: Step | Free) -> None:
        if isinstance(action, Step):
            self._step(action)
        else:
            self._free(action.request)

    def update(self, *args: Any) -> None:
        """The pool holds what the old weights made: every request begins anew."""
        super().update(*args)
        for number in range(REQUESTS):
            self._free(number)

    def _free(self, number: int) -> None:
        self.requests[number] = Request(self.requests[number].slot)

    def _new_pool(self) -> Tensor:
        channels, columns = self.layers[0].conv1d.weight.shape[0], self.layers[0].reach + self._spare
        shape = (SLOTS, channels, columns)
        if self.case.pool == "channels":
            pool = torch.empty(SLOTS, columns, channels, dtype=self.case.storage_dtype, device=self.device).mT
        else:
            larger = torch.empty(2 * SLOTS, channels, columns + 3, dtype=self.case.storage_dtype, device=self.device)
            pool = larger.new_empty(shape) if self.case.pool == "dense" else larger[::2, :, 1 : columns + 1]
        return pool.fill_(float("nan"))  # nobody may read what no request has written

    @property
    def _spare(self) -> int:
        return self.case.spare if self.case.accepted else 0

    def _step(self, action: Step) -> None:
        generator = torch.Generator().manual_seed(self.case.seed * 1000 + action.seed)
        parts = [self._part(row, generator) for row in {row.request: row for row in action.rows}.values()]
        lengths = [len(part.new) for part in parts] + [0] * action.empty
        if sum(lengths) + action.padding == 0:
            return
        tokens = [token for part in parts for token in part.new] + _draw_tokens(generator, action.padding)
        streams = torch.randn(len(tokens), self.layers[0].conv1d.weight.shape[0], generator=generator)
        streams = streams.to(self.device, self.case.storage_dtype)
        batch, ids = self._batch(parts, lengths, generator), self._index(torch.tensor(tokens))
        ends = torch.randint(0, sum(lengths) + 1, (3,), generator=generator)
        boundaries = self._index(ends) if self.case.boundaries else None
        actual, expected = self.call_both(lambda pool: (streams, ids, batch, pool, boundaries), *self.pools)
        slices = [slice(end - length, end) for length, end in zip(lengths, itertools.accumulate(lengths))]
        sensitivity = max(
            (self._compare(part, streams[own], actual[0][own], expected[0][own]) for part, own in zip(parts, slices)),
            default=0.0,
        )
        for mine, eager in zip((*actual, self.pools[0]), (*expected, self.pools[1]), strict=True):
            self.assert_equal(mine, eager, sensitivity)
        for part, own in zip(parts, slices):
            if self.case.boundaries and part.request.slot:
                inside = [(i, end - own.start) for i, end in enumerate(ends.tolist()) if own.start < end <= own.stop]
                for number, count in inside:
                    self._compare_export(part, streams[own], count, [x[number] for x in (*actual[1:], expected[1])])
                if inside and action.fork is not None:
                    number, count = inside[0]
                    self._fork(action.fork, part, streams[own], count, (actual[1][number], expected[1][number]))
            part.commit(streams[own])

    def _part(self, row: Row, generator: torch.Generator) -> Part:
        new, wanted = _draw_tokens(generator, row.length), int(row.draft and self.case.accepted)
        if row.stateless:
            request = Request(0, _draw_tokens(generator, self.case.ngram_size - 1), has_state=bool(row.accept % 2))
            return Part(request, new, min(row.accept, self._spare + 1), speculative=False)
        request = self.requests[row.request]
        request.accept(row.accept)
        number = max(request.number, wanted)
        fits = row.length <= self._spare + 1
        return Part(request, new, number, speculative=request.has_state and number > 0 and fits)

    def _batch(self, parts: list[Part], lengths: list[int], generator: torch.Generator) -> PackedBatch:
        size, empty = self.case.ngram_size - 1, len(lengths) - len(parts)
        context = torch.randint(0, 9, (len(lengths) + self.case.rows, size), generator=generator)
        for row, part in zip(context, parts):
            row[:] = torch.tensor(part.context_after(0, size, EOS))
        has_state = [part.request.has_state for part in parts] + [False] * empty
        numbers = torch.tensor([part.number for part in parts] + [0] * empty)
        return PackedBatch(
            query_start_loc=self._index(torch.tensor([0, *lengths]).cumsum(0)),
            ngram_context=context.to(self.device, self.case.context_dtype),
            state_indices=self._index(torch.tensor([part.request.slot for part in parts] + [0] * empty)),
            has_initial_state=torch.tensor(has_state, device=self.device),
            num_accepted_tokens=self._index(numbers) if self.case.accepted else None,
        )

    def _index(self, values: Tensor) -> Tensor:
        """A column of a wider table, as servers keep them."""
        return torch.stack([values, values + 50], dim=1).to(self.device, self.case.index_dtype)[:, 0]

    def _compare(self, part: Part, streams: Tensor, actual: Tensor, expected: Tensor) -> float:
        """One request's new tokens; returns what a rounding of their streams changes."""
        if not part.new:
            return 0.0
        exact, moved = (
            part.exact(self.layers[2], x, self.case.heads_per_ngram)[0] + (x if self.case.residual else 0)
            for x in (streams.double(), self.moved(streams))
        )
        sensitivity = (moved - exact).abs().max().item()
        assert_right(expected, exact, coarse=self.case.dtype != "float32")
        self.assert_near(actual, expected, exact, sensitivity)
        return sensitivity

    def _compare_export(self, part: Part, streams: Tensor, count: int, exported: list[Tensor]) -> None:
        """Columns and context after `count` of a part's new tokens; of `exported` the last are eager's columns."""
        columns, context, eager = exported
        _, normed = part.exact(self.layers[2], streams, self.case.heads_per_ngram)
        exact = F.pad(normed[: len(part.past) + count].mT, (self.layers[0].reach, 0))[:, -self.layers[0].reach :]
        assert_right(eager, exact, coarse=self.case.dtype != "float32")
        self.assert_near(columns, eager, exact)
        assert context.tolist() == part.context_after(count, self.case.ngram_size - 1, EOS)

    def _fork(self, number: int, part: Part, streams: Tensor, count: int, exported: tuple[Tensor, Tensor]) -> None:
        """Another request goes on from an exported state, as with a prefix cache."""
        other = self.requests[number]
        if other is not part.request:
            tokens, hidden = part.past + part.new[:count], [*part.request.streams, *streams[:count].double().cpu()]
            self.requests[number] = Request(other.slot, tokens, hidden, has_state=True)
            for pool, columns in zip(self.pools, exported):
                pool[other.slot, :, : self.layers[0].reach] = columns


def _draw_tokens(generator: torch.Generator, count: int) -> list[int]:
    """Few different ones, EOS often among them and often at the ends."""
    tokens = torch.randint(0, 9, (count,), generator=generator).tolist()
    for end in (0, -1):
        if count and torch.rand((), generator=generator) < 0.3:
            tokens[end] = EOS
    return tokens
