"""Which tests run a line, cheapest first: from what `executed` recorded."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import coverage

from tests.mutation.mutants import Mutant

_PHASE = re.compile(r" \((setup|call|teardown)\)$")


class Covering:
    def __init__(self, data: Path, root: Path):
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed = []
        for line in (data / "seconds.jsonl").read_text().splitlines():
            test, outcome, seconds = json.loads(line)
            self.seconds[test] += seconds
            if outcome == "failed":
                self.failed.append(test)
        users = defaultdict(set)
        for line in (data / "fixtures.jsonl").read_text().splitlines():
            test, names = json.loads(line)
            for name in names:
                users[f"fixture {name}"].add(test)
        self.lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for part in data.glob("coverage.*"):
            recorded = coverage.CoverageData(str(part))
            recorded.read()
            for file in recorded.measured_files():
                for line, contexts in recorded.contexts_by_lineno(file).items():
                    found = {_PHASE.sub("", context) for context in contexts}
                    tests = found.union(*(users[name] for name in found if name in users)) & self.seconds.keys()
                    self.lines[Path(file).relative_to(root).as_posix()][line] |= tests

    def tests(self, mutant: Mutant, seconds: float) -> list[str]:
        """Tests that run the mutant's statement, or that run its file where that says nothing; `seconds` of them.

        What runs when a module is imported is recorded for one test only, so there every test of the file counts.
        """
        lines, (first, last) = self.lines[mutant.file], mutant.lines
        tests = set().union(*(lines[line] for line in range(first, last + 1))) if mutant.in_function else set()
        return self._cheapest(tests or set().union(*lines.values()), seconds)

    def _cheapest(self, tests: Iterable[str], seconds: float) -> list[str]:
        chosen = []
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            if seconds > 0:
                chosen.append(test)
            seconds -= self.seconds[test]
        return chosen
