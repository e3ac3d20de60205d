"""Room on Python's stack for a compilation.

CPython (3.11 and later) keeps the frames of Python functions in pieces of 16 KB: one is mapped when a call does not
fit, and unmapped when that call returns (`push_chunk` and `_PyThreadState_PopFrame` in Python/pystate.c). A loop whose
calls begin at the end of a piece maps memory at every turn. At the depth of a plain script the passes on 48 layers took
5.3 s and 350,000 page faults, 30 frames further down 1.3 s and 2,000 (benchmarks/NOTES.md).
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")
WORDS = 2**17  # 1 MB; a piece's size is a power of two, so what is called finds nearly as much again


def with_room(function: Callable[..., R]) -> Callable[..., R]:
    """`function`, called from a frame so large that it begins a piece of its own."""

    def call(*args: Any, **kwargs: Any) -> R:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=WORDS)
    return functools.update_wrapper(call, function)
