"""Models from files, checkpoints and configurations; the exit code says whether every layer ran fused."""

import json
from pathlib import Path

import pytest
import torch

from ple_compile.cli.main import main
from ple_compile.cli.target import load
from tests.tiny_models import shallow_model, tiny_model

SCRIPT = """
import torch
from ple_compile.measuring.layer import Sizes, Stack

SIZES = Sizes(hidden=32, rows=2000, dtype=torch.float32, device="cpu")
inputs = SIZES.random(1, 7, SIZES.channels), torch.randint(0, 99, (1, 7))
model = Stack(SIZES, 1)


def two_layers():
    return Stack(SIZES, 2), inputs


def by_name():
    return model, (), {"hidden": inputs[0], "tokens": inputs[1]}


def plain():
    return torch.nn.Linear(32, 32), (inputs[0][..., :32],)


def number():
    return 3


def compiled(hidden, tokens):
    return model(hidden, tokens)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "my_model.py"
    file.write_text(SCRIPT)
    return file


def test_a_variable_with_inputs(script: Path, no_codegen: None, capsys: pytest.CaptureFixture) -> None:
    saved = script.with_suffix(".json")
    assert main(["explain", str(script), "--save", str(saved)]) == 0
    shown = capsys.readouterr()
    assert "1 PLE layer(s), 1 ran fused" in shown.out and "layers.0" in shown.out and f"saved {saved}" in shown.err
    assert json.loads(saved.read_text())["layers"] == ["layers.0"]


def test_a_function_and_json(script: Path, no_codegen: None, capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", f"{script}:two_layers", "--json", "--option", "merge_kv_proj=false"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["layers"] == ["layers.0", "layers.1"]
    assert "merge_kv_proj" not in {event["pass_name"] for graph in report["graphs"] for event in graph["events"]}


def test_layers_that_did_not_run_fused_are_1(script: Path, no_codegen: None, capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", str(script), "--option", "fuse_gate=false"]) == 1
    assert "0 ran fused" in capsys.readouterr().out
    assert main(["explain", f"{script}:compiled"]) == 1  # this one is not, in spite of its name
    assert "0 ran fused" in capsys.readouterr().out
    assert main(["explain", f"{script}:compiled", "--option", "fuse_gate=true"]) == 2
    assert "pass its options to torch.compile" in capsys.readouterr().err
    assert main(["explain", f"{script}:plain"]) == 1
    assert "0 PLE layer(s)" in capsys.readouterr().out


def test_what_a_file_gives(script: Path, capsys: pytest.CaptureFixture) -> None:
    device, dtype = torch.device("cpu"), torch.bfloat16
    model, args, kwargs = load(f"{script}:by_name", device, dtype, {}, 5)
    assert args == () and sorted(kwargs) == ["hidden", "tokens"]
    assert not model.training and next(model.parameters()).dtype == dtype
    for name, expected in (("nothing", "has no 'nothing'"), ("number", "gives a int")):
        assert main(["explain", f"{script}:{name}"]) == 2
        assert expected in capsys.readouterr().err
    script.write_text("def model(device):\n    return 3\n")
    assert main(["explain", str(script)]) == 2
    assert "takes device; give a function without arguments" in capsys.readouterr().err
    script.write_text("import torch\nmodel = torch.nn.Linear(2, 2)\n")
    assert main(["explain", str(script)]) == 2
    assert "came without inputs" in capsys.readouterr().err


def test_a_checkpoint_and_its_configuration_alone(
    tmp_path: Path, no_codegen: None, capsys: pytest.CaptureFixture
) -> None:
    saved = shallow_model()
    saved.save_pretrained(tmp_path)
    model, (ids,), _ = load(str(tmp_path), torch.device("cpu"), None, {}, 5)
    assert ids.shape == (1, 5)
    for name, parameter in saved.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    assert main(["explain", str(tmp_path), "--config", "hidden_size=64"]) == 2
    assert "has weights" in capsys.readouterr().err
    config = tmp_path / "config.json"
    assert main(["explain", str(config), "--config", "widht=64"]) == 2
    assert "has no such field" in capsys.readouterr().err
    assert main(["explain", str(config), "--config", "ple_layer_ids=[2]"]) == 2
    assert "only supported on linear_attention" in capsys.readouterr().err
    assert main(["explain", str(config), "--config", "hidden_size=64", "--tokens", "6", "--device", "cpu"]) == 0
    assert "Qwen4ExpForCausalLM: 1 PLE layer(s), 1 ran fused" in capsys.readouterr().out


def test_a_shorter_model_from_a_configuration(tmp_path: Path) -> None:
    tiny_model((2,), num_layers=8).config.save_pretrained(tmp_path)
    model, _, _ = load(str(tmp_path), torch.device("cpu"), torch.float32, {"num_hidden_layers": 2}, 5)
    assert len(model.model.layers) == 2
