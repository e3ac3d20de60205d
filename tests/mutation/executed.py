"""A pytest plugin: which lines of the package each test executes, its child processes included, and how long it takes.

Coverage runs in every process (`coverage.ini`, by COVERAGE_PROCESS_START); its contexts are the tests' names.
"""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

from tests.sharding import ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the first and the last variant of each parametrised test, unless MUTATION_VARIANTS=all: much quicker."""
    variants = defaultdict(list)
    for item in items:
        variants[item.nodeid.split("[")[0]].append(item)
    if os.environ.get("MUTATION_VARIANTS") != "all":
        items[:] = [item for same in variants.values() for item in dict.fromkeys([same[0], same[-1]])]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    coverage.Coverage.current().switch_context(nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> Iterator[None]:
    """What several tests share counts for each of them, not for the first alone."""
    test, recording = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0], coverage.Coverage.current()
    if fixturedef.scope != "function":
        recording.switch_context(f"fixture {fixturedef.argname}")
    try:
        return (yield)
    finally:
        recording.switch_context(test)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    _keep("fixtures", [item.nodeid, item.fixturenames])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _keep("seconds", [report.nodeid, report.outcome, report.duration])


def _keep(name: str, entry: list) -> None:
    with open(Path(os.environ["MUTATION_DATA"], f"{name}.jsonl"), "a") as file:
        file.write(json.dumps(entry) + "\n")


class CoveredRanks:
    """The process context of `ranks`, whose processes do not inherit the environment: the test's name goes along."""

    def __init__(self, context: Any):
        self.Pipe, self._context = context.Pipe, context

    def Process(self, target: Callable, args: tuple) -> Any:
        return self._context.Process(target=_covered, args=(os.environ["PYTEST_CURRENT_TEST"], target, args))


def _covered(test: str, function: Callable, args: tuple) -> None:
    os.environ["PYTEST_CURRENT_TEST"] = test
    coverage.process_startup(force=True)
    function(*args)


ranks._CONTEXT = CoveredRanks(ranks._CONTEXT)
