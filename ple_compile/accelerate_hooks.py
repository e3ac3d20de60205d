"""Hooks that accelerate's `dispatch_model` (transformers' `device_map`) puts around the forward of every module.

Each hook breaks Dynamo's graph, because accelerate keeps its work out of compiled code; a PLE layer would fall into a
dozen graphs, of which none holds an op to fuse. Where the hooks inside a layer have nothing to do, since the layer's
own hook has moved the inputs to the one device that all of it is on, the forwards behind them are called directly.
Hooks that move weights in every forward (modules offloaded to the CPU or to disk) must stay.
"""

from typing import Any

import torch
from torch import nn


def hooked_modules(layer: nn.Module) -> list[nn.Module]:
    """The modules of a layer, itself included, that carry a hook."""
    return [module for module in layer.modules() if hasattr(module, "_hf_hook")]


def idle_inside(layer: nn.Module) -> list[nn.Module] | None:
    """The modules inside `layer` whose hooks do nothing; None where a hook of the layer has work to do."""
    hooked = hooked_modules(layer)
    if not hooked:
        return []
    if hooked[0] is not layer or any(not _only_moves_inputs(module) for module in hooked):
        return None
    tensors = [*layer.parameters(), *layer.buffers()]
    devices = {_device(module) for module in hooked} | {tensor.device for tensor in tensors}
    return hooked[1:] if len(devices) == 1 else None


def _only_moves_inputs(module: nn.Module) -> bool:
    hook: Any = module._hf_hook
    moves_inputs = type(hook).__name__ == "AlignDevicesHook" and hook.execution_device is not None
    return moves_inputs and not hook.offload and not hook.io_same_device


def _device(module: nn.Module) -> torch.device:
    hook: Any = module._hf_hook
    device = hook.execution_device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
