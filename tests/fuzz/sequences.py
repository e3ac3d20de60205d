"""Random PLE layers under random sequences of calls, each call against eager and against eager in float64."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from examples.reference.ple import PLEState
from ple_compile.config import Config
from tests.graphs import Traced, passes_backend
from tests.ple_cases import LAYER, Case
from tests.test_matrix import assert_equal

SWITCHES = ("merge_kv_proj", "fuse_ngram_ids", "fuse_gate", "fuse_short_conv", "merge_gate_conv")


@dataclass(frozen=True)
class Call:
    """Some tokens for every row of the batch, on the current cache."""

    length: int
    seed: int


@dataclass(frozen=True)
class Reset:
    """The current cache as it was at first."""


@dataclass(frozen=True)
class Reorder:
    """Rows of the cache change places, as in beam search; `rows` may repeat one."""

    rows: tuple[int, ...]


@dataclass(frozen=True)
class Switch:
    """Go on with the other of two caches."""


@dataclass(frozen=True)
class Update:
    """Other weights: written in place, put in place of `.data`, or loaded."""

    how: str
    seed: int


@dataclass(frozen=True)
class Recompile:
    """Compile again with one pass switched off (or none)."""

    without: str | None


Action = Call | Reset | Reorder | Switch | Update | Recompile

cases = st.builds(
    Case,
    model=st.sampled_from(["transformers", "reference"]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "autocast"]),
    cache=st.sampled_from(["none", "dynamic", "dynamic_filled", "static", "static_filled"]),
    shapes=st.sampled_from(["dynamic", "dynamic", "dynamic", "static"]),
    batch=st.integers(1, 4),
    mask=st.booleans(),
    ngram_size=st.integers(2, 5),
    heads_per_ngram=st.integers(1, 8),
    kernel=st.integers(2, 5),
    hc_count=st.integers(2, 6),
    hidden_size=st.sampled_from([8, 20, 24, 32, 48, 72]),
    embed_per_head=st.integers(1, 12),
    seed=st.integers(0, 99),
)

actions = st.one_of(
    st.builds(Call, st.integers(1, 12), st.integers(0, 999)),
    st.builds(Call, st.just(1), st.integers(0, 999)),
    st.builds(Call, st.integers(1, 40), st.integers(0, 999)),
    st.builds(Reset),
    st.builds(Reorder, st.lists(st.integers(0, 3), min_size=4, max_size=4).map(tuple)),
    st.builds(Switch),
    st.builds(Update, st.sampled_from(["in place", "data", "load"]), st.integers(0, 99)),
    st.builds(Recompile, st.sampled_from([None, *SWITCHES])),
)


@dataclass
class Run:
    """One layer, compiled and in two eager forms, with two caches for each."""

    case: Case
    device: str = "cpu"
    through_inductor: bool = False

    def __post_init__(self) -> None:
        torch._dynamo.reset()
        layer = self.case.layer().to(self.device)
        self.layers = [layer, layer, copy.deepcopy(layer).double()]
        self.caches = [self._new_caches() for _ in range(2)]
        self.current = 0
        self.calls = 0
        self.compile(None)

    def compile(self, without: str | None) -> None:
        config = Config(**({without: False} if without else {}))
        dynamic = self.case.shapes == "dynamic"
        if self.through_inductor:
            options = {without: False} if without else {}
            self.compiled = torch.compile(self.case.call, backend="ple", options=options, dynamic=dynamic)
        else:
            self.compiled = torch.compile(self.case.call, backend=passes_backend(Traced(), config), dynamic=dynamic)

    def apply(self, action: Action) -> None:
        if isinstance(action, Call):
            self._call(action)
        elif isinstance(action, Reset):
            self.caches[self.current] = self._new_caches()
        elif isinstance(action, Reorder):
            rows = torch.tensor([row % self.case.batch for row in action.rows[: self.case.batch]], device=self.device)
            for cache in self.caches[self.current]:
                _reorder(cache, rows)
        elif isinstance(action, Switch):
            self.current = 1 - self.current
        elif isinstance(action, Update):
            self._update(action)
        else:
            self.compile(action.without)

    def _call(self, action: Call) -> None:
        streams, ids, mask = (
            None if x is None else x.to(self.device) for x in self.case.inputs(action.length, action.seed)
        )
        ours, eagers, doubles = self.caches[self.current]
        with torch.no_grad():
            with torch.autocast(self.device, torch.bfloat16, enabled=self.case.dtype == "autocast"):
                actual = self.compiled(self.layers[0], streams, ids, mask, ours)
                expected = self.case.call(self.layers[1], streams, ids, mask, eagers)
            exact = self.case.call(self.layers[2], streams.double(), ids, mask, doubles)
        self.calls += 1
        assert_equal(actual, expected)
        assert_near(actual, expected, exact)
        for mine, eager in zip(self.case.states(ours), self.case.states(eagers)):
            assert (mine.shape, mine.stride()) == (eager.shape, eager.stride())
            assert_equal(mine, eager)

    def _update(self, action: Update) -> None:
        other = self.case.with_(seed=1000 + action.seed).layer().to(self.device)
        layer = self.layers[0]
        if action.how == "load":
            layer.load_state_dict(other.state_dict())
        for mine, new in zip(layer.parameters(), other.parameters()):
            if action.how == "data":
                mine.data = new.data.clone()
            elif action.how == "in place":
                mine.data.copy_(new)
        self.layers[2] = copy.deepcopy(layer).double()

    def _new_caches(self) -> list[Any]:
        """Ours, eager's and, holding the same, the one in float64."""
        layer = copy.deepcopy(self.layers[0]).cpu()
        ours, eagers, doubles = (self.case.new_cache(layer) for _ in range(3))
        kinds = ((ours, None), (eagers, None), (doubles, torch.float64))
        return [_with_states(cache, self.device, dtype) for cache, dtype in kinds]


