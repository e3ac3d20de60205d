"""Synthetic checkpoints in the layout of the released one, at any size: tables in parts, parts in files, an index.

Values follow from row and column, so any row can be checked without a second copy of the table.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

BASE = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"


def table_rows(start: int, stop: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of the table: small numbers that every float type holds, no two neighbouring rows alike."""
    row = torch.arange(start, stop, dtype=torch.int32)[:, None] % 65521
    column = torch.arange(width, dtype=torch.int32)
    return ((row * 7919 + column * 104729) % 255 - 127).to(torch.float32).div_(64).to(dtype)


def write_checkpoint(
    directory: Path,
    num_rows: int,
    width: int,
    *,
    num_parts: int = 1,
    num_files: int = 1,
    base: str = BASE,
    dtype: torch.dtype = torch.bfloat16,
    others: dict[str, Tensor] | None = None,
    index: bool = True,
) -> list[Path]:
    """Write the files, one after the other; `num_parts` of 1 writes the merged table. Returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    step = -(-num_rows // num_parts)
    ranges = [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
    per_file = -(-len(ranges) // num_files)
    weight_map, files = {}, []
    for number in range(num_files):
        file = directory / f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        tensors = dict(others or {}) if number == 0 else {}
        for part in range(number * per_file, min((number + 1) * per_file, len(ranges))):
            name = f"{base}.weight" if num_parts == 1 else f"{base}.shard_{part}.weight"
            tensors[name] = table_rows(*ranges[part], width, dtype)
        save_file(tensors, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
        files.append(file)
    if index:
        write_index(directory, weight_map)
    return files


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
