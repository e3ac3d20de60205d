"""Every block of README.md, CONTRIBUTING.md, SECURITY.md and docs/ runs, or is known to run elsewhere."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests.documents import GPU_COMMANDS, GPU_MARK, NAMES, ROOT, blocks, commands, mentioned_commands, prose, run_python

# What a fence may be: code that runs here, commands (below), output and files that are shown, or Sphinx.
LANGUAGES = {"python", "bash", "text", "diff", "{include}", "{toctree}", "{eval-rst}"}

# Commands of `bash` blocks: the file that runs each in continuous integration, and the words by which it does.
RUN_BY: dict[str, tuple[str, str]] = {
    "make lint": (".ci/run", "make lint"),
    "make docs": (".ci/run", "make docs"),
    "make quickstart": (".ci/run", "make quickstart"),
    "make test": (".ci/run", "make test"),
    "make test-oldest": ("Makefile", "test-oldest:"),
    ".ci/run": (".ci/run", "#!/usr/bin/env bash"),
    "pip install .[transformers]": (
        ".ci/run",
        'pip install --quiet --no-deps --target build/installed ".[transformers]"',
    ),
    "torchrun --nproc-per-node 2 -m examples.etp --tp 2 --backend ple": ("tests/examples/test_etp.py", '"ple"]'),
    "python -m ple_compile doctor": ("tests/cli/test_doctor.py", '"doctor"'),
    "python -m ple_compile explain examples/quickstart.py": (
        ".ci/run",
        "python -m ple_compile explain examples/quickstart.py",
    ),
    "python -m ple_compile bench --plot bench.svg": ("tests/cli/test_bench.py", '"--plot"'),
    "python -m ple_compile quantize CHECKPOINT OUT --format fp8": ("tests/cli/test_quantize_command.py", '"quantize"'),
    "python -m ple_compile tune": ("tests/cli/test_tune.py", '"tune"'),
    "torchrun --nproc-per-node 4 -m examples.etp --tp 2": ("tests/examples/test_etp.py", "(4, 2, "),
}

# The same for commands of benchmarks/ that a text mentions, and that need no GPU.
MENTIONED_RUN_BY = {
    "python -m benchmarks.etp_traffic": ("tests/sharding/test_traffic.py", "etp_traffic"),
    "python benchmarks/plots.py": (".ci/run", "benchmarks/plots.py"),
}

# The first page is run as a reader would. The others leave out Inductor's code generation, which takes most of the
# time and is the same for all of them; CONTRIBUTING.md does so by itself.
WITH_CODE_GENERATION = {"README.md", "CONTRIBUTING.md"}

with_python = [name for name in NAMES if any(language == "python" for language, _ in blocks(name))]


@pytest.mark.parametrize("name", with_python)
def test_python_blocks(
    name: str, request: pytest.FixtureRequest, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue("fresh_dynamo" if name in WITH_CODE_GENERATION else "no_codegen")
    monkeypatch.chdir(tmp_path)
    assert run_python(name, monkeypatch, no_gpu=True) > 0


def test_blocks_that_are_whole_files_import_what_they_use() -> None:
    files = [text for _, text in blocks("CONTRIBUTING.md") if text.startswith('"""')]
    assert len(files) == 2
    for text in files:
        command = [sys.executable, "-m", "ruff", "check", "--quiet", "--select", "F821,E501", "-"]
        checked = subprocess.run(command, input=text, capture_output=True, text=True, cwd=ROOT)
        assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("name", NAMES)
def test_every_block_is_of_a_known_kind(name: str) -> None:
    kinds = {language.split(" ")[0] for language, _ in blocks(name)}
    assert kinds <= LANGUAGES
    text = (ROOT / name).read_text()
    assert text.count("<!--- skip:") == text.count(GPU_MARK), "a block is skipped for another reason than a GPU"


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_files(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", prose(name)):
        assert target.startswith("https://") or (ROOT / name).parent.joinpath(target).exists(), target


def test_every_command_runs_somewhere() -> None:
    assert {command for name in NAMES for command in commands(name)} == set(RUN_BY)
    for file, words in RUN_BY.values():
        assert words in (ROOT / file).read_text(), f"{file} no longer runs {words}"


def test_mentioned_commands_name_what_exists() -> None:
    targets = [line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line]
    for command in (command for name in NAMES for command in mentioned_commands(name)):
        words = [word for word in command.split() if "=" not in word]
        if "benchmarks" in command and command not in GPU_COMMANDS:
            file, words = MENTIONED_RUN_BY[command]
            assert words in (ROOT / file).read_text(), f"{file} no longer runs {command}"
        if words[0] == "make":
            assert words[1] in targets, command
        for word in words:
            if word.startswith(("tests/", "benchmarks/", "examples/")):
                assert (ROOT / word).exists(), command
            elif word.startswith(("tests.", "benchmarks.", "examples.")):
                path = ROOT / word.replace(".", "/")
                assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), command
