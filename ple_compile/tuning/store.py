"""The user's own launch choices: one file per GPU model, Triton version and state of the kernels.

It lies in the user's cache folder (`$XDG_CACHE_HOME` or ~/.cache, then ple_compile/tuning), not beside Inductor's
cache, which is under /tmp by default and gone after a reboot. Another GPU, another Triton or changed kernels have
another file, so choices are never used where they were not measured.
"""

import functools
import hashlib
import logging
import re
from pathlib import Path
from typing import Any

import torch
import triton

from ple_compile import config
from ple_compile.json_file import read_json, write_json
from ple_compile.tuning.entries import Entry, entries_of

log = logging.getLogger("ple_compile")


def key(device: torch.device) -> dict[str, str]:
    """What a file of choices is for."""
    return {"gpu": torch.cuda.get_device_name(device), "triton": triton.__version__, "kernels": kernels_hash()}


@functools.cache
def kernels_hash() -> str:
    """Hash of the sources of the ops."""
    digest = hashlib.sha256()
    for file in sorted((Path(__file__).parent.parent / "ops").glob("*.py")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def path(device: torch.device) -> Path:
    wanted = key(device)
    name = f"{wanted['gpu']}-triton-{wanted['triton']}-{wanted['kernels'][:16]}"
    return config.user_cache_dir() / "ple_compile" / "tuning" / (re.sub(r"[^A-Za-z0-9.]+", "-", name) + ".json")


@functools.cache
def load(device: torch.device) -> list[Entry]:
    """The user's entries for this device; a file that cannot be read is reported once and left aside."""
    file = path(device)
    try:
        data = read_json(file)
        if data["key"] != key(device):
            raise ValueError("it was written for something else")
        return entries_of(data["entries"])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as reason:
        log.warning("%s is left aside: %s. Delete it, or run `python -m ple_compile tune` again", file, reason)
        return []


def save(device: torch.device, found: list[dict[str, Any]]) -> Path:
    """Put entries into the device's file, in the place of those for the same op and shape."""
    file = path(device)
    load.cache_clear()
    old = [{"op": e.op, "shape": e.shape, "choices": e.choices} for e in load(device)]
    new = [(item["op"], item["shape"]) for item in found]
    kept = [item for item in old if (item["op"], item["shape"]) not in new]
    write_json(file, {"key": key(device), "entries": kept + found})
    load.cache_clear()
    return file
