"""The reference model's hash against plain Python integers."""

from __future__ import annotations

import random

import pytest
import torch

from examples.reference import tiny
from examples.reference.ple import PLE, NGramEmbedding
from tests import oracle

EOS = 3


def random_history(rng: random.Random, length: int) -> list[int]:
    """Tokens, EOS often, and ids that no tokenizer produces: placeholders, and so large that the product wraps."""
    return [rng.choice([EOS, rng.randrange(96), rng.randrange(96), -1, 10**15]) for _ in range(length)]


def expected_rows(embedding: NGramEmbedding, history: list[int], heads: int) -> list[list[int]]:
    constants = (embedding.layer_multipliers, embedding.ngram_heads_vocab_sizes, embedding.ngram_heads_offsets)
    return oracle.ngram_ids(history, *(c.tolist() for c in constants), eos=EOS, heads=heads)


def looked_up_rows(ple: PLE, run) -> torch.Tensor:
    """The ids that reach the table while `run()` runs."""
    seen = []
    table = ple.ple_embedding.ngram_embedding
    handle = table.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    run()
    handle.remove()
    return seen[-1]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("ngram_size, heads", [(2, 1), (3, 2), (3, 8), (4, 1)])
def test_ids_in_chunks(ngram_size, heads, dtype):
    config = tiny(ngram_size=ngram_size, heads_per_ngram=heads, ple_embed_dim=(ngram_size - 1) * heads)
    ple = PLE(config, ple_index=1)
    rng = random.Random(0)
    for _ in range(10):
        history = [t if dtype == torch.int64 or t < 2**31 else 2**31 - 1 for t in random_history(rng, 30)]
        expected = torch.tensor(expected_rows(ple.ple_embedding, history, heads))
        tokens, state, start = torch.tensor([history], dtype=dtype), ple.initial_state(1), 0
        while start < 30:
            end = min(30, start + rng.choice([1, 1, 2, 3, 9]))
            streams = torch.zeros(1, end - start, config.hc_count * config.hidden_size)
            chunk = tokens[:, start:end]
            ids = looked_up_rows(ple, lambda: ple(streams, chunk, state=state))  # noqa: B023
            assert torch.equal(ids[0], expected[start:end])
            start = end


def test_masked_tokens_hash_as_eos():
    config = tiny()
    ple = PLE(config, ple_index=0)
    ids = torch.tensor([[7, 8, 9, 10, 11]])
    mask = torch.tensor([[False, False, True, True, True]])
    streams = torch.zeros(1, 5, config.hc_count * config.hidden_size)
    rows = looked_up_rows(ple, lambda: ple(streams, ids, mask))
    assert rows[0].tolist() == expected_rows(ple.ple_embedding, [EOS, EOS, 9, 10, 11], config.heads_per_ngram)


def test_heads_do_not_overlap():
    first, second = (NGramEmbedding(tiny(), ple_index=i) for i in range(2))
    assert first.ngram_heads_vocab_sizes.tolist() == [101, 103, 107, 109]
    assert second.ngram_heads_vocab_sizes.tolist() == [113, 127, 131, 137]
    assert first.ngram_heads_offsets.tolist() == [0, 101, 204, 311]
    assert first.ngram_embedding.num_embeddings == 512
