"""Mutation testing of passes/ and ple_compile/: does a test fail when a line is changed or removed?

    python -m tests.mutation --count 210 --seed 10 --out tests/mutation/result.json

Run it in a clean checkout of its own, since it changes the sources there while it runs. First the tests run once to
record which lines each executes (`--data` keeps that: remove the folder when tests have changed); then for each mutant
the tests that execute its statement run until one fails. `--again` repeats the survivors of `--out`, and keeps what is
written there beside them.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=ROOT / "build" / "mutation")
    parser.add_argument("--seconds", type=float, default=30, help="of tests for a mutant, in their recorded time")
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    if "MUTATION_DATA" not in os.environ:
        options.data.mkdir(parents=True, exist_ok=True)
        os.execve(sys.executable, [sys.executable, "-m", "tests.mutation", *sys.argv[1:]], environment(options.data))
    # An editable installation knows passes/ by the path of another checkout; this name comes first.
    package = ROOT / "ple_compile" / "passes"
    if not package.exists():
        package.symlink_to("../passes")
    if not (options.data / "seconds.jsonl").exists():
        record(options.data)
    from tests.mutation import attempts  # it imports what reads the environment

    results = attempts.repeat(options) if options.again else attempts.first(options)
    attempts.write(results, options, unmutated=attempts.verify(results))


def environment(data: Path) -> dict[str, str]:
    """Sources of this checkout in child processes too, no bytecode of a mutant, and a cache of its own."""
    return {
        **os.environ,
        "MUTATION_DATA": str(data.resolve()),
        "MUTATION_TREE": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": str(ROOT),
        "TORCHINDUCTOR_CACHE_DIR": str(data.resolve() / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TRITON_INTERPRET": "1",
    }


def record(data: Path) -> None:
    settings = {"COVERAGE_PROCESS_START": str(Path(__file__).with_name("coverage.ini"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutation.executed"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, check=True)


if __name__ == "__main__":
    main()
