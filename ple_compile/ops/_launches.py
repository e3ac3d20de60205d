"""Launches that are worked out once for each layout of an op's tensors.

Which kernel runs, on what grid and with which numbers follows from dtypes, shapes, strides and alignment. So does what
Triton specialises a kernel for. An op therefore plans its launches for a layout, keeps them, and at the next call with
that layout passes addresses alone. On the host, gate and convolution of one token take 28.6 us without that: 15 in
Triton's binder and 10 in the op's arithmetic (benchmarks/NOTES.md).
"""

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

P = TypeVar("P")

# Plans of one op: lengths that never come back must not pile up.
MOST_PLANS = 1024


class Launch:
    """A kernel with its grid, its numbers and its constants: all of its arguments but the tensors, which come first."""

    def __init__(self, kernel: Any, programs: int, *numbers: float, **constants: Any):
        self._kernel, self._grid, self._numbers, self._constants = kernel, (programs, 1, 1), numbers, constants
        self._compiled: Any = None
        self._behind: tuple = ()

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on the current device, for tensors of the layout that this was made for."""
        if self._compiled is not None:
            self._compiled[self._grid](*tensors, *self._behind)
            return
        compiled = self._kernel[self._grid](*tensors, *self._numbers, **self._constants)
        # Neither Triton's interpreter nor its asynchronous mode gives something to launch again.
        if hasattr(compiled, "__getitem__"):
            names = [name for name in self._kernel.arg_names if name in self._constants]
            # Compiled kernels take the constants as well, in the order of their parameters.
            self._behind = (*self._numbers, *(self._constants[name] for name in names))
            self._compiled = compiled


def layout(*tensors: Tensor | None) -> Hashable:
    """All that a launch depends on, of tensors that lie on the first one's device."""
    assert tensors[0] is not None
    parts = [None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % 16) for x in tensors]
    return (tensors[0].get_device(), *parts)


class Step(NamedTuple):
    """A launch, and what takes its tensors from all that an op has at hand."""

    launch: Launch
    pick: Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...]]


class Roles:
    """What the tensors that an op has at hand are called, in their order; "none" stands for one that is not there."""

    def __init__(self, *names: str):
        self._names = (*names, "none")

    def step(self, launch: Launch, *roles: str) -> Step:
        """`launch` with the tensors in these roles."""
        return Step(launch, operator.itemgetter(*(self._names.index(role) for role in roles)))


def take(steps: Sequence[Step], *tensors: Tensor | None) -> None:
    """Launch one after the other; `tensors` in the order of their roles."""
    for launch, pick in steps:
        launch(*pick((*tensors, None)))


class Plans(Generic[P]):
    """What one op has worked out, by layout."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, P] = {}

    def find(self, key: Hashable, make: Callable[..., P], *args: Any) -> P:
        """The plan of `key`, made by `make(*args)` when it is asked for first."""
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = make(*args)
        return plan
