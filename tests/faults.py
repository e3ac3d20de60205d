"""Faults on demand: one call of a function raises, those before and after it work."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")


def does_not_compile() -> Exception:
    """What Triton raises for a kernel that needs more than an SM has."""
    return OutOfResources(300_000, 232_448, "shared memory")


def fail_at(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, error: Callable[[], Exception]
) -> Callable[[], bool]:
    """Let the `call`-th call (from 1 on) of `owner.name` raise; returns what tells whether it has."""
    original, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error()  # a new one each time: its traceback keeps what the frames hold
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return lambda: calls >= call
