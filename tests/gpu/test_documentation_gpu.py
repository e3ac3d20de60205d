"""The blocks of the documentation that need a GPU, after those of their page that do not."""

import pathlib

import pytest

from tests.documents import GPU_MARK, NAMES, ROOT, run_python

marked = [name for name in NAMES if GPU_MARK in (ROOT / name).read_text()]


@pytest.mark.parametrize("name", marked)
def test_python_blocks(name: str, fresh_dynamo: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_python(name, no_gpu=False) > 0
