"""`quantize_tables`: n-gram tables into a smaller format, a block of rows at a time.

Two passes: the first finds the largest value and refuses rows that are not finite, the second encodes, decodes and
measures. Beside the table itself there is one copy, the quantised one, and a few blocks.

With `path` the result is a safetensors file (which `load_tables` reads) and the model maps it. It is called
`<path>.part` until it is complete, and what is done is noted in `<path>.progress`, so that a run that was killed goes
on where it stopped. It does so only for the table that it began with: the first pass, which every run makes over the
whole table, takes the SHA-256 of all bytes along the way, and the note has that of the run before. This costs 1.5 s
per GB on one core (AMD EPYC with SHA instructions), in the first run and in each that goes on.

A table that stays in its files (`load_tables(format="mmap")`) is read from there by blocks, so that none of it is held
in memory.
"""

import dataclasses
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ple_compile.json_file import read_json, with_checksum
from ple_compile.tables import formats
from ple_compile.tables.find import Table, find_tables
from ple_compile.tables.formats import QuantizedEmbedding, format_class
from ple_compile.tables.mapped import MappedEmbedding
from ple_compile.tables.offload import is_offloaded
from ple_compile.tables.progress import Progress
from ple_compile.tables.replace import check_replaceable, put_back_on_failure, replace_embedding
from ple_compile.tables.tensor_file import StoredTensor, TensorWriter, map_rows, part_of, read_header, read_rows

log = logging.getLogger(__name__)

_BLOCK_VALUES = 2**19  # values handled together; what is made of them on the way takes about 25 MiB
_BLOCKS_PER_NOTE = 256  # blocks between two notes of progress
_ROWS_SHOWN = 5

ReadRows = Callable[[int, int], Tensor]
WriteRows = Callable[[str, int, Tensor], None]


@dataclass(frozen=True)
class QuantizationError:
    """How far a quantised table is from the original; errors are relative Euclidean distances."""

    table: str
    format: str
    num_rows: int
    overall: float  # of all values together
    mean_row: float  # mean over the rows
    worst_row: float
    worst_row_index: int
    largest: float  # largest absolute difference of one value

    def __str__(self) -> str:
        return (
            f"{self.table} as {self.format}: error {self.overall:.2%} overall, {self.mean_row:.2%} in a mean row, "
            f"{self.worst_row:.2%} in the worst (row {self.worst_row_index}), {self.largest:.3g} in the worst value"
        )


@dataclass
class Totals:
    """What is summed up block by block; goes through JSON when a run is resumed."""

    squares: float = 0.0
    error_squares: float = 0.0
    row_errors: float = 0.0
    worst_row: float = -1.0
    worst_row_index: int = 0
    largest: float = 0.0

    def add(self, start: int, rows: Tensor, decoded: Tensor) -> None:
        size = max(abs(float(x)) for x in rows.aminmax())
        # Squares of others would leave float32's range.
        rows = rows.float() if 1e-15 < size < 1e15 and rows.dtype != torch.float64 else rows.double()
        error = decoded - rows
        norms, distances = (torch.linalg.vector_norm(x, dim=1).double() for x in (rows, error))
        # A row of zeros comes back as zeros.
        relative = torch.where(norms > 0, distances / norms, 0.0)
        worst, index = relative.max(dim=0)
        if worst.item() > self.worst_row:
            self.worst_row, self.worst_row_index = worst.item(), start + int(index)
        self.squares += norms.square().sum().item()
        self.error_squares += distances.square().sum().item()
        self.row_errors += relative.sum().item()
        self.largest = max(self.largest, *(abs(float(x)) for x in error.aminmax()))

    def report(self, table: str, format: str, num_rows: int) -> QuantizationError:
        overall = (self.error_squares / self.squares) ** 0.5 if self.squares else 0.0
        mean = self.row_errors / max(num_rows, 1)
        return QuantizationError(
            table, format, num_rows, overall, mean, max(self.worst_row, 0.0), self.worst_row_index, self.largest
        )


