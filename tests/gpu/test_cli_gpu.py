"""`doctor` and `bench` where there is a GPU; `tune` is in test_tune_gpu.py."""

import json

import torch

from ple_compile.cli.main import main
from ple_compile.measuring.compare import WAYS


def test_doctor_finds_the_gpu(capsys):
    assert main(["doctor", "--json"]) == 0
    found = {line["name"]: line for line in json.loads(capsys.readouterr().out)}
    assert torch.cuda.get_device_name(0) in found["GPU 0"]["found"]
    for name in ("NVIDIA driver", "CUDA graphs", "launch choices"):
        assert found[name]["status"] == "ok", found[name]


def test_bench_times_a_fused_layer(tmp_path, capsys):
    command = ["bench", "--hidden", "256", "--rows", "100000", "--tokens", "1,64", "--json"]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["environment"]["gpu"] == torch.cuda.get_device_name()
    for row in report["PLE layer, us"]:
        assert row["fused"] == 1 and row["ours"] < row["eager"]
        assert all(row[way] > row["floor"] > 0 for way in WAYS)
