"""A `torch.compile` backend that fuses PLE / Engram layers: `torch.compile(model, backend="ple")`."""

from ple_compile.config import Config
from ple_compile.explain import Report, explain
from ple_compile.pipeline import DeclinedError
from ple_compile.regions import compile, restore
from ple_compile.stats import reset_stats, stats

__all__ = ["Config", "DeclinedError", "Report", "compile", "explain", "reset_stats", "restore", "stats"]
