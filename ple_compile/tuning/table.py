"""Which launch choices an op takes: the user's own for this GPU, else the shipped ones, else the op's defaults.

An op's defaults stand in its file. `shipped.json` holds what differs from them, by op, compute capability and shape
class; the user's file (ple_compile/tuning/store.py) holds what `python -m ple_compile tune` found, and goes before it.
"""

import functools
import json
from pathlib import Path
from typing import Any, TypeVar

import torch

from ple_compile.tuning import store
from ple_compile.tuning.entries import Entry, entries_of

Choices = TypeVar("Choices", bound=tuple)


@functools.cache
def chosen(op: str, defaults: Choices, device: torch.device, **shape: int) -> Choices:
    """The choices of `op` on `device` for a shape class; `defaults` where no table has one."""
    if device.type != "cuda":  # Triton's interpreter
        return defaults
    choices = find(store.load(device), op, shape)
    if choices is None:
        choices = find(shipped(), op, shape, capability(device))
    return defaults._replace(**choices) if choices else defaults  # type: ignore[attr-defined]


def forget() -> None:
    """Read the tables again at the next launch."""
    chosen.cache_clear()
    store.load.cache_clear()


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def find(
    entries: list[Entry], op: str, shape: dict[str, int], on: tuple[int, int] | None = None
) -> dict[str, Any] | None:
    for entry in entries:
        if (entry.op, entry.shape, entry.capability) == (op, shape, on):
            return entry.choices
    return None


@functools.cache
def shipped() -> list[Entry]:
    return entries_of(json.loads((Path(__file__).parent / "shipped.json").read_text()))
