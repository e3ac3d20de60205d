"""Find the short convolution over packed requests, the pool's update and the states exported beside them.

    y = silu(convolution of x, with history from the requests' slots of a pool)
    new_pool = index_put(pool, [state_indices], columns of x and of the old slots);  copy_(pool, new_pool)

No convolution op marks it: histories are gathered. The anchor is a pool [slots, C, W], an input of the graph, which is
overwritten after an `index_put` of itself. The update leads to the roles: its index is `state_indices`, the nearest
[T, C] tensor that carries everything else is x, and what is left are the other index tensors. From these and one weight
alone the activation is computed.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ple_compile.matching import ngram_ids, probe
from ple_compile.matching.bounds import Bounds
from ple_compile.matching.candidates import Declined
from ple_compile.matching.graph import (
    VIEWS,
    aten,
    calls,
    cone,
    depends_on,
    dims,
    is_tensor,
    open_inputs,
    source,
    tensor_inputs,
    value,
)
from ple_compile.matching.packed_batch import draw_slots, draw_starts, sizes_of_batches
from ple_compile.matching.packed_ids import one_more
from ple_compile.ops._packed import Requests
from ple_compile.ops.packed_short_conv import columns_at, short_conv, store_columns

COMPOSITIONS = 8  # of requests, at every size
FEW_CHANNELS = 8


@dataclass(frozen=True)
class Pool:
    """A pool of states, its update, and the tensors that say which request is where."""

    pool: Node
    copy: Node
    x: Node
    query_start_loc: Node
    state_indices: Node
    has_initial_state: Node
    num_accepted_tokens: Node | None

    @property
    def new(self) -> Node:
        return self.copy.args[1]

    @property
    def requests(self) -> Requests:
        return Requests(self.query_start_loc, self.state_indices, self.has_initial_state, self.num_accepted_tokens)

    @property
    def leaves(self) -> list[Node]:
        return [n for n in (self.pool, self.x, *self.requests) if n is not None]


@dataclass(frozen=True)
class PackedConv:
    """A convolution candidate: leaves by role and the node it replaces ([tokens, channels])."""

    state: Pool
    weight: Node
    dilation: int
    activated: Node

    @property
    def leaves(self) -> list[Node]:
        return [self.weight, *self.state.leaves]

    @property
    def reach(self) -> int:
        return (dims(self.weight)[-1] - 1) * self.dilation


def find_packed_convs(graph: Graph) -> list[tuple[Node, PackedConv | Declined]]:
    """Every convolution over a pool, verified, or why it is none."""
    found: list[tuple[Node, PackedConv | Declined]] = []
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        pool = copy.args[0]
        if pool.op != "placeholder" or value(pool).dim() != 3 or not value(pool).dtype.is_floating_point:
            continue
        try:
            state = find_pool(copy)
            outputs = [] if state is None else _outputs(state)
            if not outputs:
                continue  # a pool of something else
            found.append((copy, _match(state, outputs)))
        except Declined as reason:
            found.append((copy, reason))
    return found


def find_pool(copy: Node) -> Pool | None:
    """The roles behind a pool's update; None where the pool is not written by request."""
    pool, new = copy.args
    channels = dims(pool)[1]
    nodes = cone([new], {pool})
    writes = [n for n in nodes if calls(n, {aten.index_put.default}) and source(n.args[0], VIEWS) is pool]
    if not writes or not isinstance(channels, int):
        return None
    indices = [i for i in writes[-1].args[1] if i is not None]
    floats = [n for n in (*reversed(nodes), *open_inputs([new], {pool})) if is_tensor(n)]
    for x in (n for n in floats if value(n).dtype.is_floating_point and dims(n)[1:] == (channels,)):
        left = open_inputs([new], {pool, x})
        if any(value(n).dtype.is_floating_point for n in left):
            continue
        slots = ngram_ids._uncast(indices[0])
        left = [n for n in open_inputs([new], {pool, x, slots}) if n is not x]
        return Pool(pool, copy, x, *_requests(slots, left))
    return None


def _requests(slots: Node, left: list[Node]) -> tuple[Node, Node, Node, Node | None]:
    # What is only indexed by request may have a size of its own in the graph: the op's check makes it theirs.
    count = dims(slots)
    flags = [n for n in left if value(n).dtype == torch.bool and value(n).dim() == 1]
    integers = [n for n in left if value(n).dtype in ngram_ids.INTEGERS and value(n).dim() == 1]
    starts = [n for n in integers if dims(n)[0] == one_more(count[0])]
    accepted = [n for n in integers if n not in starts]
    if len(count) != 1 or len(starts) != 1 or len(flags) != 1 or len(accepted) > 1 or len(left) > 2 + len(accepted):
        names = ", ".join(n.name for n in left)
        raise Declined(f"the pool's update reads {names}, not query_start_loc, has_initial_state and accepted tokens")
    return starts[0], slots, flags[0], accepted[0] if accepted else None


