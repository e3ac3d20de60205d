"""Key and value projections of the looked-up rows as one matrix product.

    kv = x @ concat(key_weight, value_weight).T

x [..., E], key_weight [C, E], value_weight [H, E], kv [..., C + H] contiguous, all of one dtype; accumulation is the
GEMM's. Bytes moved: both weights once, x once, kv once.

What happens to the parameters: the first call moves `key_weight` and `value_weight` into one storage, so that one
GEMM reads both without a second copy of them (`ple_compile.merged_weights` says what stays as it was, which is all but
their addresses). Every call looks at the addresses again: parameters that were moved apart since are merged again.
Where moving is not allowed (tied weights, casts made on the fly, parameters of a sharded model, inside a CUDA graph
capture, ...) two GEMMs write the two parts of the one output.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ple_compile import merged_weights
from ple_compile.ops._library import define


def reference(x: Tensor, key_weight: Tensor, value_weight: Tensor) -> Tensor:
    return F.linear(x, torch.cat([key_weight, value_weight]))


def apart(x: Tensor, key_weight: Tensor, value_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value as two tensors, from weights that stay where they are."""
    return F.linear(x, key_weight), F.linear(x, value_weight)


def project(x: Tensor, key_weight: Tensor, value_weight: Tensor) -> Tensor:
    _check(x, key_weight, value_weight)
    # The op's types are its arguments': under autocast the product would come out in another.
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return _gemm(x, key_weight, value_weight)
    return _gemm(x, key_weight, value_weight)


def _gemm(x: Tensor, key_weight: Tensor, value_weight: Tensor) -> Tensor:
    weight = merged_weights.merged_view(key_weight, value_weight)
    if weight is None and merged_weights.why_separate(key_weight, value_weight) is None:
        merged_weights.merge(key_weight, value_weight)
        weight = merged_weights.merged_view(key_weight, value_weight)
    with torch.no_grad():
        if weight is not None:
            return F.linear(x, weight)
        kv = x.new_empty((*x.shape[:-1], key_weight.shape[0] + value_weight.shape[0]))
        rows, out = x.reshape(-1, x.shape[-1]), kv.view(-1, kv.shape[-1])
        torch.mm(rows, key_weight.t(), out=out[:, : key_weight.shape[0]])
        torch.mm(rows, value_weight.t(), out=out[:, key_weight.shape[0] :])
        return kv


def fake(x: Tensor, key_weight: Tensor, value_weight: Tensor) -> Tensor:
    _check(x, key_weight, value_weight)
    return x.new_empty((*x.shape[:-1], key_weight.shape[0] + value_weight.shape[0]))


def _check(x: Tensor, key_weight: Tensor, value_weight: Tensor) -> None:
    for name, weight in (("key_weight", key_weight), ("value_weight", value_weight)):
        if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"kv_proj: {name} has shape {tuple(weight.shape)} and x {tuple(x.shape)}; pass [out, {x.shape[-1]}]"
            )
        if weight.dtype != x.dtype:
            raise ValueError(f"kv_proj: {name} is {weight.dtype} and x {x.dtype}; pass one dtype")


kv_proj = define(
    "kv_proj(Tensor x, Tensor key_weight, Tensor value_weight) -> Tensor", cpu=project, cuda=project, fake=fake
)
