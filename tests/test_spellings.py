"""Every spelling of `tests/spellings.py` is fused, or declined with a reason; the results are eager's either way."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _pytest.mark import ParameterSet
from torch import Tensor, nn

import ple_compile
from tests.documents import ROOT
from tests.graphs import Traced, passes_backend
from tests.spellings import SPELLINGS, SpelledCase
from tests.test_matrix import ALL_PASSES, assert_equal

PASSES = ALL_PASSES | {"merge_kv_proj"}
# Spellings of another layer: the pass that declines, and words of its reason; none where the op has that form too.
OTHERS: dict[tuple[str, str], tuple[str, str] | None] = {
    ("norm", "w in the place of 1 + w"): None,
    ("hidden", "nothing"): ("fuse_ngram_ids", "agree up to the token 2 back, and part at mul"),
    ("rows", "C's remainder, made positive"): ("fuse_ngram_ids", "agree up to the hash of 3 tokens"),
    ("rows", "numbers for sizes"): ("fuse_ngram_ids", "agree up to the hash of 3 tokens"),
    ("root", "copysign"): ("fuse_gate", "agree up to the root, and part at copysign"),
    ("root", "another bound"): ("fuse_gate", "agree up to the magnitude, and part at clamp"),
    ("conv", "another activation"): ("fuse_short_conv", "agree up to the convolution"),
    ("conv", "relu of slices times taps"): ("merge_gate_conv", "not by a dilated convolution"),
    ("sum", "every pair of tokens"): ("merge_gate_conv", "which is not its sum with the convolution"),
}
# The same for spellings of the layer that are not fused.
DECLINED = {
    ("projections", "one for each stream"): ("merge_kv_proj", "is no matrix product of its own"),
    ("product", "a sigmoid by hand"): ("fuse_gate", "no sigmoid follows the root"),
    ("masked", "where"): ("merge_gate_conv", "is read by where"),
    ("conv", "conv2d"): ("merge_gate_conv", "not by a dilated convolution"),
}
DECLINED |= {way: told for way, told in OTHERS.items() if told is not None}
# Spellings that are fused in float32, but round at other points in 16 bits.
ROUND_ELSEWHERE = {
    ("norm", "rounded before its weight"): ("fuse_gate", "rounds at other points"),
    ("norm", "w in the place of 1 + w"): ("fuse_gate", "rounds at other points"),
    ("dot", "einsum"): ("fuse_gate", "agree up to the query's norm"),
    ("dot", "matmul of rows and columns"): ("fuse_gate", "agree up to the query's norm"),
    ("dot", "vecdot of a scaled query"): ("fuse_gate", "agree up to the query's norm"),
    ("dot", "a mean of products"): ("fuse_gate", "agree up to the query's norm"),
    ("conv", "conv1d with padding=, cropped"): ("fuse_short_conv", "agree up to the convolution, and part at sigmoid"),
    ("conv", "slices times taps"): ("fuse_short_conv", "agree up to the padded sequence, and part at slice"),
    ("conv", "shifts times taps"): ("fuse_short_conv", "rounds at other points"),
    ("conv", "unfold"): ("fuse_short_conv", "agree up to the padded sequence, and part at unfold"),
    ("sum", "one after the other"): ("merge_gate_conv", "added first, which rounds otherwise"),
    ("sum", "the convolution first"): ("merge_gate_conv", "added first, which rounds otherwise"),
}
# What a pass that declines leaves without anything to do.
LOST = {
    "fuse_gate": {"fuse_gate", "merge_kv_proj", "merge_gate_conv"},
    "fuse_short_conv": {"fuse_short_conv", "merge_gate_conv"},
}


def run(*spelled: tuple[str, str], dynamic: bool = False, **changes: Any) -> Traced:
    """Compile a layer of these spellings; result and state must be eager's, in 16 bits 99.9 % of them bit for bit."""
    torch._dynamo.reset()
    sizes = dict(hc_count=2, hidden_size=24, kernel=3, length=5, embed_per_head=4)
    case, traced = SpelledCase(spelled=spelled, **sizes | changes), Traced()
    layer, inputs = case.layer(), case.inputs()
    ours, eagers = case.new_cache(layer), case.new_cache(layer)
    with torch.no_grad():
        compiled = torch.compile(case.call, backend=passes_backend(traced), dynamic=dynamic)
        actual = [compiled(layer, *inputs, ours), *case.states(ours)]
        expected = [case.call(layer, *inputs, eagers), *case.states(eagers)]
    if case.dtype == "float32":
        for mine, eager in zip(actual, expected, strict=True):
            assert_equal(mine, eager)
    else:
        assert torch.cat([(a == b).flatten() for a, b in zip(actual, expected, strict=True)]).float().mean() >= 0.999
    return traced