def _outputs(state: Pool) -> list[Node]:
    """What is computed from the pool, a weight and nothing else but x and the index tensors, and read elsewhere."""
    channels = dims(state.pool)[1]
    graph = state.pool.graph
    inputs = [n for n in graph.nodes if n.op in ("placeholder", "get_attr") and is_tensor(n)]
    weights = {n for n in inputs if _is_weight(n, channels)}
    reached = {*state.leaves, *weights}
    for node in graph.nodes:
        if node.op == "call_function" and node is not state.copy and is_tensor(node):
            if all(n in reached for n in tensor_inputs(node)):
                reached.add(node)
    nodes = [n for n in graph.nodes if n in reached]
    mixed = depends_on(nodes, {state.pool}) & depends_on(nodes, weights)
    return sorted(n for n in mixed if any(u not in reached and u is not state.copy for u in n.users))


def _is_weight(node: Node, channels: int) -> bool:
    shape = dims(node)
    return (
        value(node).dtype.is_floating_point
        and shape[:1] == (channels,)
        and shape[1:-1] in ((), (1,))
        and len(shape) > 1
    )


def _match(state: Pool, outputs: list[Node]) -> PackedConv:
    if len(outputs) != 1 or dims(outputs[0]) != dims(state.x):
        read = ", ".join(n.name for n in outputs)
        raise Declined(f"more or less than one activation is read of the pool: {read}")
    (activated,) = outputs
    weights = [n for n in open_inputs([activated], set(state.leaves)) if n not in state.leaves]
    if (
        len(weights) != 1
        or not _is_weight(weights[0], dims(state.pool)[1])
        or not isinstance(dims(weights[0])[-1], int)
    ):
        raise Declined(f"{len(weights)} tensors could be the convolution's weight")
    lags = probe.constants(cone([activated], {*state.leaves, *weights}))
    kernel = dims(weights[0])[-1]
    reason = f"the activation at {activated.name} differs from silu of a convolution of the requests"
    verified: list[PackedConv] = []
    for dilation in lags:
        if dilation < 1 or kernel < 2 or (kernel - 1) * dilation not in lags:
            continue
        conv = PackedConv(state, weights[0], dilation, activated)
        try:
            _verify(conv)
            verified.append(conv)
            verify_update(conv)
            return conv
        except Declined as error:
            reason = str(error)
    if not verified:
        raise Declined(reason)
    # Where no request has a second token the activation leaves open how far apart the taps are; the update tells.
    return verified[0]


def _verify(conv: PackedConv) -> None:
    def expected(leaf: dict[Node, torch.Tensor], requests: Requests) -> list[torch.Tensor]:
        x, others = leaf[conv.state.x], (leaf[conv.weight], leaf[conv.state.pool], requests, conv.dilation)
        eager = short_conv(x, *others)
        if x.dtype.itemsize > 2:
            return [eager]
        # Inductor of torch 2.11 drops the two casts between the sum and silu: the graph rounds once less than eager.
        return [eager, short_conv(x.float(), *others).to(x.dtype)]

    _compare(conv, conv.activated, conv.leaves, expected, exact=False)


def verify_update(conv: PackedConv) -> None:
    """Raise `Declined` unless the pool's new contents are the requests' newest columns, and all else its old ones."""

    def expected(leaf: dict[Node, torch.Tensor], requests: Requests) -> list[torch.Tensor]:
        pool = leaf[conv.state.pool].clone()
        store_columns(leaf[conv.state.x], pool, requests, conv.reach)
        return [pool]

    _compare(conv, conv.state.new, conv.state.leaves, expected, exact=True)


