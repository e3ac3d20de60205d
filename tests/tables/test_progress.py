"""The bars: on a terminal only, one line that is drawn over, ended when the work is."""

import sys

import pytest

from ple_compile.tables.progress import Progress, Steps


def work() -> None:
    copy = Progress("loading", 2**31)
    for _ in range(4):
        copy.advance(2**29)
    steps = Steps("tune", 2)
    steps.begin("first")
    steps.begin("second")
    steps.end()


def test_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    work()
    first, second, rest = capsys.readouterr().err.split("\n")
    assert first.count("\r") == 4 and first.endswith("loading [##############################] 2.0 GiB\033[K")
    shown = [line.removesuffix("\033[K") for line in second.split("\r")[1:]]
    assert shown == [f"tune [{'.' * 30}] first", f"tune [{'#' * 15}{'.' * 15}] second", f"tune [{'#' * 30}] done"]
    assert rest == ""


def test_elsewhere_there_is_none(capsys: pytest.CaptureFixture) -> None:
    work()
    assert capsys.readouterr().err == ""
