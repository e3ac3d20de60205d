"""Without a GPU the command says so; the search itself is in tests/tuning and tests/gpu."""

import pytest
import torch

from ple_compile.cli.main import main
from ple_compile.cli.tune import describe
from ple_compile.tuning.search import Result


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "on a GPU, and there is no CUDA device" in line and "doctor" in line


def test_an_unknown_op_and_a_cpu_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["tune", "--ops", "gate_conf"]) == 2
    assert "the ops are gate_conv, " in capsys.readouterr().err
    assert main(["tune", "--device", "cpu"]) == 2
    assert "give cuda or cuda:N" in capsys.readouterr().err


def test_what_is_told_about_a_result() -> None:
    before = {"block": 512, "num_warps": 2}
    found = Result("short_conv", {"channels": 64, "bytes": 2}, before, {"block": 256, "num_warps": 2}, 0.9)
    assert describe(found) == "short_conv (channels 64, bytes 2): 10% less time with block 512 -> 256"
    assert "the present choices are the fastest" in describe(Result("short_conv", {}, before, before, 1.0))
