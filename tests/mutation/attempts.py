"""The tests' verdict on each mutant, and the file that keeps them."""

import argparse
import collections
import functools
import importlib.metadata
import json
import subprocess
from pathlib import Path
from typing import Any

from tests.mutation.covering import Covering
from tests.mutation.mutants import Mutant, places_of, sample
from tests.mutation.running import run

ROOT = Path(__file__).parents[2]


def first(options: argparse.Namespace) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for mutant in sample(ROOT, options.count, options.seed):
        before, after = mutant.change(ROOT)
        place = {"file": mutant.file, "line": mutant.line, "operator": mutant.operator}
        results.append({**place, "before": before, "after": after, **attempt(mutant, options)})
        write(results, options)
    return results


def repeat(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The survivors anew, found by what they change; one whose code is gone is `removed`."""
    before = json.loads(options.out.read_text())
    options.seed, results = before["seed"], before["mutants"]
    for result in results:
        if result["status"] == "survived":
            candidates = [mutant for place in places_of(ROOT, result["file"]) for mutant in place]
            changes = [result["before"], result["after"]]
            same = [m for m in candidates if m.operator == result["operator"] and list(m.change(ROOT)) == changes]
            result |= attempt(same[0], options) if same else {"status": "removed"}
            write(results, options)
    return results


def attempt(mutant: Mutant, options: argparse.Namespace) -> dict[str, Any]:
    """The tests' verdict on a mutant; the file is as before afterwards."""
    covering = _covering(options.data)
    tests = covering.tests(mutant, options.seconds)
    timeout = 60 + 4 * sum(covering.seconds[test] for test in tests)
    if options.again:  # every variant of them, not the recorded ones alone
        tests, timeout = list(dict.fromkeys(test.partition("[")[0] for test in tests)), 5 * timeout
    if not tests:
        return {"status": "survived", "test": None, "tests": 0, "seconds": 0}
    file = ROOT / mutant.file
    source = file.read_text()
    try:
        file.write_text(mutant.code(ROOT))
        outcome = run(tests, timeout)
    finally:
        file.write_text(source)
    return {"status": outcome.status, "test": outcome.test, "tests": len(tests), "seconds": outcome.seconds}


@functools.cache
def _covering(data: Path) -> Covering:
    return Covering(data, ROOT)


def verify(results: list[dict[str, Any]]) -> str:
    """A kill counts when the test that failed passes without the mutant: what they say together, run the same way."""
    tests = sorted({r["test"] for r in results if (r.get("test") or "").startswith("tests/")})
    outcome = run(tests, timeout=3600)
    return f"{len(tests)} passed" if outcome.status == "survived" else f"{outcome.status}: {outcome.test}"


def write(results: list[dict[str, Any]], options: argparse.Namespace, unmutated: str | None = None) -> None:
    """The results so far: a mutant a line."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    count = collections.Counter(result["status"] for result in results)
    head = {
        "commit": commit.stdout.strip(),
        "seed": options.seed,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "cosmic-ray")},
        "killed": count["killed"] + count["timeout"],
        "survived": count["survived"],
        "removed": count["removed"],
        "killing_tests_without_mutant": unmutated,
    }
    lines = ",\n".join(json.dumps(result) for result in results)
    options.out.write_text(json.dumps(head, indent=1)[:-2] + f',\n "mutants": [\n{lines}\n]}}\n')
