"""Runs tests in a fork of this process, which has imported all that they need but the package itself."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch  # imported here, once
import torch._inductor.compile_fx  # noqa: F401
import transformers.models.qwen4_exp.modeling_qwen4_exp  # noqa: F401

# Compiled C++ is kept: its name is the hash of its text. What the package decided is not.
_DECISIONS = ("fxgraph", "aotautograd", "ple_compile")


@dataclass(frozen=True)
class Outcome:
    """`killed`, `survived` or `timeout`, and the first test that failed, or pytest's last words where none even ran."""

    status: str
    test: str | None
    seconds: float


class _FirstFailure:
    def __init__(self, file: Path):
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.file.exists():
            self.file.write_text(report.nodeid)


def run(tests: Sequence[str], timeout: float) -> Outcome:
    started, folder = time.monotonic(), Path(os.environ["MUTATION_DATA"])
    failure, log = folder / "failure", folder / "log"
    failure.unlink(missing_ok=True)
    for name in _DECISIONS:
        shutil.rmtree(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], name), ignore_errors=True)
    child = os.fork()
    if child == 0:
        _pytest(["-x", "-q", "-p", "no:cacheprovider", *tests], failure, log)
    status = _wait(child, started + timeout)
    if status == "killed" and not failure.exists():
        failure.write_text(log.read_text().rstrip().rpartition("\n")[2])
    return Outcome(status, failure.read_text() if failure.exists() else None, round(time.monotonic() - started, 1))


def _pytest(arguments: list[str], failure: Path, log: Path) -> None:
    os.setsid()
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 1
    try:
        code = int(pytest.main(arguments, plugins=[_FirstFailure(failure)]))
        sys.stdout.flush()
    finally:
        os._exit(code)


def _wait(child: int, deadline: float) -> str:
    done, status = os.waitpid(child, os.WNOHANG)
    while not done and time.monotonic() < deadline:
        time.sleep(0.05)
        done, status = os.waitpid(child, os.WNOHANG)
    # The child leads a group of its own: a rank that hangs ends with it.
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if not done:
        os.waitpid(child, 0)
        return "timeout"
    return "survived" if status == 0 else "killed"
