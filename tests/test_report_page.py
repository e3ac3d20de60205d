"""The report as a page: what is in it, its size, and what Chromium says of it."""

import dataclasses
import pathlib
import random
import re

import pytest

from ple_compile.explain import Report
from ple_compile.facts import TableFacts
from ple_compile.layer_graphs import BEFORE, Drawing, GraphNode, LayerGraph, Prefetch
from ple_compile.page import render
from ple_compile.page.drawing import _cut, draw
from ple_compile.page.layer_section import _changed, _prefetch, _without_names
from ple_compile.page.layout import Layout, layout
from ple_compile.page.pieces import status_chip
from ple_compile.report import MATCHED, Event, GraphReport
from tests.chromium import look_at

# Every section that a page has; each layer adds its own.
SECTIONS = ["summary", "layers", "graph-breaks", "replaced", "method"]


@pytest.fixture(scope="module")
def part(layer_report: Report) -> LayerGraph:
    ((_, graph),) = layer_report.graphs
    return graph.layer_graphs[0]


def model_report(graph: GraphReport, drawings: list[Drawing]) -> Report:
    """A model of as many PLE layers as there are drawings, in one graph, and a decline with characters to escape."""
    part = graph.layer_graphs[0]
    layers = [f"layers.{i}.ple" for i in range(len(drawings))]
    flight = Prefetch("lookup_start", "lookup_wait", "layers.0", "layers.1", 120, 9)
    parts = [
        LayerGraph(layer, drawing, tuple(f"{name}_{i}" for name in part.names), (flight,))
        for i, (layer, drawing) in enumerate(zip(layers, drawings))
    ]
    events = [dataclasses.replace(event, layer=f"{layer}.norm_key") for layer in layers for event in graph.events]
    odd = 'File "/home/a user/<model>&.py", line 7, in forward'
    events.append(
        Event("lower_lookup", "declined", layers[-1], '<b>rows</b> & ids are used "elsewhere"', "sigmoid_0", odd)
    )
    told = dataclasses.replace(
        graph, events=events, layer_graphs=parts, ple_layers=len(layers) - 1, graph_break="a call to print (a<b.py:3)"
    )
    tables = [
        TableFacts(
            f"{layer}.ple_embedding.ngram_embedding.weight", 298_000_000 + i, 160, "fp8", "CPU memory", "", 2**35
        )
        for i, layer in enumerate(layers)
    ]
    return Report("<script>Model", layers, ["TheirExperts"], [("", told)], tables, {"torch": "2.13", "device": "<GPU>"})


@pytest.fixture(scope="module")
def page(layer_report: Report, part: LayerGraph) -> str:
    """Three layers, of which the first two are equal."""
    other = dataclasses.replace(part.drawing, omitted=3)
    return render(model_report(layer_report.graphs[0][1], [part.drawing, part.drawing, other]))


def test_what_is_told(page: str, part: LayerGraph) -> None:
    for name in (*SECTIONS, "layer-0", "layer-1", "layer-2"):
        assert f'id="{name}"' in page
    text = re.sub(r"<[^>]+>", "", page)
    assert "fuse_gate matched" in text and "became 1: ple.gate" in text
    assert "&lt;b&gt;rows&lt;/b&gt; &amp; ids" in text and "1 declined" in text
    assert "298,000,000 rows of 160, fp8, in CPU memory (32.0 GiB here)" in text
    assert "starts in layers.0, is waited for in layers.1 (distance 1); between them 120 launches, 9" in text
    assert "a call to print (a&lt;b.py:3)" in text and "TheirExperts" in text
    assert "2 (args[1].size(0))" in text or "2 (ids.size(0))" in text
    assert 'href="vscode://file/home/a%20user/%3Cmodel%3E%26.py:7"' in page
    assert "3 nodes of this layer were too many to keep" in text
    assert "<script" not in page and "<b>rows" not in page
    assert re.search("<title>[^<]*removed by merge_gate_conv", page)
    assert page.count(status_chip(MATCHED, "fused")) == 4  # two layers: in the list, and above their sections


def test_a_drawing_has_a_box_a_pill_and_an_edge_for_each() -> None:
    def node(target: str, *before: int) -> GraphNode:
        fields = {"shape": (2, 3), "dtype": "float32", "device": "cpu", "launches": int(target != "input")}
        return GraphNode(target, before=before, **fields)

    # The last box reads the first one past the second: an edge that bends round it.
    nodes = node("input"), node("aten.exp.default", 0), node("aten.neg.default", 1), node("aten.add.Tensor", 1, 2)
    drawn = draw(Drawing(nodes, ()), ("x", "exp", "neg", "add"), BEFORE, {})
    assert [drawn.count(f'<g class="{kind}') for kind in ("node in", "node")] == [1, 4]
    assert drawn.count('<path class="edge"') == 4 and len(re.findall(r'd="M[^"]*V[^"]*"', drawn)) == 1
    assert layout({}, 100, 10) == Layout({}, [], 0.0, 0)


def test_a_pass_that_only_made_something_is_told_of() -> None:
    made = GraphNode("ple.gate.default", shape=(2,), dtype="float32", device="cpu", launches=1, made_by="fuse_gate")
    assert _changed(Drawing((made,), ()), "fuse_gate") == "0 launches became 1: <code>ple.gate</code>"
    assert _changed(Drawing((made,), ()), "fuse_lookup") == ""


