"""Fuse the n-gram ids.

Matches:
    history = aten.cat([context, tokens], -1)                 # or the tokens alone
    shifted = aten.where(valid, aten.gather(history, 1, positions), eos)          # for each shift, any spelling
    mixed = history * multipliers[0] ^ shifted * multipliers[1] ^ ...
    ids = aten.cat([aten.remainder(mixed, sizes[...]) + offsets[...], ...], -1)
    rows = aten.embedding(table, ids)
Becomes:
    ids = ple.ngram_ids(tokens, context, multipliers, sizes, offsets, eos)

A mask's `where` on the tokens stays outside: the cut nearest the embedding that works is taken. Declines when a role
has no single candidate, when something inside is read elsewhere, or when the probe differs at every cut.
"""

from torch.fx import Graph

from ple_compile.matching.gate import Declined
from ple_compile.matching.graph import cone, erase_unused, insert
from ple_compile.matching.ngram_ids import find_embeddings, match
from ple_compile.ops.ngram_ids import ngram_ids
from ple_compile.report import GraphReport


def fuse_ngram_ids(graph: Graph, report: GraphReport) -> int:
    """Rewrite the ids of every hashed lookup; returns how many."""
    count = 0
    for node, ids in find_embeddings(graph):
        try:
            found = match(ids)
        except Declined as reason:
            report.declined("fuse_ngram_ids", node, str(reason))
            continue
        inside = cone([ids], {found.tokens})
        fused = insert(graph, ids, ngram_ids, (found.tokens, found.context, *found.tables, found.eos))
        report.matched("fuse_ngram_ids", node)
        ids.replace_all_uses_with(fused)
        erase_unused(inside)
        count += 1
    return count
