"""What servers pass to packed layers: one tensor for the states of all layers, counts from which flags are computed.

All passes match, and the states are written back into the large tensor in place.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

from examples.reference import packed
from examples.reference.packed import PackedBatch
from ple_compile import pipeline
from tests.graphs import Traced, passes_backend
from tests.test_matrix import assert_equal
from tests.test_packed_matrix import ALL_PASSES, Case

CASE, LENGTHS = Case(), (5, 7, 0, 2, 1, 1, 12)
LAYERS = 3

# How the states of all layers lie in one tensor (from [layers, slots, C, W]), and one layer's view of it.
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, int], Tensor]]] = {
    "layers first": (lambda states: states, lambda states, layer: states[layer]),
    "from the end": (lambda states: states, lambda states, layer: states[layer - LAYERS]),
    "slots first": (lambda states: states.transpose(0, 1).contiguous(), lambda states, layer: states[:, layer]),
    "columns first": (lambda states: states.mT.contiguous(), lambda states, layer: states[layer].transpose(1, 2)),
    "beside other columns": (lambda states: F.pad(states, (1, 4)), lambda states, layer: states[layer, :, :, 1:-4]),
    "every other slot": (
        lambda states: states.repeat_interleave(2, dim=1),
        lambda states, layer: states.narrow(0, layer, 1).squeeze(0)[::2],
    ),
}


def arguments() -> tuple:
    """(layer, streams, ids, batch, states)"""
    layer = CASE.layer()
    streams, ids, batch, pool, _ = CASE.arguments(layer, LENGTHS, 1)
    return layer, streams, ids, batch, torch.stack([pool + i for i in range(LAYERS)]).nan_to_num()


def run(call: Callable, *inputs: object, states: Tensor, dynamic: bool = False) -> Traced:
    """Compile and run; results and states must equal eager's, whatever was replaced.

    Sizes are not what is tested here, and symbolic ones cost PyTorch several times the time.
    """
    torch._dynamo.reset()
    traced, ours, eagers = Traced(), states.clone(), states.clone()
    with torch.no_grad():
        compiled = torch.compile(call, backend=passes_backend(traced), dynamic=dynamic, fullgraph=True)
        actual, expected = compiled(*inputs, ours), call(*inputs, eagers)
    for a, e in zip((*actual, ours), (*expected, eagers), strict=True):
        assert_equal(a, e)
    return traced


def assert_all_match(traced: Traced, layers: int = 1) -> None:
    assert not traced.declines() and traced.counts() == dict.fromkeys(ALL_PASSES, layers)
    assert not {"aten.index_put.default", "aten.copy_.default", "aten.select_scatter.default"} & set(traced.targets())


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_tensor_of_states(name: str) -> None:
    make, view = LAYOUTS[name]
    layer, streams, ids, batch, states = arguments()

    def two_layers(streams: Tensor, ids: Tensor, batch: PackedBatch, states: Tensor) -> tuple[Tensor]:
        streams = streams + layer(streams, ids, batch, view(states, 0))
        return (streams + layer(streams, ids, batch, view(states, 2)),)

    traced = run(two_layers, streams, ids, batch, states=make(states), dynamic=name == "slots first")
    assert_all_match(traced, layers=2)


def test_slots_of_all_layers_in_one_dim() -> None:
    layer, streams, ids, batch, states = arguments()

    def call(streams: Tensor, ids: Tensor, batch: PackedBatch, states: Tensor) -> tuple[Tensor]:
        return (layer(streams, ids, batch, states.unflatten(0, (LAYERS, -1))[1]),)

    assert_all_match(run(call, streams, ids, batch, states=states.flatten(0, 1)))


def test_views_and_flags_made_anew_at_every_use() -> None:
    layer, streams, ids, batch, states = arguments()

    def call(streams: Tensor, ids: Tensor, batch: PackedBatch, computed: Tensor, states: Tensor) -> tuple[Tensor]:
        gated, normed = layer.gate(streams, layer.ple_embedding(ids, packed.older_tokens(ids, batch)))
        begun = batch._replace(has_initial_state=computed > 0)
        out = gated + packed.short_conv(normed, layer.conv1d.weight, layer.ngram_size, states[1], begun)
        packed.store_columns(normed, layer.reach, states[1], batch._replace(has_initial_state=computed > 0))
        return (out,)

    assert_all_match(run(call, streams, ids, batch, batch.has_initial_state * 5, states=states))


COMPUTED: dict[str, Callable[[PackedBatch, Tensor, Tensor, Tensor], PackedBatch]] = {
    "flags of counts": lambda batch, computed, table, tokens: batch._replace(has_initial_state=computed > 0),
    "starts of lengths": lambda batch, computed, table, tokens: batch._replace(
        query_start_loc=F.pad(table[:, 1].cumsum(0), (1, 0))
    ),
    "slots of a table": lambda batch, computed, table, tokens: batch._replace(state_indices=table[:, 0]),
    "context of all tokens": lambda batch, computed, table, tokens: batch._replace(
        ngram_context=tokens.gather(1, computed[:, None] + torch.arange(2))
    ),
    "all of it": lambda batch, computed, table, tokens: batch._replace(
        query_start_loc=F.pad(table[:, 1].cumsum(0), (1, 0)),
        ngram_context=tokens.gather(1, computed[:, None] + torch.arange(2)),
        state_indices=table[:, 0],
        has_initial_state=computed > 0,
    ),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_the_graph_computes(name: str) -> None:
    layer, streams, ids, batch, states = arguments()
    computed = batch.has_initial_state * 5
    table = torch.stack([batch.state_indices, batch.query_start_loc.diff()], dim=1)
    tokens = torch.randint(0, 9, (len(LENGTHS), 20), generator=torch.Generator().manual_seed(0))

    def call(batch: PackedBatch, computed: Tensor, table: Tensor, tokens: Tensor, states: Tensor) -> tuple[Tensor]:
        return (layer(streams, ids, COMPUTED[name](batch, computed, table, tokens), states[1]),)

    assert_all_match(run(call, batch, computed, table, tokens, states=states, dynamic=name == "all of it"))


def test_accepted_tokens_of_drafts() -> None:
    case = Case(accepted=True)
    layer = case.layer()
    streams, ids, batch, pool, _ = case.arguments(layer, LENGTHS, 1)

    def call(drafts: Tensor, rejected: Tensor, pool: Tensor) -> tuple[Tensor]:
        return (layer(streams, ids, batch._replace(num_accepted_tokens=drafts - rejected + 1), pool),)

    drafts = torch.tensor([3, 3, 0, 1, 2, 0, 3])
    assert_all_match(run(call, drafts, drafts // 2, states=pool.nan_to_num()))


READ: dict[str, tuple[Callable, str]] = {
    "before": (lambda states, run: (states.sum(), run(states[1]))[::-1], "the pool, or a view that may overlap it"),
    "after": (lambda states, run: (run(states[1]), states.sum()), "the pool, or a view that may overlap it"),
    "the slots themselves": (lambda states, run: (run(states[1]), states[1, 2:].sum()), "a view that may overlap it"),
    "another layer is scaled": (lambda states, run: (run(states[1]), states[2].mul_(2.0).sum()), "another part of"),
    "a copy of the pool": (lambda states, run: (run(states[1] + 0),), "no pool of states [slots, channels, window]"),
}


@pytest.mark.parametrize("name", READ)
def test_states_that_cannot_be_written_in_place(name: str) -> None:
    """The reason says why, and nothing is lost."""
    use, reason = READ[name]
    layer, streams, ids, batch, states = arguments()

    def call(states: Tensor) -> tuple:
        return use(states, lambda pool: layer(streams, ids, batch, pool))

    traced = run(call, states=states)
    assert reason in dict(traced.declines())["merge_gate_conv"]
    assert "ple.packed_gate_conv_.default" not in traced.targets()


def test_another_layer_is_read() -> None:
    layer, streams, ids, batch, states = arguments()

    def call(states: Tensor) -> tuple[Tensor, Tensor]:
        return layer(streams, ids, batch, states[1]), states[0].sum() + states[2].sum()

    traced = run(call, states=states)
    assert not traced.declines() and traced.counts() == dict.fromkeys(ALL_PASSES, 1)


@pytest.mark.parametrize("name", ["slots first", pytest.param("columns first", marks=pytest.mark.slow)])
def test_generated_code_hands_the_op_the_states_themselves(
    name: str, fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline.FusePass, "expand", lambda self, graph: None)  # as on a GPU
    make, view = LAYOUTS[name]
    layer, streams, ids, batch, states = arguments()
    ours, eagers = make(states).clone(), make(states).clone()

    def call(streams: Tensor, states: Tensor) -> Tensor:
        return streams + layer(streams, ids, batch, view(states, 1))

    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(call, backend="ple", options={"strict": True}, dynamic=False, fullgraph=True)
        actual, (code,) = run_and_get_code(compiled, streams, ours)
        assert_equal(actual, call(streams, eagers))
    assert_equal(ours, eagers)
    (line,) = [line for line in code.splitlines() if "= torch.ops.ple.packed_gate_conv_.default(" in line]
    assert "reinterpret_tensor(arg" in line
    assert ".copy_(" not in code and "as_strided_scatter" not in code
