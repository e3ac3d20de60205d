"""Random PLE layers under random sequences of calls, each call against eager and against eager in float64."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from examples.reference.ple import PLEState
from tests.fuzz.shared import Run, recompiles, updates, weighted
from tests.ple_cases import LAYER, Case
from tests.spellings import SPELLINGS, SpelledCase


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


shapes = dict(
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
models = st.builds(
    Case,
    model=st.sampled_from(["transformers", "reference"]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "autocast"]),
    **shapes,
)
spellings = st.tuples(*[st.sampled_from([(part, name) for name in ways]) for part, ways in SPELLINGS.items()])
spelled = st.builds(
    SpelledCase, spelled=spellings, dtype=st.sampled_from(["float32", "float32", "bfloat16", "float16"]), **shapes
)
cases = weighted((2, models), (1, spelled))

calls = st.one_of(
    st.builds(Call, st.integers(1, 12), st.integers(0, 999)),
    st.builds(Call, st.just(1), st.integers(0, 999)),
    st.builds(Call, st.integers(1, 40), st.integers(0, 999)),
)
actions = weighted(
    (30, calls),
    (2, st.builds(Reset)),
    (2, st.builds(Reorder, st.lists(st.integers(0, 3), min_size=4, max_size=4).map(tuple))),
    (3, st.builds(Switch)),
    (2, updates),
    (1, recompiles),
)


class Padded(Run):
    """Two caches for each form of the layer."""

    first = Call(3, 0)

    def __init__(self, case: Case, **settings: Any):
        super().__init__(case, **settings)
        self.caches = [self._new_caches() for _ in range(2)]
        self.current = 0

    def step(self, action: Call | Reset | Reorder | Switch) -> None:
        if isinstance(action, Call):
            self._call(action)
        elif isinstance(action, Reset):
            self.caches[self.current] = self._new_caches()
        elif isinstance(action, Reorder):
            rows = torch.tensor([row % self.case.batch for row in action.rows[: self.case.batch]], device=self.device)
            for cache in self.caches[self.current]:
                _reorder(cache, rows)
        else:
            self.current = 1 - self.current

    def _call(self, action: Call) -> None:
        length = action.length if self.case.shapes == "dynamic" else (1, 4, 9)[action.length % 3]  # a graph for each
        streams, ids, mask = (None if x is None else x.to(self.device) for x in self.case.inputs(length, action.seed))
        ours, eagers, doubles = self.caches[self.current]
        actual, expected = self.call_both(lambda cache: (streams, ids, mask, cache), ours, eagers)
        before = copy.deepcopy(doubles)
        with torch.no_grad():
            exact = self.case.call(self.layers[2], streams.double(), ids, mask, doubles)
            moved = self.case.call(self.layers[2], self.moved(streams), ids, mask, before)
        sensitivity = (moved - exact).abs().max().item()
        self.assert_equal(actual, expected, sensitivity)
        self.assert_near(actual, expected, exact, sensitivity)
        for mine, eager in zip(self.case.states(ours), self.case.states(eagers)):
            assert mine.stride() == eager.stride()
            self.assert_equal(mine, eager)

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
        layer = cache.layers[LAYER]
        for key in layer.conv_states:
            layer.conv_states[key] = moved(layer.conv_states[key])
        if layer.device is not None:
            layer.device = torch.device(device)  # where it reorders
    return cache


def _reorder(cache: Any, rows: Tensor) -> None:
    if isinstance(cache, PLEState):
        cache.conv.copy_(cache.conv[rows])
        cache.context.copy_(cache.context[rows])
    elif cache is not None:
        cache.layers[LAYER].reorder_cache(rows)
