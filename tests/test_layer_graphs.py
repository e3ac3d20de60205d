"""What is recorded of a PLE layer while the passes run, and what a report makes of it."""

import json
import pathlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import ple_compile
from ple_compile import host_tables, layer_graphs, offload_tables, recorder
from ple_compile.explain import Report
from ple_compile.layer_graphs import AFTER, BEFORE, Drawing, GraphNode, LayerGraph
from ple_compile.ops.sharded_lookup import sharded_lookup
from ple_compile.passes.lower_lookup import lower_lookup
from ple_compile.recorder import Recorder, _layer_paths
from ple_compile.report import Event, GraphReport
from ple_compile.savings import evaluate, savings
from ple_compile.sharding.topology import Layout
from tests.fake_driver import driver, views  # noqa: F401
from tests.graphs import Traced, passes_backend
from tests.host_stack import Stack
from tests.ple_cases import Case
from tests.sharding.fake import fake_mesh


def node(target: str, **fields: object) -> GraphNode:
    return GraphNode(target, **{"shape": (2, 3), "dtype": "float32", "device": "cpu", **fields})


def called(drawing: Drawing, state: str) -> list[str]:
    return [node.target for _, node in drawing.present(state) if node.launches]


def test_a_layer_before_and_after(layer_report: Report) -> None:
    (run,) = layer_report.layer_runs()
    drawing, names = run.found.drawing, run.found.names
    kept = ["aten.cat.default", "aten.copy.default", "aten.embedding.default"]
    made = ["ple.ngram_ids.default", "ple.kv_proj.default", "ple.gate_conv_update_.default"]
    assert sorted(called(drawing, AFTER)) == sorted(kept + made)
    assert not any(target.startswith("ple.") for target in called(drawing, BEFORE))
    assert {node.made_by for node in drawing.nodes if node.target in made} == {
        "fuse_ngram_ids",
        "merge_kv_proj",
        "merge_gate_conv",
    }
    # The gate and the convolution were made by one pass and merged by another: in neither graph.
    (gate,) = [node for node in drawing.nodes if node.target == "ple.gate.default"]
    assert (gate.made_by, gate.removed_by, gate.before, gate.after) == ("fuse_gate", "merge_gate_conv", None, None)
    (sigmoid,) = [node for node in drawing.nodes if node.target == "aten.sigmoid.default"]
    source = drawing.sources[sigmoid.source]
    assert source.file.endswith("examples/reference/ple.py") and "sigmoid" in source.code
    assert {"conv1d.weight", "ple_embedding.ngram_embedding.weight"} <= set(names)
    assert drawing.omitted == 0
    assert len(names) == len(drawing.nodes)


def test_savings_are_evaluated_at_the_sizes_of_the_call(layer_report: Report) -> None:
    (run,) = layer_report.layer_runs()
    sizes = {layer_report.graphs[0][1].symbols[symbol].name: size for symbol, size in run.sizes.items()}
    assert sorted(sizes.values()) == [2, 7], sizes
    saved = run.savings
    assert saved.launches_before > 50 and saved.launches_after == 6
    assert saved.bytes_before > saved.bytes_after > 0
    total = eval(saved.formula.replace(",", "").replace("·", "*"), {}, dict(run.sizes))
    assert total == saved.bytes_before - saved.bytes_after


def test_it_survives_the_stored_record(layer_report: Report) -> None:
    graph = layer_report.graphs[0][1]
    read = GraphReport.from_dict(json.loads(json.dumps(graph.to_dict())))
    assert read.layer_graphs == graph.layer_graphs and read.symbols == graph.symbols and read.events == graph.events


