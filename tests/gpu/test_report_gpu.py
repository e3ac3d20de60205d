"""The report of a layer that runs on the device: where its table lies, what it ran on, and the page."""

import pathlib

import torch

import ple_compile
from tests.ple_cases import Case


def test_the_page_of_a_layer_with_a_host_table(fresh_dynamo: None, tmp_path: pathlib.Path) -> None:
    case = Case(model="reference", dtype="bfloat16")
    layer = case.layer().requires_grad_(False)
    ple_compile.offload_tables(layer)
    layer.cuda()
    streams, ids, _ = case.inputs()
    report = ple_compile.explain(layer, streams.cuda(), ids.cuda(), None, None)
    assert torch.cuda.get_device_name() in report.environment["device"]
    (table,) = report.tables
    assert table.placement == "page-locked host memory"
    (run,) = report.layer_runs()
    after = {node.target for node in run.found.drawing.nodes if node.after is not None}
    assert any(target.startswith("ple.gate_conv") for target in after)
    report.save(tmp_path / "report.html")
    assert table.placement in (tmp_path / "report.html").read_text()
