"""safetensors files: headers checked before use, rows read straight into memory, written a block at a time, or mapped.

A file is eight bytes with the length of a JSON header, the header, and the tensors' bytes. Nothing is unpickled.
"""

import contextlib
import fcntl
import json
import math
import mmap
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MOST_HEADER_BYTES = 100_000_000
_ALIGNMENT = 64
PART = ".part"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a file; its rows are its first dimension."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    unknown: str = ""  # its type in the file, where that is none of _DTYPES; dtype is then bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} in {self.file}"


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file. Raises ValueError, naming file and tensor, for one that is cut off or inconsistent."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
            raise ValueError(f"{file} is no safetensors file, or is cut off: {size} bytes, a header of {length}")
        try:
            header = json.loads(stream.read(length), object_pairs_hook=_without_repetition)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the header of {file} is damaged: {error}; download it again") from None
    if not isinstance(header, dict):
        raise ValueError(f"the header of {file} is damaged: it is a {type(header).__name__}; download it again")
    found = {name: _entry(file, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"}
    end = 8 + length
    for tensor in sorted(found.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset < end:
            raise ValueError(f"{tensor} overlaps the tensor before it")
        end = tensor.offset + tensor.nbytes
        if end > size:
            raise ValueError(f"{tensor} ends at byte {end} of a file of {size}; the file is cut off")
    return found


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, entry in pairs:
        if name in found:
            raise ValueError(f"{name} is there twice")
        found[name] = entry
    return found


def _entry(file: Path, name: str, entry: Any, start: int) -> StoredTensor:
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = isinstance(kind, str) and all(type(n) is int and n >= 0 for n in (*shape, begin, end - begin))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise ValueError(f"the header of {file} describes {name} as {entry!r}; download it again")
    if kind not in _DTYPES:
        # Still a legal file; only asking for this tensor would be an error, and it is no table.
        return StoredTensor(file, name, torch.uint8, (end - begin,), start + begin, kind)
    tensor = StoredTensor(file, name, _DTYPES[kind], shape, start + begin)
    if tensor.nbytes != end - begin:
        raise ValueError(f"{tensor} has shape {shape} of {kind} and {end - begin} bytes")
    return tensor


def read_rows(stored: StoredTensor, start: int, stop: int, into: Tensor) -> None:
    """Rows [start, stop) into a contiguous CPU tensor of as many bytes; no other memory is used."""
    target = into.detach().view(-1).view(torch.uint8).numpy().data
    assert len(target) == (stop - start) * stored.row_bytes
    position = stored.offset + start * stored.row_bytes
    with open(stored.file, "rb", buffering=0) as stream:
        stream.seek(position)
        while target:
            count = stream.readinto(target)
            if not count:
                raise ValueError(f"{stored} ends before row {stop}; the file was cut off while it was read")
            target = target[count:]


def map_rows(stored: StoredTensor, *, writable: bool = False) -> Tensor:
    """Rows as bytes [rows, row_bytes], served by the page cache; they need not be aligned."""
    mapped = map_file(stored.file, writable=writable)[stored.offset : stored.offset + stored.nbytes]
    return mapped.view(stored.shape[0], stored.row_bytes)


def map_file(file: Path, *, writable: bool = False) -> Tensor:
    """The bytes of a file as a tensor. Writes to a writable one go to the file."""
    with open(file, "r+b" if writable else "rb") as stream:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        mapping = mmap.mmap(stream.fileno(), 0, access=access)
    if hasattr(mmap, "MADV_RANDOM"):
        mapping.madvise(mmap.MADV_RANDOM)  # a lookup wants its row, not the pages around it
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapping, dtype=torch.uint8)


Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def part_of(file: Path) -> Path:
    """What a file is called until all of it is written."""
    return file.with_name(file.name + PART)


class TensorWriter:
    """A file of tensors whose rows are written in any order; the space is there from the start, or it is an error.

    The file has its name from the end of the `with` block on; until then it is `part_of(file)`, which nobody loads.
    """

    def __init__(self, file: Path, shapes: Shapes, *, resume: bool = False):
        self.file, part = file, part_of(file)
        header, self._offsets, total = _layout(shapes)
        self._row_bytes = {name: math.prod(shape[1:]) * dtype.itemsize for name, (dtype, shape) in shapes.items()}
        self._descriptor = os.open(part, os.O_RDWR if resume else os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(self._descriptor, part)
            if not resume:
                os.ftruncate(self._descriptor, 0)
            if resume and os.pread(self._descriptor, len(header), 0) != header:
                raise ValueError(f"{part} holds other tensors than those that were to be continued; delete it")
            os.pwrite(self._descriptor, header, 0)
            os.posix_fallocate(self._descriptor, 0, total)
        except BaseException:
            os.close(self._descriptor)
            raise

    def write_rows(self, name: str, start: int, rows: Tensor) -> None:
        source = rows.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        position = self._offsets[name] + start * self._row_bytes[name]
        while source:
            count = os.pwrite(self._descriptor, source, position)
            source, position = source[count:], position + count

    def flush(self) -> None:
        """Everything written so far survives the machine, not only the process."""
        os.fdatasync(self._descriptor)

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.flush()
                os.replace(part_of(self.file), self.file)
        finally:
            os.close(self._descriptor)


def _lock(descriptor: int, file: Path) -> None:
    """For as long as the descriptor is open; on a file system without locks, nothing."""
    try:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    raise ValueError(f"{file} is being written by another process; wait for it, or choose another path")


def _layout(shapes: Shapes) -> tuple[bytes, dict[str, int], int]:
    """(first bytes of the file, offset of every tensor in it, its size)."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    # The widest types first, so that every tensor is aligned.
    for name, (dtype, shape) in sorted(shapes.items(), key=lambda item: -item[1][0].itemsize):
        end = begin + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    start = 8 + len(text)
    offsets = {name: start + entry["data_offsets"][0] for name, entry in entries.items() if name != "__metadata__"}
    return len(text).to_bytes(8, "little") + text, offsets, start + begin
