"""Ids in a buffer whose size does not depend on how many there are, so that ranks can exchange them.

    packed = [number of ids,] ids[0], ids[1], ..., -1, -1, ...

ids: int32 or int64 of any shape. packed: int64 [num_ids], or [1 + num_ids] when `counted`. Ids that do not fit are cut
off; the count tells. Before anything is sent, the ranks of `group` agree that they are about to do `what`.
Bytes moved: the ids in, the buffer out. One launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ple_compile.ops._library import define
from ple_compile.ops._sizes import cdiv
from ple_compile.sharding.agreement import agree

_BLOCK = 1024


def reference(ids: Tensor, num_ids: int, counted: bool, group: str, what: str) -> Tensor:
    agree(group, what)
    packed = ids.new_full((num_ids + int(counted),), -1, dtype=torch.int64)
    kept = min(num_ids, ids.numel())
    packed[int(counted) :][:kept] = ids.reshape(-1)[:kept]
    if counted:
        packed[0] = ids.numel()
    return packed


@triton.jit(do_not_specialize=["num_given", "total"])
def pack_ids_kernel(packed_ptr, ids_ptr, num_given, total, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = index - COUNTED
    packed = tl.load(ids_ptr + source, mask=(source >= 0) & (source < num_given), other=-1).to(tl.int64)
    if COUNTED:
        packed = tl.where(index == 0, num_given, packed)
    tl.store(packed_ptr + index, packed, mask=index < total)


def launch(ids: Tensor, num_ids: int, counted: bool, group: str, what: str) -> Tensor:
    agree(group, what)
    return pack(ids.contiguous(), num_ids, counted)


def pack(ids: Tensor, num_ids: int, counted: bool) -> Tensor:
    total = num_ids + int(counted)
    packed = torch.empty(total, dtype=torch.int64, device=ids.device)
    if total:
        pack_ids_kernel[(cdiv(total, _BLOCK),)](packed, ids, ids.numel(), total, COUNTED=int(counted), BLOCK=_BLOCK)
    return packed


def fake(ids: Tensor, num_ids: int, counted: bool, group: str, what: str) -> Tensor:
    return ids.new_empty((num_ids + int(counted),), dtype=torch.int64)


pack_ids = define(
    "pack_ids(Tensor ids, SymInt num_ids, bool counted, str group, str what) -> Tensor",
    cpu=reference,
    cuda=launch,
    fake=fake,
)
