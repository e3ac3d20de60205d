"""A `torch.compile` backend that fuses PLE / Engram layers: `torch.compile(model, backend="ple")`."""

from ple_compile.config import Config
from ple_compile.explain import Report, explain
from ple_compile.pipeline import DeclinedError
from ple_compile.regions import compile, restore
from ple_compile.sharding.shard import shard_tables
from ple_compile.stats import reset_stats, stats
from ple_compile.tables.load import load_tables
from ple_compile.tables.offload import offload_tables
from ple_compile.tables.quantize import quantize_tables
from ple_compile.tables.save import save_tables

__all__ = [
    "Config",
    "DeclinedError",
    "Report",
    "compile",
    "explain",
    "load_tables",
    "offload_tables",
    "quantize_tables",
    "reset_stats",
    "restore",
    "save_tables",
    "shard_tables",
    "stats",
]