@pytest.mark.parametrize("part", SPELLINGS)
def test_spellings_compute_the_same(part: str) -> None:
    """In eager PyTorch, with masks and states."""
    case = SpelledCase(mask=True, cache="dynamic_filled", hc_count=2, hidden_size=24)
    expected = None
    for name in SPELLINGS[part]:
        if (part, name) not in OTHERS:
            layer = case.with_(spelled=((part, name),)).layer()
            with torch.no_grad():
                actual = case.call(layer, *case.inputs(), case.new_cache(layer))
            expected = actual if expected is None else expected
            assert_equal(actual, expected)


def rounds(dtype: str) -> list[list[tuple[str, str]]]:
    """All spellings that are fused in this type, one of every part at a time."""
    left = DECLINED if dtype == "float32" else DECLINED | ROUND_ELSEWHERE
    fused = {part: [(part, name) for name in ways if (part, name) not in left] for part, ways in SPELLINGS.items()}
    longest = max(map(len, fused.values()))
    return [[ways[index % len(ways)] for ways in fused.values()] for index in range(longest)]


def configurations() -> Iterator[ParameterSet]:
    """Every round in every type, with and without a state; those that run by default take turns."""
    for dtype in ("float32", "bfloat16", "float16"):
        for index, spelled in enumerate(rounds(dtype)):
            quick = [("float32", "none"), ("bfloat16", "dynamic_filled")]
            quick = quick if index % 2 == 0 else [("float32", "dynamic_filled"), ("float16", "none")]
            for cache in ("none", "dynamic_filled"):
                marks = () if (dtype, cache) in quick else (pytest.mark.slow,)
                yield pytest.param(spelled, dtype, cache, id=f"{index}-{dtype}-{cache}", marks=marks)


@pytest.mark.parametrize("spelled, dtype, cache", configurations())
def test_fused(spelled: list[tuple[str, str]], dtype: str, cache: str) -> None:
    mask, length = (cache == "none", 5) if dtype == "float32" else (False, 20)
    traced = run(*spelled, dtype=dtype, cache=cache, mask=mask, length=length)
    one_product = ("projections", "one, split") in spelled
    assert not traced.declines()
    assert traced.counts() == dict.fromkeys(PASSES - ({"merge_kv_proj"} if one_product else set()), 1)


PARTED_BY_SIZE = [("projections", "one, split"), ("dot", "matmul of rows and columns")]


@pytest.mark.parametrize(
    "spelled", [PARTED_BY_SIZE, *(pytest.param(ways, marks=pytest.mark.slow) for ways in rounds("float32"))]
)
def test_fused_with_sizes_as_symbols(spelled: list[tuple[str, str]]) -> None:
    """Sizes computed in the graph stand among the tensors that a gate is made of."""
    traced = run(*spelled, dynamic=True)
    one_product = ("projections", "one, split") in spelled
    assert not traced.declines()
    assert traced.counts() == dict.fromkeys(PASSES - ({"merge_kv_proj"} if one_product else set()), 1)


@pytest.mark.parametrize("way", DECLINED, ids=": ".join)
def test_declined(way: tuple[str, str]) -> None:
    check_declined(way, DECLINED[way], run(way, mask=way[0] == "masked"))


@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize("way", ROUND_ELSEWHERE, ids=": ".join)
def test_declined_in_16_bits(way: tuple[str, str], dtype: str) -> None:
    few = {"batch": 1, "length": 1} if way[0] == "dot" else {}
    check_declined(way, ROUND_ELSEWHERE[way], run(way, dtype=dtype, **few))


