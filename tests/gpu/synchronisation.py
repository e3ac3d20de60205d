"""Code under test that must not make the host wait for the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def forbidden() -> Iterator[None]:
    """A synchronisation that PyTorch knows of raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
