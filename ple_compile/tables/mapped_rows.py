"""Rows in files, without reading them into memory: the page cache serves what lookups touch."""

import itertools
import weakref
from bisect import bisect_right
from collections.abc import Iterator

import torch
from torch import Tensor

from ple_compile.tables.tensor_file import StoredTensor, map_rows, read_rows

_BLOCK_BYTES = 2**24

_numbers = itertools.count()
_ALL: "weakref.WeakValueDictionary[int, MappedRows]" = weakref.WeakValueDictionary()


class MappedRows:
    """The parts of one tensor, in order, as one table of bytes. Never written to, so copies of a model share it."""

    def __init__(self, parts: list[StoredTensor]):
        self.parts = parts
        self.dtype, self.width = parts[0].dtype, parts[0].shape[1]
        self.row_bytes = parts[0].row_bytes
        self._maps = [map_rows(part) for part in parts]
        self._ends = list(itertools.accumulate(part.shape[0] for part in parts))
        self.num_rows = self._ends[-1]
        self.number = next(_numbers)
        _ALL[self.number] = self

    @staticmethod
    def numbered(number: int) -> "MappedRows":
        return _ALL[number]

    def gather(self, ids: Tensor, into: Tensor) -> None:
        """Rows of ascending int64 `ids`, as bytes; raises ValueError for ids outside."""
        if ids.numel() == 0:
            return
        low, high = int(ids[0]), int(ids[-1])
        if low < 0 or high >= self.num_rows:
            raise ValueError(
                f"lookup: ids from {low} to {high} in a table of {self.num_rows} rows; check the n-gram sizes and "
                "offsets against the table"
            )
        borders = torch.searchsorted(ids, torch.tensor(self._ends)).tolist()
        begin = 0
        for rows, end, last in zip(self._maps, borders, self._ends):
            if end > begin:
                torch.index_select(rows, 0, ids[begin:end] - (last - rows.shape[0]), out=into[begin:end])
            begin = end

    def read(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) in memory, in their own type."""
        rows = torch.empty(stop - start, self.row_bytes, dtype=torch.uint8)
        position = start
        while position < stop:
            part = bisect_right(self._ends, position)
            offset = self._ends[part] - self._maps[part].shape[0]
            end = min(stop, self._ends[part])
            read_rows(self.parts[part], position - offset, end - offset, rows[position - start : end - start])
            position = end
        return rows.view(self.dtype)

    def blocks(self) -> Iterator[Tensor]:
        """All rows in memory, in order, a few at a time."""
        step = max(1, _BLOCK_BYTES // self.row_bytes)
        for start in range(0, self.num_rows, step):
            yield self.read(start, min(start + step, self.num_rows))

    def __deepcopy__(self, memo: dict) -> "MappedRows":
        return self

    def __reduce__(self) -> tuple:
        return MappedRows, (self.parts,)
