"""Random layers under random sequences of calls, until the time is over: python -m tests.fuzz --seconds 600

Prints the program that repeats the first failure, shrunk, and exits with 1. With a GPU (`--device cuda`) the calls go
through Inductor; on a CPU the rewritten graphs run in eager PyTorch unless `--inductor` is given.
"""

import argparse
import os
import sys
import time

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from tests.fuzz.sequences import Action, Call, actions, cases, run, script
from tests.ple_cases import Case


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--inductor", action="store_true", help="generate code on a CPU too")
    options = parser.parse_args(argv)
    through_inductor = options.inductor or options.device == "cuda"
    end, total = time.monotonic() + options.seconds, {"configurations": 0, "calls": 0}
    failure: list[str] = []
    round_number = 0
    while time.monotonic() < end and not failure:

        @seeded(options.seed + round_number)
        @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(cases, st.lists(actions, min_size=20, max_size=50))
        def search(case: Case, sequence: list[Action]) -> None:
            if time.monotonic() > end and not failure:
                return
            sequence = [Call(3, 0), *sequence]
            try:
                state = run(case, sequence, device=options.device, through_inductor=through_inductor)
            except BaseException:
                failure[:] = [script(case, sequence)]
                raise
            total["configurations"] += 1
            total["calls"] += state.calls
            print(f"seed {options.seed}, {total['configurations']} configurations, {total['calls']} calls", flush=True)

        try:
            search()
        except Exception as error:
            print(f"{type(error).__name__}: {error}\n\n{failure[0]}", file=sys.stderr)
        round_number += 1
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
