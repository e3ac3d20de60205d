"""Run the gate, the short convolution, the residual additions and the state update as one op.

Matches:
    gated, normed = ple.gate(...)
    y = ple.short_conv(normed, conv_weight, state, dilation)
    out = aten.add(gated, y)
    out = aten.add(hidden, out)                               # where the model adds it at once; in float32 in any order
    new_state = last columns of cat([state, normed^T])        # where there is a cache, any spelling
Becomes:
    out = ple.gate_conv(...)                                  # or
    out, new_state = ple.gate_conv_update(...)                # or, where the new state overwrites the old,
    out = ple.gate_conv_update_(..., state)

And, for requests laid end to end whose states lie in a pool:
    y = ple.packed_short_conv(normed, conv_weight, pool, query_start_loc, ...)
    columns = history and tokens of normed at `boundaries`    # where the model exports states
    aten.copy_(pool, aten.index_put(pool, [state_indices], newest columns of normed))
Becomes:
    out, columns = ple.packed_gate_conv_(..., pool, query_start_loc, ..., boundaries, ...)
The pool may be a view of an input that holds the states of several layers: the op writes to that input in place.

Neither `gated` nor `normed` is then written to memory. Declines when someone else reads either of them.
"""

import operator
from dataclasses import dataclass

from torch.fx import Graph, Node

from ple_compile.matching.candidates import Declined
from ple_compile.matching.graph import (
    VIEWS,
    aten,
    calls,
    cone,
    depends_on,
    dims,
    erase_unused,
    insert,
    reshape_like,
    size_node,
    source,
    value,
)
from ple_compile.matching.packed_conv import PackedConv, Pool, find_export, verify_update
from ple_compile.matching.pool_updates import Update, find_writes
from ple_compile.matching.short_conv import COLUMNS, ShortConv, find_state_writes, is_dilated
from ple_compile.ops.gate import gate as gate_op
from ple_compile.ops.gate_conv import gate_conv, gate_conv_update, gate_conv_update_
from ple_compile.ops.packed_gate_conv import packed_gate_conv_
from ple_compile.ops.packed_short_conv import packed_short_conv
from ple_compile.ops.short_conv import short_conv
from ple_compile.report import GraphReport

RESHAPES = VIEWS - {aten.expand.default}


@dataclass(frozen=True)
class GateConv:
    """A gate and the convolution it feeds: `root` is what the merged op returns, `writes` hold the new state."""

    gate: Node
    conv: Node
    root: Node
    writes: list[Node]
    add_hidden: bool


@dataclass(frozen=True)
class PackedGateConv:
    """The same over requests laid end to end: `conv` updates its pool, `exported` holds columns at `boundaries`."""

    gate: Node
    conv: PackedConv
    root: Node
    exported: Node | None
    boundaries: Node | None
    add_hidden: bool


def merge_gate_conv(graph: Graph, report: GraphReport, *, fuse_short_conv: bool = True) -> int:
    """Merge every gate with the short convolution that it feeds; returns how many.

    Where there are such (`fuse_short_conv`), a gate that feeds none is told of too.
    """
    count = 0
    for conv in graph.find_nodes(op="call_function", target=short_conv):
        if _reads_gate(conv):
            try:
                _replace(graph, _find(conv.args[0].args[0], conv))
            except Declined as reason:
                report.declined("merge_gate_conv", conv, str(reason))
                continue
            report.matched("merge_gate_conv", conv)
            count += 1
    count += _merge_packed(graph, report)
    for gate in graph.find_nodes(op="call_function", target=gate_op) if fuse_short_conv else ():
        reader = _other_reader(gate)
        if reader is not None:
            reason = f"the normed value is read by {reader.name}, not by a dilated convolution"
            report.declined("merge_gate_conv", reader, reason + _why_no_pool(gate))
    return count


def _why_no_pool(gate: Node) -> str:
    """What keeps a reader of packed tokens from being a convolution over a pool of states."""
    if value(gate.args[0]).dim() != 2:
        return ""
    normed = {user for user in gate.users if user.args[1] == 1}
    for update in (w for w in find_writes(gate.graph) if isinstance(w, Update)):
        if depends_on(cone([update.new], {update.view}), normed):
            return (
                f": the pool {update.view.name} is updated with it, but no activation is computed of that pool, index "
                "tensors and one weight alone"
            )
    return ": no pool of states [slots, channels, window], an input of the graph or a view of one, is updated with it"


