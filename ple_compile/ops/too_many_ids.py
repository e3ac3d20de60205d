"""The end of a lookup with more ids than the ranks' buffers hold: raises, once the other ranks have been told.

`gathered` holds the counts of all ranks, this one's too, so they raise on reading it (`local_ids`). This rank knows
already; it takes `gathered` as an argument because the exchange must come first.
"""

import torch
from torch import Tensor

from ple_compile.ops._library import define
from ple_compile.ops.local_ids import too_many


def refuse(gathered: Tensor, ids: Tensor, shard: Tensor, max_ids: int, what: str) -> Tensor:
    if gathered.is_cuda:
        # The error may end this process, which must not be before the exchange is over.
        torch.cuda.current_stream(gathered.device).synchronize()
    raise ValueError(too_many(ids.numel(), max_ids, what))


def fake(gathered: Tensor, ids: Tensor, shard: Tensor, max_ids: int, what: str) -> Tensor:
    return ids.new_empty((*ids.shape, shard.shape[1]), dtype=shard.dtype)


too_many_ids = define(
    "too_many_ids(Tensor gathered, Tensor ids, Tensor shard, int max_ids, str what) -> Tensor",
    cpu=refuse,
    cuda=refuse,
    fake=fake,
)
