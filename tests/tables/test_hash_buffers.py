"""Hash buffers that do not fit together: a ValueError names buffer, value and remedy before anything changes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ple_compile
from examples.reference.config import Config as ReferenceConfig
from examples.reference.packed import PackedBatch, PackedPLE
from ple_compile.tables.hash_buffers import check_graph_hashes, check_hash_buffers
from tests.ple_cases import Case

Change = Callable[[Tensor], Tensor]

# What was done to one buffer of a layer with bigrams and trigrams of two heads each, and what the error says of it.
WRONG: dict[str, tuple[str, Change, str]] = {
    "one offset short": (
        "ngram_heads_offsets",
        lambda b: b[:-1],
        r"int64 of shape \[3\]; expected \[4\], one for each of",
    ),
    "one size short": (
        "ngram_heads_vocab_sizes",
        lambda b: b[:-1],
        r"int64 of shape \[3\]; expected \[4\], one for each",
    ),
    "twice the multipliers": ("layer_multipliers", lambda b: b.repeat(2), r"int64 of shape \[6\]; expected \[(3|N)\]"),
    "one multiplier": ("layer_multipliers", lambda b: b[:1], r"int64 of shape \[1\]; expected \[(3|N)\]"),
    "int32 multipliers": (
        "layer_multipliers",
        lambda b: b.int(),
        r"int32 of shape \[3\]; expected a vector of torch.int64",
    ),
    "float sizes": (
        "ngram_heads_vocab_sizes",
        lambda b: b.double(),
        r"float64 of shape \[4\]; expected a vector of torch",
    ),
    "offsets as a row": (
        "ngram_heads_offsets",
        lambda b: b[None],
        r"int64 of shape \[1, 4\]; expected a vector of torch",
    ),
}
MODELS = ("transformers", "reference", "packed")


def a_layer(model: str) -> nn.Module:
    if model == "packed":
        return PackedPLE(ReferenceConfig.from_transformers(Case().hf_config()), 0).eval()
    return Case(model=model).layer()


def wrong_layer(model: str, fault: str) -> tuple[nn.Module, str]:
    """A layer with one wrong buffer, and the pattern of the message."""
    name, change, told = WRONG[fault]
    layer = a_layer(model)
    buffers = layer.ple_embedding._buffers
    buffers[name] = change(buffers[name])
    return layer, rf"ple_embedding.{name} is torch.{told}.*load the checkpoint that goes with it"


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("model", MODELS)
def test_a_model_with_wrong_hash_buffers(model: str, fault: str) -> None:
    layer, message = wrong_layer(model, fault)
    calls: tuple[Callable, ...] = (ple_compile.compile, ple_compile.explain, ple_compile.offload_tables)
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call(nn.ModuleDict({"ple": layer}))
    assert all(module._compiled_call_impl is None for module in layer.modules())


def test_a_model_that_was_compiled_before_stays_compiled() -> None:
    model = ple_compile.compile(nn.ModuleDict({"ple": Case().layer()}))
    compiled, embedding = model["ple"]._compiled_call_impl, model["ple"].ple_embedding
    embedding.layer_multipliers = embedding.layer_multipliers.int()
    with pytest.raises(ValueError, match="layer_multipliers is torch.int32"):
        ple_compile.compile(model)
    assert model["ple"]._compiled_call_impl is compiled
    ple_compile.restore(model)


def test_other_numbers_of_heads_and_orders_fit() -> None:
    for case in (Case(ngram_size=2, heads_per_ngram=1), Case(ngram_size=4, heads_per_ngram=8), Case(model="reference")):
        check_hash_buffers(case.layer())


@pytest.mark.parametrize("fault", ["one offset short", "twice the multipliers", "int32 multipliers"])
def test_a_graph_with_wrong_hash_buffers(fault: str) -> None:
    layer, message = wrong_layer("transformers", fault)
    found = {f"L['self'].ple.{name}": buffer for name, buffer in layer.named_buffers()}
    with pytest.raises(ValueError, match=message):
        check_graph_hashes(list(found), list(found.values()))


@torch.no_grad()
@pytest.mark.parametrize("model", MODELS)
def test_wrong_hash_buffers_through_torch_compile(fresh_dynamo: None, model: str) -> None:
    layer, message = wrong_layer(model, "int32 multipliers")
    streams, ids, _ = Case(batch=1).inputs()
    arguments: tuple = (streams, ids, None)
    if model == "packed":
        starts, context, slots = torch.tensor([0, 7]), torch.full((1, 2), 3), torch.tensor([1])
        batch = PackedBatch(starts, context, slots, torch.tensor([False]))
        arguments = (streams[0], ids[0], batch, torch.zeros(3, streams.shape[-1], layer.reach))
    with pytest.raises(Exception, match=message):
        torch.compile(layer, backend="ple")(*arguments)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
@pytest.mark.parametrize("road", ["compile", "torch.compile"])
def test_token_ids_of_another_type(no_codegen: None, road: str, dtype: torch.dtype) -> None:
    """Eager casts them silently; ids above 2**24 are not whole in float32."""
    case = Case()
    layer, (streams, ids, _) = case.layer(), case.inputs()
    compiled = ple_compile.compile(layer) if road == "compile" else torch.compile(layer, backend="ple")
    with pytest.raises(Exception, match=f"input_ids, which are hashed to n-gram ids, are {dtype}; pass int32 or int64"):
        compiled(streams, ids.to(dtype), None)
    ple_compile.restore(layer)
    layer(streams, ids.to(dtype), None)
