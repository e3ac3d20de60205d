"""The blocks of the documentation that need a GPU, after those of their page that do not, and its measurements."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from tests.documents import GPU_COMMANDS, GPU_MARK, NAMES, ROOT, run_python

marked = [name for name in NAMES if GPU_MARK in (ROOT / name).read_text()]


@pytest.mark.parametrize("name", marked)
def test_python_blocks(name: str, fresh_dynamo: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_python(name, monkeypatch, no_gpu=False) > 0


@pytest.mark.parametrize("command", GPU_COMMANDS)
def test_measurements_run(command: str, tmp_path: pathlib.Path) -> None:
    if "torchrun" in command and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    arguments = GPU_COMMANDS[command].replace("OUT", str(tmp_path)).split()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
