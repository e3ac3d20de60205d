# mypy: disable-error-code="assignment"
"""Requests laid end to end: which of them a token belongs to, and where its state lies.

Request r owns tokens `query_start_loc[r]` up to `query_start_loc[r + 1]`, possibly none; tokens after the last end are
the last request's own. Its columns are slot `state_indices[r]` of a pool [slots, C, W]; slot 0 is no state. Its history
begins at column `num_accepted_tokens[r] - 1` of the slot (0 without that tensor) where `has_initial_state[r]`, and is
zeros elsewhere. The four tensors may have any strides and integer types.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ple_compile.ops._sizes import next_power_of_2

INTEGERS = (torch.int32, torch.int64)


class Requests(NamedTuple):
    query_start_loc: Tensor  # [R + 1]
    state_indices: Tensor  # [R]
    has_initial_state: Tensor  # [R]
    num_accepted_tokens: Tensor | None  # [R]

    @property
    def num_requests(self) -> int:
        return self.state_indices.shape[0]

    def without_bools(self) -> "Requests":
        """As kernels take them: bools as bytes."""
        has = self.has_initial_state
        return self._replace(has_initial_state=has.view(torch.uint8)) if has.dtype == torch.bool else self

    def strides(self) -> list[int]:
        return [0 if tensor is None else tensor.stride(0) for tensor in self]


def locate(query_start_loc: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The request of each of `tokens` (positions in the batch), and the token's place in it."""
    starts = query_start_loc.long()
    # Not in a slice of `starts`: PyTorch 2.11 generates no code for that, and starts[1:-1] would guard on R - 1 and
    # cost a graph for two requests.
    request = (torch.searchsorted(starts, tokens, right=True) - 1).clamp(0, starts.shape[0] - 2)
    return request, tokens - starts[request]


def first_columns(requests: Requests) -> Tensor:
    """The column of its slot at which each request's history begins."""
    if requests.num_accepted_tokens is None:
        return torch.zeros_like(requests.state_indices, dtype=torch.int64)
    return (requests.num_accepted_tokens.long() - 1).clamp(min=0)


@triton.jit
def find_request(starts_ptr, starts_stride, num_requests, token, BLOCK: tl.constexpr):
    """The request of one token: so many others end at or before it."""
    # Wide independent reads cost one latency where a bisection pays one for every halving.
    request = tl.zeros([], tl.int32)
    for begin in tl.range(0, num_requests - 1, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        listed = other < num_requests - 1
        ends = tl.load(starts_ptr + (other + 1) * starts_stride, mask=listed, other=0)
        request += tl.sum((listed & (ends <= token)).to(tl.int32), 0)
    return request


@triton.jit
def load_state(
    request, slots_ptr, slots_stride, has_ptr, has_stride, accepted_ptr, accepted_stride, SPARE: tl.constexpr
):  # fmt: skip
    """(slot, whether it holds the request's history, the history's first column). SPARE: columns beyond the reach."""
    slot = tl.load(slots_ptr + request * slots_stride).to(tl.int64)
    has = tl.where(slot != 0, tl.load(has_ptr + request * has_stride).to(tl.int32), 0)
    column = tl.zeros([], tl.int32)
    if accepted_ptr is not None:
        accepted = tl.load(accepted_ptr + request * accepted_stride).to(tl.int32)
        column = tl.minimum(tl.maximum(accepted - 1, 0), SPARE)
    return slot, has, column


def search_block(num_requests: int) -> int:
    """Width of `find_request`'s reads."""
    return min(256, max(16, next_power_of_2(num_requests)))


def check(name: str, num_tokens: int, query_start_loc: Tensor, **per_request: Tensor | None) -> None:
    """Shapes and types of a batch's index tensors."""
    if query_start_loc.dim() != 1 or query_start_loc.shape[0] < 1 or query_start_loc.dtype not in INTEGERS:
        raise ValueError(
            f"{name}: query_start_loc is {query_start_loc.dtype} {tuple(query_start_loc.shape)}; "
            "pass int32 or int64 [requests + 1]"
        )
    requests = query_start_loc.shape[0] - 1
    if num_tokens and not requests:
        raise ValueError(f"{name}: {num_tokens} tokens and no request; pass a query_start_loc that covers the tokens")
    for argument, tensor in per_request.items():
        if tensor is not None and (tensor.dim() < 1 or tensor.shape[0] != requests):
            raise ValueError(
                f"{name}: {argument} has shape {tuple(tensor.shape)}; query_start_loc tells of {requests} requests"
            )
        if tensor is not None and tensor.dtype not in (*INTEGERS, torch.bool):
            raise ValueError(f"{name}: {argument} is {tensor.dtype}; pass integers")


def check_pool(name: str, channels: int, pool: Tensor, reach: int) -> None:
    if pool.dim() != 3 or pool.shape[1] != channels or pool.shape[2] < reach:
        raise ValueError(
            f"{name}: pool {tuple(pool.shape)} must be [slots, {channels}, window] with a window of at least "
            f"(taps - 1) * dilation = {reach}"
        )
