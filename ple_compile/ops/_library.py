"""Registration of the `ple::` operators.

Plain `torch.library` definitions rather than `custom_op`: each op is one dispatcher entry per device, which keeps
its host time low, and FX passes see it as one opaque node.
"""

from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("ple", "DEF")


def define(schema: str, *, cpu: Callable, cuda: Callable, fake: Callable) -> torch._ops.OpOverload:
    """Register `ple::<schema>` with its CPU reference, its CUDA launcher and its fake (meta) implementation."""
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"ple::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.ple, name).default
