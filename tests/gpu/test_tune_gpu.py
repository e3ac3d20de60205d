"""Launch choices on a GPU: every candidate gives the same bits, and what the command finds is what runs."""

import json

import pytest
import torch

from ple_compile.cli.main import main
from ple_compile.measuring.layer import Sizes
from ple_compile.ops import short_conv
from ple_compile.tuning import spaces, store, table
from ple_compile.tuning.search import Group, Space, search
from ple_compile.tuning.spaces import SPACES

SIZES = Sizes(rows=1_000_000)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table.forget()
    yield tmp_path
    table.forget()


@pytest.mark.parametrize("op", SPACES)
def test_every_candidate_gives_the_same_bits(op, own_cache, monkeypatch):
    monkeypatch.setattr(spaces, "_MANY", 2048)
    space = SPACES[op](SIZES)

    def results(group, choices):
        torch.manual_seed(0)
        found = [work.step(0, choices) for work in group.works()]
        tensors = [tensor for given in found for tensor in (given if isinstance(given, tuple) else (given,))]
        return [tensor.contiguous() for tensor in tensors if tensor is not None]

    for group in space.groups:
        expected = results(group, space.present)
        for values in group.candidates():
            for actual, wanted in zip(results(group, space.present._replace(**values)), expected, strict=True):
                # Bytes: tables are not filled, and NaN equals nothing.
                assert torch.equal(actual.view(torch.uint8), wanted.view(torch.uint8)), values


def test_the_command_stores_what_the_op_then_takes(own_cache, monkeypatch, capsys):
    shape = {"channels": 64, "bytes": 2}
    x = torch.randn(1, 50, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(64, 1, 4, device="cuda", dtype=torch.bfloat16)
    expected = short_conv.launch(x, weight, None, 3)
    assert main(["tune", "--ops", "short_conv,ngram_ids", "--hidden", "32", "--streams", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    device = torch.device("cuda", torch.cuda.current_device())
    assert said["file"] == str(store.path(device)) and str(own_cache) in said["file"]
    assert [result["op"] for result in said["results"]] == ["short_conv", "ngram_ids"]
    chosen = table.chosen("short_conv", short_conv.Choices(), device, **shape)
    assert chosen._asdict() == said["results"][0]["choices"]
    assert torch.equal(short_conv.launch(x, weight, None, 3), expected)


def test_no_search_inside_a_capture(own_cache):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = torch.zeros(1, device="cuda")
        with pytest.raises(ValueError, match="while a CUDA graph is captured"):
            search(Space("short_conv", {}, short_conv.Choices(), []))
        x += 1


def test_a_search_holds_one_table(own_cache, monkeypatch):
    sizes = Sizes(rows=4_000_000)
    row_bytes = sizes.hidden // spaces.HEADS * 2
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    monkeypatch.setattr(spaces, "_MANY", 2048)
    space = SPACES["lookup"](sizes)
    group = space.groups[0]
    small = Group({name: values[:2] for name, values in group.axes.items()}, group.works)
    search(Space(space.op, space.shape, space.present, [small]))
    assert torch.cuda.max_memory_allocated() - before < 1.5 * sizes.rows * row_bytes
