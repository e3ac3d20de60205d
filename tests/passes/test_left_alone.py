"""What must not be rewritten: look-alikes that differ in one place, and intermediates that someone else reads."""

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding, Qwen4ExpTextPLELayer

from tests.graphs import Traced, passes_backend
from tests.ple_cases import EOS, Case


def compiled_and_eager(call: Callable, *args: Any) -> tuple[Traced, Any, Any]:
    torch._dynamo.reset()
    found = Traced()
    with torch.no_grad():
        actual = torch.compile(call, backend=passes_backend(found))(*args)
        return found, actual, call(*args)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x.float() * scale_of(x) * (1.0 + weight.float())


def scale_of(x: Tensor) -> Tensor:
    return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)


def gate(
    layer: nn.Module,
    streams: Tensor,
    embeddings: Tensor,
    *,
    clamp: float = 1e-6,
    scale: float | None = None,
    sign: Callable[[Tensor], Tensor] = torch.sign,
    weigh: Callable[[Tensor], Tensor] = lambda opening: opening,
    **norms: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """transformers' gate with one place to change at a time; returns gated and normed side by side."""

    def norm(x: Tensor, module: nn.Module) -> Tensor:
        (name,) = [name for name in ("norm_key", "norm_query", "norm_conv") if getattr(layer, name) is module]
        weight = module.weight.view(-1, layer.hidden_size)
        return norms.get(name, rms_norm)(x.unflatten(-1, weight.shape), weight).flatten(-2).to(x.dtype)

    split = (layer.hc_count, layer.hidden_size)
    key = norm(layer.key_proj(embeddings), layer.norm_key).unflatten(-1, split)
    query = norm(streams, layer.norm_query).unflatten(-1, split)
    dot = (key * query).sum(-1, keepdim=True) / (math.sqrt(layer.hidden_size) if scale is None else scale)
    opening = weigh(torch.sigmoid(dot.abs().clamp_min(clamp).sqrt() * sign(dot)))
    gated = (opening * layer.value_proj(embeddings).unsqueeze(-2)).flatten(-2)
    return torch.cat([gated, norm(gated, layer.norm_conv)], dim=-1)


DIFFERS = "differs from the PLE gate"


@pytest.mark.parametrize(
    "change, reason",
    [
        ({}, None),
        ({"clamp": 1e-5}, DIFFERS),
        ({"scale": 6.0}, DIFFERS),
        ({"sign": lambda d: torch.where(d >= 0, 1.0, -1.0)}, DIFFERS),  # differs only where the dot product is zero
        ({"weigh": lambda opening: opening * torch.linspace(1, 2, opening.shape[-2])[:, None]}, DIFFERS),
    ],
    ids=["the gate", "clamp", "scale", "sign of zero", "a weight for each stream"],
)
@pytest.mark.parametrize("dtype, length", [("float32", 7), ("float16", 1)])
def test_gates_that_differ_in_one_constant(change: dict, reason: str | None, dtype: str, length: int) -> None:
    found = compiled_gate(Case(dtype=dtype, length=length), **change)
    assert found.counts().get("fuse_gate", 0) == (reason is None)
    if reason is not None:
        assert [name for name, why in found.declines() if reason in why] == ["fuse_gate"]


@pytest.mark.parametrize("change", [{}, {"clamp": 1e-5}, {"scale": 6.0}], ids=["the gate", "clamp", "scale"])
def test_a_gate_behind_the_gate_itself(change: dict) -> None:
    """What was found out about the first holds for equal ones alone."""
    case = Case()
    layer = case.layer()
    streams, _, _ = case.inputs()
    embeddings = torch.randn(2, case.length, layer.key_proj.in_features)

    def both(s: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        return gate(layer, s + 1, e), gate(layer, s, e, **change)

    found, actual, expected = compiled_and_eager(both, streams, embeddings)
    torch.testing.assert_close(actual, expected)
    assert found.counts()["fuse_gate"] == 1 + (not change)
    assert any(DIFFERS in why for _, why in found.declines()) == bool(change)


def compiled_gate(case: Case, **change: Any) -> Traced:
    """Compile a gate; its results must be eager's, in 16 bits 99.9 % of them bit for bit."""
    layer = case.layer()
    streams, _, _ = case.inputs()
    embeddings = torch.randn(2, case.length, layer.key_proj.in_features).to(case.storage_dtype)
    found, actual, expected = compiled_and_eager(lambda s, e: gate(layer, s, e, **change), streams, embeddings)
    if case.dtype == "float32":
        torch.testing.assert_close(actual, expected)
    else:
        assert (actual == expected).float().mean() >= 0.999
    return found


OTHER_NORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "no eps": lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * (1 + w),
    "small values dropped": lambda x, w: torch.where(x.abs() < 1e-4, 0, x) * scale_of(x) * (1 + w),
    "eps outside the root": lambda x, w: x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-6) * (1 + w),
    "eps outside the mean": lambda x, w: x * torch.rsqrt((x.square().sum(-1, keepdim=True) + 1e-6) / 32) * (1 + w),
    "eps twice": lambda x, w: x * torch.rsqrt(torch.add(x.square().mean(-1, keepdim=True), 1e-6, alpha=2)) * (1 + w),
    "eps as a bound": lambda x, w: x * x.square().mean(-1, keepdim=True).clamp_min(1e-6).rsqrt() * (1 + w),
    "twice as much": lambda x, w: 2 * rms_norm(x, w),
    "a bias": lambda x, w: rms_norm(x, w) + w,
    "the weight squared": lambda x, w: x * scale_of(x) * w * w,
    "one weight for all streams": lambda x, w: rms_norm(x, w[:1]),
    "the weight of the token": lambda x, w: rms_norm(x, w + x.mean(1, keepdim=True)),
    "the mean taken off": lambda x, w: (x - x.mean(-1, keepdim=True)) * scale_of(x) * (1 + w),
    "all streams at once": lambda x, w: rms_norm(x.flatten(-2), w.flatten()).unflatten(-1, w.shape),
    "the mean of magnitudes": lambda x, w: x / (x.abs().mean(-1, keepdim=True) + 1e-6) * (1 + w),
    "no root": lambda x, w: x / (x.square().mean(-1, keepdim=True) + 1e-6) * (1 + w),
    "squares of something else": lambda x, w: x * scale_of(x.roll(1, -1) + x) * (1 + w),
}
PLACES = ["norm_key", "norm_query", "norm_conv"]


