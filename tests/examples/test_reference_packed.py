"""The packed PLE layer against the padded one, request by request."""

from __future__ import annotations

import random

import pytest
import torch

from examples.reference import Config, tiny
from examples.reference.packed import PackedBatch, PackedPLE
from examples.reference.ple import PLE

EOS = 3
CONFIGS = {
    "tiny": tiny(),
    "bigrams_two_taps": tiny(ngram_size=2, ple_conv_kernel_size=2, hc_count=4),
    "four_grams_three_taps": tiny(ngram_size=4, ple_conv_kernel_size=3, ple_embed_dim=42),
}


def build(config: Config) -> tuple[PackedPLE, PLE]:
    torch.manual_seed(0)
    packed, padded = PackedPLE(config, 0), PLE(config, 0)
    for parameter in packed.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    padded.load_state_dict(packed.state_dict())
    return packed, padded


class Request:
    """One request's whole text, and what the padded layer says of it when it runs alone."""

    def __init__(self, padded: PLE, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 96, (length,), generator=generator)
        self.ids[torch.rand(length, generator=generator) < 0.2] = EOS
        self.streams = torch.randn(length, padded.conv1d.weight.shape[0], generator=generator)
        self.expected, self.state = self.run(padded, length)

    def run(self, padded: PLE, length: int):
        state = padded.initial_state(1)
        if length == 0:
            return self.streams[:0], state
        return padded(self.streams[None, :length], self.ids[None, :length], state=state)[0], state


def context(padded: PLE, ids: list[int]) -> list[int]:
    size = padded.ngram_size - 1
    return ([EOS] * size + ids)[len(ids) :]


def make_batch(padded: PLE, pieces: list[tuple[Request, int, int]], slots, accepted=None) -> tuple:
    """(streams, input_ids, batch) of requests' tokens from `start` up to `end`."""
    lengths = torch.tensor([0] + [end - start for _, start, end in pieces])
    contexts = [context(padded, r.ids[:start].tolist()) for r, start, _ in pieces]
    batch = PackedBatch(
        query_start_loc=lengths.cumsum(0).int(),
        ngram_context=torch.tensor(contexts).view(-1, padded.ngram_size - 1),
        state_indices=torch.as_tensor(slots),
        has_initial_state=torch.tensor([start > 0 for _, start, _ in pieces], dtype=torch.bool),
        num_accepted_tokens=None if accepted is None else torch.tensor(accepted),
    )
    width = padded.conv1d.weight.shape[0]
    streams = torch.cat([torch.empty(0, width)] + [r.streams[start:end] for r, start, end in pieces])
    ids = torch.cat([torch.empty(0, dtype=torch.int64)] + [r.ids[start:end] for r, start, end in pieces])
    return streams, ids.int(), batch


def new_pool(padded: PLE, num_slots: int, extra_columns: int = 0) -> torch.Tensor:
    """Full of garbage, as a used pool is."""
    return torch.full((num_slots, padded.conv1d.weight.shape[0], padded.reach + extra_columns), 7.0)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [(5, 1, 40), (0, 5, 0, 0, 2, 0), (1,) * 7, (0, 0), (), (30,)])
@pytest.mark.parametrize("name", CONFIGS)
def test_prefill(name, lengths, index_dtype):
    packed, padded = build(CONFIGS[name])
    requests = [Request(padded, length, seed) for seed, length in enumerate(lengths)]
    slots = torch.arange(1, len(lengths) + 1, dtype=index_dtype)
    table = torch.stack([slots, slots + 100], dim=1)  # a column of a block table: strided
    pool = new_pool(padded, len(lengths) + 1)
    out = packed(*make_batch(padded, [(r, 0, len(r.ids)) for r in requests], table[:, 0]), pool)
    assert_close(out, torch.cat([r.expected for r in requests] + [out[:0]]))
    for slot, request in enumerate(requests, start=1):
        untouched = len(request.ids) == 0
        assert_close(pool[slot], torch.full_like(pool[slot], 7.0) if untouched else request.state.conv[0])
    assert (pool[0] == 7).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_any_mix_of_chunks_equals_one_shot(name):
    """Requests advance at random, some not at all, in a pool that is a view into a larger one."""
    packed, padded = build(CONFIGS[name])
    rng = random.Random(0)
    requests = [Request(padded, length, seed) for seed, length in enumerate([33, 8, 1, 20, 13])]
    slots = [4, 1, 5, 2, 3]
    pool = new_pool(padded, 12, extra_columns=2)[::2]
    done = [0] * len(requests)
    outputs: list[list[torch.Tensor]] = [[] for _ in requests]
    while any(d < len(r.ids) for d, r in zip(done, requests)):
        ends = [min(len(r.ids), d + rng.choice([0, 1, 1, 2, 3, 11])) for d, r in zip(done, requests)]
        order = rng.sample(range(len(requests)), len(requests))
        pieces = [(requests[i], done[i], ends[i]) for i in order]
        out = packed(*make_batch(padded, pieces, [slots[i] for i in order]), pool)
        for i, piece in zip(order, out.split([end - start for _, start, end in pieces])):
            outputs[i].append(piece)
        done = ends
    for i, request in enumerate(requests):
        assert_close(torch.cat(outputs[i]), request.expected)
        assert_close(pool[slots[i], :, : padded.reach], request.state.conv[0])
        assert (pool[slots[i], :, padded.reach :] == 7).all()


