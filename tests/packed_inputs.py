"""Packed batches of every composition, and random inputs of the packed ops for them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from ple_inputs import DEVICE, new_seed
from torch import Tensor

from ple_compile.ops._packed import Requests
from ple_compile.ops.packed_gate_conv import Inputs


@dataclass(frozen=True)
class Batch:
    """Per request: tokens, slot, whether it has state, and the accepted tokens of a speculative batch."""

    lengths: tuple[int, ...]
    slots: tuple[int, ...] | None = None  # 1, 2, ... without
    fresh: tuple[int, ...] = ()  # requests without state
    accepted: tuple[int, ...] | None = None
    padding: int = 0  # tokens after the last request's end

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths) + self.padding

    def requests(self, dtype: torch.dtype = torch.int32, device: str = DEVICE) -> Requests:
        """Index tensors as columns of wider ones, as servers keep them."""
        count = len(self.lengths)

        def strided(values: list[int], dtype: torch.dtype) -> Tensor:
            table = torch.full((len(values), 3), 99, dtype=dtype)
            table[:, 1] = torch.tensor(values, dtype=dtype)
            return table.to(device)[:, 1]

        starts = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        has = torch.tensor([r not in self.fresh for r in range(count)], dtype=torch.bool, device=device)
        return Requests(
            strided(starts, dtype),
            strided(list(self.slots or range(1, count + 1)), dtype),
            has,
            None if self.accepted is None else strided(list(self.accepted), dtype),
        )


BATCHES = {
    "decode": Batch((1,) * 5, fresh=(3,)),
    "decode_without_slots": Batch((1,) * 4, slots=(2, 0, 1, 0)),
    "decode_padded": Batch((1, 1, 0, 0), slots=(2, 3, 0, 0), padding=2),
    # As many tokens as requests, but not one each.
    "decode_and_more_tokens": Batch((0, 5, 1, 1, 0, 0, 0), fresh=(2,)),
    "as_many_tokens_past_the_end": Batch((1, 0, 1, 0, 2), padding=1),
    "one_token": Batch((1,)),
    "prefill": Batch((11, 1, 14), fresh=(0, 1, 2)),
    "chunks": Batch((0, 4, 11, 0, 2, 0), slots=(5, 3, 6, 1, 2, 4), fresh=(1,)),
    "mixed_without_slots": Batch((1, 13, 1, 2, 9), slots=(3, 0, 0, 1, 4), fresh=(4,)),
    "padded_prefill": Batch((3, 8), padding=4),
    "all_of_one": Batch((0, 0, 12)),
    "speculative": Batch((4, 4, 4), accepted=(1, 2, 4)),
    "speculative_mixed": Batch(
        (4, 1, 11, 0, 2, 5, 1), fresh=(2,), slots=(3, 7, 5, 1, 2, 4, 6), accepted=(3, 2, 0, 1, 4, 0, 1)
    ),
    "speculative_decode": Batch((1, 1, 1), accepted=(1, 4, 0)),
    "no_tokens": Batch((0, 0)),
    "nothing": Batch(()),
}


def draw(
    batch: Batch,
    width: int,
    streams: int,
    kernel: int = 4,
    dilation: int = 3,
    *,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    pool: str = "dense",
    add_hidden: bool = True,
    boundaries: bool = False,
    autocast: bool = False,
    plain: bool = False,
    seed: int | None = None,
    device: str = DEVICE,
) -> Inputs:
    """Key and value are views of one projection, hidden a view.

    `pool`: "dense", with the "channels" together, or a "view" of a larger one; the latter two have columns to spare.
    What nobody may read is NaN: slot 0, the slots of fresh requests, and columns beside the history.
    """
    generator = torch.Generator().manual_seed(new_seed() if seed is None else seed)
    wide = torch.float32 if autocast else dtype
    channels, reach, tokens = streams * width, (kernel - 1) * dilation, batch.num_tokens

    def rand(*shape: int, dtype: torch.dtype = dtype, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    requests = batch.requests(index_dtype, device)
    num_slots = max([*requests.state_indices.tolist(), 0]) + 3
    columns = reach if pool == "dense" and batch.accepted is None else reach + 5
    values = rand(num_slots, channels, columns, dtype=wide)
    values[0] = float("nan")
    for r, slot in enumerate(requests.state_indices.tolist()):
        first = max((batch.accepted or (1,) * len(batch.lengths))[r] - 1, 0)
        values[slot, :, :first] = float("nan")
        values[slot, :, first + reach :] = float("nan")
        if r in batch.fresh:
            values[slot] = float("nan")
    if pool == "channels":
        values = values.mT.contiguous().mT
    elif pool == "view":
        larger = torch.full((2 * num_slots, channels, columns + 3), 5.0, dtype=wide, device=device)
        larger[::2, :, 1 : columns + 1] = values
        values = larger[::2, :, 1 : columns + 1]

    projected = rand(tokens, channels + width)
    seed = int(torch.randint(2**31, (1,), generator=generator))
    ends = random.Random(seed).sample(range(1, tokens + 1), min(tokens, 5)) if boundaries else []
    return Inputs(
        key=projected[:, :channels],
        value=projected[:, channels:],
        hidden=rand(tokens, 2 * channels, dtype=wide)[:, :channels],
        norm_key_weight=rand(channels, dtype=wide, scale=0.2),
        norm_query_weight=rand(channels, dtype=wide, scale=0.2),
        norm_conv_weight=rand(channels, dtype=wide, scale=0.2),
        conv_weight=rand(channels, 1, kernel, dtype=wide, scale=0.5),
        pool=values,
        query_start_loc=requests.query_start_loc,
        state_indices=requests.state_indices,
        has_initial_state=requests.has_initial_state,
        num_accepted_tokens=requests.num_accepted_tokens,
        boundaries=torch.tensor([0, *ends], dtype=index_dtype, device=device) if boundaries else None,
        eps=[1e-6, 2e-6, 3e-6],
        eps_tensors=[],
        gate_dtype=wide,
        dilation=dilation,
        add_hidden=add_hidden,
        plain=plain,
    )