@pytest.mark.parametrize("name", OTHER_NORMS)
def test_norms_that_differ(name: str) -> None:
    """In one of the three places; with PLE_MATRIX=full in each."""
    places = PLACES if os.environ.get("PLE_MATRIX") == "full" else [PLACES[list(OTHER_NORMS).index(name) % 3]]
    for place in places:
        found = compiled_gate(Case(length=4), **{place: OTHER_NORMS[name]})
        assert not found.counts() and [pass_name for pass_name, _ in found.declines()] == ["fuse_gate"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "norm, fused",
    [
        (rms_norm, True),
        (lambda x, w: x.float() * scale_of(x) * (1.0 + w).float(), True),  # weights that were rounded before
        (lambda x, w: (x.float() * scale_of(x)).to(x.dtype).float() * (1.0 + w.float()), False),
        (lambda x, w: (x.float() * scale_of(x)).to(x.dtype) * (1.0 + w), False),
        (lambda x, w: x * scale_of(x).to(x.dtype) * (1.0 + w), False),
        (lambda x, w: x.float() * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1.0 + w.float()), False),
        (lambda x, w: (x.float() * scale_of(x) * (1.0 + w.float())).to(torch.float8_e5m2), False),
    ],
    ids=["float32", "1 + w", "before the weight", "product", "scale", "squares", "8 bits"],
)
def test_norms_that_round_elsewhere(norm: Callable, fused: bool, dtype: str) -> None:
    found = compiled_gate(Case(dtype=dtype, length=24, hidden_size=24), **dict.fromkeys(PLACES, norm))
    assert found.counts().get("fuse_gate", 0) == fused
    assert fused or ["rounds at other points" in why for _, why in found.declines()] == [True]


