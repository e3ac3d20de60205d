"""What runs on a CPU: C++ made of the ops' references, with eager's bits in 16-bit types; and what is left alone."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import ple_compile
from ple_compile import expand_on_cpu as module
from ple_compile import upstream
from ple_compile.expand_on_cpu import EXPANSIONS, expand_on_cpu, rounding
from ple_compile.matching.graph import fake_value, layer_of
from ple_compile.ops import gate, kv_proj, ngram_ids, short_conv
from tests.graphs import Traced, passes_backend
from tests.ple_cases import Case, Layers

ROUNDS = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"


def share_equal(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.dtype == expected.dtype
    return (actual == expected).float().mean().item()


@torch.no_grad()
def test_sixteen_bit_code_has_eagers_bits(fresh_dynamo: None) -> None:
    """Lengths at which Inductor's own C++ gives garbage for a transposed sum are among them."""
    case = Case(model="reference", cache="static_filled", dtype="bfloat16")
    layer = case.layer()
    compiled = torch.compile(case.call, backend="ple", fullgraph=True, dynamic=True)
    ours, eagers = case.new_cache(layer), case.new_cache(layer)
    for length in (7, 64, 96):
        streams, ids, _ = case.inputs(length)
        actual, code = run_and_get_code(compiled, layer, streams, ids, None, ours)
        expected = case.call(layer, streams, ids, None, eagers)
        for a, e in ((actual, expected), *zip(case.states(ours), case.states(eagers))):
            assert share_equal(a, e) >= 0.999
        if length == 7:
            assert any("torch.ops.ple." in text for text in code) != ROUNDS
    assert ple_compile.stats()["ple_executions"] == 3


def test_equal_layers_are_traced_once_and_keep_their_provenance(
    monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None
) -> None:
    traced, asked, trace = Traced(), [], module.trace
    monkeypatch.setattr(module, "trace", lambda *args: asked.append(args[0]) or trace(*args))
    case = Case()
    model = Layers(case)
    streams, ids, _ = case.inputs()
    with torch.no_grad():
        actual = torch.compile(model, backend=passes_backend(traced, expanded=True), fullgraph=True)(streams, ids)
        expected = model(streams, ids)
    assert ((actual - expected).abs().max() / expected.abs().max()) < 2e-5
    assert len(asked) == 3 and traced.counts()["merge_gate_conv"] == 2
    assert not any(target.startswith("ple.") for target in traced.targets())
    (graph,) = [found.graph for found in traced.graphs]
    paths = sorted(
        layer_of(node) for node in graph.find_nodes(op="call_function", target=torch.ops.aten.remainder.Tensor)
    )
    assert [path.split(".")[:2] for path in paths] == [["layers", "0"]] * 2 + [["layers", "1"]] * 2


def graph_of(op: object, *args: object, mode: FakeTensorMode) -> Graph:
    """One op on placeholders with these fake values."""
    graph = Graph()
    owner = torch.nn.Module()
    nodes = []
    for index, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            node = graph.placeholder(f"x{index}")
            node.meta["val"] = arg
            nodes.append(node)
        else:
            nodes.append(arg)
    node = graph.call_function(op, tuple(nodes))
    node.meta["val"] = fake_value(node)
    graph.output(node)
    graph.owning_module = owner
    return graph


def called(graph: Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes if node.op == "call_function"}


def conv(dtype: torch.dtype = torch.float32, device: str = "cpu", batch: int | torch.SymInt = 2) -> tuple:
    options = {"dtype": dtype, "device": device}
    return torch.empty(batch, 5, 8, **options), torch.empty(8, 1, 4, **options), None, 3


def test_what_is_left_alone() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, mode.shape_env.ignore_fresh_unbacked_symbols():
        cases = {
            "expanded": conv(),
            "another device": conv(device="cuda"),
            "sixteen bits": conv(torch.bfloat16),
            "data-dependent sizes": conv(batch=mode.shape_env.create_unbacked_symint()),
        }
        graphs = {name: graph_of(short_conv.short_conv, *args, mode=mode) for name, args in cases.items()}
    for name, graph in graphs.items():
        expand_on_cpu(graph)
        graph.lint()
        assert ("ple.short_conv.default" in called(graph)) == (name != "expanded"), name
    with upstream.inductor_config.patch(emulate_precision_casts=True):
        expand_on_cpu(graphs["sixteen bits"])
    assert ("ple.short_conv.default" in called(graphs["sixteen bits"])) != ROUNDS


def test_graphs_with_sixteen_bits_on_the_cpu_round_as_eager() -> None:
    def options(*tensors: torch.Tensor) -> dict:
        graph = Graph()
        for index, tensor in enumerate(tensors):
            graph.placeholder(f"x{index}").meta["example_value"] = tensor
        graph.output(())
        return rounding(torch.fx.GraphModule(torch.nn.Module(), graph))

    single, half = torch.empty(1), torch.empty(1, dtype=torch.bfloat16)
    with FakeTensorMode():
        on_gpu = torch.empty(1, device="cuda")
    assert options(single) == options() == options(half, on_gpu) == {}
    assert options(single, half) == {"emulate_precision_casts": True}


def test_only_pure_ops_are_expanded() -> None:
    """Nothing that reads values on the host, starts a transfer or talks to other ranks."""
    assert {gate.gate, kv_proj.kv_proj, ngram_ids.ngram_ids} <= set(EXPANSIONS)
    for op in EXPANSIONS:
        assert torch.Tag.cudagraph_unsafe not in op.tags and "group" not in str(op._schema), op
