"""The search for launch choices on this GPU. Only `python -m ple_compile tune` and tests call it."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.errors import OutOfResources, PTXASError

from ple_compile.measuring.timing import graph_microseconds
from ple_compile.tables.progress import Steps
from ple_compile.tuning.entries import TUNABLE
from ple_compile.tuning.spaces import Group, Space, Work

log = logging.getLogger("ple_compile")

MARGIN = 0.98  # a candidate replaces the present choice where it takes less than this share of its time
Time = Callable[[Work, Any], float]


@dataclass(frozen=True)
class Result:
    """What the search found for one op and shape; `ratio`: geometric mean of time after over time before."""

    op: str
    shape: dict[str, int]
    before: dict[str, Any]
    choices: dict[str, Any]
    ratio: float

    def entry(self) -> dict[str, Any]:
        """As a table of choices holds it."""
        return {"op": self.op, "shape": self.shape, "choices": self.choices}

    @property
    def changes(self) -> dict[str, Any]:
        return {name: value for name, value in self.choices.items() if value != self.before[name]}


def microseconds(work: Work, choices: Any) -> float:
    """Infinite for choices with which a kernel does not fit into an SM or is not assembled."""
    try:
        return graph_microseconds(lambda i: work.step(i, choices), work.calls, replays=9)
    except (OutOfResources, PTXASError) as reason:
        log.debug("%s: %s", choices, reason)
        return math.inf


@torch.no_grad()
def search(space: Space, time: Time = microseconds, steps: Steps | None = None) -> Result:
    """The best choices of a space, group after group, from the present ones on.

    Raises ValueError inside a CUDA-graph capture: timing captures graphs of its own.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ValueError("launch choices cannot be searched while a CUDA graph is captured; tune before")
    best, ratio = space.present, 1.0
    for group in space.groups:
        best, share = _search_group(group, best, time, steps)
        ratio *= share
    kept = {name: getattr(best, name) for name in TUNABLE[space.op]}
    before = {name: getattr(space.present, name) for name in TUNABLE[space.op]}
    return Result(space.op, space.shape, before, kept, ratio)


def _search_group(group: Group, present: Any, time: Time, steps: Steps | None) -> tuple[Any, float]:
    works = group.works()
    before = [time(work, present) for work in works]
    best, least = present, MARGIN
    for values in group.candidates():
        if steps is not None:
            steps.begin(", ".join(f"{name}={value}" for name, value in values.items()))
        candidate = present._replace(**values)
        share = mean_ratio([time(work, candidate) for work in works], before)
        if share < least:
            best, least = candidate, share
    # The luckiest of many measurements looks better than it is: only the second one counts.
    again = mean_ratio([time(work, best) for work in works], [time(work, present) for work in works])
    return (best, again) if again < MARGIN else (present, 1.0)


def mean_ratio(after: list[float], before: list[float]) -> float:
    """Geometric mean of after over before."""
    return math.exp(sum(math.log(a / b) for a, b in zip(after, before)) / len(before))


def num_candidates(space: Space) -> int:
    return sum(len(group.candidates()) for group in space.groups)