def quantize_tables(model: nn.Module, format: str, *, path: str | os.PathLike | None = None) -> list[QuantizationError]:
    """Replace the model's n-gram tables by quantised ones, in place; returns how far each is from the original.

    `format` is "fp8" (e4m3 values, one scale for the table), "fp8_row" (one scale for each row) or "nvfp4" (e2m1
    values, two in a byte, an e4m3 scale for every 16 values of a row and a float32 scale for the table). Lookups give
    rows in the dtype that the table had. The new table lies on the old one's device; beside both, a few blocks of rows
    are in memory.

    `path`: a safetensors file to write into, which the model then maps, and to go on with if a former run was killed
    while writing it.

    Raises ValueError for an unknown format, for a model without an n-gram table, for a table that is quantised,
    sharded, on the meta device, or in an embedding that does more than look rows up, for a `path` that holds something
    else or that another process is writing, and for rows that are not finite or beyond the range of float32 or of the
    table's dtype, naming table and row; the model is then as it was.
    """
    cls = format_class(format)
    tables = find_tables(model)
    if not tables:
        raise ValueError(f"quantize_tables: {type(model).__name__} has no n-gram table; pass a model with PLE layers")
    for table in tables:
        _check(table, cls)
    unique = list({id(table.weight): table for table in tables}.values())
    if path is None:
        made = {id(table.weight): _quantize_in_memory(table, cls) for table in unique}
    else:
        made = _quantize_into_file(unique, cls, Path(path))
    with put_back_on_failure(model):  # an offloaded table's successor is page-locked, which may be refused
        for table in tables:
            new = _empty(table, cls)
            for name, parameter in made[id(table.weight)][0].items():
                setattr(new, name, parameter)
            replace_embedding(model, table, new)
    errors = [made[id(table.weight)][1] for table in unique]
    for error in errors:
        log.info("%s", error)
    return errors


def _check(table: Table, cls: type[QuantizedEmbedding]) -> None:
    weight = table.weight
    if weight.is_meta:
        raise ValueError(f"quantize_tables: {table.name} is on the meta device; load it first, or use load_tables")
    quantized = isinstance(table.embedding, QuantizedEmbedding) or weight.dtype.itemsize == 1
    if quantized or (isinstance(table.embedding, MappedEmbedding) and table.embedding.quantized is not None):
        raise ValueError(f"quantize_tables: {table.name} is {weight.dtype} already; load the original to change it")
    if type(weight) is not nn.Parameter or hasattr(table.embedding, "layout"):
        raise ValueError(f"quantize_tables: {table.name} is sharded; quantise before shard_tables")
    check_replaceable(table)
    cls.spec(*_shape(table))


def _empty(table: Table, cls: type[QuantizedEmbedding]) -> QuantizedEmbedding:
    rows, width = _shape(table)
    return cls(rows, width, table.embedding.padding_idx, dtype=table.weight.dtype, device="meta")


def _quantize_in_memory(
    table: Table, cls: type[QuantizedEmbedding]
) -> tuple[dict[str, nn.Parameter], QuantizationError]:
    weight = table.weight.detach()
    spec = cls.spec(*_shape(table))
    tensors = {name: torch.empty(shape, dtype=dtype, device=weight.device) for name, (dtype, shape) in spec.items()}

    def write(name: str, start: int, rows: Tensor) -> None:
        tensors[name][start : start + rows.shape[0]] = rows.to(weight.device)

    error = quantize_rows(table.name, cls, _reader(table), _shape(table), weight.dtype, write)
    return {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}, error


def quantize_rows(
    name: str,
    cls: type[QuantizedEmbedding],
    read: ReadRows,
    shape: tuple[int, int],
    dtype: torch.dtype,
    write: WriteRows,
) -> QuantizationError:
    """Encode the rows that `read` gives and hand every parameter to `write` by blocks."""
    largest = largest_value(name, read, shape, dtype)
    totals = Totals()
    for _ in encode_rows(name, cls, read, shape, write, largest, totals):
        pass
    return totals.report(name, cls.format, shape[0])


