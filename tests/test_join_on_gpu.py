"""Ids and rows in one launch: the graphs that this rewrites, those that it leaves alone, and their results.

The CPU stands for the GPU here, whose graphs are the same; the op runs its reference.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import ple_compile
from ple_compile import join_on_gpu as module
from ple_compile.ops import ngram_lookup
from tests.graphs import Traced, passes_backend
from tests.ple_cases import Case

IDS, ROWS, JOINED = "ple.ngram_ids.default", "aten.embedding.default", "ple.ngram_lookup.default"


@pytest.fixture(autouse=True)
def on_this_device(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    monkeypatch.setattr(module, "DEVICE", "cpu")


def targets(call: object, *args: object, config: ple_compile.Config | None = None) -> set[str]:
    """Of the one graph of a call without gradients, as Inductor gets it, lookups and ids."""
    traced = Traced()
    with torch.no_grad():
        torch.compile(call, backend=passes_backend(traced, config, expanded=True), fullgraph=True)(*args)
    return {IDS, ROWS, JOINED} & set(traced.targets())


@pytest.mark.parametrize(
    "model, cache, dynamic",
    [
        ("transformers", "none", False),
        ("transformers", "dynamic_filled", True),
        ("reference", "static_filled", True),
    ],
)
@torch.no_grad()
def test_results_are_eagers(model: str, cache: str, dynamic: bool) -> None:
    case = Case(model=model, cache=cache, dtype="float32")
    layer = case.layer()
    compiled = torch.compile(case.call, backend="ple", fullgraph=True, dynamic=dynamic)
    ours, eagers = case.new_cache(layer), case.new_cache(layer)
    for length in (5, 1, 9):
        streams, ids, _ = case.inputs(length, seed=length)
        actual, code = run_and_get_code(compiled, layer, streams, ids, None, ours)
        torch.testing.assert_close(actual, case.call(layer, streams, ids, None, eagers), rtol=1e-4, atol=1e-5)
        assert not code or "ple.ngram_lookup" in code[0] and "ple.ngram_ids" not in code[0]
    assert ple_compile.stats()["ple_executions"] == 3


def test_stats_and_report_are_those_of_the_passes() -> None:
    case = Case()
    layer = case.layer()
    streams, ids, _ = case.inputs()
    report = ple_compile.explain(layer, streams, ids, None)
    assert "ngram_lookup" not in str(report) and "fuse_ngram_ids" in str(report)
    ple_compile.reset_stats()
    with torch.no_grad():
        torch.compile(layer, backend="ple")(streams, ids, None)
    assert ple_compile.stats()["rows_looked_up"] == ids.numel() * 4


class Rows(nn.Module):
    """A product of a layer's rows, with something done to them before, or with something else that reads them."""

    def __init__(self, use: str):
        super().__init__()
        self.use, self.embedding, self.proj = use, Case().layer().ple_embedding, nn.Linear(32, 8)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        rows = self.embedding(tokens, None)
        if self.use == "arithmetic":
            rows = rows * 2.0
        if self.use == "cast":
            rows = rows.bfloat16().float()
        return (self.proj(rows), *([rows] if self.use == "returned" else []))


@pytest.mark.parametrize(
    "use, joined", [("product", True), ("arithmetic", False), ("cast", False), ("returned", False)]
)
def test_only_what_goes_into_a_product(use: str, joined: bool) -> None:
    tokens = Case().inputs()[1]
    assert targets(Rows(use).eval(), tokens) == ({JOINED} if joined else {ROWS})


class Table(nn.Module):
    """A table that is not what is looked up in."""

    def __init__(self, weight: Tensor, layout: Callable[[Tensor], Tensor]):
        super().__init__()
        self.weight, self.layout = nn.Parameter(weight.detach()), layout

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.layout(self.weight))


@torch.no_grad()
@pytest.mark.parametrize(
    "stored, layout",
    [
        (lambda w: w, lambda w: w * 2.0),
        (lambda w: w.bfloat16(), lambda w: w.float()),
        (lambda w: w.t().contiguous(), lambda w: w.t()),
        (lambda w: w.t().contiguous().t(), lambda w: w),
        (lambda w: w.repeat_interleave(2, 1)[:, ::2], lambda w: w),
    ],
    ids=["product", "cast", "transposed", "transposed in memory", "every other column"],
)
def test_a_table_that_is_computed_or_not_row_by_row_stays(
    stored: Callable[[Tensor], Tensor], layout: Callable[[Tensor], Tensor]
) -> None:
    model, tokens = Rows("product").eval(), Case().inputs()[1]
    model.embedding.ngram_embedding = Table(stored(model.embedding.ngram_embedding.weight), layout)
    assert targets(model, tokens) == {ROWS}


def test_the_op_refuses_rows_that_are_not_contiguous() -> None:
    """The kernel reads them as they lie."""
    table, hashes = torch.randn(8, 40).t(), (torch.tensor([3, 5]), torch.tensor([40]), torch.tensor([0]))
    for function in (ngram_lookup.launch, ngram_lookup.reference):
        with pytest.raises(ValueError, match="contiguous rows"):
            function(table, torch.zeros(1, 3, dtype=torch.int64), None, *hashes, 3)


def test_ids_that_something_else_reads_stay() -> None:
    """Autograd, for the table's gradient."""
    model, traced = Rows("product"), Traced()
    tokens = Case().inputs()[1]
    (out,) = torch.compile(model, backend=passes_backend(traced, expanded=True), fullgraph=True)(tokens)
    out.sum().backward()
    assert JOINED not in traced.targets() and model.embedding.ngram_embedding.weight.grad is not None


def test_debug_keeps_inductors_check_of_the_ids() -> None:
    tokens = Case().inputs()[1]
    assert targets(Rows("product").eval(), tokens, config=ple_compile.Config(debug=True)) == {ROWS}


def test_another_device_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEVICE", "cuda")
    assert targets(Rows("product").eval(), Case().inputs()[1]) == {ROWS}
