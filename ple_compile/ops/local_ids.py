"""Which of the wanted rows lie on this rank, and where.

    local[i] = ids[i] - first_row where 0 <= ids[i] - first_row < num_rows, else 0
    mine[i]  = whether it is so

ids: int32 or int64, flattened; or, when `counted`, the gathered buffers of `pack_ids`, [num_sources, 1 + n], whose
counts are dropped. A count above `max_ids` means that a rank has more ids than a buffer holds: an error on every rank,
an exception on the CPU and a device-side assertion on CUDA, where nothing is read back to the host.
local: int64 [n]; mine: bool [n]. Bytes moved: the ids in; local and mine out. One launch, and two for the assertion.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ple_compile.ops._library import define
from ple_compile.ops._sizes import cdiv, next_power_of_2
from ple_compile.sharding.agreement import agree

_BLOCK = 1024
# An assertion ends this device's context, which the rank with too many ids must not feel before it has told its user:
# its half of the exchange may still be reading this device's memory. So many atomics in a row take about half a second.
_TURNS_BEFORE_ASSERTION = 500_000


def reference(
    ids: Tensor, num_sources: int, counted: bool, max_ids: int, first_row: int, num_rows: int, group: str, what: str
) -> tuple[Tensor, Tensor]:
    agree(group, what)
    ids = ids.reshape(num_sources, -1)
    if counted:
        if (ids[:, 0] > max_ids).any():
            raise ValueError(too_many(int(ids[:, 0].max()), max_ids, what))
        ids = ids[:, 1:]
    local = ids.reshape(-1).long() - first_row
    mine = (local >= 0) & (local < num_rows)
    return torch.where(mine, local, 0), mine


def too_many(given: int, max_ids: int, what: str) -> str:
    return (
        f"{what}: a rank has {given} ids and the buffers hold {max_ids}; raise Config.etp_max_tokens to the largest "
        "number of tokens that a rank has in one step, on every rank"
    )


@triton.jit(do_not_specialize=["num_sources", "stride", "max_ids", "turns"])
def counts_fit_kernel(fits_ptr, turn_ptr, ids_ptr, num_sources, stride, max_ids, turns, BLOCK: tl.constexpr):
    """Whether no count is above `max_ids`; if one is, `turns` atomics later."""
    source = tl.arange(0, BLOCK)
    counts = tl.load(ids_ptr + source * stride, mask=source < num_sources, other=0)
    fits = tl.max(counts, axis=0) <= max_ids
    tl.store(turn_ptr, 0)
    tl.debug_barrier()
    turn = tl.where(fits, turns, 0)
    while turn < turns:
        turn = tl.atomic_add(turn_ptr, 1) + 1
    tl.store(fits_ptr, fits)


@triton.jit(do_not_specialize=["num_ids", "per_source", "first_row", "num_rows"])
def local_ids_kernel(
    local_ptr, mine_ptr, ids_ptr, num_ids, per_source, first_row, num_rows, COUNTED: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_ids
    source = index
    if COUNTED:
        source += index // per_source + 1
    local = tl.load(ids_ptr + source, mask=inside, other=-1).to(tl.int64) - first_row
    mine = (local >= 0) & (local < num_rows)
    tl.store(local_ptr + index, tl.where(mine, local, 0), mask=inside)
    tl.store(mine_ptr + index, mine, mask=inside)


def launch(
    ids: Tensor, num_sources: int, counted: bool, max_ids: int, first_row: int, num_rows: int, group: str, what: str
) -> tuple[Tensor, Tensor]:
    agree(group, what)
    ids = ids.contiguous()
    if counted:
        fits = counts_fit(ids, num_sources, max_ids)
        torch._assert_async(fits, f"{what}: a rank has more tokens than Config.etp_max_tokens")
    return locate(ids, num_sources, counted, first_row, num_rows)


def counts_fit(ids: Tensor, num_sources: int, max_ids: int, turns: int = _TURNS_BEFORE_ASSERTION) -> Tensor:
    """int32, 1 or 0."""
    fits, turn = ids.new_empty(2, dtype=torch.int32).unbind()
    block = next_power_of_2(num_sources)
    counts_fit_kernel[(1,)](fits, turn, ids, num_sources, ids.numel() // num_sources, max_ids, turns, BLOCK=block)
    return fits


def locate(ids: Tensor, num_sources: int, counted: bool, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    num_ids = ids.numel() - num_sources * int(counted)
    local = torch.empty(num_ids, dtype=torch.int64, device=ids.device)
    mine = torch.empty(num_ids, dtype=torch.bool, device=ids.device)
    if num_ids:
        local_ids_kernel[(cdiv(num_ids, _BLOCK),)](
            local, mine, ids, num_ids, num_ids // num_sources, first_row, num_rows, COUNTED=int(counted), BLOCK=_BLOCK
        )
    return local, mine


def fake(
    ids: Tensor, num_sources: int, counted: bool, max_ids: int, first_row: int, num_rows: int, group: str, what: str
) -> tuple[Tensor, Tensor]:
    num_ids = ids.numel() - num_sources * int(counted)
    return ids.new_empty((num_ids,), dtype=torch.int64), ids.new_empty((num_ids,), dtype=torch.bool)


local_ids = define(
    "local_ids(Tensor ids, int num_sources, bool counted, int max_ids, int first_row, int num_rows, str group, "
    "str what) -> (Tensor local, Tensor mine)",
    cpu=reference,
    cuda=launch,
    fake=fake,
)
