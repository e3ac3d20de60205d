"""The backend through `torch.compile`, with Inductor's real code generation (float32 on the CPU)."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import ple_compile
from ple_compile import upstream
from tests.ple_cases import Case


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((actual - expected).abs().max() / expected.abs().max() <= 2e-5)


@torch.no_grad()
def test_generated_code_is_the_references_in_cpp(fresh_dynamo: None) -> None:
    case = Case(cache="dynamic_filled")
    layer = case.layer()
    streams, ids, mask = case.inputs()
    ours, eagers = case.new_cache(layer), case.new_cache(layer)
    compiled = torch.compile(case.call, backend="ple", fullgraph=True)
    actual, code = run_and_get_code(compiled, layer, streams, ids, mask, ours)
    assert close(actual, case.call(layer, streams, ids, mask, eagers))
    for ours_state, eager_state in zip(case.states(ours), case.states(eagers)):
        torch.testing.assert_close(ours_state, eager_state)
    (text,) = code
    assert "ple" not in text.partition("async_compile.wait")[2] and "extern_kernels.convolution" not in text
    assert text.count("extern_kernels.mm(") == 2
    passes = ("fuse_short_conv", "fuse_gate", "fuse_ngram_ids", "merge_kv_proj", "merge_gate_conv")
    assert dict(upstream.counters["ple_compile"]) == dict.fromkeys(passes, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(layer, streams, ids, mask, ours)
    assert not any(event.key.startswith("ple::") for event in profile.key_averages())
    rows = 2 * case.batch * case.length * case.heads_per_ngram * (case.ngram_size - 1)
    counted = {name: count for name, count in ple_compile.stats().items() if count}
    assert counted == {"ple_executions": 2, "rows_looked_up": rows}


@torch.no_grad()
@pytest.mark.parametrize("change", ["in place", "load_state_dict", "data", "dtype"])
def test_weights_changed_after_compiling_take_effect(no_codegen: None, change: str) -> None:
    case = Case()
    layer, other = case.layer(), case.with_(seed=7).layer()
    streams, ids, mask = case.inputs()
    compiled = torch.compile(case.call, backend="ple")
    compiled(layer, streams, ids, mask, None)
    if change == "in place":
        for mine, new in zip(layer.parameters(), other.parameters()):
            mine.copy_(new)
    elif change == "load_state_dict":
        layer.load_state_dict(other.state_dict())
    elif change == "data":
        for mine, new in zip(layer.parameters(), other.parameters()):
            mine.data = new.clone()
    else:
        layer, streams = layer.double().float().to(torch.float64), streams.double()
    expected = case.call(layer, streams, ids, mask, None)
    assert close(compiled(layer, streams, ids, mask, None), expected)
    assert close(compiled(layer, streams, ids, mask, None), expected)


@torch.no_grad()
def test_merged_weights_take_no_memory_and_keep_their_values(no_codegen: None) -> None:
    case = Case()
    layer = case.layer()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    torch.compile(case.call, backend="ple")(layer, *case.inputs(), None)
    key, value = layer.key_proj.weight, layer.value_proj.weight
    assert key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    assert key.untyped_storage().nbytes() == key.nbytes + value.nbytes
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_gradients_equal_eagers(no_codegen: None) -> None:
    case = Case(mask=True)
    layer = case.layer()
    streams, ids, mask = case.inputs()

    def loss_and_gradients(call: object) -> list[torch.Tensor]:
        layer.zero_grad()
        leaf = streams.clone().requires_grad_()
        loss = call(layer, leaf, ids, mask, None).square().sum()
        loss.backward()
        return [loss.detach(), leaf.grad, *(p.grad for p in layer.parameters())]

    expected = [t.clone() for t in loss_and_gradients(case.call)]
    for actual, eager in zip(loss_and_gradients(torch.compile(case.call, backend="ple")), expected):
        assert close(actual, eager)


@torch.no_grad()
def test_the_last_graph_that_dynamo_keeps_is_a_warning(no_codegen: None, caplog: pytest.LogCaptureFixture) -> None:
    layer = Case().layer()
    compiled = torch.compile(Case().call, backend="ple", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=3):
        for length in (4, 5, 6, 7):
            streams, ids, _ = Case().inputs(length)
            executions = ple_compile.stats()["ple_executions"]
            compiled(layer, streams, ids, None, None)
            told = [r for r in caplog.records if "torch._dynamo.config.recompile_limit allows" in r.message]
            assert len(told) == (length >= 6)
    assert ple_compile.stats()["ple_executions"] == executions  # the fourth ran eagerly, as the warning said


def test_mistakes_reach_the_user_at_the_first_call(fresh_dynamo: None) -> None:
    compiled = torch.compile(lambda x: x + 1, backend="ple", options={"fuse_gates": True})
    with pytest.raises(Exception, match="unknown option 'fuse_gates'; did you mean 'fuse_gate'"):
        compiled(torch.ones(2))


@torch.no_grad()
def test_a_users_own_pass_runs_first(fresh_dynamo: None) -> None:
    seen = []

    def users_pass(graph: torch.fx.Graph) -> None:
        seen.append(any("remainder" in str(node.target) for node in graph.nodes))

    case = Case()
    options = {"inductor": {"post_grad_custom_pre_pass": users_pass}}
    torch.compile(case.call, backend="ple", options=options)(case.layer(), *case.inputs(), None)
    assert seen == [True]
    assert upstream.counters["ple_compile"]["fuse_ngram_ids"] == 1


SCRIPT = """
import json, sys, torch, ple_compile
from torch._dynamo.utils import counters
from ple_compile import records
from tests.ple_cases import Case
case = Case()
layer = case.layer()
options = json.loads(sys.argv[1])
with torch.no_grad():
    with records.collect() as calls:
        out = torch.compile(case.call, backend="ple", options=options)(layer, *case.inputs(), None)
    assert torch.allclose(out, case.call(layer, *case.inputs(), None), rtol=1e-4, atol=1e-4)
told = [[{**c.report.to_dict(), "sizes": c.report.sizes} for c in calls], counters["ple_compile"]]
print(json.dumps([told, ple_compile.stats(), counters["aot_autograd"]["autograd_cache_hit"]]))
"""


def run_in_new_process(cache: pathlib.Path, options: dict) -> list:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", SCRIPT, json.dumps(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_compile_cache_hits_report_and_never_go_stale(tmp_path: pathlib.Path) -> None:
    told, stats, hits = run_in_new_process(tmp_path, {})
    ((graph,), counts) = told
    assert hits == 0 and counts["fuse_gate"] == 1 and stats["ple_executions"] == 1
    assert {"fuse_gate", "merge_gate_conv"} <= {node["removed_by"] for node in graph["drawings"][0]["nodes"]}
    assert run_in_new_process(tmp_path, {}) == [told, stats, 1]
    # Another option is another entry.
    (_, other_counts), other_stats, hits = run_in_new_process(tmp_path, {"fuse_gate": False})
    assert hits == 0 and "fuse_gate" not in other_counts and other_stats["ple_executions"] == 0
    # A record that is damaged or gone makes a new entry rather than an empty report.
    for record in (tmp_path / "ple_compile").iterdir():
        record.write_text("{")
    assert run_in_new_process(tmp_path, {}) == [told, stats, 0]


def test_changed_sources_change_the_cache_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from ple_compile import pipeline

    before = pipeline.FusePass(ple_compile.Config(), False, []).uuid()
    monkeypatch.setattr(pipeline, "source_hash", lambda: "changed")
    assert pipeline.FusePass(ple_compile.Config(), False, []).uuid() != before