def _merge_packed(graph: Graph, report: GraphReport) -> int:
    writes = find_writes(graph)
    updates = [w for w in writes if isinstance(w, Update)]
    found: list[PackedGateConv] = []
    for conv in graph.find_nodes(op="call_function", target=packed_short_conv):
        if _reads_gate(conv):
            try:
                found.append(_find_packed(conv.args[0].args[0], conv, updates))
            except Declined as reason:
                report.declined("merge_gate_conv", conv, str(reason))
    count = 0
    merged = [each.conv.state.update for each in found]
    for each, update in zip(found, merged):
        # The op writes in place: that into one view of an input must not meet a copy that the graph makes of the whole.
        others = [w.new for w in writes if w.base is update.base and w not in merged]
        if others:
            reason = f"another part of {update.base.name} is updated by the graph, at {others[0].name}"
            report.declined("merge_gate_conv", each.conv.activated, reason)
            continue
        _replace_packed(graph, each)
        report.matched("merge_gate_conv", each.conv.activated)
        count += 1
    return count


def _reads_gate(conv: Node) -> bool:
    normed = conv.args[0]
    return calls(normed, {operator.getitem}) and calls(normed.args[0], {gate_op})


def _other_reader(gate: Node) -> Node | None:
    """What reads the normed value of a gate, unless it is a convolution that `fuse_short_conv` looks at."""
    stack = [user for user in gate.users if user.args[1] == 1]
    for node in stack:
        stack += [u for u in node.users if calls(u, COLUMNS) and u not in stack]
    readers = [u for node in stack for u in node.users if u not in stack]
    if any(calls(u, {short_conv, packed_short_conv, gate_op}) or is_dilated(u) for u in readers):
        return None
    return min(readers, default=None)


def _outputs(gate: Node) -> tuple[Node, Node]:
    """(gated, normed)"""
    outputs = {user.args[1]: user for user in gate.users}
    if len(outputs) != len(gate.users) or set(outputs) != {0, 1}:
        raise Declined("an output of the gate is read more than once")
    return outputs[0], outputs[1]


def _find(gate: Node, conv: Node) -> GateConv:
    gated, normed = _outputs(gate)
    x, weight, state, dilation = conv.args
    shape = ShortConv(conv, x, weight, state, dilation, conv, transposed=False)
    writes, reader = find_state_writes(shape)
    if reader is not None:
        raise Declined(f"the normed value is read by {reader.name}")
    if state is not None and value(state).dtype != value(normed).dtype:
        raise Declined(f"the state is {value(state).dtype}, the normed value {value(normed).dtype}")
    if len(writes) > 1 or any(value(w).dtype != value(normed).dtype for w in writes):
        raise Declined("the normed value goes into several states, or into one of another type")
    root, add_hidden = _root(gate, gated, conv)
    return GateConv(gate, conv, root, writes, add_hidden)


def _find_packed(gate: Node, conv: Node, updates: list[Update]) -> PackedGateConv:
    gated, normed = _outputs(gate)
    _, weight, pool, *requests, dilation = conv.args
    state = next((Pool(u, normed, *requests) for u in updates if u.view is pool), None)
    if state is None:
        raise Declined(f"the pool {pool.name} is not updated with the columns that the convolution reads")
    if gate.args[6] is not None:
        raise Declined("a mask lies over the gate")
    reader = next(state.update.other_readers(), None)
    if reader is not None:
        raise Declined(f"the pool, or a view that may overlap it, is read by {reader.name} too")
    found = PackedConv(state, weight, dilation, conv)
    verify_update(found)

    update = state.update
    inside = {conv, *cone([update.written], {pool, normed, update.before})}
    inside |= {u for u in pool.users if _writes(u, pool)}
    others = sorted({u for n in (normed, pool) for u in n.users} - inside)
    exported, boundaries = find_export(found, others) if others else (None, None)
    if exported is not None:
        inside |= set(cone([exported], {pool, normed}))
    interior = depends_on(sorted(inside), {pool, normed}) - {conv, exported, update.written}
    readers = [u for n in (normed, pool, *sorted(interior)) for u in n.users if u not in inside]
    if readers:
        raise Declined(f"the normed value or the pool is read by {readers[0].name}")
    root, add_hidden = _root(gate, gated, conv)
    return PackedGateConv(gate, found, root, exported, boundaries, add_hidden)


def _writes(node: Node, pool: Node) -> bool:
    return calls(node, {aten.copy_.default}) and node.args[0] is pool


