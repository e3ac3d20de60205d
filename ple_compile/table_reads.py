"""How many table rows one call of a compiled graph looks up, from the sizes of its arguments."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ple_compile import upstream
from ple_compile.layer_graphs import Symbol
from ple_compile.matching.graph import aten, source, value
from ple_compile.ops.dequantized_lookup import dequantized_lookup
from ple_compile.ops.lookup import lookup
from ple_compile.ops.mapped_lookup import mapped_lookup
from ple_compile.ops.ngram_ids import ngram_ids
from ple_compile.ops.packed_ngram_ids import packed_ngram_ids
from ple_compile.ops.sharded_lookup import sharded_lookup
from ple_compile.savings import evaluate

# Which arguments of a lookup are its table and its ids.
_LOOKUPS: dict[Any, tuple[int, int]] = {
    aten.embedding.default: (0, 1),
    lookup: (0, 1),
    dequantized_lookup: (0, 3),
    mapped_lookup: (0, 1),
    sharded_lookup: (0, 1),
}
_FUSED_IDS = {ngram_ids, packed_ngram_ids}


@dataclass(frozen=True)
class TableRead:
    """One lookup. `rows`: a number, or an expression in the graph's symbols; `over_bus`: in host memory, by the GPU."""

    rows: int | str
    row_bytes: int
    over_bus: bool


def find_reads(graph: Graph) -> list[TableRead]:
    """The lookups in n-gram tables, before they are lowered or split."""
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _LOOKUPS:
            continue
        table, ids = (node.args[index] for index in _LOOKUPS[node.target])
        if node.target is aten.embedding.default and source(ids).target not in _FUSED_IDS:
            continue
        found.append(TableRead(_num_values(ids), _row_bytes(node, table), node.target is lookup))
    return found


def _num_values(ids: Node) -> int | str:
    count: Any = value(ids).numel()
    return upstream.size_in_symbols(count) if isinstance(count, torch.SymInt) else count


def _row_bytes(node: Node, table: Any) -> int:
    rows = value(table) if isinstance(table, Node) else value(node)
    return int(rows.shape[-1]) * rows.element_size()


class ReadCounter:
    """Counts the reads of one compiled graph, call by call."""

    def __init__(self, reads: Sequence[TableRead], symbols: Mapping[str, Symbol]):
        self._reads = reads
        self._arguments = {name: symbol.argument for name, symbol in symbols.items()}
        self._totals = functools.lru_cache(maxsize=256)(self._evaluated)

    def __call__(self, args: Sequence[Any]) -> tuple[int, int]:
        """(rows looked up, bytes read over the bus) of a call with these arguments."""
        if not self._reads:
            return 0, 0
        return self._totals(tuple(int(args[index]) for index in self._arguments.values()))

    def _evaluated(self, values: tuple[int, ...]) -> tuple[int, int]:
        sizes = dict(zip(self._arguments, values))
        rows, over_bus = 0, 0
        for read in self._reads:
            count = evaluate(read.rows, sizes) or 0
            rows += count
            over_bus += count * read.row_bytes * read.over_bus
        return rows, over_bus