def test_a_prefetch_outside_numbered_layers_is_told_without_them() -> None:
    told = _prefetch(Prefetch("lookup_start", "lookup_wait", "", "layers.1", 3, 2))
    assert told.startswith("the graph shows no layers between start and wait; between them 3 launches, 2")


def test_long_labels_are_cut_where_they_say_least() -> None:
    assert _cut("short.name") == "short.name"
    assert _cut("layers.0.ple.conv.weight") == "…s.0.ple.conv.weight" and _cut("a" * 30) == "a" * 19 + "…"


def test_equal_layers_are_drawn_once(page: str) -> None:
    assert page.count("<svg") == 4
    assert "The graphs equal those of" in page.split('id="layer-1"')[1].split("</section>")[0]


def test_symbols_of_another_name_make_no_other_drawing(layer_report: Report, part: LayerGraph) -> None:
    """Every compiled graph names its sizes anew, and so orders the terms of a sum anew."""

    def named(tokens: str, columns: str) -> Drawing:
        sizes = tokens, columns, " + ".join(sorted([tokens, columns])), f"2*({tokens} + 1)"
        fields = {"dtype": "float32", "device": "cpu", "before": (), "after": ()}
        nodes = [GraphNode("aten.sin.default", (size,), **fields) for size in sizes]
        return Drawing(tuple(nodes), ())

    same = [named("s3", "s77"), named("s90", "s12")]
    assert _without_names(same[0]) == _without_names(same[1]) != _without_names(named("s3", "s3"))
    parts = [
        dataclasses.replace(part, layer=f"layers.{i}.ple", drawing=drawing, names=tuple("abcd"))
        for i, drawing in enumerate(same)
    ]
    graphs = [("", dataclasses.replace(layer_report.graphs[0][1], events=[], layer_graphs=[part])) for part in parts]
    text = re.sub(r"<[^>]+>", "", render(Report("Model", [part.layer for part in parts], [], graphs)))
    assert "The graphs equal those of layers.0.ple in compiled graph 1, where they are drawn" in text


def test_everything_is_in_the_file(page: str) -> None:
    assert "http:" not in page and "https:" not in page and "url(" not in page
    assert {link.split(":")[0] for link in re.findall(r'href="([^"]+)"', page)} <= {"vscode", "data"} | set(
        f"#layer-{i}" for i in range(3)
    )


@pytest.mark.parametrize("equal", [True, False])
def test_48_layers_are_far_below_2_mb(
    layer_report: Report, part: LayerGraph, equal: bool, tmp_path: pathlib.Path
) -> None:
    drawings = [part.drawing if equal else dataclasses.replace(part.drawing, omitted=i) for i in range(48)]
    report = model_report(layer_report.graphs[0][1], drawings)
    report.save(tmp_path / "report.html")
    report.save(tmp_path / "report.HTML")
    assert (tmp_path / "report.HTML").read_text() == (tmp_path / "report.html").read_text()
    size = (tmp_path / "report.html").stat().st_size
    assert size < (600_000 if equal else 1_800_000), size
    text = (tmp_path / "report.html").read_text()
    assert text.count('class="layer"') == 48
    assert ("Not drawn, to keep this page small" in text) == (not equal)


def test_a_report_without_anything(tmp_path: pathlib.Path) -> None:
    page = render(Report("f", [], [], []))
    assert "No PLE layer was found" in page and all(f'id="{name}"' in page for name in SECTIONS)


@pytest.mark.parametrize("seed", range(20))
def test_layouts_go_down_and_never_overlap(seed: int) -> None:
    chosen = random.Random(seed)
    graph: dict = {
        i: chosen.sample(range(i), min(i, chosen.choice([0, 1, 1, 2, 3]))) for i in range(chosen.randint(1, 60))
    }
    found = layout(graph, 100, 10)
    assert set(found.places) == set(graph)
    for source, node, points in found.edges:
        assert points[0] == found.places[source] and points[-1] == found.places[node]
        assert [row for _, row in points] == list(range(points[0][1], points[-1][1] + 1))
    assert len(found.edges) == sum(map(len, graph.values()))
    for row in range(found.rows):
        middles = sorted(x for x, r in found.places.values() if r == row)
        assert all(right - left >= 99.9 for left, right in zip(middles, middles[1:]))
        assert not middles or (middles[0] >= 49.9 and middles[-1] <= found.width - 49.9)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_in_chromium(page: str, width: int, dark: bool) -> None:
    seen = look_at(page, width, dark)
    assert seen.console == []
    assert {*SECTIONS, "layer-0", "layer-1", "layer-2"} <= set(seen.sections)
    assert seen.headings[0] == "<script>Model" and len(seen.drawings) == 4 and min(seen.drawings) > 200
    assert seen.width == width and seen.folded <= width and seen.unfolded <= width
    light = sum(map(int, re.findall(r"\d+", seen.paper)[:3])) > 3 * 128
    assert light == (not dark)


def test_chromium_would_tell() -> None:
    """The checks above can fail: a page that wants something from outside, is too wide, and lacks a section."""
    policy = '<meta http-equiv="Content-Security-Policy" content="img-src data:">'
    seen = look_at(f'{policy}<div style="width:700px;height:1px"></div><img src="http://127.0.0.1:9/x.png">', 390, True)
    assert len(seen.console) >= 1 and seen.unfolded > 390 and "summary" not in seen.sections
