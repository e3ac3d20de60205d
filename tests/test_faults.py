"""Faults in the middle of a compilation or a step: a clear error, nothing lost, and the next call works."""

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ple_compile
from ple_compile import accelerate_hooks, records, regions, upstream
from ple_compile.matching import probe
from ple_compile.recorder import Recorder
from tests.faults import does_not_compile, fail_at, out_of_memory
from tests.ple_cases import Case
from tests.test_backend import close
from tests.tiny_models import prompt, shallow_model

# Where a compilation may fail: while the graph is prepared, in a probe, in the report, and in Inductor and Triton.
PLACES: dict[str, tuple[object, str, Callable[[], Exception]]] = {
    "the first probe": (probe.Probe, "run", out_of_memory),
    "the record": (records, "find", out_of_memory),
    "the drawing": (Recorder, "layers", out_of_memory),
    "code generation": (upstream, "compile_fx", does_not_compile),
}


def contents(layer: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in layer.state_dict().items()}


def assert_as_before(layer: nn.Module, before: dict[str, Tensor]) -> None:
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


@pytest.mark.parametrize("place", PLACES)
@torch.no_grad()
def test_a_compilation_that_fails(no_codegen: None, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    owner, name, error = PLACES[place]
    case = Case(cache="dynamic_filled")
    layer = case.layer()
    inputs, before = case.inputs(), contents(layer)
    ours, eagers = case.new_cache(layer), case.new_cache(layer)
    compiled = torch.compile(case.call, backend="ple")
    with monkeypatch.context() as patch, pytest.raises(Exception, match=str(error())[:20]):
        fail_at(patch, owner, name, 1, error)
        compiled(layer, *inputs, ours)
    assert_as_before(layer, before)
    assert not upstream.counters["ple_compile"] and not any(ple_compile.stats().values())
    for mine, eager in zip(case.states(ours), case.states(eagers)):
        assert torch.equal(mine, eager)
    # First in eager PyTorch, then compiled anew.
    assert close(case.call(layer, *inputs, case.new_cache(layer)), case.call(layer, *inputs, eagers))
    expected = case.call(layer, *inputs, eagers)
    case.call(layer, *inputs, ours)
    assert close(compiled(layer, *inputs, ours), expected)
    assert upstream.counters["ple_compile"]["merge_gate_conv"] == 1


@pytest.mark.parametrize("call", range(1, 12, 3))
@torch.no_grad()
def test_no_memory_for_a_later_probe(no_codegen: None, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Nothing that a pass found out before is kept in a way that changes what it finds the next time."""
    case = Case(model="reference")
    layer = case.layer()
    compiled = torch.compile(case.call, backend="ple")
    with monkeypatch.context() as patch:
        failed = fail_at(patch, probe.Probe, "run", call, out_of_memory)
        with pytest.raises(Exception, match="CUDA out of memory"):
            compiled(layer, *case.inputs(), None)
        assert failed()
    assert close(compiled(layer, *case.inputs(), None), case.call(layer, *case.inputs(), None))
    passes = ("fuse_short_conv", "fuse_gate", "fuse_ngram_ids", "merge_kv_proj", "merge_gate_conv")
    assert dict(upstream.counters["ple_compile"]) == dict.fromkeys(passes, 1)


@torch.no_grad()
def test_a_step_that_fails(no_codegen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled graph raises before it writes its state; then weights, states and counters go on as they were."""
    case = Case(model="reference", cache="dynamic_filled")
    layer = case.layer()
    ours, eagers, inputs = case.new_cache(layer), case.new_cache(layer), case.inputs()
    compiled = torch.compile(case.call, backend="ple")
    compiled(layer, *inputs, ours), case.call(layer, *inputs, eagers)
    before = contents(layer)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        fail_at(patch, torch.nn.functional, "linear", 1, out_of_memory)  # what ple::kv_proj calls
        compiled(layer, *inputs, ours)
    assert_as_before(layer, before)
    for mine, eager in zip(case.states(ours), case.states(eagers)):
        torch.testing.assert_close(mine, eager)
    assert close(compiled(layer, *inputs, ours), case.call(layer, *inputs, eagers))


@pytest.mark.parametrize("whole_graph", [False, True])
@pytest.mark.parametrize(
    "owner, name, call",
    [(torch, "compile", 2), (accelerate_hooks, "idle_inside", 2), (regions._CompiledCallHook, "__init__", 1)],
)
def test_a_model_is_compiled_wholly_or_not_at_all(
    fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch, whole_graph: bool, owner: object, name: str, call: int
) -> None:
    model = shallow_model(ple_layer_ids=(1, 2))
    attributes = [set(vars(module)) for module in model.modules()]
    limit = torch._dynamo.config.recompile_limit
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        fail_at(patch, owner, name, 1 if whole_graph else call, out_of_memory)
        ple_compile.compile(model, whole_graph=whole_graph)
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert torch._dynamo.config.recompile_limit == limit and regions.config_of(model) is None
    with torch.no_grad():
        model(prompt(5))
    ple_compile.restore(ple_compile.compile(model, whole_graph=whole_graph))
    assert [set(vars(module)) for module in model.modules()] == attributes


@torch.no_grad()
def test_explain_of_a_model_that_fails(no_codegen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shallow_model()
    attributes = [set(vars(module)) for module in model.modules()]
    with monkeypatch.context() as patch, pytest.raises(Exception, match="CUDA out of memory"):
        fail_at(patch, probe.Probe, "run", 1, out_of_memory)
        ple_compile.explain(model, prompt(5))
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert not records._collectors and not any(ple_compile.stats().values())
    assert "1 ran fused" in str(ple_compile.explain(model, prompt(5)))


SCRIPT = """
import os, signal, sys, torch
import ple_compile
from torch._dynamo.utils import counters
from tests.ple_cases import Case
if "kill" in sys.argv:
    os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
case = Case()
layer = case.layer()
with torch.no_grad():
    out = torch.compile(case.call, backend="ple")(layer, *case.inputs(), None)
    assert torch.allclose(out, case.call(layer, *case.inputs(), None), rtol=1e-4, atol=1e-4)
assert counters["ple_compile"]["merge_gate_conv"] == 1
"""


def compile_in_new_process(cache: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def damaged(content: bytes, way: int) -> bytes:
    """Cut off, empty, or with one byte changed."""
    at = len(content) // 2
    return (content[:at], b"", content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :])[way % 3]


def test_a_cache_folder_that_a_kill_and_a_disk_have_damaged(tmp_path: pathlib.Path) -> None:
    """Our records and PyTorch's entries that name compiled code; the libraries are the C++ compiler's, and stay."""
    assert compile_in_new_process(tmp_path, "kill").returncode == -signal.SIGKILL
    done = compile_in_new_process(tmp_path)
    assert done.returncode == 0, done.stderr
    ours, theirs = "ple_compile", {"fxgraph", "aotautograd"}
    entries = [file for file in tmp_path.rglob("*") if file.is_file() and {ours, *theirs} & {*file.parts}]
    assert any(ours in file.parts for file in entries) and any(theirs & {*file.parts} for file in entries)
    for way, file in enumerate(entries):
        file.write_bytes(damaged(file.read_bytes(), way))
    done = compile_in_new_process(tmp_path)
    assert done.returncode == 0, done.stderr
