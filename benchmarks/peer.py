"""vLLM's PLE kernels as a measuring stick, from an installed vllm or from the one file of it that holds them.

The file's imports from vllm are answered by small stand-in modules, so nothing else of vllm is needed. It is read
where it lies; nothing of it belongs in this repository.
"""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

FILE = "vllm_ple_kernels.py"
MODULE = "vllm.models.qwen4_exp.common.ops.ple"


def load(folder: str, pdl: bool) -> ModuleType:
    """The kernels from `folder`/vllm_ple_kernels.py, or from the installed vllm (`folder` = "installed").

    `pdl`: programmatic dependent launch, which vLLM uses from sm90 on.
    """
    if folder == "installed":
        module = importlib.reload(importlib.import_module(MODULE))
        if not pdl:
            raise ValueError("an installed vllm decides about dependent launch itself; pass a folder to time without")
        return module
    path = Path(folder) / FILE
    if not path.is_file():
        raise ValueError(f"--peer {folder}: no {FILE} there; pass the folder that holds it, or 'installed'")
    with stand_ins(pdl):
        spec = importlib.util.spec_from_file_location(f"ple_peer_{'pdl' if pdl else 'plain'}", path)
        if spec is None or spec.loader is None:
            raise ValueError(f"--peer {folder}: {path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def stand_ins(pdl: bool) -> Iterator[None]:
    """While importing, `vllm` and what the file takes from it are these; afterwards sys.modules is as before."""
    contents = {
        "vllm.platforms": {"current_platform": SimpleNamespace(is_arch_support_pdl=lambda: pdl)},
        "vllm.triton_utils": {"triton": triton, "tl": tl},
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0},
    }
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "vllm"}
    for name in before:
        del sys.modules[name]
    try:
        for leaf, members in contents.items():
            parts = leaf.split(".")
            for depth in range(1, len(parts) + 1):
                package = ModuleType(".".join(parts[:depth]))
                package.__path__ = []
                sys.modules.setdefault(package.__name__, package)
            vars(sys.modules[leaf]).update(members)
        yield
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "vllm"]:
            del sys.modules[name]
        sys.modules.update(before)


class Layer:
    """vLLM's two kernels as one step over [tokens, channels] inputs, for a single sequence or for decoding."""

    def __init__(self, kernels: ModuleType, weights: dict[str, Tensor], eps: float, dilation: int):
        self.kernels, self.weights, self.eps, self.dilation = kernels, weights, eps, dilation
        device = weights["conv"].device
        self.slot = torch.ones(1, dtype=torch.int32, device=device)
        self.no_state = torch.zeros(1, dtype=torch.bool, device=device)

    def gate(self, key: Tensor, value: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.weights
        return self.kernels.ple_gate(
            key, value, hidden, weights["norm_key"], weights["norm_query"], weights["norm_conv"], self.eps
        )

    def prefill(self, key: Tensor, value: Tensor, hidden: Tensor, state: Tensor, bounds: Tensor) -> Tensor:
        """One sequence without history; `state` is a pool whose slot 1 it fills, `bounds` int32 [0, tokens]."""
        gated, normed = self.gate(key, value, hidden)
        self.kernels.ple_conv(
            normed, gated, state, self.weights["conv"], self.slot, hidden, mode="prefill", dilation=self.dilation,
            query_start_loc=bounds, has_initial_states=self.no_state,
        )  # fmt: skip
        return gated

    def decode(self, key: Tensor, value: Tensor, hidden: Tensor, state: Tensor, slots: Tensor) -> Tensor:
        """One token for each of `slots` (int32, from 1 on)."""
        gated, normed = self.gate(key, value, hidden)
        self.kernels.ple_conv(
            normed, gated, state, self.weights["conv"], slots, hidden, mode="decode", dilation=self.dilation
        )
        return gated
