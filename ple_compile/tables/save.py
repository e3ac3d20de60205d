"""`save_tables`: n-gram tables as the parts of a safetensors checkpoint, the reverse of `load_tables`."""

import json
import os
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch import Tensor, nn

from ple_compile.tables.find import Table, find_tables
from ple_compile.tables.formats import QuantizedEmbedding
from ple_compile.tables.index import INDEX, read_index
from ple_compile.tables.mapped import MappedEmbedding
from ple_compile.tables.parts import SAVING
from ple_compile.tables.progress import Progress
from ple_compile.tables.tensor_file import PART, TensorWriter, part_of, read_header

_BLOCK_BYTES = 2**25
_FILE_BYTES = 4 * 2**30
_SINGLE, _FIRST = "model.safetensors", "model-00001-of-00001.safetensors"

# Name, type, shape, and what gives rows [start, stop).
_Outgoing = tuple[str, torch.dtype, tuple[int, ...], Callable[[int, int], Tensor]]


def save_tables(model: nn.Module, checkpoint_dir: str | os.PathLike, num_parts: int = 1) -> list[Path]:
    """Write the model's n-gram tables as `num_parts` parts each, which transformers and `load_tables` read.

    The directory may hold the rest of the model (safetensors files, without these tables); its index is then extended,
    or made. A single `model.safetensors` gets the name of a first part, as transformers reads no index beside one.
    A part has ceil(rows / num_parts) rows, the last one what is left; parts share a file up to 4 GiB. Returns the
    files written.

    A call that was stopped leaves a note, with which `load_tables` refuses the directory; the same call begins anew.

    Raises ValueError, and writes nothing, for a model without an n-gram table, for a table that is sharded or on the
    meta device, for `num_parts` below one or above the number of rows, and where the directory holds one of the tables
    already.
    """
    directory = Path(checkpoint_dir)
    tables = find_tables(model)
    if not tables:
        raise ValueError(f"save_tables: {type(model).__name__} has no n-gram table; pass a model with PLE layers")
    groups = _grouped([piece for table in tables for piece in _outgoing(table, num_parts)])
    files = [directory / f"ngram_tables-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    note = directory / SAVING
    leftover = set(note.read_text(errors="replace").splitlines()) if note.exists() else set()
    present = _present(directory, tables, files, leftover)
    total = sum(t.nbytes for name in set(present.values()) for t in read_header(directory / name).values())
    added = sum(_nbytes(shape, dtype) for group in groups for _, dtype, shape, _ in group)

    directory.mkdir(parents=True, exist_ok=True)
    for file in directory.iterdir():
        if file.name.removesuffix(PART) in leftover:
            file.unlink()
    note.write_text("\n".join(file.name for file in files))
    progress = Progress("saving tables", added)
    for file, group in zip(files, groups):
        _write(file, group, progress)
    names = {piece[0]: file.name for file, group in zip(files, groups) for piece in group}
    _add_to_index(directory, present | names, total + added)
    note.unlink()
    return files


def _present(directory: Path, tables: list[Table], files: list[Path], leftover: set[str]) -> dict[str, str]:
    """Tensor names to files of what the directory holds, apart from `leftover` files; ValueError for what clashes."""
    weight_map = refuse_tables_in(directory, tables, leftover)
    for path in [*files, directory / _FIRST] if (directory / _SINGLE).exists() else files:
        if path.exists() and path.name not in leftover:
            raise ValueError(f"save_tables: {path} is there already; save into another directory, or delete it")
    return weight_map


def refuse_tables_in(directory: Path, tables: list[Table], leftover: Collection[str] = ()) -> dict[str, str]:
    """Tensor names to files of what a directory holds, apart from `leftover` files; ValueError for one of `tables`."""
    weight_map = read_index(directory)
    if weight_map is None:
        weight_map = {name: file.name for file in sorted(directory.glob("*.safetensors")) for name in read_header(file)}
    weight_map = {name: file for name, file in weight_map.items() if file not in leftover}
    for table in tables:
        base = table.name.removesuffix("weight")
        for name, file in weight_map.items():
            if name.startswith(base):
                raise ValueError(f"{directory / file} holds {name} already; save into a directory without this table")
    return weight_map


def _write(file: Path, group: list[_Outgoing], progress: Progress) -> None:
    with TensorWriter(file, {name: (dtype, shape) for name, dtype, shape, _ in group}) as writer:
        for name, dtype, shape, read in group:
            step = max(1, _BLOCK_BYTES // max(_nbytes(shape[1:], dtype), 1))
            for start in range(0, shape[0], step):
                rows = read(start, min(start + step, shape[0]))
                writer.write_rows(name, start, rows)
                progress.advance(rows.nbytes)


def _add_to_index(directory: Path, weight_map: dict[str, str], total: int) -> None:
    single = directory / _SINGLE
    if single.exists():
        weight_map = {name: _FIRST if file == _SINGLE else file for name, file in weight_map.items()}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    written = part_of(directory / INDEX)
    written.write_text(json.dumps(index, indent=2) + "\n")
    if single.exists():
        single.rename(directory / _FIRST)
    os.replace(written, directory / INDEX)


def _outgoing(table: Table, num_parts: int) -> list[_Outgoing]:
    """The tensors of one table, as they are named in a checkpoint, each with a function that gives its rows."""
    embedding, base = table.embedding, table.name.removesuffix(".weight")
    if hasattr(embedding, "layout"):
        raise ValueError(f"save_tables: {table.name} is sharded; save it with torch.distributed.checkpoint")
    num_rows = embedding.num_embeddings
    if type(num_parts) is not int or not 1 <= num_parts <= max(num_rows, 1):
        raise ValueError(f"save_tables: num_parts is {num_parts!r}; {table.name} has {num_rows} rows")
    mapped = embedding.rows if isinstance(embedding, MappedEmbedding) else {}
    found: list[_Outgoing] = []
    for key, parameter in embedding._parameters.items():
        if parameter is None or key in mapped:
            continue
        if parameter.is_meta:
            raise ValueError(f"save_tables: {base}.{key} is on the meta device; load it first")
        tensor = parameter.detach()
        read = lambda start, stop, tensor=tensor: tensor[start:stop]  # noqa: E731
        found += _split(base, key, tensor.dtype, tuple(tensor.shape), read, num_parts if _by_row(embedding, key) else 1)
    for key, rows in mapped.items():
        found += _split(base, key, rows.dtype, (rows.num_rows, rows.width), rows.read, num_parts)
    return found


def _by_row(embedding: nn.Module, key: str) -> bool:
    return key == "weight" or (isinstance(embedding, QuantizedEmbedding) and key in embedding.row_parameters)


def _split(
    base: str, key: str, dtype: torch.dtype, shape: tuple[int, ...], read: Callable[[int, int], Tensor], num_parts: int
) -> list[_Outgoing]:
    if num_parts == 1:
        return [(f"{base}.{key}", dtype, shape, read)]
    # As `torch.chunk` does, so that transformers, which cuts again when it saves, gets the same parts.
    step = -(-shape[0] // num_parts)
    found: list[_Outgoing] = []
    for number, start in enumerate(range(0, shape[0], step)):
        rows = min(step, shape[0] - start)
        part = lambda begin, end, start=start: read(start + begin, start + end)  # noqa: E731
        found.append((f"{base}.shard_{number}.{key}", dtype, (rows, *shape[1:]), part))
    return found


def _grouped(pieces: list[_Outgoing]) -> list[list[_Outgoing]]:
    """Pieces by file, in order, at most `_FILE_BYTES` in a file."""
    groups: list[list[_Outgoing]] = []
    size = _FILE_BYTES
    for piece in pieces:
        num_bytes = _nbytes(piece[2], piece[1])
        if not groups or size + num_bytes > _FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += num_bytes
    return groups


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