def check_declined(way: tuple[str, str], told: tuple[str, str], traced: Traced) -> None:
    name, words = told
    (first, reason), *others = traced.declines()
    assert first == name and words in reason, traced.declines()
    # A sum of taps is no convolution to the pass that would merge it with the gate.
    assert [pass_name for pass_name, _ in others] in ([], ["merge_gate_conv"])
    lost = LOST["fuse_short_conv"] if way[0] == "conv" else LOST.get(name, {name})
    assert set(traced.counts()) == PASSES - lost


def test_explain_names_the_line(no_codegen: None) -> None:
    """Through the public functions: what is left alone is told, with the line of the model that differs."""
    case = SpelledCase(spelled=(("root", "copysign"), ("conv", "unfold and einsum")))
    compiled, layer = torch.compile(case.call, backend="ple"), case.layer()
    with torch.no_grad():
        report = ple_compile.explain(compiled, layer, *case.inputs(), None)
        assert_equal(compiled(layer, *case.inputs(), None), case.call(layer, *case.inputs(), None))
    (line,) = [line for line in str(report).splitlines() if "agree up to the root, and part at copysign" in line]
    assert "spellings.py" in line


def test_the_page_tells_of_every_spelling() -> None:
    lines = (ROOT / "docs" / "spellings.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][2:]
    for (part, ways), (_, *columns) in zip(SPELLINGS.items(), rows, strict=True):
        told = [{cell.split(":")[0] for cell in column.split("; ") if cell} for column in columns]
        left, in_float32 = ({name for name in ways if (part, name) in table} for table in (DECLINED, ROUND_ELSEWHERE))
        assert told == [set(ways) - left - in_float32, in_float32, left]


class Engram(nn.Module):
    """Gate and convolution as in DeepSeek's Engram: hidden states [B, S, streams, D] and looked-up rows [B, S, E]."""

    def __init__(self, streams: int, hidden: int = 24, rows: int = 16) -> None:
        super().__init__()
        self.hidden = hidden
        self.key, self.value = nn.Linear(rows, streams * hidden), nn.Linear(rows, hidden)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(streams, hidden)) for _ in range(3))
        channels = streams * hidden
        self.conv = nn.Conv1d(channels, channels, 3, groups=channels, bias=False, padding=6, dilation=3)

    def norm(self, x: Tensor, index: int) -> Tensor:
        return F.rms_norm(x, (self.hidden,)) * self.weights[index]

    def gate(self, key: Tensor, query: Tensor, value: Tensor) -> Tensor:
        dot = (key * query).sum(-1) / math.sqrt(self.hidden)
        return (dot.abs().clamp_min(1e-6).sqrt() * dot.sign()).sigmoid().unsqueeze(-1) * value

    def forward(self, states: Tensor, rows: Tensor) -> Tensor:
        key, value = self.norm(self.key(rows).view(states.shape), 0), self.value(rows).unsqueeze(2)
        return self.finish(states, self.gate(key, self.norm(states, 1), value))

    def finish(self, states: Tensor, gated: Tensor) -> Tensor:
        normed = self.norm(gated, 2).flatten(2).transpose(1, 2)
        convolved = F.silu(self.conv(normed)[..., : states.shape[1]]).transpose(1, 2).view(states.shape)
        return states + (gated + convolved)


class EngramByStream(Engram):
    """Every stream with norms and a gate of its own; the gated values are stacked."""

    def norm(self, x: Tensor, index: int) -> Tensor:
        return F.rms_norm(x, (self.hidden,)) * self.weights[index]

    def normed(self, x: Tensor, index: int, stream: int) -> Tensor:
        return F.rms_norm(x, (self.hidden,), self.weights[index][stream])

    def gates(self, states: Tensor, rows: Tensor, value: Tensor) -> list[Tensor]:
        keys = self.key(rows).split(self.hidden, -1)
        normed = [(self.normed(k, 0, i), self.normed(states[:, :, i], 1, i)) for i, k in enumerate(keys)]
        return [self.gate(key, query, value) for key, query in normed]

    def forward(self, states: Tensor, rows: Tensor) -> Tensor:
        return self.finish(states, torch.stack(self.gates(states, rows, self.value(rows)), 2))


