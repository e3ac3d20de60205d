"""Rows of a table that lies in files, by id: a gather on the CPU, through the page cache, staged on the way to a GPU.

    rows = ple.mapped_lookup(table, ids, width, dtype)        equals index_select of the whole table

`table` is the number of a `MappedRows`. Every id that occurs is read once, in the order of the file; only those rows
are moved to the device of the ids, where they are spread to all places that ask for them. With CUDA ids this stops
the GPU, as every lookup on the host does. ids are int32 or int64 of any shape; rows [*ids.shape, width] contiguous.
"""

import torch
from torch import Tensor

from ple_compile.ops._library import define
from ple_compile.tables.mapped_rows import MappedRows


def reference(table: int, ids: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"mapped_lookup: ids are {ids.dtype}; pass int32 or int64")
    stored = MappedRows.numbered(table)
    wanted, places = torch.unique(ids.flatten(), return_inverse=True)
    staging = torch.empty(wanted.numel(), stored.row_bytes, dtype=torch.uint8, pin_memory=ids.is_cuda)
    stored.gather(wanted.cpu().long(), staging)
    rows = staging.to(ids.device).index_select(0, places)
    return rows.view(dtype).reshape(*ids.shape, width)


def fake(table: int, ids: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    return ids.new_empty((*ids.shape, width), dtype=dtype)


mapped_lookup = define(
    "mapped_lookup(int table, Tensor ids, int width, ScalarType dtype) -> Tensor",
    cpu=reference,
    cuda=reference,
    fake=fake,
)
