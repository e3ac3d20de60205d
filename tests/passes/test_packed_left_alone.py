"""Packed layers that differ from the reference in one place: what differs is left to the graph, with a reason."""

import inspect

import pytest
import torch

from examples.reference import packed
from ple_compile import upstream
from ple_compile.config import Config as Options
from ple_compile.passes.fuse_ngram_ids import fuse_ngram_ids
from ple_compile.report import GraphReport
from tests.graphs import Traced, passes_backend
from tests.test_matrix import assert_equal
from tests.test_packed_matrix import Case

LENGTHS = (5, 7, 0, 2, 1, 1, 12)
# function of examples/reference/packed.py, text in it, what stands there instead, the pass that declines
CHANGES = {
    "another activation": ("short_conv", "F.silu(total", "F.relu(total", "fuse_short_conv"),
    "history one column later": ("short_conv", "reach + place - lag)", "reach + place - lag + 1)", "fuse_short_conv"),
    "history of a stale slot": ("short_conv", "torch.where(has_state, from_pool, 0)", "from_pool", "fuse_short_conv"),
    "slot 0 has a convolution": ("short_conv", "(slot != 0)", "(slot != -1)", "fuse_short_conv"),
    "a tap at its request's start": ("short_conv", "place >= lag", "place > lag", "fuse_short_conv"),
    "other weights for history": ("short_conv", "weight[:, 0, tap]", "1.001 * weight[:, 0, tap]", "fuse_short_conv"),
    "empty requests write": ("store_columns", "(length > 0)", "(length > -1)", "merge_gate_conv"),
    "the update loses a column": ("store_columns", "(source < reach +", "(source < reach - 1 +", "merge_gate_conv"),
    "the update forgets old columns": ("history_and_tokens", "has_state.view", "(~has_state).view", "merge_gate_conv"),
    "slots are shifted": ("store_columns", "pool[slot] = ", "pool[slot + 1] = ", "fuse_short_conv"),
    "ids look one token further": ("older_tokens", "(token - shift)", "(token - shift - 1)", "fuse_ngram_ids"),
    "ids read the context backwards": (
        "older_tokens", "(size + place - shift).clamp(max", "(shift - place - 1).clamp(0, max", "fuse_ngram_ids"
    ),
    "requests end one token late": ("locate", "right=True", "right=False", "fuse_ngram_ids"),
}  # fmt: skip


def change(monkeypatch, function: str, old: str, new: str) -> None:
    source = inspect.getsource(getattr(packed, function))
    assert source.count(old) == 1
    namespace = dict(vars(packed))
    exec(source.replace(old, new), namespace)
    monkeypatch.setattr(packed, function, namespace[function])


def run(case: Case, options: Options | None = None, call=None, dynamic: bool = True) -> Traced:
    """Compile and run; the result and the pool must equal eager's, whatever was replaced."""
    torch._dynamo.reset()
    layer, traced, call = case.layer(), Traced(), call or case.call
    arguments = case.arguments(layer, LENGTHS, 1)
    ours, eagers = arguments[3].clone(), arguments[3].clone()
    with torch.no_grad():
        compiled = torch.compile(call, backend=passes_backend(traced, options), dynamic=dynamic, fullgraph=True)
        actual = compiled(layer, *arguments[:3], ours, arguments[4])
        expected = call(layer, *arguments[:3], eagers, arguments[4])
    for a, e in zip((*actual, ours), (*expected, eagers), strict=True):
        assert_equal(a.nan_to_num(), e.nan_to_num())
    return traced


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CHANGES)
def test_one_change(name, dynamic, monkeypatch):
    function, old, new, declines = CHANGES[name]
    change(monkeypatch, function, old, new)
    traced = run(Case(accepted="column" in name, spare=3), dynamic=dynamic)
    assert declines in dict(traced.declines()) and declines not in traced.counts()


def test_a_pool_that_is_read_elsewhere():
    case = Case()

    def call(layer, streams, ids, batch, pool, boundaries):
        before = pool[1:].sum()
        return *case.call(layer, streams, ids, batch, pool, boundaries), before, pool[1:].sum()

    traced = run(case, call=call)
    assert "merge_gate_conv" in dict(traced.declines())
    assert "ple.packed_gate_conv_.default" not in traced.targets()


def test_a_normed_value_that_is_read_elsewhere(monkeypatch):
    change(monkeypatch, "columns_at", "return history_and_tokens", "return columns[0, :, None] + history_and_tokens")
    traced = run(Case(boundaries=True))
    assert "merge_gate_conv" in dict(traced.declines())
    assert traced.counts()["fuse_short_conv"] == 1


def test_pools_of_something_else_are_no_candidates():
    """A cache that is written by request, but read by no convolution."""
    traced = Traced()

    def append(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        cache[slots] = rows
        return rows * 2

    torch._dynamo.reset()
    compiled = torch.compile(append, backend=passes_backend(traced), fullgraph=True)
    compiled(torch.zeros(4, 8, 3), torch.tensor([1, 2]), torch.ones(2, 8, 3))
    assert not traced.declines() and not traced.counts()


def test_debug_checks_the_context():
    """Placeholders pass unseen without `debug`: they hash like any token."""
    case = Case()
    layer = case.layer()
    streams, ids, batch, pool, _ = case.arguments(layer, LENGTHS, 1)

    def fuse(graph: torch.fx.Graph) -> None:
        with upstream.no_dispatch_modes():
            assert fuse_ngram_ids(graph, GraphReport(), debug=True) == 1

    torch._dynamo.reset()
    options = {"post_grad_custom_pre_pass": fuse}
    compiled = torch.compile(case.call, options=options, dynamic=True, fullgraph=True)
    with torch.no_grad():
        compiled(layer, streams, ids, batch, pool.clone(), None)
        batch.ngram_context[3, 0] = -1
        with pytest.raises(ValueError, match=r"ngram_context\[3, 0\] is -1"):
            compiled(layer, streams, ids, batch, pool.clone(), None)
