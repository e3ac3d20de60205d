"""Models from files, checkpoints and configurations; the exit code says whether every layer ran fused."""

import json
from pathlib import Path

import pytest
import torch

from ple_compile.cli.main import main
from ple_compile.cli.target import load
from tests.tiny_models import shallow_model, tiny_model

SCRIPT = """
import ple_compile
import torch
from ple_compile.measuring.layer import Sizes, Stack
from tests.ple_cases import Case, Layers

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


def own_settings():
    return ple_compile.compile(Stack(SIZES, 1), merge_kv_proj=False), inputs


def half_fused():
    made = Layers(Case()).eval()
    made.layers[0].conv1d.register_forward_hook(lambda module, args, output: output.tanh())
    ple_compile.compile(made)
    return (lambda *args: made(*args) + made(*args)), Case().inputs()[:2]
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
    events = [event for graph in report["graphs"] for event in graph["events"]]
    assert {event["status"] for event in events if event["pass_name"] == "merge_kv_proj"} == {"not applicable"}


def test_layers_that_did_not_run_fused_are_1(script: Path, no_codegen: None, capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", str(script), "--option", "fuse_gate=false"]) == 1
    assert "0 ran fused" in capsys.readouterr().out
    assert main(["explain", f"{script}:compiled"]) == 1  # this one is not, in spite of its name
    assert "0 ran fused" in capsys.readouterr().out
    assert main(["explain", f"{script}:compiled", "--option", "fuse_gate=true"]) == 2
    assert "pass its options to torch.compile" in capsys.readouterr().err
    assert main(["explain", f"{script}:plain"]) == 1
    assert "0 PLE layer(s)" in capsys.readouterr().out


def test_a_layer_that_ran_fused_twice_does_not_stand_for_another(
    script: Path, no_codegen: None, capsys: pytest.CaptureFixture
) -> None:
    assert main(["explain", f"{script}:half_fused"]) == 1
    assert "2 PLE layer(s), " in capsys.readouterr().out


def test_what_the_file_has_compiled_stays_so(script: Path, no_codegen: None, capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", f"{script}:own_settings"]) == 0
    assert "merge_kv_proj      not applicable: Config.merge_kv_proj is False" in capsys.readouterr().out
    assert main(["explain", f"{script}:own_settings", "--option", "merge_kv_proj=true"]) == 0
    assert "merge_kv_proj      matched" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("model = 1 +", "SyntaxError: invalid syntax"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def model():\n    a, b = [1]", "in model\n    a, b = [1]"),
        ("class M(torch.nn.Module):\n    def forward(self, x):\n        a, b = [1]\nmodel = M()", "in forward"),
    ],
)
def test_an_error_of_the_models_code_is_its_traceback(
    tmp_path: Path, code: str, told: str, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "model.py"
    file.write_text(f"import torch\ninputs = torch.ones(2)\nprint('read')\n{code}\n")
    assert main(["explain", str(file), "--json"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("Traceback") == 1 and told in shown.err


def test_a_file_that_ends_the_process(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "model.py"
    file.write_text("import sys\nmodel = None\nsys.exit(0)\n")
    assert main(["explain", str(file)]) == 2
    assert "ends the process, by exit(0); put what a script does under" in capsys.readouterr().err


def test_a_model_without_ple_layers_is_told_of_once(
    script: Path, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["explain", f"{script}:plain", "--option", "fuse_gate=true"]) == 1
    assert len(caplog.records) == 1 and "Linear has no PLE layer" in caplog.text
    assert "a module is compiled for the call where it has PLE layers" in capsys.readouterr().out


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
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert main(["explain", str(tmp_path)]) == 2
    assert f"{tmp_path}: its weights cannot be read: " in capsys.readouterr().err
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
