"""The tables of a checkpoint directory: which tensors of which files hold which rows.

Released checkpoints split a table: `<table>.shard_<i>.weight`, concatenated in the order of i; transformers joins them
to `<table>.weight`, which is the other form that is read. Scales of a quantised table are `<table>.weight_scale` (and
`weight_scale_2`), or, where they have a row for each of the table's, split as the table is.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from ple_compile.tables.formats import E4M3, FP8Embedding, NVFP4Embedding, QuantizedEmbedding, RowScaledFP8Embedding
from ple_compile.tables.index import INDEX, read_index
from ple_compile.tables.tensor_file import PART, StoredTensor, read_header

SAVING = "ngram_tables.progress"  # lists the files that `save_tables` is writing
_NAME = re.compile(r"(?P<base>.+?)(?:\.shard_(?P<number>\d+))?\.(?P<parameter>weight|weight_scale|weight_scale_2)")
# Wrappers around the text model that a checkpoint may have and a model may not, or the reverse.
_WRAPPERS = {"model", "language_model", "module", "_orig_mod"}
_PLAIN = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


@dataclass(frozen=True)
class StoredTable:
    """A table in files: its row parameters as parts in the order of rows, and its single tensors."""

    base: str
    rows: dict[str, list[StoredTensor]]
    singles: dict[str, StoredTensor]

    @property
    def num_rows(self) -> int:
        return sum(part.shape[0] for part in self.rows["weight"])

    @property
    def dtype(self) -> torch.dtype:
        return self.rows["weight"][0].dtype

    @property
    def quantized(self) -> type[QuantizedEmbedding] | None:
        """The format, None for plain floats."""
        if self.dtype in _PLAIN:
            return None
        if self.dtype == torch.uint8:
            return NVFP4Embedding
        return FP8Embedding if "weight_scale" in self.singles else RowScaledFP8Embedding


class Checkpoint:
    """The tensors of a directory that could be a table's, by the table's name there."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.groups: dict[str, dict[tuple[str, int | None], StoredTensor]] = {}
        for tensor in _tensors(directory):
            match = _NAME.fullmatch(tensor.name)
            if match is None:
                continue
            number = None if match["number"] is None else int(match["number"])
            group = self.groups.setdefault(match["base"], {})
            twin = group.get((match["parameter"], number))
            if twin is not None:
                raise ValueError(f"{tensor} is there twice, also as {twin}")
            group[match["parameter"], number] = tensor

    def find(self, table: str, shape: tuple[int, int]) -> StoredTable:
        """The table that the model calls `table` (a weight's name), checked against its shape; ValueError otherwise."""
        wanted = _path(table.removesuffix(".weight"))
        bases = [base for base in self.groups if _path(base)[-len(wanted) :] == wanted]
        exact = [base for base in bases if _path(base) == wanted]
        if not bases:
            _refuse_unfinished(self.directory)
        if len(exact or bases) != 1:
            found = ", ".join(exact or bases) or "no tensor of that name"
            raise ValueError(f"{self.directory} has {found} for {table}; one table is needed")
        return self._checked((exact or bases)[0], shape)

    def _checked(self, base: str, shape: tuple[int, int]) -> StoredTable:
        group = self.groups[base]
        rows = {"weight": self._parts(base, "weight")}
        singles = {}
        for parameter in ("weight_scale", "weight_scale_2"):
            given = [tensor for (name, _), tensor in group.items() if name == parameter]
            if len(given) == 1 and _is_single(given[0], shape[0]):
                singles[parameter] = given[0]
            elif given:
                rows[parameter] = self._parts(base, parameter)
        table = StoredTable(base, rows, singles)
        self._check_format(table)
        self._check_shapes(table, shape)
        return table

    def _parts(self, base: str, parameter: str) -> list[StoredTensor]:
        numbered = {number: tensor for (name, number), tensor in self.groups[base].items() if name == parameter}
        if not numbered:
            raise ValueError(f"{self.directory} has no {base}.{parameter} and no {base}.shard_0.{parameter}")
        parts = {number: tensor for number, tensor in numbered.items() if number is not None}
        if None in numbered:
            if parts:
                raise ValueError(
                    f"{numbered[None]} overlaps {next(iter(parts.values()))}: the table is there whole and in parts"
                )
            return [numbered[None]]
        last = max(parts)
        missing = [number for number in range(last + 1) if number not in parts]
        if missing:
            raise ValueError(
                f"{base}.shard_{missing[0]}.{parameter} is missing in {self.directory}; parts 0 to {last} are needed "
                f"and {len(missing)} of them are not there"
            )
        return [parts[number] for number in range(last + 1)]

    def _check_format(self, table: StoredTable) -> None:
        weight = table.rows["weight"][0]
        for tensor in self.groups[table.base].values():
            if tensor.unknown:
                raise ValueError(f"{tensor} is {tensor.unknown}, which is no format of a table")
        for parts in table.rows.values():
            for part in parts:
                if part.dtype != parts[0].dtype:
                    raise ValueError(f"{part} is {part.dtype} and {parts[0]} is {parts[0].dtype}")
        scaled = "weight_scale" in table.rows or "weight_scale" in table.singles
        if weight.dtype == E4M3 and not scaled:
            raise ValueError(f"{weight} is {E4M3} and there is no {table.base}.weight_scale; its scale is needed")
        if weight.dtype == torch.uint8 and not (scaled and "weight_scale_2" in table.singles):
            raise ValueError(f"{weight} is packed, and {table.base}.weight_scale or weight_scale_2 is not there")
        if weight.dtype not in _PLAIN | {E4M3, torch.uint8}:
            raise ValueError(f"{weight} is {weight.dtype}, which is no format of a table")

    def _check_shapes(self, table: StoredTable, shape: tuple[int, int]) -> None:
        num_rows, width = shape
        cls, weight = table.quantized, table.rows["weight"][0]
        spec = {"weight": (table.dtype, shape)} if cls is None else cls.spec(num_rows, width)
        for parameter, tensor in [*table.singles.items(), *((key, parts[0]) for key, parts in table.rows.items())]:
            if parameter not in spec:
                raise ValueError(f"{tensor} does not go with {weight}, which is {weight.dtype} and has no {parameter}")
            if parameter in table.singles and cls is not None and parameter in cls.row_parameters:
                raise ValueError(_misshapen(tensor, spec[parameter][1]))
            if parameter in table.singles and tensor.dtype not in _PLAIN:
                raise ValueError(f"{tensor} is {tensor.dtype}; {torch.float32} is needed")
        for parameter, parts in table.rows.items():
            dtype, expected = spec[parameter]
            for part in parts:
                if len(part.shape) != len(expected) or part.shape[1:] != expected[1:]:
                    raise ValueError(_misshapen(part, expected))
                if part.dtype != dtype:
                    raise ValueError(f"{part} is {part.dtype}; {dtype} is needed")
            total = sum(part.shape[0] for part in parts)
            if total != num_rows:
                word = "missing" if total < num_rows else "too many; parts overlap, or belong to another table"
                raise ValueError(
                    f"{table.base}.{parameter} has {total} rows in {len(parts)} parts, the last is {parts[-1]}; the "
                    f"model's table has {num_rows}, so {abs(num_rows - total)} are {word}"
                )