def find_export(conv: PackedConv, readers: Iterable[Node]) -> tuple[Node, Node]:
    """(exported columns [P, C, reach], boundaries) behind `readers` of x; `Declined` where they are something else."""
    graph = conv.activated.graph
    wanted = (dims(conv.state.pool)[1], conv.reach)
    behind = depends_on(graph.nodes, set(readers)) | set(readers)
    reason = f"the normed value is read by {min(readers).name}"
    for node in sorted(behind, reverse=True):
        if not is_tensor(node) or dims(node)[1:] != wanted:
            continue
        left = [n for n in open_inputs([node], set(conv.state.leaves)) if n not in conv.state.leaves]
        if len(left) != 1 or dims(left[0]) != dims(node)[:1] or value(left[0]).dtype not in ngram_ids.INTEGERS:
            continue
        (boundaries,) = left

        def expected(leaf: dict[Node, torch.Tensor], requests: Requests, at: Node = boundaries) -> list[torch.Tensor]:
            return [columns_at(leaf[conv.state.x], leaf[conv.state.pool], requests, conv.reach, leaf[at])]

        try:
            _compare(conv, node, [*conv.state.leaves, boundaries], expected, exact=True)
            return node, boundaries
        except Declined as error:
            reason = str(error)
    raise Declined(reason)


def _compare(conv: PackedConv, root: Node, leaves: list[Node], expected, *, exact: bool) -> None:
    """Raise `Declined` unless `root` equals one of `expected` for batches of every composition, rounding included."""
    nodes = cone([root], set(leaves))
    stray = [n for n in open_inputs([root], set(leaves)) if n not in leaves]
    if stray:
        raise Declined(f"{root.name} also reads {stray[0].name}")
    state, bounds = conv.state, Bounds(nodes)
    try:
        every = sizes_of_batches([*leaves, *nodes], state.x, [state.pool, conv.weight])
        for i, sizes in enumerate(every):
            for kind in range(COMPOSITIONS):
                for precise in (True, False) if i == 0 else (True,):
                    leaf, requests, run = _draw(conv, leaves, sizes, kind, precise)
                    wanted = expected(leaf, requests)
                    run.run(nodes)
                    bounds.saw(run.env)
                    actual = run.env[root]
                    same = probe.identical if exact else probe.close if precise else probe.same_rounding
                    if not any(same(actual, one) for one in wanted):
                        raise Declined(f"{root.name} differs from the packed convolution's")
    except (probe.Unprobeable, ValueError, IndexError) as reason:
        raise Declined(str(reason)) from None
    bounds.check()


def _draw(conv: PackedConv, leaves: list[Node], sizes: dict, kind: int, precise: bool):
    """(values of the leaves, the same by role, the probe). What nobody may read is NaN."""
    generator = torch.Generator().manual_seed(kind)
    state, reach = conv.state, conv.reach
    channels = dims(state.pool)[1]
    plain = probe.Probe(sizes)
    num_tokens, num_requests = plain.shape(state.x)[0], plain.shape(state.state_indices)[0]
    num_slots, _, window = plain.shape(state.pool)
    large = channels * max(num_tokens, num_slots * window) > probe.MOST_VALUES // 16
    count = FEW_CHANNELS if large and channels > FEW_CHANNELS else channels
    resize = probe.FewerChannels(channels, count) if count != channels else None
    if window < reach:
        raise probe.Unprobeable(f"a window of {window} columns does not hold a history of {reach}")

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    starts = draw_starts(num_tokens, num_requests, generator, kind)
    slots = draw_slots(num_requests, num_slots, generator)
    has = torch.rand(num_requests, generator=generator) < 0.7
    accepted = torch.randint(0, window - reach + 2, (num_requests,), generator=generator)
    pool = torch.full((num_slots, count, window), float("nan"), dtype=torch.float64)
    firsts = (accepted - 1).clamp(min=0) if state.num_accepted_tokens is not None else torch.zeros_like(accepted)
    for slot, first, real in zip(slots.tolist(), firsts.tolist(), has.tolist()):
        if slot and real:
            pool[slot, :, first : first + reach] = normal(count, reach)
    drawn = {
        state.pool: pool,
        state.x: normal(num_tokens, count),
        conv.weight: normal(count, *plain.shape(conv.weight)[1:]),
        state.query_start_loc: starts,
        state.state_indices: slots,
        state.has_initial_state: has,
    }
    if state.num_accepted_tokens is not None:
        drawn[state.num_accepted_tokens] = accepted
    for other in leaves:
        if other not in drawn:  # boundaries
            drawn[other] = torch.randint(0, num_tokens + 1, plain.shape(other), generator=generator)
    run = probe.Probe(sizes, precise=precise, resize=resize)
    leaf = {n: t.to(value(n).dtype).to(run.dtype(value(n).dtype)) for n, t in drawn.items()}
    run.env = dict(leaf)
    requests = Requests(*(leaf[n] if n is not None else None for n in state.requests))
    return leaf, requests, run