def largest_value(name: str, read: ReadRows, shape: tuple[int, int], dtype: torch.dtype, digest: Any = None) -> float:
    """The largest absolute value of a table that gives rows of `dtype`; all bytes go to `digest`, one of hashlib's.

    Raises ValueError for rows that are not finite, in float32 or in `dtype`.
    """
    narrow = min(torch.float32, dtype, key=lambda kind: torch.finfo(kind).max)
    largest, progress = 0.0, None
    for start, stop in _blocks(0, shape):
        rows = read(start, stop)
        progress = progress or Progress(f"checking {name}", shape[0] * shape[1] * rows.dtype.itemsize)
        progress.advance(rows.nbytes)
        low, high = (float(x) for x in rows.aminmax())
        if not -torch.finfo(narrow).max <= low <= high <= torch.finfo(narrow).max:  # NaN compares as false
            raise ValueError(_rows_out_of_range(name, rows, start, narrow))
        largest = max(largest, -low, high)
        if digest is not None:
            digest.update(rows.cpu().contiguous().view(torch.uint8).numpy())
    return largest


def _rows_out_of_range(name: str, rows: Tensor, start: int, narrow: torch.dtype) -> str:
    most = torch.finfo(narrow).max
    finite = rows.isfinite().all(dim=1)
    # In float64: as bfloat16 the largest float32 is infinite.
    bad = ((rows.double().abs() > most).any(dim=1) if finite.all() else ~finite).nonzero().flatten() + start
    shown = ", ".join(map(str, bad[:_ROWS_SHOWN].tolist())) + (", ..." if len(bad) > _ROWS_SHOWN else "")
    if finite.all():
        return f"row {shown} of {name} has values beyond {most:.4g}, the largest of {narrow}; mend the table"
    return f"row {shown} of {name} has NaN or infinite values; no format holds them, so mend the table"


def encode_rows(
    name: str,
    cls: type[QuantizedEmbedding],
    read: ReadRows,
    shape: tuple[int, int],
    write: WriteRows,
    largest: float,
    totals: Totals,
    first_row: int = 0,
) -> Iterator[int]:
    """Encode from `first_row` on, adding to `totals`; yields the number of rows done after every block."""
    table_scale = cls.table_scale(largest)
    single = {}
    for key in cls.spec(*shape).keys() - set(cls.row_parameters):
        assert table_scale is not None
        single[key] = table_scale
        write(key, 0, table_scale)
    progress = None
    for start, stop in _blocks(first_row, shape):
        rows = read(start, stop)
        if progress is None:
            total = (shape[0] - first_row) * shape[1] * rows.dtype.itemsize
            progress = Progress(f"quantising {name} to {cls.format}", total)
        single = {key: scale.to(rows.device) for key, scale in single.items()}
        stored = cls.encode(rows, next(iter(single.values()), None))
        for key, value in stored.items():
            write(key, start, value)
        totals.add(start, rows, cls.decode(stored | single, torch.float32))
        progress.advance(rows.nbytes)
        yield stop