def test_a_signed_root_that_is_no_gate() -> None:
    found, _, _ = compiled_and_eager(lambda x: x.abs().clamp_min(1e-6).sqrt() * x.sign(), torch.randn(4, 8))
    assert found.counts() == {} and not found.declines()


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(bias=True), "bias"),
        (dict(stride=2), "stride"),
        (dict(activation=F.gelu), "differs from silu"),
        (dict(shift=1), "differs from silu"),
    ],
    ids=["bias", "stride", "activation", "shift"],
)
def test_convolutions_that_are_not_ours(change: dict, reason: str) -> None:
    conv = nn.Conv1d(16, 16, 4, groups=16, dilation=3, bias=change.get("bias", False), stride=change.get("stride", 1))
    activation, shift = change.get("activation", F.silu), change.get("shift", 0)

    def call(x: Tensor) -> Tensor:
        return activation(conv(F.pad(x.mT, (9 - shift, shift)))).mT

    found, actual, expected = compiled_and_eager(call, torch.randn(2, 7, 16))
    torch.testing.assert_close(actual, expected)
    assert found.counts() == {}
    assert [name for name, why in found.declines() if reason in why] == ["fuse_short_conv"]


def test_a_convolution_that_is_read_before_its_activation() -> None:
    conv = nn.Conv1d(16, 16, 4, groups=16, dilation=3, bias=False)

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        convolved = conv(F.pad(x.mT, (9, 0)))
        return F.silu(convolved), convolved.relu()

    found, actual, expected = compiled_and_eager(call, torch.randn(2, 7, 16))
    torch.testing.assert_close(actual, expected)
    assert found.counts() == {} and "more than the activation is read" in found.declines()[0][1]


@pytest.mark.parametrize("lags, read", [((9, 6, 3, 0), False), ((9, 6, 3, 0), True), ((9, 6, 4, 0), False)])
def test_a_sum_of_taps(lags: tuple[int, ...], read: bool) -> None:
    """Fused where nobody reads the sum itself; other lags than multiples of a dilation are no convolution."""
    weight = torch.randn(16, 4)

    def call(x: Tensor) -> tuple[Tensor, ...]:
        x = F.rms_norm(x, (16,))
        shifted = [F.pad(x, (0, 0, lag, 0))[:, : x.shape[1]] for lag in lags]
        total = sum(s * weight[:, tap] for tap, s in enumerate(shifted))
        return (F.silu(total), total.relu()) if read else (F.silu(total),)

    found, actual, expected = compiled_and_eager(call, torch.randn(2, 12, 16))
    torch.testing.assert_close(actual, expected)
    assert found.counts() == ({"fuse_short_conv": 1} if lags == (9, 6, 3, 0) and not read else {})
    assert ["more than the activation is read" in why for _, why in found.declines()] == [True] * read


def test_a_convolution_that_keeps_the_channels_first() -> None:
    conv = nn.Conv1d(16, 16, 4, groups=16, dilation=3, bias=False)
    found, actual, expected = compiled_and_eager(lambda x: F.silu(conv(F.pad(x.mT, (9, 0)))), torch.randn(2, 7, 16))
    torch.testing.assert_close(actual, expected)
    assert found.counts() == {"fuse_short_conv": 1}


def test_a_convolution_without_dilation_is_no_candidate() -> None:
    conv = nn.Conv1d(16, 16, 4, groups=16, bias=False)
    found, _, _ = compiled_and_eager(lambda x: F.silu(conv(F.pad(x.mT, (3, 0)))).mT, torch.randn(2, 7, 16))
    assert found.counts() == {} and not found.declines()


class OtherIds(Qwen4ExpTextNGramEmbedding):
    """transformers' ids, changed afterwards."""

    change: Callable[[Tensor], Tensor]

    def _shift_right_ignore_eos(self, token_ids: Tensor, shift: int) -> Tensor:
        return self.change(super()._shift_right_ignore_eos(token_ids, shift))