def test_the_report_as_a_dict(layer_report: Report, tmp_path: pathlib.Path) -> None:
    told = layer_report.to_dict()
    (part,) = told["graphs"][0]["layer_graphs"]
    assert part["drawing"] == 0 and part["savings"]["launches_after"] == 6 and part["collectives"] == {}
    assert len(part["names"]) == len(told["drawings"][0]["nodes"])
    assert told["environment"]["torch"] == torch.__version__
    for key in (*told, *told["graphs"][0], *part, *part["savings"], *told["drawings"][0]):
        assert key in Report.to_dict.__doc__, key
    layer_report.save(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == told


@pytest.mark.usefixtures("views", "fresh_dynamo")
@pytest.mark.parametrize(("distance", "start"), [(1, "layers.2"), (2, "layers.1")])
def test_where_a_lookup_starts_and_is_waited_for(distance: int, start: str) -> None:
    model, traced, config = Stack(3), Traced(), ple_compile.Config(prefetch_distance=distance)
    offload_tables(model)

    def backend(gm: torch.fx.GraphModule, inputs: list) -> object:
        inputs = list(inputs)
        host_tables.take_over(gm, inputs, config)
        passes_backend(traced, config)(gm, inputs)
        return gm.forward  # torch 2.11 cannot run the passes' graph without Inductor

    with torch.no_grad():
        torch.compile(model, backend=backend)(*model.inputs())
    ((part,),) = [report.layer_graphs for report in traced.reports]
    (prefetch,) = part.prefetches
    assert part.layer == "layers.3"
    assert (prefetch.starts_in, prefetch.waits_in, prefetch.products) == (start, "layers.3", 2 * distance)
    assert prefetch.launches > prefetch.products


def test_collectives_are_counted() -> None:
    nodes = [
        node("_c10d_functional.all_reduce.default", before=(), after=(), launches=1),
        node("_c10d_functional.wait_tensor.default", before=(), after=()),
        node("ple.peer_lookup.default", before=None, after=(), launches=1),
        node("ple.sharded_lookup.default", before=(), after=None, launches=1),
    ]
    found = Drawing(tuple(nodes), ()).collectives()
    assert found == {"_c10d_functional.all_reduce.default": 1, "ple.peer_lookup.default": 1}


def test_layers_are_told_by_where_passes_found_something() -> None:
    def paths(*events: tuple[str, str]) -> list[str]:
        return _layer_paths([Event(name, "matched", path) for name, path in events])

    gate, ids, conv = "fuse_gate", "fuse_ngram_ids", "fuse_short_conv"
    assert paths((gate, "layers.0.ple"), (ids, "layers.0.ple.ids.table")) == ["layers.0.ple"]
    assert paths((ids, "layers.0.ple.ids.table"), (ids, "layers.1.ple.ids.table")) == ["layers.0.ple", "layers.1.ple"]
    assert paths((ids, "layers.3.table")) == ["layers.3"]
    assert paths((conv, "layers.0.linear_attn.conv1d")) == []
    assert paths((gate, ""), (ids, "L['args'][0].ids.table")) == [""]
    assert paths((gate, ""), (ids, "layers.1.ple.ids.table")) == ["layers.1.ple"]


def test_sizes_are_integer_arithmetic_only() -> None:
    sizes = {"s0": 7, "s1": 2}
    assert evaluate("2*s0 + (s1 // 2) - 1", sizes) == 14
    assert evaluate("-s0", sizes) == -7
    for unknown in ("s2", "Max(1, s0)", "s0 +", "__import__('os')", "s0 // (s1 - 2)", "s0 / s1", "~s0"):
        assert evaluate(unknown, sizes) is None
    drawing = Drawing((node("aten.mul.Tensor", shape=("s2", 4), before=(), writes=True),), ())
    assert savings(drawing, sizes).bytes_before is None
    assert savings(drawing, sizes).formula == "16 · s2"


def test_equal_layers_share_a_drawing() -> None:
    drawing = Drawing((node("aten.mul.Tensor", before=(), after=()),), ())
    parts = [LayerGraph(f"layers.{i}", drawing, (f"mul_{i}",)) for i in range(3)]
    told = layer_graphs.to_dict(parts)
    assert len(told["drawings"]) == 1 and [part["drawing"] for part in told["layer_graphs"]] == [0, 0, 0]
    assert layer_graphs.from_dict(told) == parts


def test_layers_in_decoder_layers_of_their_own_share_a_drawing(no_codegen: None) -> None:
    """What becomes part of a layer but stands above it, its residual sum, has a path with the layer's number."""

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ple = Case(model="reference").layer()

        def forward(self, streams: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return (streams + self.ple(streams, ids, None, None)).sin()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Decoder() for _ in range(2))

        def forward(self, streams: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                streams = layer(streams, ids)
            return streams

    model = torch.compile(Model().eval(), backend="ple")
    with torch.no_grad():
        ((_, graph),) = ple_compile.explain(model, *Case().inputs()[:2]).graphs
    first, second = graph.layer_graphs
    assert (first.layer, second.layer) == ("layers.0.ple", "layers.1.ple")
    assert first.drawing == second.drawing
    assert {node.module for node in first.drawing.nodes if node.target == "aten.add.Tensor"} >= {".."}


def test_a_lowered_lookup_and_its_collectives() -> None:
    layout = Layout(10, 3, 4, 2, "rows.weight", "0", "1", "3")  # rank 3 of dp=2 x tp=2
    with fake_mesh(rank=3, dp=2, tp=2):
        with FakeTensorMode(allow_non_fake_inputs=True):
            shard, ids = torch.empty(layout.rows_per_rank, 4), torch.empty(3, 2, dtype=torch.int64)
            gm = make_fx(lambda shard, ids: sharded_lookup(shard, ids, None, *layout) + 1)(shard, ids)
        report, recorder = GraphReport(), Recorder(gm.graph)
        assert lower_lookup(gm.graph, report, etp_lowering="reduce_scatter", etp_max_tokens=4) == 1
        recorder.after("lower_lookup")
        (part,) = recorder.layers(report.events)
    assert part.drawing.collectives() == {
        "_c10d_functional.all_gather_into_tensor.default": 2,
        "_c10d_functional.reduce_scatter_tensor.default": 1,
    }
    (before,) = [node for node in part.drawing.nodes if node.removed_by]
    assert (before.target, before.removed_by) == ("ple.sharded_lookup.default", "lower_lookup")


def test_what_nobody_reads_any_more_is_removed_with_its_last_reader() -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        read = x.sin()
        return read.cos() + read.tan()

    gm = make_fx(both, tracing_mode="fake")(torch.ones(2))
    watched = Recorder(gm.graph)
    x, sin, cos, tan = list(gm.graph.nodes)[:4]
    for node, pass_name in ((cos, "fuse_gate"), (tan, "merge_gate_conv")):
        node.replace_all_uses_with(x)
        gm.graph.erase_node(node)
        watched.after(pass_name)
    (part,) = watched.layers([Event("fuse_gate", "matched", "")])
    assert {node.target: node.removed_by for node in part.drawing.nodes if node.removed_by} == {
        "aten.sin.default": "merge_gate_conv",
        "aten.cos.default": "fuse_gate",
        "aten.tan.default": "merge_gate_conv",
    }


def test_a_layer_that_is_too_large_is_cut_around_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_NODES", 5)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = x.sin()
        return x

    gm = make_fx(chain, tracing_mode="fake")(torch.ones(2))
    watched, middle = Recorder(gm.graph), list(gm.graph.nodes)[10]
    middle.replace_all_uses_with(middle.args[0])
    gm.graph.erase_node(middle)
    watched.after("fuse_gate")
    (part,) = watched.layers([Event("fuse_gate", "matched", "")])
    assert part.drawing.omitted == 15 and middle.name in part.names
