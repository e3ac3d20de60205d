"""A checkpoint folder in, its tables in a smaller format out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ple_compile.cli.main import main
from ple_compile.cli.quantize import FILE
from ple_compile.tables.load import load_tables
from ple_compile.tables.quantize import TensorWriter, quantize_tables
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model((1, 2), num_layers=2, ple_embed_dim=64).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_the_tables_are_those_of_quantize_tables(
    checkpoint: Path, tmp_path: Path, format: str, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "new" / "folder"
    assert main(["quantize", str(checkpoint), str(out), "--format", format, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["file"] == str(out / FILE) and len(said["tables"]) == 2
    expected, loaded = (tiny_model((1, 2), num_layers=2, ple_embed_dim=64) for _ in range(2))
    quantize_tables(expected, format)
    load_tables(loaded, out)
    stored = load_file(out / FILE)
    for name, tensor in stored.items():
        for model in (expected, loaded):
            assert torch.equal(model.get_parameter(name).view(torch.uint8), tensor.view(torch.uint8)), name
    assert [file.name for file in out.iterdir()] == [FILE]


def test_a_run_that_was_stopped_goes_on(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    command = ["quantize", str(checkpoint), str(tmp_path), "--format", "fp8_row"]

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TensorWriter, "write_rows", stop)
        assert main(command) == 130
    assert (tmp_path / f"{FILE}.progress").exists()
    assert main(["quantize", str(checkpoint), str(tmp_path), "--format", "fp8"]) == 2
    assert "begun with other tables, another format" in capsys.readouterr().err
    assert main(command) == 0 and not (tmp_path / f"{FILE}.progress").exists()
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {tmp_path / FILE}"
    assert main(command) == 2
    assert "is there and complete" in capsys.readouterr().err


def test_folders_that_have_no_table(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["quantize", str(tmp_path), str(tmp_path), "--format", "fp8"]) == 2
    assert "no config.json" in capsys.readouterr().err
    tiny_model((), num_layers=1).config.save_pretrained(tmp_path)
    assert main(["quantize", str(tmp_path), str(tmp_path), "--format", "fp8"]) == 2
    assert "without PLE layers" in capsys.readouterr().err


def test_a_folder_that_would_hold_the_table_twice(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    before = sorted(checkpoint.iterdir())
    assert main(["quantize", str(checkpoint), str(checkpoint), "--format", "fp8"]) == 2
    assert "already; save into a directory without this table" in capsys.readouterr().err
    assert sorted(checkpoint.iterdir()) == before
    (tmp_path / "file").touch()
    assert main(["quantize", str(checkpoint), str(tmp_path / "file"), "--format", "fp8"]) == 2
    assert "file is a file; name a folder" in capsys.readouterr().err
