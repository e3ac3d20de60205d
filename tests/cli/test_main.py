"""What every command shares: help, exit codes, one line for a user's mistake."""

import subprocess
import sys

import pytest

from ple_compile.cli import arguments
from ple_compile.cli.main import main

COMMANDS = ("explain", "bench", "tune", "doctor", "quantize")


def test_the_module_runs_and_its_exit_code_is_the_commands() -> None:
    wrong = subprocess.run([sys.executable, "-m", "ple_compile", "explain", "nowhere"], capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stdout == ""
    (line,) = wrong.stderr.splitlines()
    assert line.startswith("python -m ple_compile explain: nowhere does not exist; give a checkpoint folder, ")


def test_help_lists_every_command(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    shown = capsys.readouterr().out
    assert exit.value.code == 0 and "Exit codes: 0" in shown
    for command in COMMANDS:
        assert f"\n    {command}  " in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_tells_its_exit_codes(command: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit:
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert exit.value.code == 0 and "--json" in shown
    assert "Exit code 0" in shown or command == "quantize"
    assert max(map(len, shown.splitlines())) <= 120


@pytest.mark.parametrize("argv", [[], ["unknown"], ["bench", "--tokens", "1,x"], ["explain", "m", "--option", "a"]])
def test_arguments_that_cannot_be_read_are_2(argv: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit:
        main(argv)
    assert exit.value.code == 2 and "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["bench", "--device", "cuda:99"], "--device cuda:99: "),
        (["bench", "--device", "nonsense"], "no such kind of device"),
        (["bench", "--device", "meta"], "no such kind of device"),
        (["bench", "--hidden", "20"], "hidden is 20; it is a multiple of 16"),
        (["bench", "--hidden", "0"], "hidden is 0"),
        (["bench", "--layers", "0"], "--layers 0"),
        (["bench", "--plot", "x.pdf"], "figures are .svg or .png files"),
        (["explain", "m", "--tokens", "0"], "--tokens 0"),
        (["explain", "m", "--option", "fuse_gat=true"], "did you mean 'fuse_gate'"),
        (["explain", "m", "--option", "fuse_gate=2"], "Config.fuse_gate is 2"),
        (["explain", "m", "--option", "strict=true"], "the exit code says"),
        (["explain", "m.py", "--config", "a=1"], "makes its own model"),
        (["explain", "m", "--save", "no/folder/report.html"], "the folder does not exist"),
        (["explain", "m", "--save", "."], "this is a folder"),
        (["quantize", "nowhere", "out", "--format", "fp8"], "nowhere does not exist"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(
    argv: list[str], expected: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m ple_compile {argv[0]}: ") and expected in line


def test_values_of_assignments() -> None:
    found = [arguments.assignment(text)[1] for text in ("a=true", "a=False", "a=3", "a=[1, 2]", "a=all_reduce")]
    assert found == [True, False, 3, [1, 2], "all_reduce"]
