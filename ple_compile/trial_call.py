"""A call that is made to be watched: it gets copies, and what it changes beside its results is put back."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def copies(values: Any) -> Any:
    """Deep copies, of whatever the values hold; tensors that autograd made, at any depth, lose their history."""
    with _CopyWithoutHistory():
        return copy.deepcopy(values)


class _CopyWithoutHistory(TorchFunctionMode):
    """Tensors that are results of autograd refuse to be deep-copied; inside, what they hold is copied instead."""

    def __init__(self) -> None:
        super().__init__()
        # deepcopy remembers copies by the address of the original, which must not be used again while it goes on.
        self.detached: list[Tensor] = []

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            args = (args[0].detach(), *args[1:])
            self.detached.append(args[0])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def put_back(module: nn.Module | None) -> Iterator[None]:
    """Afterwards the random number generators, and the buffers of `module`, are as they were."""
    tensors = [] if module is None else [*module.parameters(), *module.buffers()]
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    owners = [] if module is None else list(module.modules())
    buffers = [(m, name, b, b.detach().clone()) for m in owners for name, b in m._buffers.items() if b is not None]
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            for owner, name, buffer, before in buffers:
                owner._buffers[name] = buffer
                _set(buffer, before)


@torch.inference_mode()
def _set(buffer: Tensor, before: Tensor) -> None:
    # Writing what is there already would make autograd refuse a graph that saved the buffer.
    if not buffer.is_meta and not torch.equal(buffer, before):
        buffer.copy_(before)
