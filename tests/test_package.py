"""What is installed: every package, the entry point, and nothing called `passes` beside us."""

import importlib.metadata
import pathlib
import tomllib

import torch

import ple_compile

ROOT = pathlib.Path(__file__).parent.parent


def test_every_package_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {file.parent for file in (ROOT / "ple_compile").rglob("*.py")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert sorted(names | {"ple_compile.passes"}) == settings["packages"]
    data = {file.parent for file in (ROOT / "ple_compile").rglob("*.*") if file.suffix not in (".py", ".pyc")}
    assert {".".join(folder.relative_to(ROOT).parts) for folder in data} == settings["package-data"].keys()
    assert settings["package-dir"] == {"ple_compile": "ple_compile", "ple_compile.passes": "passes"}


def test_the_backend_is_known_by_name() -> None:
    assert "ple" in torch._dynamo.list_backends()
    (entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="ple")
    assert entry.value == "ple_compile.backend:ple"


def test_public_names_exist_and_are_documented() -> None:
    for name in ple_compile.__all__:
        assert getattr(ple_compile, name).__doc__, name
