"""The three ways through one small layer, as a table, as JSON and as a figure."""

import json
from pathlib import Path

import pytest
import torch

from ple_compile.cli.main import main
from ple_compile.measuring import compare, figures, timing


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, no_codegen: None) -> None:
    """No code generation either for what is called stock Inductor, and few repetitions."""
    monkeypatch.setitem(compare._BACKENDS, "inductor", "eager")
    monkeypatch.setattr(timing, "_CPU_SECONDS", 0.0)


def test_json_and_figure(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "bench.svg"
    command = ["bench", "--device", "cpu", "--tokens", "1,9", "--hidden", "32", "--rows", "2000"]
    assert main([*command, "--json", "--plot", str(file)]) == 0
    report = json.loads(capsys.readouterr().out)
    (_, rows) = report.items()
    assert [row["tokens"] for row in rows[1]] == [1, 9]
    for row in rows[1]:
        assert row["fused"] == 1 and all(row[way] > row["floor"] > 0 for way in compare.WAYS)
    assert report["environment"]["gpu"] == "none" and report["environment"]["torch"]
    drawn = file.read_text()
    for text in ("1 PLE layer(s), hidden 32", "bytes at copy bandwidth", "inductor", report["environment"]["torch"]):
        assert text in drawn


def test_a_layer_that_is_not_fused_is_1(
    quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(compare._BACKENDS, "ours", "eager")
    assert main(["bench", "--device", "cpu", "--tokens", "1", "--hidden", "32", "--rows", "2000"]) == 1
    what, _, header, _, row = capsys.readouterr().out.strip().splitlines()
    assert what == "microseconds per call of 1 PLE layer(s), medians:"
    assert header.startswith("| tokens | eager | inductor | ours | fused | floor |") and row.startswith("| 1 |")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(["bench", "--plot", "x.svg"]) == 2
    assert "pip install 'ple-compile[plots]'" in capsys.readouterr().err


def test_a_commit_that_was_not_noted_is_called_that() -> None:
    noted = {"gpu": "GPU", "torch": "2.11", "triton": "3.6", "command": "x.py", "commit": "0123456789abcdef"}
    assert "commit 0123456789;" in figures.caption(noted)
    assert "commit not noted" in figures.caption(noted | {"commit": "HEAD"})


def test_a_way_that_computes_something_else_is_not_timed() -> None:
    expected = torch.ones(4)
    compare.check("ours", expected * 1.01, expected)
    for wrong in (expected * 1.05, expected * torch.nan):
        with pytest.raises(RuntimeError, match="ours gives another result than eager"):
            compare.check("ours", wrong, expected)
