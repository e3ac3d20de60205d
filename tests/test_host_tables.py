"""Graphs that read a host table: which are computed on the GPU instead, shown with fake tensors on a GPU."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ple_compile import host_tables
from ple_compile.config import Config
from ple_compile.ops.lookup import lookup
from ple_compile.ops.sharded_lookup import sharded_lookup
from ple_compile.tables import pinning
from ple_compile.tables.formats import FORMATS

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    monkeypatch.setattr(pinning, "available", lambda: True)
    monkeypatch.setattr(pinning, "current_device", lambda: GPU)
    monkeypatch.setattr(pinning, "is_page_locked", lambda table: True)


@pytest.fixture
def fake_mode() -> Iterator[None]:
    """Tensors are fakes, which may lie on a GPU that is not there."""
    with FakeTensorMode():
        yield


class Placed(torch.fx.Interpreter):
    """Runs a graph and notes which nodes are tensors on the host."""

    def run_node(self, node: torch.fx.Node) -> object:
        result = super().run_node(node)
        if isinstance(result, Tensor) and result.device != GPU and node.op != "output":
            self.on_host.append(node.name)
        return result


def taken(function: Callable, *arguments: Tensor) -> tuple[int, list[str], list]:
    """How many tables the GPU reads, which nodes stay on the host, and what the graph calls."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append(gm)
        return gm.forward

    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    (gm,) = graphs
    inputs = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    tables, _ = host_tables.take_over(gm, inputs, Config())
    placed = Placed(gm)
    placed.on_host = []
    with inputs[0].fake_mode, torch.no_grad():
        placed.run(*inputs)
    return len(tables), placed.on_host, [node.target for node in gm.graph.nodes]


def on(device: torch.device | str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device=device).to(dtype)


@pytest.fixture
def ids(fake_mode: None) -> Tensor:
    return on(GPU, 2, 7, dtype=torch.int64)


