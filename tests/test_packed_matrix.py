"""Packed batches through the passes: every pass matches; output, pool and exported states equal eager's.

One graph, compiled for one batch, then runs batches of every other composition.
"""

from dataclasses import dataclass

import pytest
import torch
from allpairspy import AllPairs
from torch import Tensor, nn

from examples.reference import Config, tiny
from examples.reference.packed import PackedBatch, PackedPLE
from ple_compile.config import Config as Options
from tests.graphs import Traced, passes_backend
from tests.packed_replays import ReplayedStep
from tests.test_matrix import assert_equal

ALL_PASSES = {"fuse_short_conv", "fuse_gate", "fuse_ngram_ids", "merge_gate_conv", "merge_kv_proj"}
EOS = 3

MATRIX = {
    "dtype": ["float32", "bfloat16", "float16", "autocast"],
    "accepted": [False, True],
    "boundaries": [False, True],
    "shapes": ["dynamic", "static"],
    "index_dtype": [torch.int64, torch.int32],
    "residual": [True, False],
    "ngram_size": [3, 2, 4],
    "kernel": [4, 2, 3],
    "streams": [2, 4],
    "spare": [3, 0],
    "expanded": [False, True],
}
# Lengths of the batch that is compiled for, then of those that run through the same graph. In the first no two sizes
# coincide, which would make them one symbol.
COMPOSITIONS = [(5, 7, 2, *(4, 0, 1, 3, 3, 3, 3, 3, 3, 3)), (1, 1, 1, 1, 1), (0, 33, 0, 4, 1), (3, 0, 11, 1), (0, 0, 6)]


@dataclass(frozen=True)
class Case:
    dtype: str = "float32"
    accepted: bool = False
    boundaries: bool = False
    shapes: str = "dynamic"
    index_dtype: torch.dtype = torch.int64
    residual: bool = True
    ngram_size: int = 3
    kernel: int = 4
    streams: int = 2
    spare: int = 3
    expanded: bool = False

    @property
    def storage_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "autocast" else getattr(torch, self.dtype)

    def config(self) -> Config:
        return tiny(ngram_size=self.ngram_size, ple_conv_kernel_size=self.kernel, hc_count=self.streams,
                    ple_embed_dim=12 * (self.ngram_size - 1))  # fmt: skip

    def layer(self) -> PackedPLE:
        torch.manual_seed(0)
        layer = PackedPLE(self.config(), 0)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.5)
        return layer.to(self.storage_dtype).eval()

    def arguments(self, layer: PackedPLE, lengths: tuple[int, ...], seed: int) -> tuple:
        """(streams, ids, batch, pool, boundaries) of a batch whose requests have state or not, a slot or not."""
        generator = torch.Generator().manual_seed(seed)

        def draw(high: int, *shape: int) -> Tensor:
            return torch.randint(0, high, shape, generator=generator)

        count, tokens = len(lengths), sum(lengths)
        width = layer.conv1d.weight.shape[0]
        spare = self.spare if self.accepted else 0
        pool = torch.randn(count + 4, width, layer.reach + spare, generator=generator).to(self.storage_dtype)
        pool[0] = float("nan")
        slots = torch.randperm(count + 3, generator=generator)[:count] + 1
        slots[torch.rand(count, generator=generator) < 0.2] = 0
        batch = PackedBatch(
            query_start_loc=torch.tensor([0, *lengths]).cumsum(0).to(self.index_dtype),
            ngram_context=torch.where(
                draw(3, count, layer.ngram_size - 1) == 0, EOS, draw(9, count, layer.ngram_size - 1)
            ),
            state_indices=torch.stack([slots, slots + 50], dim=1).to(self.index_dtype)[:, 0],
            has_initial_state=draw(3, count) > 0,
            num_accepted_tokens=draw(spare + 2, count).to(self.index_dtype) if self.accepted else None,
        )
        boundaries = 1 + draw(tokens, 16) if self.boundaries else None
        streams = torch.randn(tokens, width, generator=generator).to(self.storage_dtype)
        return streams, draw(9, tokens).to(self.index_dtype), batch, pool, boundaries

    def call(
        self, layer: PackedPLE, streams: Tensor, ids: Tensor, batch: PackedBatch, pool: Tensor, boundaries
    ) -> tuple:
        """What a decoder layer does with its PLE layer: (output, exported columns and context...)."""
        out = layer(streams, ids, batch, pool, boundaries)
        out, exported = out if boundaries is not None else (out, ())
        return (streams + out if self.residual else out), *exported


