"""Gather and dequantise the rows of a quantised table in one launch.

Matches:
    stored = aten.embedding(table, ids)                       # or index_select, or index; table e4m3, or bytes
    rows = prims.convert_element_type(stored, float32) * scale                    # one scale, or
    rows = ... * aten.embedding(scale, ids)                                       # one for each row, or
    rows = e2m1(stored & 15, stored >> 4) * aten.embedding(scale, ids) * table_scale
    rows = prims.convert_element_type(rows, bfloat16)         # where the model rounds them
Becomes:
    rows = ple.dequantized_lookup(table, scale, table_scale, ids, float32, bfloat16)

A table of bf16 or float32 is left as it is (on a GPU its rows come with their ids, ple_compile/join_on_gpu.py), and so
is the arithmetic after a lookup in a sharded table, whose rows travel as they are stored. Declines when rows are used
without a scale or move to another device before they are scaled, when the scales are looked up by other ids or belong
to no known format, when something inside is read elsewhere (autograd), or when the probe differs. With `debug` the ids
go through ple.checked_ids first.
"""

from torch.fx import Graph

from ple_compile.matching.candidates import accepted
from ple_compile.matching.graph import cone, erase_unused, insert, value
from ple_compile.matching.lookup import find_quantized_lookups
from ple_compile.ops.checked_ids import checked_ids
from ple_compile.ops.dequantized_lookup import dequantized_lookup
from ple_compile.report import GraphReport


def fuse_lookup(graph: Graph, report: GraphReport, *, debug: bool = False) -> int:
    """Rewrite every lookup in a quantised table; returns how many."""
    count = 0
    for node, lookup in accepted(find_quantized_lookups(graph), "fuse_lookup", report):
        root = lookup.root
        inside = cone([root], {lookup.ids, lookup.table, lookup.scale})
        dtypes = (lookup.product_dtype, value(root).dtype)
        ids = insert(graph, root, checked_ids, (lookup.table, lookup.ids)) if debug else lookup.ids
        tensors = (lookup.table, lookup.scale, lookup.table_scale, ids)
        fused = insert(graph, root, dequantized_lookup, (*tensors, *dtypes))
        report.matched("fuse_lookup", node)
        root.replace_all_uses_with(fused)
        erase_unused(inside)
        count += 1
    return count
