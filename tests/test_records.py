"""Records of compiled graphs on a disk that is full, read-only or damaged."""

import json
import logging
import pathlib

import pytest
import torch

import ple_compile
from ple_compile import Config, records
from ple_compile.pipeline import FusePass
from ple_compile.report import MATCHED, Event, GraphReport
from ple_compile.table_reads import Exchange, TableRead
from tests.ple_cases import Case


@pytest.mark.parametrize("fault", ["mkdir", "replace"])
def test_a_record_that_cannot_be_written_is_a_warning(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "ple_compile" / "graph.json"
    if fault == "mkdir":
        (tmp_path / "ple_compile").write_text("a file where the folder should be")
    else:
        monkeypatch.setattr("os.replace", full)
    with caplog.at_level(logging.WARNING, "ple_compile"):
        records._keep(records.Record(file, "1", None), GraphReport())
    assert "could not be kept" in caplog.text
    assert fault == "mkdir" or list(file.parent.iterdir()) == []


def test_a_log_without_graphs_says_where_they_are(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    report = GraphReport([Event("fuse_gate", MATCHED, "layers.1.ple", node="mul")], 1)
    record = records.Record(tmp_path / "graph.json", "1", report)
    with caplog.at_level(logging.INFO, "ple_compile"):
        assert records.resolve(record, FusePass(Config(), False, []), from_cache=True) is report
    assert "no pass ran; those of its compilation rewrote: fuse_gate 1. TORCHINDUCTOR_FORCE" in caplog.text


@torch.no_grad()
def test_passes_that_inductor_left_out_are_not_reported(no_codegen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its bisector has it do, though an earlier compilation of the same graph has left a record."""
    case = Case()
    layer, events = case.layer(), []
    for skipped in (False, True):
        torch._dynamo.reset()
        if skipped:
            monkeypatch.setattr(FusePass, "__call__", lambda self, graph: None)
        compiled = torch.compile(case.call, backend="ple")
        events.append(ple_compile.explain(compiled, layer, *case.inputs(), None).events())
    assert events[0] and not events[1]


def test_a_report_survives_the_record() -> None:
    reads = [TableRead("16*s0", 320, False, Exchange(4, 2, "s1", "peer", 64)), TableRead(7, 320, True)]
    report = GraphReport([Event("fuse_gate", MATCHED, "layers.1.ple", node="mul")], 1, reads=reads)
    assert GraphReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


@pytest.mark.parametrize(
    "data", ["[]", '{"events": [], "ple_layers": "2"}', '{"events": [{"pass": 1}], "ple_layers": 1}']
)
def test_other_content_is_no_report(data: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        GraphReport.from_dict(json.loads(data))
