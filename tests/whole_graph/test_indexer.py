"""The tensor-form indexer against transformers' loop, under the contract that its module states.

`PLE_INDEXER_CASES=500 pytest tests/whole_graph/test_indexer.py -k random` runs the long form.
"""

import math
import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ple_compile.ops import select_tokens as op
from ple_compile.whole_graph.indexer import Layout, make_forward
from tests.whole_graph.tiny_qwen4exp import CACHE, make_cache, make_config, modeling

NUM_CASES = int(os.environ.get("PLE_INDEXER_CASES", "60"))
# Relative size of the score differences that rounding explains: float32 sums, and one flipped rounding of a key.
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass
class Call:
    """One call of an indexer: what it is given, and what is known about its mask."""

    hidden: Tensor
    positions: tuple[Tensor, Tensor]
    mask: Tensor
    layout: str


def make_indexer(generator: torch.Generator, dtype: torch.dtype, **settings) -> torch.nn.Module:
    config = make_config(num_hidden_layers=1, layer_types=["full_attention"], ple_layer_ids=[], **settings)
    indexer = modeling.Qwen4ExpTextQSAIndexer(config, 0).to(dtype)
    with torch.no_grad():
        for parameter in indexer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return indexer, config


def draw(generator: torch.Generator, low: int, high: int) -> int:
    """An integer in [low, high]."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def pick(generator: torch.Generator, options):
    return options[draw(generator, 0, len(options) - 1)]


def as_mask(visible: Tensor, dtype: torch.dtype, additive: bool) -> Tensor:
    visible = visible.unsqueeze(1)
    if not additive:
        return visible
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def padding(generator: torch.Generator, kind: str, rows: int, length: int) -> Tensor:
    """Which keys are real, `[rows, length]`."""
    real = torch.ones(rows, length, dtype=torch.bool)
    for row in range(rows):
        width = draw(generator, 0, length)
        if kind == "left":
            real[row, :width] = False
        elif kind == "right":
            real[row, length - width :] = False
        elif kind == "holes":
            real[row] = torch.rand(length, generator=generator) < 0.6
    if kind == "empty row":
        real[draw(generator, 0, rows - 1)] = False
    return real


def draw_visible(generator: torch.Generator, rows: int, length: int) -> tuple[Tensor, str]:
    """Visible keys `[rows, length, length]` of a whole sequence, and the layout that the text model would know."""
    kind = pick(generator, ["none", "left", "right", "holes", "empty row", "packed", "window", "random"])
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(rows, -1, -1)
    if kind == "packed":
        segment = (torch.rand(rows, length, generator=generator) < 0.2).cumsum(-1)
        return causal & (segment[:, :, None] == segment[:, None, :]), "interval"
    if kind == "window":
        return causal & ~causal.tril(-draw(generator, 1, length)), "any"
    if kind == "random":
        return causal & (torch.rand(rows, length, length, generator=generator) < 0.7), "any"
    real = padding(generator, kind, rows, length)
    return causal & real[:, None, :], "prefix"


def draw_calls(generator: torch.Generator, config, dtype: torch.dtype, cache_kind: str, max_cache_len: int):
    """The calls of one sequence: whole, or a prefill, a chunk and single tokens on a cache."""
    rows, length = draw(generator, 1, 3), draw(generator, 2, 40)
    visible, layout = draw_visible(generator, rows, length)
    additive = draw(generator, 0, 1) == 1
    hidden = torch.randn(rows, length, config.hidden_size, generator=generator).to(dtype)
    rotary_dim = pick(generator, [4, 8, config.indexer_head_dim])
    angles = torch.arange(length)[:, None] * torch.rand(rotary_dim // 2, generator=generator)
    angles = torch.cat([angles, angles], dim=-1).expand(rows, -1, -1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    steps = [length]
    if cache_kind != "none":
        prefill = draw(generator, 1, length)
        chunk = draw(generator, 0, length - prefill)
        steps = [n for n in (prefill, chunk, *([1] * min(3, length - prefill - chunk))) if n]
    end = 0
    for step in steps:
        start, end = end, end + step
        sees = visible[:, start:end, :end]
        if cache_kind == "static":
            sees = torch.nn.functional.pad(sees, (0, max_cache_len - end))
        yield Call(hidden[:, start:end], (cos[:, :end], sin[:, :end]), as_mask(sees, dtype, additive), layout)


def query_scores(indexer, call: Call, keys: Tensor, row: int, query: int) -> tuple[Tensor, Tensor]:
    """Block scores of one query, and its visible positions: an independent statement of the formula."""
    cos, sin = call.positions
    num_queries = call.hidden.shape[1]
    heads = indexer.index_qk_proj(call.hidden[row, query]).view(-1, indexer.index_head_dim)
    q = indexer.q_layernorm(heads[: indexer.index_n_heads])
    q = op.rotate(q, cos[row, query - num_queries], sin[row, query - num_queries])
    sees = call.mask[row, 0, query]
    positions = (sees if sees.dtype == torch.bool else sees == 0).nonzero().flatten()
    blocks = positions[: len(positions) // indexer.compress_ratio * indexer.compress_ratio]
    blocks = blocks.view(-1, indexer.compress_ratio)
    pooled = indexer.k_layernorm(keys[row, blocks].float().mean(1).to(keys.dtype))
    pooled = op.rotate(pooled, cos[row, blocks[:, 0]], sin[row, blocks[:, 0]])
    scores = torch.relu(q.float() @ pooled.float().T).sum(0) / math.sqrt(indexer.index_head_dim)
    return scores, positions


def unexplained_rows(indexer, call: Call, keys: Tensor, expected: Tensor, actual: Tensor) -> list[str]:
    """Queries whose selections differ for another reason than a tie or a gap below rounding."""
    problems = []
    for row, query in (expected != actual).any(-1).nonzero().tolist():
        scores, positions = query_scores(indexer, call, keys, row, query)
        if len(scores) <= indexer.block_topk:
            problems.append(f"row {row} query {query}: every block fits, yet selections differ")
            continue
        threshold = scores.topk(indexer.block_topk).values[-1]
        block_of = {int(p): i // indexer.compress_ratio for i, p in enumerate(positions)}
        blocks = {block_of[p] for p in (expected ^ actual)[row, query].nonzero().flatten().tolist()}
        if any(b >= len(scores) for b in blocks):
            problems.append(f"row {row} query {query}: keys after the last complete block differ")
            continue
        gap = max(abs(float(scores[b] - threshold)) for b in blocks)
        if gap > ROUNDING[keys.dtype] * float(scores.max()):
            problems.append(f"row {row} query {query}: gap {gap:.3g} of {float(scores.max()):.3g}")
    return problems


def run_both(indexer, config, calls, cache_kind: str):
    """Yields each call with the raw keys so far, the loop's selection and ours with and without a known layout."""
    layout = Layout()
    ours = make_forward(layout, additive=CACHE == "past_key_values")
    caches = [make_cache(cache_kind, config) for _ in range(3)]
    keys = []
    with torch.no_grad():
        for call in calls:
            heads = indexer.index_qk_proj(call.hidden).unflatten(-1, (-1, indexer.index_head_dim))
            keys.append(heads[:, :, indexer.index_n_heads])
            arguments = call.hidden, call.positions, call.mask
            selections = [indexer(*arguments, caches[0])]
            for layout.name, cache in ((call.layout, caches[1]), ("any", caches[2])):
                selections.append(ours(indexer, *arguments, cache))
            assert len({(x.dtype, x.shape) for x in selections}) == 1
            yield call, torch.cat(keys, dim=1), *[(x if x.dtype == torch.bool else x == 0)[:, 0] for x in selections]


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_random_calls_select_what_the_loop_selects(seed):
    generator = torch.Generator().manual_seed(seed)
    dtype = pick(generator, [torch.float32, torch.float32, torch.bfloat16, torch.float16])
    ratio = draw(generator, 1, 5)
    indexer, config = make_indexer(
        generator,
        dtype,
        indexer_n_heads=draw(generator, 1, 4),
        indexer_head_dim=pick(generator, [16, 24]),
        indexer_compress_ratio=ratio,
        indexer_budget=ratio * draw(generator, 1, 4),
    )
    cache_kind = pick(generator, ["none", "dynamic", "static"])
    calls = draw_calls(generator, config, dtype, cache_kind, 64)
    for call, keys, expected, known, unknown in run_both(indexer, config, calls, cache_kind):
        visible = (call.mask if call.mask.dtype == torch.bool else call.mask == 0)[:, 0]
        for actual in (known, unknown):
            assert not (actual & ~visible).any()
            assert unexplained_rows(indexer, call, keys, expected, actual) == []


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_as_the_loop_under_autocast(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    indexer, config = make_indexer(generator, torch.float32, indexer_budget=8, indexer_compress_ratio=4)
    cache_kind = pick(generator, ["none", "dynamic"])
    calls = draw_calls(generator, config, torch.float32, cache_kind, 64)
    with torch.autocast("cpu", dtype=dtype):
        for call, keys, expected, known, unknown in run_both(indexer, config, calls, cache_kind):
            assert keys.dtype == dtype
            for actual in (known, unknown):
                assert unexplained_rows(indexer, call, keys, expected, actual) == []


def tied_call(left_padding: int, length: int) -> tuple[Call, torch.nn.Module, object]:
    """Keys that repeat every four tokens and positions that do not turn them: every block scores the same."""
    generator = torch.Generator().manual_seed(0)
    indexer, config = make_indexer(generator, torch.float32, indexer_budget=8, indexer_compress_ratio=4)
    hidden = torch.randn(1, 4, config.hidden_size, generator=generator).repeat(1, length // 4, 1)
    hidden = torch.cat([hidden.new_zeros(1, left_padding, config.hidden_size), hidden], dim=1)
    total = left_padding + length
    visible = torch.ones(1, total, total, dtype=torch.bool).tril()
    visible[:, :, :left_padding] = False
    still = torch.ones(1, total, 8), torch.zeros(1, total, 8)
    return Call(hidden, still, as_mask(visible, torch.float32, False), "prefix"), indexer, config


@pytest.mark.parametrize("left_padding", [0, 3, 8])
def test_ties_keep_the_lowest_blocks_of_the_query(left_padding):
    call, indexer, config = tied_call(left_padding, length=24)
    (_, _, _, known, unknown), *_ = run_both(indexer, config, [call], "none")
    for query in range(24):
        expected = torch.zeros(24, dtype=torch.bool)
        num_complete = (query + 1) // 4
        expected[: 4 * min(2, num_complete)] = True
        expected[4 * num_complete : query + 1] = True
        for actual in (known, unknown):
            torch.testing.assert_close(actual[0, left_padding + query, left_padding:], expected)


def test_results_do_not_depend_on_the_steps_over_queries(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    indexer, config = make_indexer(generator, torch.float32)
    hidden = torch.randn(2, 30, config.hidden_size, generator=generator)
    angles = torch.randn(2, 30, 8, generator=generator)
    causal = torch.ones(2, 30, 30, dtype=torch.bool).tril()
    for visible, layout in (
        (causal & padding(generator, "left", 2, 30)[:, None], "prefix"),
        (causal.triu(-11), "interval"),
        (causal & (torch.rand(2, 30, 30, generator=generator) < 0.7), "any"),
    ):
        call = Call(hidden, (angles.cos(), angles.sin()), as_mask(visible, torch.float32, False), layout)
        monkeypatch.setattr(op, "_MAX_ELEMENTS", 1 << 24)
        (*_, whole, _), *_ = run_both(indexer, config, [call], "none")
        monkeypatch.setattr(op, "_MAX_ELEMENTS", 1 << 10)
        (*_, stepped, unknown), *_ = run_both(indexer, config, [call], "none")
        assert torch.equal(whole, stepped) and torch.equal(whole, unknown)


def test_op_is_well_formed():
    generator = torch.Generator().manual_seed(2)
    query, keys = torch.randn(2, 6, 2, 16, generator=generator), torch.randn(2, 9, 16, generator=generator)
    angles = torch.randn(2, 9, 8, generator=generator)
    visible = torch.ones(1, 6, 9, dtype=torch.bool).tril(3).expand(2, -1, -1)
    arguments = query, keys, angles.cos(), angles.sin(), visible, torch.zeros(16), 1e-6, 2, 2
    for layout in ("prefix", "interval", "any"):
        torch.library.opcheck(torch.ops.ple.select_tokens.default, (*arguments, layout))
    with pytest.raises(ValueError, match="layout='causal'"):
        torch.ops.ple.select_tokens(*arguments, "causal")
