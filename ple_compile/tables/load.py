"""`load_tables`: n-gram tables straight from the parts of a safetensors checkpoint.

Rows are read into the memory that the lookups use, each once, without any copy on the way: the host needs the table,
or this rank's rows, and one part. Only the tables are loaded; the rest of the model is the model's own affair.
"""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ple_compile.sharding.agreement import succeeding_together
from ple_compile.tables.find import Table, find_tables
from ple_compile.tables.formats import QuantizedEmbedding, format_class
from ple_compile.tables.mapped import MappedEmbedding
from ple_compile.tables.mapped_rows import MappedRows
from ple_compile.tables.offload import is_offloaded, offload_tables
from ple_compile.tables.parts import Checkpoint, StoredTable
from ple_compile.tables.progress import Progress
from ple_compile.tables.quantize import quantize_rows
from ple_compile.tables.replace import check_replaceable, put_back_on_failure, replace_embedding
from ple_compile.tables.scales import check_scale, check_scale_blocks
from ple_compile.tables.tensor_file import StoredTensor, read_rows

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)

_READERS = 8
_BLOCK_BYTES = 2**24
_AXIS = "tp"  # of a mesh, over which tables are sharded


def load_tables(
    model: nn.Module,
    checkpoint_dir: str | os.PathLike,
    mesh: "DeviceMesh | None" = None,
    format: str | None = None,
) -> list[str]:
    """Fill the model's n-gram tables from the safetensors files of a checkpoint, in place; returns their names.

    A table on the meta device gets memory on the CPU first. The table takes the format in which it is stored; `format`
    "fp8", "fp8_row" or "nvfp4" quantises a plain one while it is read, and "mmap" leaves it in its files. With `mesh`,
    tables that are not sharded yet are sharded over its axis "tp" (`shard_tables`), and each rank reads its own rows
    only, as it does for tables that are sharded already. All ranks must call it, and meet
    (`torch.distributed.barrier`) before the first lookup.

    Raises ValueError, naming file and tensor, for parts that are missing, there twice, overlapping, cut off or of
    another shape, for a scale that is absent or not a positive number, and for a table that would change its format in
    an embedding that does more than look rows up; with `mesh` every rank raises when one does.
    The model then has the tables that it had, with their values: nothing is written before all of this is checked. Only
    a file that cannot be read to its end, and a number beyond the range of the model's type, which is a ValueError too,
    leave memory that was there before filled in part. With "mmap" no number is looked at: one beyond that range becomes
    infinite when its row is looked up, as `Tensor.to` makes it.
    """
    with succeeding_together(mesh, "load_tables"):
        tied, stored = _find(model, Path(checkpoint_dir), format, mesh is not None)
        if mesh is not None:
            _check_axis(model, mesh)
    with put_back_on_failure(model), succeeding_together(mesh, "load_tables"):
        for tables, found in zip(tied, stored):
            _prepare(model, tables, found, format, mesh is not None)
        if mesh is not None:
            _shard(model, mesh)
        current = {table.name: table for table in find_tables(model)}
        for tables, found in zip(tied, stored):
            if _converts(found, format):
                _quantize_from(model, tables, found, format_class(str(format)))
            elif format != "mmap":
                _fill_table(model, current[tables[0].name], found)
    return list(current)


def _find(
    model: nn.Module, directory: Path, format: str | None, meshed: bool
) -> tuple[list[list[Table]], list[StoredTable]]:
    """The model's tables, those with one weight together, and what the checkpoint has for each; all is checked."""
    checkpoint = Checkpoint(directory)
    tables = find_tables(model)
    if not tables:
        raise ValueError(f"load_tables: {type(model).__name__} has no n-gram table; pass a model with PLE layers")
    if format is not None and format != "mmap":
        format_class(format)
    groups: dict[int, list[Table]] = {}
    for table in tables:
        groups.setdefault(id(table.weight), []).append(table)
    tied = list(groups.values())
    stored = [checkpoint.find(group[0].name, _shape(group[0])) for group in tied]
    for group, found in zip(tied, stored):
        _check(group[0], found, format, meshed)
    for group, found in zip(tied, stored):
        _check_scales(group[0], found)
    return tied, stored


def _shape(table: Table) -> tuple[int, int]:
    return table.embedding.num_embeddings, table.embedding.embedding_dim


def _converts(stored: StoredTable, format: str | None) -> bool:
    return format not in (None, "mmap") and stored.quantized is None