def selection() -> list[Case]:
    return [Case(**dict(zip(MATRIX, values))) for values in AllPairs(list(MATRIX.values()))]


@pytest.mark.parametrize("case", selection(), ids=str)
def test_fused_layer_equals_eager(case: Case) -> None:
    torch._dynamo.reset()
    layer, traced = case.layer(), Traced()
    backend = passes_backend(traced, expanded=case.expanded)
    compiled = torch.compile(case.call, backend=backend, dynamic=case.shapes == "dynamic", fullgraph=True)
    compositions = COMPOSITIONS if case.shapes == "dynamic" else COMPOSITIONS[3:4]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == "autocast"):
        for seed, lengths in enumerate(compositions):
            arguments = case.arguments(layer, lengths, seed)
            ours, eagers = arguments[3].clone(), arguments[3].clone()
            actual = compiled(layer, *arguments[:3], ours, arguments[4])
            expected = case.call(layer, *arguments[:3], eagers, arguments[4])
            for a, e in zip((*actual, ours), (*expected, eagers), strict=True):
                assert torch.equal(a.isnan(), e.isnan()) and not actual[0].isnan().any()
                assert_equal(a.nan_to_num(), e.nan_to_num())
    merges = {"merge_kv_proj"} if case.dtype == "autocast" else set()
    assert {p for p, _ in traced.declines()} == merges
    assert traced.counts() == dict.fromkeys(ALL_PASSES - merges, 1)
    assert len(traced.graphs) == 1


@pytest.mark.parametrize(
    "lengths", [(1, 1, 1), *(pytest.param(x, marks=pytest.mark.slow) for x in ((9, 9), (1,), (4,), (3, 4, 5)))]
)
def test_sizes_that_coincide(lengths):
    """As many tokens as requests, as many of either as columns: symbols that are one, or none; then others."""
    torch._dynamo.reset()
    case, traced = Case(accepted=True, spare=0, kernel=2), Traced()
    layer = case.layer()
    compiled = torch.compile(case.call, backend=passes_backend(traced), dynamic=True, fullgraph=True)
    for batch in (lengths, (2, 1, 1, 3, 6)):
        arguments = case.arguments(layer, batch, 1)
        ours, eagers = arguments[3].clone(), arguments[3].clone()
        with torch.no_grad():
            actual = compiled(layer, *arguments[:3], ours, None)[0]
            assert_equal(actual, case.call(layer, *arguments[:3], eagers, None)[0])
        assert_equal(ours.nan_to_num(), eagers.nan_to_num())
    assert not traced.declines() and traced.counts() == dict.fromkeys(ALL_PASSES, len(traced.graphs))