def _root(gate: Node, gated: Node, conv: Node) -> tuple[Node, bool]:
    """The sum that the merged op returns, and whether the residual streams are in it."""
    hidden = source(gate.args[2], RESHAPES)
    first, other = _sole_reader(gated), _sole_reader(conv)
    if first is other and _is_sum(first, gated, conv):
        onward = _readers(first)
        add_hidden = len(onward) == 1 and _is_sum(onward[0], first, hidden)
        return (onward[0] if add_hidden else first), add_hidden
    for inner, outer, left, right in ((first, other, gated, conv), (other, first, conv, gated)):
        if _is_sum(inner, left, hidden) and _readers(inner) == [outer] and _is_sum(outer, inner, right):
            if min(value(gated).dtype.itemsize, value(conv).dtype.itemsize) < 4:
                raise Declined(f"{left.name} and the hidden state are added first, which rounds otherwise in 16 bits")
            return outer, True
    raise Declined(f"{gated.name} is read by {first.name}, which is not its sum with the convolution")


def _readers(node: Node) -> list[Node]:
    """What reads a node or views of it."""
    found: dict[Node, None] = {}
    for user in node.users:
        found |= dict.fromkeys(_readers(user) if calls(user, RESHAPES) else [user])
    return list(found)


def _sole_reader(node: Node) -> Node:
    readers = _readers(node)
    if len(readers) != 1:
        raise Declined(f"{node.name} is read by {', '.join(n.name for n in readers)}, not only by their sum")
    return readers[0]


def _is_sum(node: Node, left: Node, right: Node) -> bool:
    """Whether `node` adds two nodes, or views of them, value by value."""
    if not calls(node, {aten.add.Tensor}) or node.kwargs or not all(isinstance(n, Node) for n in node.args):
        return False
    sources = {source(n, RESHAPES) for n in node.args}
    return sources == {source(left, RESHAPES), source(right, RESHAPES)} and {dims(n) for n in node.args} == {dims(node)}


def _written_back(found: GateConv) -> Node | None:
    """The `copy_` of the new state over the old one, where the op may write the state itself.

    That is where the state is an input of the graph which nobody else reads, before or after.
    """
    state = found.conv.args[2]
    if not found.writes or state is None or state.op != "placeholder":
        return None
    (write,) = found.writes
    (copy, *others) = write.users
    if others or not calls(copy, {aten.copy_.default}) or copy.args != (state, write) or dims(write) != dims(state):
        return None
    inside = {*cone([write], {found.conv.args[0], state}), found.conv, copy}
    readers = {*state.users, *(user for node in inside - {found.conv} for user in node.users)}
    return copy if readers <= inside else None


def _replace(graph: Graph, found: GateConv) -> None:
    key, val, hidden, norm_key, norm_query, norm_conv, mask, eps, eps_tensors, gate_dtype, plain = found.gate.args
    _, weight, state, dilation = found.conv.args
    norms = (key, val, hidden, norm_key, norm_query, norm_conv, weight, mask, state)
    settings = (eps, eps_tensors, gate_dtype, dilation, found.add_hidden, plain)
    interior = [found.root]
    written_back = _written_back(found)
    if written_back is not None:
        out = insert(graph, found.root, gate_conv_update_, (*norms, *settings))
        graph.erase_node(written_back)
        interior += found.writes
    elif found.writes:
        (write,) = found.writes
        window = size_node(graph, found.root, write, 2)
        both = insert(graph, found.root, gate_conv_update, (*norms, *settings, window))
        out = insert(graph, found.root, operator.getitem, (both, 0))
        write.replace_all_uses_with(insert(graph, found.root, operator.getitem, (both, 1)))
        interior.append(write)
    else:
        out = insert(graph, found.root, gate_conv, (*norms, *settings))
    found.root.replace_all_uses_with(reshape_like(graph, found.root, out, found.root))
    erase_unused(interior)


def _replace_packed(graph: Graph, found: PackedGateConv) -> None:
    key, val, hidden, norm_key, norm_query, norm_conv, _, eps, eps_tensors, gate_dtype, plain = found.gate.args
    state = found.conv.state
    norms = (key, val, hidden, norm_key, norm_query, norm_conv, found.conv.weight)
    settings = (eps, eps_tensors, gate_dtype, found.conv.dilation, found.add_hidden, plain)
    args = (*norms, state.pool, *state.requests, found.boundaries, *settings)
    both = insert(graph, found.root, packed_gate_conv_, args)
    base, written = state.update.base, state.update.written
    interior = [found.root, written]
    written.replace_all_uses_with(base)
    for copy in [u for u in base.users if _writes(u, base) and u.args[1] is base]:
        graph.erase_node(copy)
    if found.exported is not None:
        found.exported.replace_all_uses_with(insert(graph, found.root, operator.getitem, (both, 1)))
        interior.append(found.exported)
    out = insert(graph, found.root, operator.getitem, (both, 0))
    found.root.replace_all_uses_with(reshape_like(graph, found.root, out, found.root))
    erase_unused(interior)