def _check(table: Table, stored: StoredTable, format: str | None, meshed: bool) -> None:
    """Raise for what does not go together, before anything is changed."""
    first, quantized = stored.rows["weight"][0], stored.quantized
    if meshed and (format == "mmap" or _converts(stored, format)):
        raise ValueError(
            f"load_tables: format={format!r} with a mesh; quantise once with quantize_tables(path=...), then load that"
        )
    if quantized is not None and format not in (None, "mmap", quantized.format):
        raise ValueError(f"{first} is {quantized.format}, not {format}; load it as it is")
    changes = format == "mmap" or _converts(stored, format)
    if quantized is None and not changes and not _is_plain(table.embedding):
        raise ValueError(f"{table.name} is {table.weight.dtype} and {first} is {stored.dtype}; pass format=")
    changes |= quantized is not None and not _fits(table.embedding, quantized)
    if changes and hasattr(table.embedding, "layout"):
        raise ValueError(f"{table.name} is sharded and would change its format; load_tables before shard_tables")
    if changes:
        check_replaceable(table)


def _check_scales(table: Table, stored: StoredTable) -> None:
    """Raise for a wrong scale, in the type that it gets, before anything is changed."""
    for key, parts in stored.rows.items():
        if key != "weight":
            check_scale_blocks(f"the {key} of {table.name}", MappedRows(parts).blocks())
    for key, tensor in stored.singles.items():
        scale, target = _read_whole(tensor), table.embedding._parameters.get(key)
        check_scale(f"the {key} of {table.name}", scale if target is None else scale.to(target.dtype))


def _prepare(model: nn.Module, group: list[Table], stored: StoredTable, format: str | None, meshed: bool) -> None:
    """Bring a table's embeddings into the class of its format, with memory where it had some and is not sharded yet."""
    embedding, weight, cls = group[0].embedding, group[0].weight, stored.quantized
    activation = _activation_dtype(embedding)
    if format == "mmap":
        rows = {key: MappedRows(parts) for key, parts in stored.rows.items()}
        singles = {key: _read_whole(tensor) for key, tensor in stored.singles.items()}
        _replace(model, group, MappedEmbedding(rows, singles, cls, embedding.embedding_dim, activation))
    elif cls is None and isinstance(embedding, MappedEmbedding):
        _replace(model, group, nn.Embedding(*_shape(group[0]), dtype=activation, device="meta"))
    elif cls is not None and not _fits(embedding, cls):
        num_rows, width = _shape(group[0])
        new = cls(num_rows, width, embedding.padding_idx, dtype=activation, device="meta")
        _replace(model, group, new if weight.is_meta or meshed else new.to_empty(device=weight.device))


def _replace(model: nn.Module, group: list[Table], new: nn.Embedding) -> None:
    for table in group:
        replace_embedding(model, table, new)


def _is_plain(embedding: nn.Embedding) -> bool:
    return not isinstance(embedding, QuantizedEmbedding) and embedding.weight.dtype.itemsize > 1


def _activation_dtype(embedding: nn.Module) -> torch.dtype:
    """Of the rows that the embedding gives."""
    if isinstance(embedding, QuantizedEmbedding):
        return embedding.activation_dtype
    weight, scale = embedding._parameters["weight"], embedding._parameters.get("weight_scale")
    assert weight is not None
    if scale is not None and weight.dtype.itemsize == 1:
        return scale.dtype  # transformers' FP8Embedding
    return weight.dtype if weight.dtype.itemsize > 1 else torch.get_default_dtype()


def _fits(embedding: nn.Embedding, cls: type[QuantizedEmbedding]) -> bool:
    """Whether the embedding has the parameters of a format; transformers' FP8Embedding has those of `fp8`."""
    spec = cls.spec(embedding.num_embeddings, embedding.embedding_dim)
    parameters = {key: p for key, p in embedding._parameters.items() if p is not None}
    weight = parameters["weight"]
    return parameters.keys() == spec.keys() and weight.dtype == spec["weight"][0]


def _is_sharded(model: nn.Module) -> bool:
    return all(hasattr(table.embedding, "layout") for table in find_tables(model))


def _check_axis(model: nn.Module, mesh: "DeviceMesh") -> None:
    if not _is_sharded(model) and _AXIS not in (mesh.mesh_dim_names or ()):
        raise ValueError(
            f"load_tables: tables are sharded over the mesh's axis {_AXIS!r}, and it has {mesh.mesh_dim_names}; call "
            "shard_tables(model, mesh, axis) first, with the tables on the meta device, then load_tables"
        )


def _shard(model: nn.Module, mesh: "DeviceMesh") -> None:
    from ple_compile.sharding.shard import shard_tables

    if not _is_sharded(model):
        shard_tables(model, mesh, _AXIS)