@pytest.mark.parametrize(
    "change, matches",
    [
        (lambda t: t, 1),
        (lambda t: torch.where(t == 6, 7, t), 0),  # one token of the vocabulary
        (lambda t: torch.where(t == EOS, 0, t), 0),
    ],
)
def test_ids_that_differ_for_one_token(change: Callable, matches: int) -> None:
    case = Case()
    embedding = OtherIds(case.hf_config(), 48, 1)
    embedding.change = change
    nn.init.normal_(embedding.ngram_embedding.weight)
    _, ids, _ = case.inputs()
    found, actual, expected = compiled_and_eager(lambda i: embedding(i, None), ids)
    torch.testing.assert_close(actual, expected)
    assert found.counts().get("fuse_ngram_ids", 0) == matches
    assert len(found.declines()) == 1 - matches


def test_heads_that_do_not_divide_by_the_orders() -> None:
    multipliers, sizes, offsets = (torch.tensor(numbers) for numbers in ([3, 5, 7], [11, 13, 17], [0, 11, 24]))
    table = torch.randn(41, 4)

    def call(tokens: Tensor) -> Tensor:
        one, two = (F.pad(tokens, (shift, 0), value=EOS)[:, : tokens.shape[1]] for shift in (1, 2))
        pairs = (tokens * multipliers[0]) ^ (one * multipliers[1])
        mixed = torch.stack([pairs, pairs, pairs ^ (two * multipliers[2])], dim=-1)
        return F.embedding(mixed % sizes + offsets, table)

    found, actual, expected = compiled_and_eager(call, torch.randint(50, (2, 9)))
    torch.testing.assert_close(actual, expected)
    assert found.counts() == {} and "no whole number of heads" in found.declines()[0][1]


def test_what_is_left_alone_does_not_keep_the_next_from_being_fused() -> None:
    case = Case()
    changed, ours = (cls(case.hf_config(), 48, 1) for cls in (OtherIds, Qwen4ExpTextNGramEmbedding))
    changed.change = lambda t: t + 1
    for embedding in (changed, ours):
        nn.init.normal_(embedding.ngram_embedding.weight)
    _, ids, _ = case.inputs()
    found, actual, expected = compiled_and_eager(lambda i: (changed(i, None), ours(i, None)), ids)
    torch.testing.assert_close(actual, expected)
    assert found.counts() == {"fuse_ngram_ids": 1} and len(found.declines()) == 1


# What a hook may read: the pass that then declines, if one does.
READ = {
    "norm_key": "fuse_gate",
    "norm_query": "fuse_gate",
    "conv1d": "fuse_short_conv",
    "norm_conv": "merge_gate_conv",
    "key_proj": None,
    "value_proj": None,
    "ple_embedding": None,
}


@pytest.mark.parametrize("module", READ)
def test_intermediates_that_a_hook_reads(module: str) -> None:
    case = Case()
    layer = case.layer()
    read: list[Tensor] = []
    layer.get_submodule(module).register_forward_hook(lambda m, args, output: read.append(output))

    def call(*args: Tensor) -> tuple[Tensor, Tensor]:
        read.clear()
        return case.call(layer, *args, None), read[0]

    found, actual, expected = compiled_and_eager(call, *case.inputs())
    for mine, eager in zip(actual, expected):
        torch.testing.assert_close(mine, eager)
    assert [name for name, _ in found.declines()] == ([READ[module]] if READ[module] else [])


@pytest.mark.parametrize("what", ["bias", "tied", "mixed types"])
def test_projections_that_are_not_merged(what: str) -> None:
    case = Case(hc_count=2)
    layer = case.layer()
    if what == "bias":
        layer.key_proj = nn.Linear(layer.key_proj.in_features, case.width, bias=True)
    elif what == "tied":
        # Both read one parameter: the value is the first stream's key.
        shared = layer.key_proj.weight

        class First(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return F.linear(x, shared)[..., : case.hidden_size]

        layer.value_proj = First()
    else:
        layer.value_proj.to(torch.bfloat16)
        original = layer.value_proj.forward
        layer.value_proj.forward = lambda x: original(x.bfloat16()).float()
    found, actual, expected = compiled_and_eager(lambda *args: case.call(layer, *args, None), *case.inputs())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert "merge_kv_proj" not in found.counts()
    (declined,) = [event for event in found.reports[0].declines() if event.pass_name == "merge_kv_proj"]
    assert declined.layer.endswith("key_proj")


def test_a_model_without_ple_is_untouched() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.SiLU())
    found, actual, expected = compiled_and_eager(model, torch.arange(4))
    torch.testing.assert_close(actual, expected)
    assert found.before == found.after and not found.reports[0].events


