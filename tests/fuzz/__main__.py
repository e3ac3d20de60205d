"""Random layers under random sequences of calls, until the time is over: python -m tests.fuzz --seconds 600

Padded and packed layers by turns, unless `--layout` names one. Prints the program that repeats the first failure,
at once and then shrunk, and exits with 1; at the end, how much was tried. With a GPU (`--device cuda`) the calls go
through Inductor, on a CPU the rewritten graphs run in eager PyTorch, unless `--inductor` or `--no-inductor` says
otherwise.
"""

import argparse
import os
import sys
import time

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from tests.fuzz import packed, padded
from tests.fuzz.shared import run, script

LAYOUTS = {"padded": (padded.Padded, padded), "packed": (packed.Packed, packed)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--layout", choices=LAYOUTS, help="this one alone")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--inductor", action=argparse.BooleanOptionalAction, help="generate code")
    options = parser.parse_args(argv)
    names = [options.layout] if options.layout else list(LAYOUTS)
    through_inductor = options.device == "cuda" if options.inductor is None else options.inductor
    search = Search(options.device, through_inductor, time.monotonic() + options.seconds)
    for number, name in enumerate(names * 10**6):
        if search.failure or search.is_over():
            break
        search.try_some(name, options.seed + number)
    print(f"seed {options.seed}: {search}")
    if search.failure:
        print(f"\nshrunk: {search.failure}", file=sys.stderr)
    return 1 if search.failure else 0


class Search:
    """What was tried until now, and the program that failed."""

    def __init__(self, device: str, through_inductor: bool, end: float):
        self.device, self.through_inductor, self.end = device, through_inductor, end
        self.totals = {name: [0, 0] for name in LAYOUTS}  # calls, compiled configurations
        self.failure = ""

    def is_over(self) -> bool:
        return time.monotonic() > self.end

    def try_some(self, name: str, seed: int) -> None:
        """Random layers of a layout, each under a random sequence of calls; a failure is shrunk."""
        layout, module = LAYOUTS[name]

        @seeded(seed)
        @settings(
            max_examples=8,
            phases=set(Phase) - {Phase.explain},  # it traces every line of every compilation
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        @given(module.cases, st.lists(module.actions, min_size=60, max_size=120))
        def search(case: object, sequence: list) -> None:
            if self.is_over() and not self.failure:
                return
            sequence = [layout.first, *sequence]
            try:
                state = run(
                    layout,
                    case,
                    sequence,
                    lambda: self.is_over() and not self.failure,
                    device=self.device,
                    through_inductor=self.through_inductor,
                )
            except Exception as error:
                is_first = not self.failure
                self.failure = f"{type(error).__name__}: {error}\n\n{script(layout, case, sequence)}"
                if is_first:
                    print(f"{self.failure}\nshrinking ...", file=sys.stderr, flush=True)
                raise
            self.totals[name][0] += state.calls
            self.totals[name][1] += state.configurations
            print(self, flush=True)

        try:
            search()
        except Exception:
            assert self.failure

    def __str__(self) -> str:
        parts = [f"{name} {c} calls, {k} compiled configurations" for name, (c, k) in self.totals.items()]
        calls, configurations = map(sum, zip(*self.totals.values()))
        return (
            f"{calls} calls through {configurations} compiled configurations ({'; '.join(parts)}), "
            f"{1 if self.failure else 0} mismatches"
        )


if __name__ == "__main__":
    sys.exit(main())
