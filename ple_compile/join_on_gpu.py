"""On a GPU, a lookup's ids and its rows in one launch.

    ids = ple.ngram_ids(tokens, context, multipliers, sizes, offsets, eos)
    rows = aten.embedding(table, ids)
Becomes:
    rows = ple.ngram_lookup(table, tokens, context, multipliers, sizes, offsets, eos)

This comes after all passes, so that what they match and report is the same on every device; what they made of tables in
host memory, quantised and sharded ones has no plain lookup any more. Left alone are ids that something else reads,
tables that the graph computes or whose rows are not contiguous, rows that go into arithmetic, which Inductor fuses with
its own gather, and every lookup under `debug`, for Inductor's gather checks the ids.
"""

from collections.abc import Iterator

from torch.fx import Graph, Node

from ple_compile.matching.graph import VIEWS, aten, calls, erase_unused, insert, value
from ple_compile.ops.kv_proj import kv_proj
from ple_compile.ops.ngram_ids import ngram_ids
from ple_compile.ops.ngram_lookup import ngram_lookup

DEVICE = "cuda"
PRODUCTS = {kv_proj, aten.mm.default, aten.addmm.default, aten.bmm.default}
FREE = VIEWS - {aten.expand.default, aten.clone.default}


def join_on_gpu(graph: Graph) -> None:
    """Replace every plain lookup by hashed ids in a table of the GPU."""
    for node in graph.find_nodes(op="call_function", target=aten.embedding.default):
        table, ids = node.args[:2]
        if not calls(ids, {ngram_ids}) or list(ids.users) != [node]:
            continue
        if {value(table).device.type, value(ids).device.type} != {DEVICE} or not _is_stored(table):
            continue
        if not all(calls(reader, PRODUCTS) for reader in _readers(node)):
            continue
        node.replace_all_uses_with(insert(graph, node, ngram_lookup, (table, *ids.args)))
        erase_unused([node])


def _is_stored(table: Node) -> bool:
    """Whether the table is there, with its rows contiguous, rather than computed for the rows that are looked up."""
    return table.op in ("placeholder", "get_attr") and (value(table).stride(1) == 1 or value(table).shape[1] == 1)


def _readers(node: Node) -> Iterator[Node]:
    """What reads `node`, itself or a view of it."""
    for user in node.users:
        if calls(user, FREE):
            yield from _readers(user)
        else:
            yield user
