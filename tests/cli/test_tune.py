"""Without a GPU the command says so; the search itself is in tests/tuning and tests/gpu."""

import contextlib
import json
from pathlib import Path

import pytest
import torch

from ple_compile.cli import tune
from ple_compile.cli.main import main
from ple_compile.cli.tune import describe
from ple_compile.measuring.layer import Sizes
from ple_compile.ops import ngram_ids
from ple_compile.tuning import store, table
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


def test_what_was_found_is_stored_and_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The command without its search, on a machine that says it has a GPU with 1 MiB of memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in {
        "is_available": True, "device_count": 1, "mem_get_info": (2**20, 2**20), "get_device_name": "NVIDIA H200",
        "get_device_capability": (9, 0),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(tune.arguments, "current", lambda device: contextlib.nullcontext())
    asked: list[Sizes] = []

    def found(op: str, sizes: Sizes) -> Result:
        asked.append(sizes)
        return Result(op, {"heads": 16}, {"block": 32, "num_warps": 4}, {"block": 64, "num_warps": 4}, 0.5)

    monkeypatch.setattr(tune, "tune", found)
    gpu = torch.device("cuda", 0)
    table.forget()
    assert table.chosen("ngram_ids", ngram_ids.Choices(), gpu, heads=16).block == 32
    assert main(["tune", "--ops", "ngram_ids", "--hidden", "64", "--dtype", "float32"]) == 0
    assert asked == [Sizes(hidden=64, rows=2**20 // 2 // 16, dtype=torch.float32, device="cuda:0")]
    told = capsys.readouterr().out.splitlines()
    assert told == ["ngram_ids (heads 16): 50% less time with block 32 -> 64", f"wrote {store.path(gpu)}"]
    assert table.chosen("ngram_ids", ngram_ids.Choices(), gpu, heads=16).block == 64
    assert main(["tune", "--ops", "ngram_ids", "--rows", "5000", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert asked[1].rows == 5000 and said["results"][0]["changes"] == {"block": 64}
    table.forget()