class EngramOfGates(EngramByStream):
    """The gates alone are stacked, and every stream of the product is normed by itself, as published."""

    def forward(self, states: Tensor, rows: Tensor) -> Tensor:
        gates = torch.stack(self.gates(states, rows, rows.new_ones(())), 2)
        return self.finish(states, gates * self.value(rows).unsqueeze(2))

    def norm(self, x: Tensor, index: int) -> Tensor:
        return torch.cat([self.normed(x[:, :, i], index, i) for i in range(x.shape[2])], -1).view(x.shape)


class EngramInOneLoop(EngramByStream):
    """Every stream is gated and normed before any is joined."""

    def forward(self, states: Tensor, rows: Tensor) -> Tensor:
        gated = self.gates(states, rows, self.value(rows))
        self.whole = torch.cat([self.normed(x, 2, i) for i, x in enumerate(gated)], -1).view(states.shape)
        return self.finish(states, torch.cat(gated, -1).view(states.shape))

    def norm(self, x: Tensor, index: int) -> Tensor:
        return self.whole


class EngramInAnotherOrder(EngramInOneLoop):
    """The last stream is joined first."""

    def gates(self, states: Tensor, rows: Tensor, value: Tensor) -> list[Tensor]:
        return super().gates(states, rows, value)[::-1]


class EngramOfDoubles(EngramByStream):
    """What is joined is not what is normed."""

    def forward(self, states: Tensor, rows: Tensor) -> Tensor:
        gated = self.gates(states, rows, self.value(rows))
        self.whole = torch.stack([self.normed(x, 2, i) for i, x in enumerate(gated)], 2)
        return self.finish(states, torch.stack([2 * x for x in gated], 2))

    def norm(self, x: Tensor, index: int) -> Tensor:
        return self.whole


class EngramOfModules(EngramByStream):
    """Every stream's weights are parameters of their own."""

    def __init__(self, streams: int, hidden: int = 24) -> None:
        super().__init__(streams, hidden)
        rows = [nn.ParameterList(nn.Parameter(row.clone()) for row in weight) for weight in self.weights]
        self.weights = nn.ModuleList(rows)

    def norm(self, x: Tensor, index: int) -> Tensor:
        return torch.stack([self.normed(x[:, :, i], index, i) for i in range(x.shape[2])], 2)


GATED_AND_CONVOLVED = {"fuse_short_conv", "fuse_gate", "merge_gate_conv"}
ENGRAMS: dict[str, tuple[Engram, set[str]]] = {
    "streams at once": (Engram(2), GATED_AND_CONVOLVED),
    "one stream": (Engram(1), GATED_AND_CONVOLVED),
    "stream by stream": (EngramByStream(2), GATED_AND_CONVOLVED),
    "gates stacked": (EngramOfGates(4), GATED_AND_CONVOLVED),
    "one loop": (EngramInOneLoop(2), GATED_AND_CONVOLVED),
    "another order": (EngramInAnotherOrder(2), {"fuse_short_conv"}),
    "doubles": (EngramOfDoubles(2), {"fuse_short_conv"}),
    "weights of its own": (EngramOfModules(2), {"fuse_short_conv"}),
}
LEFT_ALONE = {
    "another order": "differs from the PLE gate",
    "doubles": "are not joined as they are",
    "weights of its own": "share no weight",
}


@pytest.mark.parametrize("name", ENGRAMS)
def test_engram(name: str) -> None:
    torch._dynamo.reset()
    layer, fused = ENGRAMS[name]
    traced, inputs = Traced(), (torch.randn(2, 7, layer.conv.out_channels // 24, 24), torch.randn(2, 7, 16))
    with torch.no_grad():
        assert_equal(torch.compile(layer, backend=passes_backend(traced))(*inputs), layer(*inputs))
    assert set(traced.counts()) == fused, traced.declines()
    reasons = dict(traced.declines())
    assert reasons.keys() == ({"merge_kv_proj"} if "fuse_gate" in fused else {"fuse_gate"})
    assert LEFT_ALONE.get(name, "has a bias") in next(iter(reasons.values()))
