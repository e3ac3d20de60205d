"""What PyTorch's own tools see of the passes: logs, tlparse artifacts, pass switches, the bisector."""

import logging
import os
import subprocess
import sys

import pytest
import torch
from torch._inductor.compiler_bisector import CompilerBisector

import ple_compile
from ple_compile import pipeline, records, upstream
from ple_compile.backend import ple
from ple_compile.report import DECLINED, Event, GraphReport
from tests.ple_cases import Case


@torch.no_grad()
def run_layer(**options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """(compiled, eager) output of one PLE layer."""
    torch._dynamo.reset()
    case = Case()
    layer, arguments = case.layer(), (*case.inputs(), None)
    return torch.compile(case.call, backend="ple", options=options)(layer, *arguments), case.call(layer, *arguments)


def test_torch_logs_names_the_package() -> None:
    script = "import logging, torch; print(logging.getLogger('ple_compile').getEffectiveLevel())"
    environment = {**os.environ, "TORCH_LOGS": "+ple_compile"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) == logging.DEBUG


def test_each_changed_graph_is_logged_and_an_artifact_for_tlparse(
    no_codegen: None, caplog: pytest.LogCaptureFixture
) -> None:
    artifacts = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "artifact" in record.metadata:
                artifacts.append((record.metadata["artifact"]["name"], record.payload))

    trace = logging.getLogger("torch.__trace")
    handler = Handler()
    trace.addHandler(handler)
    try:
        with caplog.at_level(logging.DEBUG, "ple_compile"):
            run_layer()
    finally:
        trace.removeHandler(handler)
    ours = {name: text for name, text in artifacts if name.startswith("ple_compile")}
    changed = dict(upstream.counters["ple_compile"])
    assert ours.keys() == {f"ple_compile_after_{name}" for name in changed}
    assert "ple.ngram_ids" in ours["ple_compile_after_fuse_ngram_ids"]
    assert all(f"after {name}:" in caplog.text for name in changed)
    told = [record for record in caplog.records if record.levelno == logging.INFO]
    assert [r.message for r in told] == ["the passes rewrote: " + ", ".join(f"{n} {k}" for n, k in changed.items())]


def test_a_declined_pass_is_one_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_warned", set())
    event = Event("merge_kv_proj", DECLINED, "layers.1.ple", "the weights differ in dtype", "mm")
    with caplog.at_level(logging.INFO, "ple_compile"):
        for _ in range(2):
            records.publish(GraphReport([event]))
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO]
    assert "merge_kv_proj declined at layers.1.ple: the weights differ in dtype" in caplog.records[0].message
    assert "explain" in caplog.records[0].message


def test_a_decline_in_a_region_is_named_from_outside(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_warned", set())
    with records.region("model.layers.1.ple"):
        records.publish(GraphReport([Event("merge_kv_proj", DECLINED, "L['args'][0].norm_conv", "why", "mm")]))
    assert "declined at model.layers.1.ple.norm_conv: why" in caplog.text


def test_inductors_own_switch_leaves_a_pass_out_and_the_report_says_so(no_codegen: None) -> None:
    with records.collect() as calls:
        actual, expected = run_layer(inductor={"disabled_passes": "fuse_gate"})
    assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-4)
    assert "fuse_gate" not in upstream.counters["ple_compile"]
    (event,) = [event for call in calls for event in call.report.events if event.pass_name == "fuse_gate"]
    assert event.status == "not applicable" and "disabled_passes" in event.reason
    assert ple_compile.stats()["ple_executions"] == 0


def test_a_setting_of_inductor_names_another_record() -> None:
    plain = upstream.inductor_settings({})
    assert upstream.inductor_settings({}) == plain
    with upstream.inductor_config.patch(disabled_passes="fuse_gate"):
        assert upstream.inductor_settings({}) != plain
    assert upstream.inductor_settings({"disabled_passes": "fuse_gate"}) != plain


def test_pytorchs_bisector_finds_a_faulty_pass(no_codegen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps a custom backend only where it is told to, and given as a function."""

    def fuse_gate(graph: torch.fx.Graph, report: GraphReport) -> int:
        (sine,) = graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
        sine.target = torch.ops.aten.cos.default
        return 1

    others = [function for function in pipeline.PASSES if function.__name__ != "fuse_gate"]
    monkeypatch.setattr(pipeline, "PASSES", (*others[:2], fuse_gate, *others[2:]))
    x = torch.rand(3)

    def is_right() -> bool:
        torch._dynamo.reset()
        return torch.equal(torch.compile(lambda x: x.sin(), backend=ple)(x), x.sin())

    with upstream.inductor_config.patch({"test_configs.bisect_keep_custom_backend_for_inductor": True}):
        found = CompilerBisector.do_bisect(is_right)
    assert found is not None and found.subsystem == "post_grad_passes" and "fuse_gate" in str(found.debug_info)