def test_slot_zero_has_no_convolution_and_no_state():
    packed, padded = build(CONFIGS["tiny"])
    requests = [Request(padded, 12, 0), Request(padded, 12, 1), Request(padded, 12, 2)]
    for accepted in (None, [1, 1, 1]):
        pool = new_pool(padded, 3, extra_columns=3)
        pieces = [(requests[0], 4, 8), (requests[1], 0, 12), (requests[2], 4, 8)]
        streams, ids, batch = make_batch(padded, pieces, [0, 2, 0], accepted)
        out = packed(streams, ids, batch, pool)
        packed.conv1d.weight.zero_()
        without = packed(streams, ids, batch, new_pool(padded, 3, extra_columns=3))
        packed.load_state_dict(padded.state_dict())
        assert_close(out[:4], without[:4])
        assert_close(out[16:], without[16:])
        assert_close(out[4:16], requests[1].expected)
        assert (pool[:2] == 7).all() and not (pool[2] == 7).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_speculation_and_rollback(name):
    """Beside a prefill and a plain decode, a request guesses: drafts are accepted from none to all."""
    packed, padded = build(CONFIGS[name])
    drafts = 3
    for accepted_per_step in ([1, 1, 1, 1], [4, 4, 4], [2, 4, 1, 3, 1, 4], [1, 3, 2]):
        truth = Request(padded, 7 + sum(accepted_per_step), seed=1)
        other = Request(padded, 40, seed=2)
        pool = new_pool(padded, 4, extra_columns=drafts)
        packed(*make_batch(padded, [(truth, 0, 7), (other, 0, 5)], [1, 2], [1, 0]), pool)
        position, other_position, standing = 7, 5, 1
        for accepted in accepted_per_step:
            # The query: the verified token and three drafts, of which those beyond `accepted` are wrong.
            guess = Request(padded, position + 1 + drafts, seed=99)
            guess.ids[: position + accepted] = truth.ids[: position + accepted]
            guess.streams[: position + accepted] = truth.streams[: position + accepted]
            other_end = other_position + (1 if accepted % 2 else 6)
            pieces = [(guess, position, position + 1 + drafts), (other, other_position, other_end)]
            out = packed(*make_batch(padded, pieces, [1, 2], [standing, 0]), pool)
            assert_close(out[:accepted], truth.expected[position : position + accepted])
            assert_close(out[1 + drafts :], other.expected[other_position:other_end])
            position, other_position, standing = position + accepted, other_end, accepted
            _, state = truth.run(padded, position)
            assert_close(pool[1, :, standing - 1 : standing - 1 + padded.reach], state.conv[0])
        # A single token ends the speculation: its columns stand at the window's beginning again.
        final = Request(padded, position + 1, seed=1)
        final.ids[:position], final.streams[:position] = truth.ids[:position], truth.streams[:position]
        expected, state = final.run(padded, position + 1)
        out = packed(*make_batch(padded, [(final, position, position + 1)], [1], [standing]), pool)
        assert_close(out, expected[-1:])
        assert_close(pool[1, :, : padded.reach], state.conv[0])


def test_full_graph_with_any_batch():
    """One graph serves every composition."""
    packed, padded = build(CONFIGS["tiny"])
    graphs = []

    def count(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module.forward

    torch._dynamo.reset()
    compiled = torch.compile(packed, backend=count, fullgraph=True, dynamic=True)
    for lengths in ((5, 7, 2), (1, 1, 1, 1), (0, 33, 0, 4, 1)):
        requests = [Request(padded, length, seed) for seed, length in enumerate(lengths)]
        pieces = [(r, 0, len(r.ids)) for r in requests]
        pool = new_pool(padded, 9)
        out = compiled(*make_batch(padded, pieces, list(range(1, len(lengths) + 1))), pool)
        assert_close(out, torch.cat([r.expected for r in requests]))
    assert len(graphs) == 1


@pytest.mark.parametrize("name", CONFIGS)
def test_states_at_boundaries(name):
    """What a chunk exports is what the padded layer's state holds there, and another request goes on from it."""
    packed, padded = build(CONFIGS[name])
    requests = [Request(padded, length, seed) for seed, length in enumerate((20, 33, 6))]
    pool = new_pool(padded, 5)
    packed(*make_batch(padded, [(r, 0, 5) for r in requests], [1, 2, 3]), pool)
    pieces = [(requests[0], 5, 20), (requests[1], 5, 33), (requests[2], 5, 6)]
    ends = [(0, 7), (0, 20), (1, 6), (1, 17), (2, 6)]  # request, its tokens so far
    offsets = [0, 15, 43]
    boundaries = torch.tensor([offsets[r] + end - 5 for r, end in ends])
    out, exported = packed(*make_batch(padded, pieces, [1, 2, 3]), pool, boundaries)
    assert_close(out, torch.cat([r.expected[start:end] for r, start, end in pieces]))
    for (r, end), columns, tokens in zip(ends, exported.conv, exported.context):
        _, state = requests[r].run(padded, end)
        assert_close(columns, state.conv[0])
        assert torch.equal(tokens, state.context[0])

    pool[4, :, : padded.reach] = exported.conv[3]
    out = packed(*make_batch(padded, [(requests[1], 17, 33)], [4]), pool)
    assert_close(out, requests[1].expected[17:])
