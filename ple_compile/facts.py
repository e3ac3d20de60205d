"""What a report tells beside the graphs: where a model's tables lie, and what everything ran on."""

import importlib.metadata
import platform
import sys
from dataclasses import dataclass

import torch
from torch import nn

from ple_compile.sharding.embedding import ShardedLookup
from ple_compile.tables import pinning
from ple_compile.tables.find import Table, find_tables
from ple_compile.tables.formats import QuantizedEmbedding
from ple_compile.tables.hot_rows import cache_of
from ple_compile.tables.mapped import MappedEmbedding


@dataclass(frozen=True)
class TableFacts:
    """One n-gram table. `placement` in words; `nbytes` of the weights in this process, scales not counted."""

    name: str
    rows: int
    width: int
    format: str
    placement: str
    sharding: str
    nbytes: int


def table_facts(model: nn.Module) -> list[TableFacts]:
    """Every n-gram table of a model, in the model's order."""
    return [_facts(table) for table in find_tables(model)]


def _facts(table: Table) -> TableFacts:
    embedding, weight = table.embedding, table.weight
    rows, sharding = embedding.num_embeddings, ""
    if isinstance(embedding, ShardedLookup):
        layout = embedding.layout
        rows = layout.num_rows
        sharding = f"rank {layout.rank} of {layout.num_ranks} holds {layout.num_local_rows:,} rows"
    return TableFacts(
        table.name,
        rows,
        embedding.embedding_dim,
        _format(embedding, weight),
        _placement(table),
        sharding,
        weight.nbytes,
    )


def _format(embedding: nn.Embedding, weight: torch.Tensor) -> str:
    dtype = str(weight.dtype).removeprefix("torch.")
    quantized = embedding.quantized if isinstance(embedding, MappedEmbedding) else type(embedding)
    return quantized.format if quantized is not None and issubclass(quantized, QuantizedEmbedding) else dtype


def _placement(table: Table) -> str:
    weight = table.weight
    if isinstance(table.embedding, MappedEmbedding):
        return "mapped files"
    if weight.device.type == "meta":
        return "meta device"
    if not pinning.available() or not pinning.is_host_memory(weight):
        return "CPU memory" if weight.device.type == "cpu" else f"memory of {weight.device}"
    cache = cache_of(weight, pinning.current_device())
    place = "page-locked host memory" if pinning.is_page_locked(weight) else "pageable host memory"
    return f"{place}, {cache.rows.shape[0]:,} rows cached on the GPU" if cache is not None else place


def environment() -> dict[str, str]:
    """Versions and the device that new tensors would be computed on."""
    found = {"ple-compile": _own_version(), "torch": torch.__version__}
    for name in ("triton", "transformers"):
        if name in sys.modules:
            found[name] = getattr(sys.modules[name], "__version__", "unknown")
    found["python"] = platform.python_version()
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        found["device"] = f"{torch.cuda.get_device_name()} (sm{major}{minor}), CUDA {torch.version.cuda}"
    else:
        found["device"] = f"CPU ({platform.machine()}), {torch.get_num_threads()} thread(s)"
    return found


def _own_version() -> str:
    try:
        return importlib.metadata.version("ple-compile")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