def _misshapen(tensor: StoredTensor, expected: tuple[int, ...]) -> str:
    needed = ", ".join(["rows", *map(str, expected[1:])])
    return f"{tensor} has shape {tensor.shape}; ({needed}) is needed"


def _is_single(scale: StoredTensor, num_rows: int) -> bool:
    """One value for the whole table; what a table of one row has for that row has two dimensions."""
    return math.prod(scale.shape) == 1 and (num_rows != 1 or len(scale.shape) < 2)


def _path(name: str) -> list[str]:
    return [part for part in name.split(".") if part not in _WRAPPERS]


def _refuse_unfinished(directory: Path) -> None:
    """Name what a call that was stopped left, where a table is missing."""
    for part in sorted(directory.glob(f"*.safetensors{PART}")):
        raise ValueError(
            f"{part} is unfinished, so it is not read; finish it with the same call of quantize_tables again, "
            f"or delete every file that begins with {part.stem}"
        )


def _tensors(directory: Path) -> list[StoredTensor]:
    if not directory.is_dir():
        raise ValueError(f"{directory} is no directory on this machine; pass the one that holds the safetensors files")
    note = directory / SAVING
    if note.exists():
        raise ValueError(
            f"{note} says that save_tables was stopped here; finish it with the same call again, or delete it and "
            "the files that it lists"
        )
    weight_map = read_index(directory)
    if weight_map is None:
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            _refuse_unfinished(directory)
            raise ValueError(f"{directory} has no safetensors files, the only kind that is read")
        return [tensor for file in files for tensor in read_header(file).values()]
    found: list[StoredTensor] = []
    for name in sorted(set(weight_map.values())):
        file = directory / name
        if not file.exists():
            tensor = next(key for key, value in weight_map.items() if value == name)
            raise ValueError(f"{file} is missing, with {tensor} and others; {INDEX} lists it")
        found += read_header(file).values()
    there = {(tensor.file.name, tensor.name) for tensor in found}
    for tensor, name in weight_map.items():
        if (name, tensor) not in there:
            raise ValueError(f"{tensor} is missing in {directory / name}; {INDEX} says that it is there")
    return found
