"""Equal layers are probed once, and nothing else counts as equal."""

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from ple_compile import pipeline
from ple_compile.matching import gate, ngram_ids, short_conv
from ple_compile.matching.graph import aten
from ple_compile.matching.repeats import asked_once, signature
from tests.graphs import Traced, passes_backend
from tests.ple_cases import Case, Layers


def test_two_layers_are_probed_as_one(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    probed: list[str] = []
    for part, name in ((gate, "_probe"), (short_conv, "_probe"), (ngram_ids, "_equals_reference")):
        original = getattr(part, name)

        def counted(*args, part=part, original=original, **settings):
            probed.append(part.__name__)
            return original(*args, **settings)

        monkeypatch.setattr(part, name, counted)
    case, traced = Case(), Traced()
    model = Layers(case)
    streams, ids, _ = case.inputs()
    with torch.no_grad():
        actual = torch.compile(model, backend=passes_backend(traced), fullgraph=True)(streams, ids)
        expected = model(streams, ids)
    assert ((actual - expected).abs().max() / expected.abs().max()) < 2e-5
    assert set(traced.counts().values()) == {2} and not traced.declines()
    # The convolution twice: its mathematics, then its rounding.
    assert sorted(probed) == sorted(part.__name__ for part in (gate, short_conv, short_conv, ngram_ids))


def calls_of_passes(num_layers: int) -> int:
    """How many functions of this package the passes call on a graph of so many PLE layers."""
    called, run = 0, pipeline.run

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal called
        called += event == "call" and frame.f_globals.get("__name__", "").startswith("ple_compile")

    def counted(*args: Any, **settings: Any) -> None:
        sys.setprofile(count)
        run(*args, **settings)
        sys.setprofile(None)

    case = Case()
    streams, ids, _ = case.inputs()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(pipeline, "run", counted)
        torch.compile(Layers(case, num_layers), backend=passes_backend(Traced()), fullgraph=True)(streams, ids)
    return called


def test_work_grows_with_the_layers_not_with_their_square(fresh_dynamo: None) -> None:
    few, some, many = (calls_of_passes(num_layers) for num_layers in (4, 8, 16))
    assert 0 < many - some < 2.2 * (some - few)


def line(graph: Graph, source: Node, factor: float) -> list[Node]:
    """relu(source * factor), as nodes."""
    product = graph.call_function(aten.mul.Tensor, (source, factor))
    nodes = [product, graph.call_function(aten.relu.default, (product,))]
    for node in nodes:
        node.meta["val"] = source.meta["val"]
    return nodes


def placeholder(graph: Graph, name: str, val: torch.Tensor) -> Node:
    node = graph.placeholder(name)
    node.meta["val"] = val
    return node


def test_equal_parts() -> None:
    graph = Graph()
    x, y = (placeholder(graph, name, torch.empty(2, 3)) for name in "xy")
    first, second = line(graph, x, 2.0), line(graph, y, 2.0)
    assert signature(first, x, first[-1]) == signature(second, y, second[-1])
    wide, half = (placeholder(graph, "wide", torch.empty(2, 4)), placeholder(graph, "half", torch.empty(2, 3).half()))
    strided = placeholder(graph, "strided", torch.empty(3, 2).t())
    others = [line(graph, x, 3.0), *(line(graph, source, 2.0) for source in (wide, half, strided))]
    signatures = [signature(nodes) for nodes in (first, *others)]
    assert len(set(signatures)) == len(signatures)
    assert signature(first, x, first[-1]) != signature(first, first[-1], x)
    assert signature(first, x, 0.1) != signature(first, x, 0.2) != signature(first, y, 0.2)


def test_an_answer_is_its_graphs_own_and_a_failure_is_none() -> None:
    asked = []

    def ask() -> str:
        asked.append(len(asked))
        if len(asked) == 1:
            raise ValueError("not yet")
        return "answer"

    graph, other = Graph(), Graph()
    with pytest.raises(ValueError, match="not yet"):
        asked_once(graph, "question", ask)
    answers = [asked_once(graph, "question", ask), asked_once(graph, "question", ask)]
    assert answers == ["answer"] * 2 and len(asked) == 2
    asked_once(other, "question", ask)
    assert len(asked) == 3
