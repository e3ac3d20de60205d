"""Find the short convolution over packed requests, the pool's update and the states exported beside them.

    y = silu(convolution of x, with history from the requests' slots of a pool)
    new_pool = index_put(pool, [state_indices], columns of x and of the old slots);  copy_(pool, new_pool)

No convolution op marks it: histories are gathered. The anchor is a pool [slots, C, W], an input of the graph or a view
of one, which is overwritten after an `index_put` of itself (pool_updates.py). The update leads to the roles: its index
is `state_indices`, the nearest [T, C] tensor that carries everything else is x, and what is left are the other index
tensors (packed_roles.py). From these and one weight alone the activation is computed.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ple_compile.matching import ngram_ids, probe
from ple_compile.matching.bounds import Bounds
from ple_compile.matching.candidates import Declined
from ple_compile.matching.graph import (
    aten,
    calls,
    cone,
    depends_on,
    dims,
    is_tensor,
    open_inputs,
    tensor_inputs,
    value,
)
from ple_compile.matching.packed_batch import draw_slots, draw_starts, sizes_of_batches
from ple_compile.matching.packed_roles import MOST_ROLES, find_roles
from ple_compile.matching.pool_updates import Update, find_writes, path_of
from ple_compile.ops._packed import Requests
from ple_compile.ops.packed_short_conv import columns_at, short_conv, store_columns

COMPOSITIONS = 8  # of requests, at every size
FEW_CHANNELS = 8


@dataclass(frozen=True)
class Pool:
    """A pool of states, its update, and the tensors that say which request is where."""

    update: Update
    x: Node
    query_start_loc: Node
    state_indices: Node
    has_initial_state: Node
    num_accepted_tokens: Node | None

    @property
    def pool(self) -> Node:
        return self.update.view

    @property
    def new(self) -> Node:
        return self.update.new

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
    for update in (w for w in find_writes(graph) if isinstance(w, Update)):
        try:
            conv = _find(update)
        except Declined as reason:
            found.append((update.new, reason))
        else:
            if conv is not None:
                found.append((update.new, conv))
    return found


def _find(update: Update) -> PackedConv | None:
    """The convolution over an updated pool; None where that is a pool of something else."""
    x, slots = _columns(update) or (None, None)
    if x is None or slots is None:
        return None
    declined: Declined | None = None
    for roles in itertools.islice(find_roles(update.new, update.view, x, slots), MOST_ROLES):
        state = Pool(update, x, *roles)
        outputs = _outputs(state)
        if not outputs:
            continue
        try:
            return _match(state, outputs)
        except Declined as reason:
            declined = declined or reason
    if declined is not None:
        raise declined
    return None


def _columns(update: Update) -> tuple[Node, Node] | None:
    """(x [T, C], slots) of an update with columns of x; None where the pool is not written by request."""
    pool, new = update.view, update.new
    channels = dims(pool)[1]
    nodes = cone([new], {pool})
    writes = [n for n in nodes if calls(n, {aten.index_put.default}) and path_of(n.args[0]) == path_of(pool)]
    if not writes or not isinstance(channels, int):
        return None
    indices = [i for i in writes[-1].args[1] if i is not None]
    floats = [n for n in (*reversed(nodes), *open_inputs([new], {pool})) if is_tensor(n)]
    for x in (n for n in floats if value(n).dtype.is_floating_point and dims(n)[1:] == (channels,)):
        if not any(value(n).dtype.is_floating_point for n in open_inputs([new], {pool, x})):
            return x, ngram_ids._uncast(indices[0])
    return None


def _outputs(state: Pool) -> list[Node]:
    """What is computed from the pool, a weight and nothing else but x and the index tensors, and read elsewhere."""
    channels = dims(state.pool)[1]
    graph = state.pool.graph
    inputs = [n for n in graph.nodes if n.op in ("placeholder", "get_attr") and is_tensor(n)]
    weights = {n for n in inputs if _is_weight(n, channels)}
    reached = {*state.leaves, *weights}
    for node in graph.nodes:
        if node.op == "call_function" and not _mutates(node) and is_tensor(node):
            if all(n in reached for n in tensor_inputs(node)):
                reached.add(node)
    nodes = [n for n in graph.nodes if n in reached]
    mixed = depends_on(nodes, {state.pool}) & depends_on(nodes, weights)
    return sorted(n for n in mixed if any(u not in reached and not _mutates(u) for u in n.users))


def _mutates(node: Node) -> bool:
    return calls(node, {aten.copy_.default})


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
        every = [sizes for sizes in every if probe.Probe(sizes).shape(state.pool)[0] > 0]  # slot 0 is always there
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
        if not every:
            raise probe.Unprobeable(f"no sizes are known at which {state.pool.name} has slots")
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