LOOKUPS = {
    "embedding": lambda t, i: F.embedding(i.cpu(), t).to(i.device) * 2,
    "embedding by keyword": lambda t, i: F.embedding(i.to("cpu"), weight=t).to(i.device) * 2,
    "embedding by keywords": lambda t, i: F.embedding(input=i.to("cpu"), weight=t, padding_idx=3).to(i.device) * 2,
    "torch.embedding": lambda t, i: torch.embedding(t, i.cpu()).to(i.device) * 2,
    "ids widened there": lambda t, i: F.embedding(i.int().cpu().long(), t).to(i.device) * 2,
    "ids moved and widened": lambda t, i: F.embedding(i.short().to("cpu", torch.int32).to(torch.int64), t).to(GPU) * 2,
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_rows_that_move_to_the_gpu(name: str, ids: Tensor) -> None:
    count, on_host, targets = taken(LOOKUPS[name], on("cpu", 1000, 32), ids)
    assert count == 1 and not on_host
    assert lookup in targets and "cpu" not in targets


OTHERWISE = {
    "by getitem|getitem reads it": lambda t, i: t[i.cpu()].to(GPU),
    "by index_select|index_select reads it": lambda t, i: t.index_select(0, i.cpu().view(-1)).to(GPU),
    "also by row|getitem reads it": lambda t, i: F.embedding(i.cpu(), t).to(GPU) + t[0].to(GPU),
    "with ids made there|computed on the host, by clamp": lambda t, i: F.embedding(i.cpu().clamp(0, 9), t).to(GPU),
    "with ids cut there|computed on the host, by int": lambda t, i: F.embedding(i.cpu().int(), t).to(GPU),
    "with ids rounded there|computed on the host, by long": lambda t, i: F.embedding(i.half().cpu().long(), t).to(GPU),
    "by a part|getitem reads it": lambda t, i: F.embedding(i.cpu(), t[:, :8]).to(GPU),
    "by a part of a part|getitem reads it": lambda t, i: F.embedding(i.cpu(), t[:, :8].narrow(1, 0, 4)).to(GPU),
    "with max_norm|has max_norm": lambda t, i: F.embedding(i.cpu(), t, max_norm=1.0).to(GPU),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_locked_table_that_is_read_otherwise_is_a_warning(
    name: str, ids: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    host_tables._warned.clear()
    count, _, _ = taken(OTHERWISE[name], on("cpu", 1000, 32), ids)
    assert count == 0
    (warning,) = [record.getMessage() for record in caplog.records if "page-locked" in record.getMessage()]
    assert "the page-locked table l_t_ is looked up on the CPU" in warning and name.split("|")[1] in warning


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_pageable_table_that_is_read_otherwise_is_a_warning(
    name: str, ids: Tensor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "is_page_locked", lambda table: False)
    host_tables._warned.clear()
    count, _, _ = taken(OTHERWISE[name], on("cpu", 1000, 32), ids)
    assert count == 0
    (warning,) = [record.getMessage() for record in caplog.records if "pageable" in record.getMessage()]
    assert "the table l_t_ (0.0 GiB) lies in pageable" in warning and name.split("|")[1] in warning


def test_a_locked_table_that_trains_is_a_warning(ids: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    host_tables._warned.clear()
    count, _, _ = taken(LOOKUPS["embedding"], on("cpu", 1000, 32).requires_grad_(), ids)
    assert count == 0 and "its gradient is recorded; call the model under torch.no_grad" in caplog.text


@pytest.mark.parametrize("call", [lambda t, i: F.embedding(i, t), lambda t, i: t[i]])
def test_a_graph_without_a_gpu_is_no_warning(call: Callable, fake_mode: None, caplog: pytest.LogCaptureFixture) -> None:
    count, _, _ = taken(call, on("cpu", 1000, 32), on("cpu", 2, 7, dtype=torch.int64))
    assert count == 0 and "table" not in caplog.text


def test_a_sparse_matrix_is_no_table(fake_mode: None) -> None:
    with torch.no_grad():
        sparse = torch.sparse_coo_tensor(on("cpu", 2, 4, dtype=torch.int64), on("cpu", 4), (9, 9))
    graph = torch.fx.Graph()
    node = graph.placeholder("t")
    node.meta["example_value"] = sparse
    graph.call_function(torch.mul, (node, 2)).meta["example_value"] = sparse
    assert host_tables._host_lookups(node, sparse) == []


MOVES = {
    "ids moved": lambda i: i.to("cpu"),
    "ids moved and widened": lambda i: i.short().cpu().long(),
    "ids as they are": lambda i: i,
}


@pytest.mark.parametrize("way", MOVES)
def test_a_shard_on_the_host(way: str, ids: Tensor) -> None:
    """As `ShardedLookup.forward` calls it, with transformers' way around the GPU or without."""

    def call(shard: Tensor, ids: Tensor) -> Tensor:
        layout = (1999, 0, 2, 1, "table", "0", "", "0", True)
        return torch.ops.ple.sharded_lookup(shard, MOVES[way](ids), None, *layout).to(ids.device) * 2

    count, on_host, targets = taken(call, on("cpu", 1000, 32), ids)
    assert count == 1 and not on_host
    assert sharded_lookup in targets and lookup not in targets


@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_are_scaled_on_the_host(format: str, ids: Tensor) -> None:
    """The scales lie on the GPU and are copied to where the rows are, as the embedding's own forward does."""
    module = FORMATS[format](1000, 32, dtype=torch.bfloat16)
    for name, parameter in list(module.named_parameters()):
        place = "cpu" if name == "weight" else GPU
        module._parameters[name] = torch.nn.Parameter(parameter.detach().to(place), requires_grad=False)
    count, on_host, targets = taken(lambda i: module(i.to("cpu")).to(GPU), ids)
    assert count == 1 and not on_host
    assert targets.count(lookup) == 1


def test_two_tables_that_meet_on_the_host(ids: Tensor) -> None:
    def call(first: Tensor, second: Tensor, ids: Tensor) -> Tensor:
        moved = ids.to("cpu")
        return (F.embedding(moved, first) * F.embedding(moved, second)).to(GPU)

    count, on_host, targets = taken(call, on("cpu", 1000, 32), on("cpu", 1000, 32), ids)
    assert count == 2 and not on_host and targets.count(lookup) == 2


def test_what_else_is_computed_there_from_copies(ids: Tensor) -> None:
    def call(table: Tensor, scale: Tensor, ids: Tensor) -> Tensor:
        moved = ids.to("cpu")
        factor = scale.to("cpu").exp() * (moved != 3).unsqueeze(-1)
        return (F.embedding(moved, table) * factor).to("cpu").to(GPU)

    count, on_host, targets = taken(call, on("cpu", 1000, 32), on(GPU, 32), ids)
    assert count == 1 and not on_host and targets.count(lookup) == 1


LEFT_ALONE = {
    "meet a tensor of the host": lambda t, i, h: (F.embedding(i.cpu(), t) * h).to(GPU),
    "are returned on the host": lambda t, i, h: F.embedding(i.cpu(), t),
    "are returned on the host, changed": lambda t, i, h: F.embedding(i.cpu(), t) * 2,
    "are copied to the host by name": lambda t, i, h: F.embedding(i.cpu(), t).to("cpu", torch.float64).to(GPU),
    "meet a tensor made there": lambda t, i, h: (F.embedding(i.cpu(), t) * torch.ones(32, device="cpu")).to(GPU),
    "meet one as a copy": lambda t, i, h: (F.embedding(i.cpu(), t) * h.to("cpu").exp()).to(GPU),
    "meet what is returned there": lambda t, i, h: ((F.embedding(i.cpu(), t) * (y := i.cpu() * 2).sum()).to(GPU), y),
    "leave a sum there": lambda t, i, h: F.embedding(i.cpu(), t).sum(),
    "meet it in a tuple": lambda t, i, h: (F.embedding(i.cpu(), t).chunk(2, -1)[0] * h[:16]).to(GPU),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_to_the_host_where_rows(name: str, ids: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    host_tables._warned.clear()
    count, on_host, targets = taken(LEFT_ALONE[name], on("cpu", 1000, 32), ids, on("cpu", 32))
    assert count == 0 and on_host and lookup not in targets
    assert "the page-locked table l_t_ is looked up on the CPU" in caplog.text


def test_a_table_that_meets_one_left_to_the_host_stays_there_too(ids: Tensor) -> None:
    def call(first: Tensor, second: Tensor, other: Tensor, ids: Tensor) -> Tensor:
        moved = ids.to("cpu")
        scaled = F.embedding(moved, first) * other
        return (scaled + F.embedding(moved, second)).to(GPU)

    count, _, targets = taken(call, on("cpu", 1000, 32), on("cpu", 1000, 32), on("cpu", 32), ids)
    assert count == 0 and lookup not in targets


def test_single_values_may_stay_on_the_host(ids: Tensor) -> None:
    count, _, targets = taken(
        lambda t, s, i: (F.embedding(i.cpu(), t) * s).to(GPU), on("cpu", 1000, 32), on("cpu"), ids
    )
    assert count == 1 and lookup in targets
