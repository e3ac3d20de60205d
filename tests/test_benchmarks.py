"""What benchmarks are made of, where no GPU is needed to see that it is right."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import compile_time

FILES = sorted((Path(__file__).parent.parent / "benchmarks").glob("*.py"))
SCRIPTS = [file for file in FILES if "__main__" in file.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_scripts_start_in_any_folder(script: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, script, "--help"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("num_ple_layers", [1, 36])
def test_ple_is_in_layers_with_linear_attention(num_ple_layers: int) -> None:
    config = compile_time.config_of(num_ple_layers)
    assert len(config.ple_layer_ids) == num_ple_layers
    assert {config.layer_types[number - 1] for number in config.ple_layer_ids} == {"linear_attention"}


def test_more_layers_than_can_have_ple_are_refused() -> None:
    with pytest.raises(SystemExit, match="1 to 36 of 48"):
        compile_time.config_of(37)
