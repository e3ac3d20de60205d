"""What the fuzzers of both layouts share: other weights, compiling again, and what may differ from eager."""

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from ple_compile.config import Config
from tests.graphs import Traced, passes_backend

SWITCHES = ("merge_kv_proj", "fuse_ngram_ids", "fuse_gate", "fuse_short_conv", "merge_gate_conv")


@dataclass(frozen=True)
class Update:
    """Other weights: written in place, put in place of `.data`, or loaded."""

    how: str
    seed: int


@dataclass(frozen=True)
class Recompile:
    """Compile again with one pass switched off (or none)."""

    without: str | None


updates = st.builds(Update, st.sampled_from(["in place", "data", "load"]), st.integers(0, 99))
recompiles = st.builds(Recompile, st.sampled_from([None, *SWITCHES]))


def weighted(*choices: tuple[int, st.SearchStrategy]) -> st.SearchStrategy:
    """One of several kinds of actions, each as often as its number says; `one_of` takes equals only once."""
    return st.sampled_from([kind for often, kind in choices for _ in range(often)]).flatmap(lambda kind: kind)


class Run:
    """A layer, compiled and in two eager forms; a layout says what a call is. Counts calls and what was compiled."""

    def __init__(self, case: Any, device: str = "cpu", through_inductor: bool = False):
        torch._dynamo.reset()
        self.case, self.device, self.through_inductor = case, device, through_inductor
        layer = case.layer().to(device)
        self.layers = [layer, layer, copy.deepcopy(layer).double()]
        # On a GPU no share can be told: one product for key and value rounds otherwise than two (cuBLAS picks another
        # kernel), Inductor sums small products itself, and a gate that rounds otherwise moves its whole row.
        self.may_differ = 1.0 if device == "cuda" else 0.01
        self.holds_16_bits = device == "cuda" and case.dtype == "autocast"
        self.calls, self.configurations = 0, 0
        self.compile(None)

    def compile(self, without: str | None) -> None:
        options = {without: False} if without else {}
        backend: Any = "ple" if self.through_inductor else passes_backend(Traced(), Config(**options))
        self.compiled = torch.compile(
            self.case.call,
            backend=backend,
            # What no pass takes rounds as in eager too.
            options={**options, "inductor": {"emulate_precision_casts": True}} if self.through_inductor else None,
            dynamic=self.case.shapes == "dynamic",
        )
        self.has_run = False

    def apply(self, action: Any) -> None:
        if isinstance(action, Recompile):
            self.compile(action.without)
        elif isinstance(action, Update):
            self.update(action)
        else:
            self.step(action)

    def step(self, action: Any) -> None:
        raise NotImplementedError

    def call_both(self, arguments: Callable[[Any], tuple], ours: Any, eagers: Any) -> tuple[Any, Any]:
        """What the compiled call and eager give for the `arguments` with a state of their own."""
        with torch.no_grad(), torch.autocast(self.device, torch.bfloat16, enabled=self.case.dtype == "autocast"):
            actual = self.compiled(self.layers[0], *arguments(ours))
            expected = self.case.call(self.layers[1], *arguments(eagers))
        self.calls += 1
        self.configurations += not self.has_run
        self.has_run = True
        return actual, expected

    def moved(self, streams: Tensor) -> Tensor:
        """The streams in float64, each one rounding up or down.

        How far the result moves with them is what the order of a sum may change: much where a gate's dot product is
        near zero, since its root is steep there.
        """
        signs = 2.0 * torch.randint(0, 2, streams.shape, generator=torch.Generator().manual_seed(0)) - 1
        return streams.double() * (1 + self._rounding(streams.dtype) * signs.to(streams.device))

    def _rounding(self, dtype: torch.dtype) -> float:
        return torch.finfo(torch.bfloat16 if self.holds_16_bits else dtype).eps

    def assert_equal(self, actual: Tensor, expected: Tensor, sensitivity: float = 0.0) -> None:
        """float32 within 2e-5 of the largest; of 16-bit values a share, and two, may be a few of its ulps off."""
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        assert torch.equal(actual.isnan(), expected.isnan())
        actual, expected = actual.nan_to_num(), expected.nan_to_num()
        if not actual.numel():
            return
        largest = expected.abs().max().clamp_min(1)
        if actual.dtype.itemsize == 2:
            share = ((actual != expected).sum() - 2) / actual.numel()
            assert share <= self.may_differ, f"{share:.4f} of the values differ"
            tolerance = 16 * torch.finfo(actual.dtype).eps
        else:
            tolerance = 2e-2 if self.holds_16_bits else 2e-5
        error, most = (actual - expected).abs().max().item(), (tolerance * largest).item() + 4 * sensitivity
        assert error <= most, f"{error:.3g} from eager where {most:.3g} may be"

    def assert_near(self, actual: Tensor, expected: Tensor, exact: Tensor, sensitivity: float = 0.0) -> None:
        """Error against float64 no larger than eager's own plus four roundings, and the result's `sensitivity` to
        four of its inputs'."""
        if not actual.numel():
            return
        rounding = exact.abs().max().clamp_min(1).item() * self._rounding(actual.dtype)
        error, worst = ((x.double() - exact).abs().max().item() for x in (actual, expected))
        most = worst + 4 * (rounding + sensitivity)
        assert error <= most, f"{error:.3g} from float64 where eager's {worst:.3g} and in all {most:.3g} may be"

    def update(self, action: Update) -> None:
        other = self.case.with_(seed=1000 + action.seed).layer().to(self.device)
        layer: nn.Module = self.layers[0]
        if action.how == "load":
            layer.load_state_dict(other.state_dict())
        for mine, new in zip(layer.parameters(), other.parameters()):
            if action.how == "data":
                mine.data = new.data.clone()
            elif action.how == "in place":
                mine.data.copy_(new)
        self.layers[2] = copy.deepcopy(layer).double()


def assert_right(eager: Tensor, exact: Tensor, coarse: bool) -> None:
    """Eager computes what the oracle says, though roughly where it rounds to 16 bits (`coarse`)."""
    if eager.numel():
        assert (eager.double() - exact).abs().max() <= (0.15 if coarse else 1e-3) * exact.abs().max().clamp_min(1)


def run(
    layout: Callable[..., Run],
    case: Any,
    sequence: list[Any],
    is_over: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> Run:
    """Apply actions to a layer, all or until it `is_over`; raises AssertionError at the first call that differs."""
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
        state = layout(case, **settings)
        for number, action in enumerate(sequence):
            if is_over():
                break
            try:
                state.apply(action)
            except AssertionError as error:
                raise AssertionError(f"action {number}, {action}: {error}") from error
    return state


def script(layout: type[Run], case: Any, sequence: list[Any]) -> str:
    """A program that repeats a run."""
    kinds = sorted({layout, *_kinds((case, sequence))}, key=lambda kind: kind.__name__)
    imports = "".join(f"from {kind.__module__} import {kind.__name__}\n" for kind in kinds)
    steps = "".join(f"\n    {action!r}," for action in sequence)
    call = f"run({layout.__name__}, {case!r}, [{steps}\n])\n"
    return f"import torch\n\nfrom tests.fuzz.shared import run\n{imports}\n{call}"


def _kinds(value: Any) -> set[type]:
    """The dataclasses that a value is made of."""
    if dataclasses.is_dataclass(value):
        inside = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return {type(value)}.union(*map(_kinds, inside))
    return set().union(*map(_kinds, value)) if isinstance(value, (tuple, list)) else set()
