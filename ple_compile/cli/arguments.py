"""What several commands read from their arguments."""

import argparse
import ast
import contextlib
from typing import Any

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: the GPU where there is one)")


def device_of(name: str | None) -> torch.device:
    """The device that was asked for; ValueError where it is not there."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name}: no such kind of device; give cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: {torch.cuda.device_count()} CUDA device(s) found; see doctor")
    return device


def current(device: torch.device) -> contextlib.AbstractContextManager:
    """Context in which a GPU is the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def numbers(text: str) -> list[int]:
    """A list such as 1,64,1024."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 1,64,1024") from None
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers from 1 on")
    return found


def assignment(text: str) -> tuple[str, Any]:
    """A pair such as whole_graph=True; what is no Python value is a string."""
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not name=value")
    if value in ("true", "false"):
        value = value.title()
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value