def _blocks(first_row: int, shape: tuple[int, int]) -> list[tuple[int, int]]:
    step = max(1, _BLOCK_VALUES // shape[1])
    return [(start, min(start + step, shape[0])) for start in range(first_row, shape[0], step)]


def _reader(table: Table) -> ReadRows:
    if isinstance(table.embedding, MappedEmbedding):
        return table.embedding.rows["weight"].read
    weight = table.weight.detach()
    return lambda start, stop: weight[start:stop]


def _quantize_into_file(
    tables: list[Table], cls: type[QuantizedEmbedding], path: Path
) -> dict[int, tuple[dict[str, nn.Parameter], QuantizationError]]:
    note, largest = _Note(path), {}
    for table in tables:
        digest = hashlib.sha256()
        dtype = table.weight.dtype
        largest[table.name] = largest_value(table.name, _reader(table), _shape(table), dtype, digest)
        note.tables[table.name] = f"{cls.format} {_shape(table)} {dtype} {digest.hexdigest()} {_encoder()}"
    note.check()
    shapes = {f"{_base(table)}.{key}": value for table in tables for key, value in cls.spec(*_shape(table)).items()}
    errors = {}
    with TensorWriter(path, shapes, resume=note.resumed) as writer:
        note.save()
        for table in tables:
            errors[id(table.weight)] = _continue(table, cls, writer, note, largest[table.name])
    note.remove()
    stored = read_header(path)
    return {
        id(table.weight): (
            {key: _parameter(stored[f"{_base(table)}.{key}"], table) for key in cls.spec(*_shape(table))},
            errors[id(table.weight)],
        )
        for table in tables
    }


def _continue(
    table: Table, cls: type[QuantizedEmbedding], writer: TensorWriter, note: "_Note", largest: float
) -> QuantizationError:
    shape, read, base = _shape(table), _reader(table), _base(table)

    def write(key: str, start: int, rows: Tensor) -> None:
        writer.write_rows(f"{base}.{key}", start, rows)

    state = note.state.get(table.name, {"totals": {}, "done": 0})
    totals, done = Totals(**state["totals"]), state["done"]
    if done:
        log.info("%s: going on at row %d of %d", table.name, done, shape[0])
    blocks = encode_rows(table.name, cls, read, shape, write, largest, totals, done)
    for number, done in enumerate(blocks, start=1):
        if number % _BLOCKS_PER_NOTE == 0 or done == shape[0]:
            writer.flush()
            note.state[table.name] = {"totals": dataclasses.asdict(totals), "done": done}
            note.save()
    return totals.report(table.name, cls.format, shape[0])


def _parameter(stored: StoredTensor, table: Table) -> nn.Parameter:
    """A stored tensor as the model's parameter: the file itself, or memory where a device or the driver needs it."""
    device = table.weight.device
    if device.type == "cpu" and not is_offloaded(table.embedding) and stored.nbytes:
        tensor = map_rows(stored, writable=True).view(-1).view(stored.dtype).view(stored.shape)
    else:
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        read_rows(stored, 0, stored.shape[0], tensor)
        tensor = tensor.to(device)
    return nn.Parameter(tensor, requires_grad=False)


def _shape(table: Table) -> tuple[int, int]:
    return table.embedding.num_embeddings, table.embedding.embedding_dim


def _base(table: Table) -> str:
    return table.name.removesuffix(".weight")


def _encoder() -> str:
    """Of the source that encodes: a run may go on only if it encodes as before."""
    return hashlib.sha256(Path(formats.__file__).read_bytes()).hexdigest()


class _Note:
    """The file that says how far a run has come, and what it makes of which tables."""

    def __init__(self, path: Path):
        self.file, self.part = path.with_name(path.name + ".progress"), part_of(path)
        self.tables: dict[str, str] = {}
        self.state: dict[str, dict[str, Any]] = {}
        if path.suffix != ".safetensors" or not path.parent.is_dir():
            raise ValueError(
                f"quantize_tables: path is {path}; pass a file that ends in .safetensors, in a directory that is there"
            )
        if path.exists():
            raise ValueError(f"{path} is there already; delete it, or choose another path")
        self.resumed = self.part.exists() and self.file.exists()
        self._before = self._read() if self.resumed else {}
        if not self.resumed:
            self.remove()  # it is of another file than the one that is begun now

    def check(self) -> None:
        """Go on where the run before was, if that was of the same tables."""
        if not self.resumed:
            return
        if self._before["tables"] != self.tables:
            raise ValueError(
                f"{self.part} was begun with other tables, another format or another version of ple_compile; delete it "
                f"and {self.file.name}, or choose another path"
            )
        self.state = self._before["state"]

    def _read(self) -> dict[str, Any]:
        try:
            return read_json(self.file)
        except ValueError:
            raise ValueError(
                f"{self.file} is damaged: it does not say how far {self.part.name} is; delete both"
            ) from None

    def save(self) -> None:
        written = self.file.with_name(self.file.name + ".new")
        written.write_text(with_checksum({"tables": self.tables, "state": self.state}))
        os.replace(written, self.file)

    def remove(self) -> None:
        self.file.unlink(missing_ok=True)