def _with_states(cache: Any, device: str, dtype: torch.dtype | None) -> Any:
    """A cache whose states lie on a device, those of floating point in another type."""

    def moved(state: Tensor | None) -> Tensor | None:
        if state is None:
            return None
        return state.to(device, dtype if state.is_floating_point() else None)

    if isinstance(cache, PLEState):
        return PLEState(*map(moved, cache))
    if cache is not None:
        states = cache.layers[LAYER].conv_states
        for key in states:
            states[key] = moved(states[key])
    return cache


def _reorder(cache: Any, rows: Tensor) -> None:
    if isinstance(cache, PLEState):
        cache.conv.copy_(cache.conv[rows])
        cache.context.copy_(cache.context[rows])
    elif cache is not None:
        cache.layers[LAYER].reorder_cache(rows)


def assert_near(actual: Tensor, expected: Tensor, exact: Tensor) -> None:
    """Error against float64 no larger than eager's own plus one rounding."""
    rounding = exact.abs().max().clamp_min(1) * torch.finfo(actual.dtype).eps
    worst = (expected.double() - exact).abs().max()
    assert (actual.double() - exact).abs().max() <= worst + 4 * rounding


def run(case: Case, sequence: list[Action], **settings: Any) -> Run:
    """Apply a sequence of actions to a layer; raises AssertionError at the first call that differs."""
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
        state = Run(case, **settings)
        for action in sequence:
            state.apply(action)
    return state


def script(case: Case, sequence: list[Action]) -> str:
    """A program that repeats a run."""
    names = ", ".join(sorted({type(action).__name__ for action in sequence}))
    steps = "".join(f"\n    {action!r}," for action in sequence)
    return (
        f"from tests.fuzz.sequences import {names or 'Call'}, run\nfrom tests.ple_cases import Case\n\n"
        f"run({case!r}, [{steps}\n])\n"
    )