@pytest.mark.parametrize("accepted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_second_graph_is_fused_too(accepted: bool) -> None:
    """In a graph for several requests behind one for a single one, what is only indexed has a size of its own."""
    torch._dynamo.reset()
    case, traced = Case(accepted=accepted, ngram_size=2, kernel=2), Traced()
    layer = case.layer()
    compiled = torch.compile(case.call, backend=passes_backend(traced), dynamic=True, fullgraph=True)
    for lengths in ((3,), (3, 5, 2, 7), (4, 4)):
        arguments = case.arguments(layer, lengths, 1)
        ours, eagers = arguments[3].clone(), arguments[3].clone()
        with torch.no_grad():
            actual = compiled(layer, *arguments[:3], ours, None)[0]
            assert_equal(actual.nan_to_num(), case.call(layer, *arguments[:3], eagers, None)[0].nan_to_num())
        assert_equal(ours.nan_to_num(), eagers.nan_to_num())
    assert len(traced.graphs) > 1
    assert not traced.declines() and traced.counts() == dict.fromkeys(ALL_PASSES, len(traced.graphs))


def test_no_tokens() -> None:
    """A batch without tokens has a graph of its own, in which there is nothing to do."""
    torch._dynamo.reset()
    case, traced = Case(), Traced()
    layer = case.layer()
    streams, ids, batch, pool, _ = case.arguments(layer, (0, 0), 0)
    before = pool.nan_to_num()
    with torch.no_grad():
        compiled = torch.compile(case.call, backend=passes_backend(traced), dynamic=True, fullgraph=True)
        assert compiled(layer, streams, ids, batch, pool, None)[0].shape == streams.shape
    assert torch.equal(pool.nan_to_num(), before) and not traced.declines()


def test_without_the_merge_the_pool_is_updated_by_the_graph() -> None:
    torch._dynamo.reset()
    case, traced = Case(accepted=True), Traced()
    layer = case.layer()
    arguments = case.arguments(layer, (3, 0, 11, 1), 2)
    ours, eagers = arguments[3].clone(), arguments[3].clone()
    with torch.no_grad():
        backend = passes_backend(traced, Options(merge_gate_conv=False))
        compiled = torch.compile(case.call, backend=backend, dynamic=True, fullgraph=True)
        actual = compiled(layer, *arguments[:3], ours, None)[0]
        assert_equal(actual, case.call(layer, *arguments[:3], eagers, None)[0])
    assert_equal(ours.nan_to_num(), eagers.nan_to_num())
    assert "ple.packed_short_conv.default" in traced.targets() and "aten.index_put.default" in traced.targets()


def test_through_inductor() -> None:
    """The whole backend: the pool is updated in place, in generated code."""
    torch._dynamo.reset()
    case = Case(boundaries=True)
    layer = case.layer()
    compiled = torch.compile(case.call, backend="ple", options={"strict": True}, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for seed, lengths in enumerate(COMPOSITIONS[:2]):
            arguments = case.arguments(layer, lengths, seed)
            ours, eagers = arguments[3].clone(), arguments[3].clone()
            actual = compiled(layer, *arguments[:3], ours, arguments[4])
            expected = case.call(layer, *arguments[:3], eagers, arguments[4])
            for a, e in zip((*actual, ours), (*expected, eagers), strict=True):
                assert_equal(a.nan_to_num(), e.nan_to_num())


def test_debug_names_a_placeholder_in_the_context() -> None:
    torch._dynamo.reset()
    case, traced = Case(), Traced()
    layer = case.layer()
    arguments = case.arguments(layer, (3, 1, 4), 3)
    backend = passes_backend(traced, Options(debug=True))
    compiled = torch.compile(case.call, backend=backend, dynamic=True, fullgraph=True)
    with torch.no_grad():
        expected = case.call(layer, *arguments[:3], arguments[3].clone(), None)[0]
        assert_equal(compiled(layer, *arguments[:3], arguments[3].clone(), None)[0], expected)
        arguments[2].ngram_context[1, 0] = -1
        with pytest.raises(ValueError, match=r"ngram_context\[1, 0\] is -1"):
            compiled(layer, *arguments)
    assert "ple.checked_context.default" in traced.targets()


@pytest.mark.parametrize("expanded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_one_graph_for_any_composition(expanded: bool) -> None:
    """Two more are Dynamo's, which specialises on sizes of 1: one request, and one token. None comes of a pass."""
    torch._dynamo.reset()
    case, traced = Case(accepted=True, boundaries=True), Traced()
    layer = case.layer()
    backend = passes_backend(traced, expanded=expanded)
    compiled = torch.compile(case.call, backend=backend, dynamic=True, fullgraph=True)
    several = [(3, 1, 4, 2, 8), (3, 5), (1, 1), (2, 0), (1, 1, 1), (0, 0, 9), (4, 5, 0, 7), (1,) * 16, (0,) * 5 + (7,)]
    graphs = []
    for lengths in (*several, (7,), (30,), (1,)):
        with torch.no_grad():
            compiled(layer, *case.arguments(layer, lengths, 0))
        graphs.append(len(traced.graphs))
    assert graphs == [1] * len(several) + [2, 2, 3]
    assert not traced.declines()


@pytest.mark.parametrize("decode", [True, False], ids=["decode", "mixed"])
def test_changing_contents_in_the_same_tensors(decode: bool) -> None:
    """What tests/gpu replays a thousand times as a CUDA graph."""
    torch._dynamo.reset()
    step, traced = ReplayedStep("cpu", decode=decode), Traced()
    compiled = torch.compile(step.layer, backend=passes_backend(traced), dynamic=True, fullgraph=True)
    with torch.no_grad():
        step.run(lambda: compiled(*step.arguments(step.pool)), 15)
    assert len(traced.graphs) == 1 and not traced.declines()
