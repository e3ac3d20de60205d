"""Lines about this machine, and about machines that lack something."""

import importlib.metadata
import json
import resource
import tomllib
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from ple_compile.cli import checks
from ple_compile.cli.main import main

ROOT = Path(__file__).parent.parent.parent


def lines(capsys: pytest.CaptureFixture, expected_code: int) -> dict[str, dict]:
    assert main(["doctor", "--json"]) == expected_code
    return {line["name"]: line for line in json.loads(capsys.readouterr().out)}


def test_this_machine(capsys: pytest.CaptureFixture) -> None:
    found = lines(capsys, 0)
    for name in ("Python", "torch", "triton", "transformers", 'backend="ple"', "Inductor's cache"):
        assert found[name]["status"] == "ok", found[name]
    for line in found.values():
        assert line["status"] == "ok" or line["remedy"], line
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for name in found:
        assert f"  {name}" in text


def test_lowest_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["transformers"]
    stated = {name: version for name, version in checks.REQUIRED.items() if any(version)}
    stated["transformers"] = checks.OPTIONAL["transformers"][0]
    for name, version in stated.items():
        assert any(item.split(";")[0] == f"{name}>={checks._dotted(version)}" for item in wanted), name
    assert project["requires-python"] == f">={checks._dotted(checks.PYTHON)}"
    for _, extra in checks.OPTIONAL.values():
        assert extra in project["optional-dependencies"]


def test_versions_that_are_old_or_absent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    there = {"torch": "2.9.1+cu130", "numpy": "2.4", "transformers": "4.57.0"}

    def version(name: str) -> str:
        if name not in there:
            raise importlib.metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(torch.compiler, "list_backends", lambda: ["inductor"])
    found = lines(capsys, 1)
    assert found["torch"]["status"] == "missing" and "older than 2.11" in found["torch"]["found"]
    assert found["torch"]["remedy"] == "pip install --upgrade 'torch>=2.11'"
    assert found["triton"]["status"] == "missing"
    assert found["transformers"]["remedy"] == "pip install --upgrade 'ple-compile[transformers]'"
    assert found["matplotlib"]["status"] == "warning" and "ple-compile[plots]" in found["matplotlib"]["remedy"]
    assert found['backend="ple"']["status"] == "missing" and "pip install" in found['backend="ple"']["remedy"]


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    for check, variable in zip(checks.compilers(), ("CXX", "CC")):
        assert check.status == "missing" and check.remedy.endswith(f"apt-get install g++, or set {variable}")


def test_a_cache_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(checks.upstream, "cache_dir", lambda: str(tmp_path / "gone"))
    found = lines(capsys, 1)["Inductor's cache"]
    assert found["status"] == "missing" and "TORCHINDUCTOR_CACHE_DIR" in found["remedy"]


def test_limits_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 * 2**20, 8 * 2**20))
    monkeypatch.setattr(checks, "_container_limit", lambda: 2**28)
    found = {check.name: check for check in (*checks.page_locking(), *checks.memory())}
    assert found["page-lock limit"].found == "8.0 MiB (ulimit -l)" and "ulimit -l" in found["page-lock limit"].remedy
    assert found["container memory"].status == "warning" and "256.0 MiB" in found["container memory"].found


def test_gpus_that_cannot_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    Properties = namedtuple("Properties", "name major minor total_memory")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Properties("GPU", 9 - 2 * i, 0, 141 * 2**30))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 3))
    found = {check.name: check for check in (*checks.gpus(), *checks.several_gpus())}
    assert found["GPU 0"].status == "ok" and found["GPU 1"].status == "warning"
    assert found["NCCL"].found == "2.29.3"
    assert found["peer access"].status == "warning" and "0-1, 1-0" in found["peer access"].found