def test_masks_on_one_of_the_two_stay_outside() -> None:
    class MasksNormedOnly(Qwen4ExpTextPLELayer):
        def forward(self, hidden_states: Tensor, input_ids: Tensor, cache: Any, conv_mask: Any = None) -> Tensor:
            embeddings = self.ple_embedding(input_ids, cache)
            both = gate(self, hidden_states, embeddings)
            gated, normed = both.chunk(2, dim=-1)
            return gated + self._short_conv(normed * conv_mask.unsqueeze(-1), cache)

    case = Case(mask=True)
    layer = MasksNormedOnly(case.hf_config(), 1, 0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    found, actual, expected = compiled_and_eager(lambda *args: case.call(layer, *args, None), *case.inputs())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert found.counts()["fuse_gate"] == 1 and "merge_gate_conv" not in found.counts()


def hashed(tokens: Tensor, other: Tensor) -> Tensor:
    """Ids of a sort: an xor of products under a remainder."""
    mixed = (tokens * 3) ^ (other * torch.tensor([5, 7])[0])
    return mixed.unsqueeze(-1) % torch.tensor([97, 101]) + torch.tensor([0, 97])


@pytest.mark.parametrize(
    "call",
    [
        lambda x, ids, table: torch.sigmoid(x.to(torch.float8_e4m3fn).float() * 2),
        lambda x, ids, table: F.embedding(hashed(torch.arange(9)[ids], ids), table),
        lambda x, ids, table: F.embedding(hashed(ids.gather(1, ids.clamp_max(6)), ids), table),
        lambda x, ids, table: F.embedding(hashed(torch.unique(ids)[None], torch.unique(ids)[None]), table),
    ],
    ids=["float8", "a lookup before the hash", "a gather by token", "a size known at run time"],
)
def test_graphs_on_which_a_probe_cannot_run(call: Callable) -> None:
    ids = torch.randint(0, 7, (2, 7))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        _, actual, expected = compiled_and_eager(call, torch.randn(4), ids, torch.randn(300, 8))
    torch.testing.assert_close(actual, expected)


class Bounded(nn.Module):
    """What a module returns, up to a bound."""

    def __init__(self, inner: nn.Module, bound: Callable[[Tensor], Tensor]):
        super().__init__()
        self.inner, self.bound = inner, bound

    def forward(self, *args: Tensor) -> Tensor:
        return self.bound(self.inner(*args))


@pytest.mark.parametrize(
    "bound",
    [
        lambda x: x.clamp(-3000, 3000),
        lambda x: torch.minimum(x, torch.tensor(3000.0)),
        lambda x: torch.where(x.abs() > 3000, 0, x),
        lambda x: x.nan_to_num(0, 3000, -3000),
    ],
    ids=["clamp", "minimum", "where", "nan_to_num"],
)
@pytest.mark.parametrize("part", ["norm_key", "norm_query", "norm_conv", "conv1d"])
def test_a_bound_that_no_probe_reaches(part: str, bound: Callable[[Tensor], Tensor]) -> None:
    """It acts on these weights, and must go on to."""
    case = Case(model="transformers")
    layer = case.layer()
    streams, ids, _ = case.inputs()
    inner = getattr(layer, part)
    with torch.no_grad():
        inner.weight += 10_000
    setattr(layer, part, Bounded(inner, bound))
    found, actual, expected = compiled_and_eager(lambda s, i: layer(s, i, None), streams, ids)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert found.declines()