def _fill_table(model: nn.Module, table: Table, stored: StoredTable) -> None:
    embedding: Any = table.embedding
    for parameter in list(embedding.parameters(recurse=False)):
        if parameter.is_meta:
            device = "cpu" if embedding.weight.is_meta else embedding.weight.device
            empty = torch.empty_like(parameter, device=device)
            _put(model, parameter, nn.Parameter(empty, parameter.requires_grad))
    layout = getattr(embedding, "layout", None)
    total = sum(part.nbytes for parts in stored.rows.values() for part in parts)
    progress = Progress(f"loading {table.name}", total if layout is None else total // layout.num_ranks)
    for key, parts in stored.rows.items():
        target = embedding.get_parameter(key).detach()
        rows = (0, stored.num_rows)
        if layout is not None and key == "weight":
            rows = (layout.first_row, layout.first_row + layout.num_local_rows)
            target = target[: layout.num_local_rows]
        fill(target, parts, rows, progress)
    for key, tensor in stored.singles.items():
        target = embedding.get_parameter(key).detach()
        target.copy_(_read_whole(tensor).reshape(target.shape))
    if is_offloaded(embedding):
        offload_tables(table.owner, gpu_cache_bytes=embedding._cache_bytes)


def _put(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put a parameter in the place of another, wherever the model has it."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new


def fill(target: Tensor, parts: list[StoredTensor], rows: tuple[int, int], progress: Progress | None = None) -> None:
    """Read rows [start, stop) of a table in parts into `target`, each row once."""
    assert target.shape[0] == rows[1] - rows[0]
    if target.numel() == 0:
        return
    in_place = target.device.type == "cpu" and target.is_contiguous() and target.dtype == parts[0].dtype

    def read(piece: tuple[StoredTensor, int, int, int]) -> int:
        part, start, stop, position = piece
        into = target[position : position + stop - start]
        if in_place:
            read_rows(part, start, stop, into)
        else:
            staging = torch.empty((stop - start, *part.shape[1:]), dtype=part.dtype)
            read_rows(part, start, stop, staging)
            _check_range(part, start, staging, into.dtype)
            into.copy_(staging)
        return (stop - start) * part.row_bytes

    # Several readers: what holds one alone up are the page faults of fresh memory.
    with ThreadPoolExecutor(_READERS) as pool:
        for num_bytes in pool.map(read, _pieces(parts, rows)):
            if progress is not None:
                progress.advance(num_bytes)
    target[:0].zero_()  # numpy's write went unseen: raise the tensor's version, which copies of rows go by


def _check_range(part: StoredTensor, first_row: int, rows: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError for a number that `dtype` would make infinite."""
    floating = dtype.is_floating_point and part.dtype.is_floating_point
    if not floating or torch.finfo(dtype).max >= torch.finfo(part.dtype).max:
        return
    lost = rows.to(dtype).isinf() & rows.isfinite()
    if lost.any():
        row = int(lost.flatten(1).any(1).int().argmax())
        value = float(rows[row][lost[row]][0])
        raise ValueError(
            f"{part} holds {value} in row {first_row + row}, which {dtype} cannot hold; load the model in another type"
        )


def _pieces(parts: list[StoredTensor], rows: tuple[int, int]) -> Iterator[tuple[StoredTensor, int, int, int]]:
    """(part, first row, end row, row of the target) that cover rows [start, stop)."""
    first = 0
    for part in parts:
        start, stop = max(rows[0] - first, 0), min(rows[1] - first, part.shape[0])
        step = max(1, _BLOCK_BYTES // max(part.row_bytes, 1))
        for begin in range(start, stop, step):
            yield part, begin, min(begin + step, stop), first + begin - rows[0]
        first += part.shape[0]


def _read_whole(tensor: StoredTensor) -> Tensor:
    into = torch.empty(tensor.shape, dtype=tensor.dtype)
    read_rows(StoredTensor(tensor.file, tensor.name, tensor.dtype, (1, into.numel()), tensor.offset), 0, 1, into)
    return into


def _quantize_from(model: nn.Module, group: list[Table], stored: StoredTable, cls: type[QuantizedEmbedding]) -> None:
    """Quantise a plain table while it is read."""
    table = group[0]
    num_rows, width = _shape(table)
    activation = _activation_dtype(table.embedding)
    device = "cpu" if table.weight.is_meta else table.weight.device
    new = cls(num_rows, width, table.embedding.padding_idx, dtype=activation, device=device)

    def read(start: int, stop: int) -> Tensor:
        rows = torch.empty(stop - start, width, dtype=stored.dtype)
        fill(rows, stored.rows["weight"], (start, stop))
        return rows

    def write(name: str, start: int, rows: Tensor) -> None:
        new.get_parameter(name).detach()[start : start + rows.shape[0]] = rows

    error = quantize_rows(table.name, cls, read, (num_rows, width), activation, write)
    log.info("%s", error)
    _replace(model, group, new)
