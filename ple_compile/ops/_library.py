"""Registration of the `ple::` operators.

Plain `torch.library` definitions rather than `custom_op`: each op is one dispatcher entry per device, which keeps
its host time low, and FX passes see it as one opaque node.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("ple", "DEF")


def define(
    schema: str, *, cpu: Callable, cuda: Callable, fake: Callable, on_host: bool = False
) -> torch._ops.OpOverload:
    """Register `ple::<schema>` with its CPU reference, its CUDA launcher and its fake (meta) implementation.

    An op that reads values `on_host` is left out of the CUDA graphs that Inductor makes.
    """
    name = schema.split("(", 1)[0]
    tags = [torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order]
    _LIBRARY.define(schema, tags=(*tags, torch.Tag.cudagraph_unsafe) if on_host else tags)
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, _on_its_device(cuda), "CUDA")
    torch.library.register_fake(f"ple::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.ple, name).default


def _on_its_device(launch: Callable) -> Callable:
    """Triton launches on the current device: make the one that the tensors are on current, where it is not."""

    @functools.wraps(launch)
    def call(*args: Any, **kwargs: Any) -> Any:
        for tensor in args:
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                break
        if tensor.get_device() == torch.cuda.current_device():
            return launch(*args, **kwargs)
        with torch.cuda.device(tensor.device):
            return launch(*args, **kwargs)

    return call
