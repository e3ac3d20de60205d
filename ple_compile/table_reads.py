"""What one call of a compiled graph looks up in n-gram tables, and what travels for it, from its arguments' sizes."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from ple_compile.sharding import traffic
from ple_compile.sharding.topology import Layout

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
class Exchange:
    """How the ranks that share a table exchange the rows of one lookup. `heads`: ids a token, as `TableRead.rows`.

    Without a lowering it is an all-reduce, padded to the most tokens of any rank instead of `max_tokens`.
    """

    num_ranks: int
    num_copies: int
    heads: int | str
    lowering: str = ""
    max_tokens: int = 0

    def received(self, num_rows: int, row_bytes: int, sizes: dict[str, int]) -> int:
        """Bytes that a rank receives which looks up `num_rows` rows, where the others look up as many."""
        heads = evaluate(self.heads, sizes)
        if not heads:
            return 0
        tokens = num_rows // heads
        limit = self.max_tokens if self.lowering else max(1, tokens)
        return round(traffic.received(self.lowering or "all_reduce", self, tokens, limit, heads, row_bytes))


@dataclass(frozen=True)
class TableRead:
    """One lookup. `rows`: a number, or an expression in the graph's symbols; `over_bus`: in host memory, by the GPU;
    `exchange`: of a table that several ranks share."""

    rows: int | str
    row_bytes: int
    over_bus: bool
    exchange: Exchange | None = None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "TableRead":
        """What `dataclasses.asdict` made of one."""
        return cls(**{**data, "exchange": data["exchange"] and Exchange(**data["exchange"])})


def find_reads(graph: Graph) -> dict[str, TableRead]:
    """The lookups in n-gram tables, by the names of their nodes, before they are lowered or split."""
    found = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _LOOKUPS:
            continue
        table, ids = (node.args[index] for index in _LOOKUPS[node.target])
        if node.target is aten.embedding.default and source(ids).target not in _FUSED_IDS:
            continue
        rows, row_bytes = _in_symbols(value(ids).numel()), _row_bytes(node, table)
        found[node.name] = TableRead(rows, row_bytes, node.target is lookup, _exchange(node, ids))
    return found


def lowered(reads: Mapping[str, TableRead], lowerings: Mapping[str, str], max_tokens: int) -> Iterable[TableRead]:
    """`reads` of a graph in which `lower_lookup` has run; `lowerings`: which one each node became."""
    for name, read in reads.items():
        if read.exchange is not None and name in lowerings:
            read = replace(read, exchange=replace(read.exchange, lowering=lowerings[name], max_tokens=max_tokens))
        yield read


def _exchange(node: Node, ids: Any) -> Exchange | None:
    if node.target is not sharded_lookup:
        return None
    layout = Layout(*node.args[3:])  # type: ignore[arg-type]
    return Exchange(layout.num_ranks, layout.num_copies, _in_symbols(value(ids).shape[-1]))


def _in_symbols(size: Any) -> int | str:
    return upstream.size_in_symbols(size) if isinstance(size, torch.SymInt) else size


def _row_bytes(node: Node, table: Any) -> int:
    rows = value(table) if isinstance(table, Node) else value(node)
    return int(rows.shape[-1]) * rows.element_size()


class ReadCounter:
    """Counts the reads of one compiled graph, call by call."""

    def __init__(self, reads: Sequence[TableRead], symbols: Mapping[str, Symbol]):
        self._reads = reads
        self._arguments = {name: symbol.argument for name, symbol in symbols.items()}
        self._totals = functools.lru_cache(maxsize=256)(self._evaluated)

    def __call__(self, args: Sequence[Any]) -> Mapping[str, int]:
        """What a call with these arguments adds to the counters of `ple_compile.stats`."""
        if not self._reads:
            return {}
        return self._totals(tuple(int(args[index]) for index in self._arguments.values()))

    def _evaluated(self, values: tuple[int, ...]) -> Mapping[str, int]:
        sizes = dict(zip(self._arguments, values))
        rows, over_bus, from_ranks = 0, 0, 0
        for read in self._reads:
            count = evaluate(read.rows, sizes) or 0
            rows += count
            over_bus += count * read.row_bytes * read.over_bus
            if read.exchange is not None:
                from_ranks += read.exchange.received(count, read.row_bytes, sizes)
        return {"rows_looked_up": rows, "host_table_bytes": over_bus, "bytes_from_other_ranks": from_ranks}
