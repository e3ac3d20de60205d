"""Fuse the n-gram ids.

Matches:
    history = aten.cat([context, tokens], -1)                 # or the tokens alone
    shifted = aten.where(valid, aten.gather(history, 1, positions), eos)          # for each shift, any spelling
    mixed = history * multipliers[0] ^ shifted * multipliers[1] ^ ...
    ids = aten.cat([aten.remainder(mixed, sizes[...]) + offsets[...], ...], -1)
    rows = aten.embedding(table, ids)
Becomes:
    ids = ple.ngram_ids(tokens, context, multipliers, sizes, offsets, eos)

And, for requests laid end to end (tokens [T], ids [T, heads]):
    request = aten.searchsorted(query_start_loc[1:], iota)    # any spelling
    shifted = aten.where(place >= shift, tokens[iota - shift], context[request, ...])
Becomes:
    ids = ple.packed_ngram_ids(tokens, query_start_loc, context, multipliers, sizes, offsets, eos)

A mask's `where` on the tokens stays outside: the cut nearest the embedding that works is taken. With `debug` the
context of packed requests goes through ple.checked_context first. Declines when a role has no single candidate, when
something inside is read elsewhere, or when the probe differs at every cut. Raises ValueError for tokens that the user
passes in a type other than int32 and int64.
"""

from torch.fx import Graph, Node

from ple_compile.matching import packed_ids
from ple_compile.matching.candidates import Declined
from ple_compile.matching.graph import cone, erase_unused, insert, value
from ple_compile.matching.ngram_ids import check_token_type, find_embeddings, match
from ple_compile.ops.checked_context import checked_context
from ple_compile.ops.ngram_ids import ngram_ids
from ple_compile.ops.packed_ngram_ids import packed_ngram_ids
from ple_compile.report import GraphReport


def fuse_ngram_ids(graph: Graph, report: GraphReport, *, debug: bool = False) -> int:
    """Rewrite the ids of every hashed lookup; returns how many."""
    count = 0
    for node, layouts in find_embeddings(graph):
        reasons: list[Declined] = []
        for ids in layouts:
            try:
                inside, fused = _fuse_packed(graph, ids, debug) if value(ids).dim() == 2 else _fuse(graph, ids)
            except Declined as reason:
                reasons.append(reason)
                continue
            report.matched("fuse_ngram_ids", node)
            ids.replace_all_uses_with(fused)
            erase_unused(inside)
            count += 1
            break
        else:
            reason = (
                reasons[0] if reasons else Declined("the ids are neither [batch, sequence, heads] nor [tokens, heads]")
            )
            report.declined("fuse_ngram_ids", reason.node or node, str(reason))
    return count


def _fuse(graph: Graph, ids: Node) -> tuple[list[Node], Node]:
    """(what is replaced, the op)"""
    found = match(ids)
    check_token_type(found.tokens)
    args = (found.tokens, found.context, *found.tables, found.eos)
    return cone([ids], {found.tokens}), insert(graph, ids, ngram_ids, args)


def _fuse_packed(graph: Graph, ids: Node, debug: bool) -> tuple[list[Node], Node]:
    found = packed_ids.match(ids)
    check_token_type(found.tokens)
    inside = cone([ids], set(found.leaves))
    tokens, starts, context, *tables = found.leaves
    if debug:
        context = insert(graph, ids, checked_context, (context,))
    return inside, insert(graph, ids, packed_ngram_ids, (tokens, starts, context, *tables, found.eos))
