"""The search finds the fastest choices, keeps the present ones where nothing is faster, and changes no bit."""

import math
import random
from typing import Any

import pytest
import torch

from ple_compile.measuring import timing
from ple_compile.measuring.layer import Sizes
from ple_compile.ops.short_conv import Choices
from ple_compile.tables.progress import Steps
from ple_compile.tuning import spaces
from ple_compile.tuning.entries import TUNABLE, entries_of
from ple_compile.tuning.search import Group, Space, Work, num_candidates, search
from ple_compile.tuning.spaces import SPACES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = Sizes(hidden=32, streams=2, rows=2000, device=DEVICE)


def made_up(cost: Any) -> tuple[Space, Any]:
    """A space of which `cost` says how long each choice takes."""
    works = [Work("short", 1, lambda i, choices: None), Work("long", 1, lambda i, choices: None)]
    groups = [
        Group({"block": (128, 256, 512), "num_warps": (1, 2)}, lambda: works),
        Group({"chains": (1024, 4096, 8192)}, lambda: works),
    ]
    present = Choices(block=512, chains=4096, num_warps=2)
    return Space("short_conv", {"channels": 32, "bytes": 2}, present, groups), lambda work, choices: cost(work, choices)


def test_the_fastest_choices_of_every_group_are_found() -> None:
    space, time = made_up(lambda work, c: 1 + abs(c.block - 256) / 256 + (c.num_warps != 1) + (c.chains != 8192))
    result = search(space, time, Steps("tune", num_candidates(space)))
    assert result.choices == dict(block=256, chains=8192, num_warps=1) == result.changes
    assert result.ratio == pytest.approx(1 / 4)
    (entry,) = entries_of([result.entry()])
    assert entry.op == "short_conv" and entry.choices == result.choices


def test_what_is_hardly_faster_stays() -> None:
    space, time = made_up(lambda work, c: 0.99 if c.block == 256 else 1.0)
    result = search(space, time)
    assert result.changes == {} and result.ratio == 1.0


def test_what_was_lucky_once_stays() -> None:
    seen: set = set()

    def cost(work: Work, choices: Choices) -> float:
        first = (work.name, choices) not in seen
        seen.add((work.name, choices))
        return 0.5 if first and choices.block == 256 else 1.0

    assert search(*made_up(cost)).changes == {}


def test_choices_that_do_not_launch_are_passed_over() -> None:
    space, time = made_up(lambda work, c: math.inf if c.block == 128 else 0.5 if c.block == 256 else 1.0)
    assert search(space, time).choices["block"] == 256


def test_no_search_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="while a CUDA graph is captured"):
        search(*made_up(lambda work, choices: 1.0))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Works that Triton's interpreter can run: few tokens, two sets of inputs."""
    monkeypatch.setattr(timing, "L2_BYTES", 1)
    monkeypatch.setattr(spaces, "_LOOKUP_CALLS", 1)
    monkeypatch.setattr(spaces, "_FEW", 8)
    monkeypatch.setattr(spaces, "_MANY", 64)


@pytest.mark.parametrize("op", SPACES)
def test_spaces_hold_the_present_choices_and_no_others_than_tunable_ones(op: str, small: None) -> None:
    space = SPACES[op](SIZES)
    searched = [name for group in space.groups for name in group.axes]
    assert sorted(searched) == sorted(TUNABLE[op])
    for group in space.groups:
        assert space.present in [space.present._replace(**values) for values in group.candidates()]


@pytest.mark.parametrize("op", ["short_conv", "ngram_ids", "lookup", "ngram_lookup"])
def test_candidates_change_no_bit(op: str, small: None) -> None:
    """Some of each group on the CPU, in Triton's interpreter; tests/gpu has all of them, and the slower ops."""
    space = SPACES[op](SIZES)
    for group in space.groups:
        expected = result(group, space.present)
        for values in random.Random(0).sample(group.candidates(), 2):
            assert torch.equal(result(group, space.present._replace(**values)), expected), values


def result(group: Group, choices: Any) -> torch.Tensor:
    """The bytes that the first work gives, from the same inputs every time."""
    torch.manual_seed(0)
    return group.works()[0].step(0, choices).view(torch.uint8)  # tables are not filled, and NaN equals nothing
