"""Fuse the dilated short convolution and its activation.

Matches:
    permute = aten.permute(x, [0, 2, 1])                      # x [B, S, C]
    cat = aten.cat([state, permute], -1)                      # or no state; pads and slices in any arrangement
    convolution = aten.convolution(cat, weight, None, [1], [0], [dilation], False, [0], C)
    silu = convolution / (exp(-convolution) + 1)              # or any spelling
    y = aten.permute(silu, [0, 2, 1])
or a sum of taps, of something normed, in the place of the convolution
Becomes:
    y = ple.short_conv(x, weight, state, dilation)

And, for requests laid end to end whose states lie in a pool [slots, C, W] (x [T, C]; any spelling):
    past = aten.index(pool, [slot, None, column])             # for each older tap
    tap = aten.where(place >= lag, aten.index(x, [token - lag]), aten.where(has_initial_state, past, 0))
    y = aten.where(slot != 0, silu(x * weight[:, 0, -1] + tap * weight[:, 0, ...] + ...), 0)
    aten.copy_(pool, aten.index_put(pool, [state_indices], ...))    # or where `pool` is a view of an input: into that
Becomes:
    y = ple.packed_short_conv(x, weight, pool, query_start_loc, state_indices, has_initial_state, accepted, dilation)

The cache update, which reads `cat` too, stays. Declines when the convolution has a bias or a stride, when its input is
not one sequence and at most one state, when something inside is read elsewhere, or when the probe differs.
"""

from torch.fx import Graph

from ple_compile.matching.candidates import accepted
from ple_compile.matching.graph import aten, cone, erase_unused, insert
from ple_compile.matching.packed_conv import find_packed_convs
from ple_compile.matching.packed_roles import is_view_or_index
from ple_compile.matching.pool_updates import Update, find_writes
from ple_compile.matching.repeats import merge_equal
from ple_compile.matching.short_conv import find_short_convs, verify, verify_rounding
from ple_compile.matching.taps import find_taps
from ple_compile.ops.packed_short_conv import packed_short_conv
from ple_compile.ops.short_conv import short_conv
from ple_compile.report import GraphReport


def fuse_short_conv(graph: Graph, report: GraphReport) -> int:
    """Rewrite every dilated short convolution; returns how many."""
    count = 0
    convs = [*accepted(find_short_convs(graph), "fuse_short_conv", report, verify)]
    for node, conv in [*convs, *accepted(find_taps(graph), "fuse_short_conv", report, verify_rounding)]:
        inside = cone([conv.activated], set(conv.leaves))
        fused = insert(graph, conv.activated, short_conv, (conv.x, conv.weight, conv.state, conv.dilation))
        if conv.transposed:
            fused = insert(graph, conv.activated, aten.permute.default, (fused, [0, 2, 1]))
        report.matched("fuse_short_conv", node)
        conv.activated.replace_all_uses_with(fused)
        erase_unused(inside)
        count += 1
    return count + _fuse_packed(graph, report)


def _fuse_packed(graph: Graph, report: GraphReport) -> int:
    count = 0
    if any(isinstance(write, Update) for write in find_writes(graph)):
        merge_equal(graph, is_view_or_index)
    for _, conv in accepted(find_packed_convs(graph), "fuse_short_conv", report):
        inside = cone([conv.activated], set(conv.leaves))
        args = (conv.state.x, conv.weight, conv.state.pool, *conv.state.requests, conv.dilation)
        fused = insert(graph, conv.activated, packed_short_conv, args)
        report.matched("fuse_short_conv", conv.activated)
        conv.activated.replace_all_uses_with(fused)
        erase_unused(inside)
        count += 1
    return count
