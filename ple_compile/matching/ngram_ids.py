"""Find n-gram ids in a graph: remainders of an xor of products that become rows of an embedding.

Roles come from data flow: under the remainder's divisor the one-dimensional leaf is `sizes`, under its dividend it is
`multipliers`, any other is `offsets`. The tokens are the cut nearest the embedding that carries everything else. Where
the ids are flattened or cast for the lookup, those before that are the ids.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from ple_compile.matching import probe
from ple_compile.matching.candidates import Declined
from ple_compile.matching.difference import Parting, where_they_part
from ple_compile.matching.graph import (
    CASTS,
    DEVICE_COPIES,
    LAYOUT,
    aten,
    calls,
    cone,
    depends_on,
    dims,
    gathered,
    is_tensor,
    open_inputs,
    outside_reader,
    producers,
    value,
)
from ple_compile.matching.repeats import asked_once, signature
from ple_compile.ops.lookup import lookup
from ple_compile.ops.mapped_lookup import mapped_lookup
from ple_compile.ops.ngram_ids import stages
from ple_compile.ops.sharded_lookup import sharded_lookup

PROBE_POSITIONS = 1024
LOOKUPS = {lookup, mapped_lookup, sharded_lookup}
REMAINDERS = {aten.remainder.Tensor, aten.fmod.Tensor, aten.div.Tensor_mode, aten.floor_divide.default}
HASHES = {aten.remainder.Tensor, aten.bitwise_xor.Tensor}
# Moving tokens about costs nothing; the cache update reads the same concatenation.
COLUMNS = {aten.cat.default, aten.slice.Tensor, aten.constant_pad_nd.default}
INTEGERS = {torch.int32, torch.int64}


@dataclass(frozen=True)
class NgramIds:
    """An ids candidate: leaves by role and the node it replaces. `context` may be missing."""

    ids: Node
    tokens: Node
    context: Node | None
    multipliers: Node
    sizes: Node
    offsets: Node
    eos: int

    @property
    def tables(self) -> tuple[Node, Node, Node]:
        return self.multipliers, self.sizes, self.offsets


def find_embeddings(graph: Graph) -> Iterator[tuple[Node, list[Node]]]:
    """(lookup node, int64 ids on the tokens' device that it may look up) of every lookup of hashed ids.

    Of ids that are [batch, sequence, heads] first, then of packed ones, [tokens, heads].
    """
    for node in list(graph.nodes):
        looked_up = _looked_up(node)
        if looked_up is None:
            continue
        ids = list(producers(looked_up, LAYOUT | DEVICE_COPIES, lossy=True))
        if _is_hashed(ids[-1]):
            found = {dim: n for n in ids for dim in (3, 2) if value(n).dim() == dim and value(n).dtype == torch.int64}
            yield node, [found[dim] for dim in (3, 2) if dim in found]


def _is_hashed(ids: Node) -> bool:
    """Whether a remainder or xor is among the integers that `ids` are made of."""
    seen, stack = set(), [ids]
    while stack:
        node = stack.pop()
        if node in seen or not is_tensor(node) or value(node).dtype not in INTEGERS | {torch.bool}:
            continue
        if calls(node, HASHES) and value(node).dtype in INTEGERS:
            return True
        seen.add(node)
        stack += node.all_input_nodes
    return False


def _looked_up(node: Node) -> Any:
    """The ids whose rows of a table a node gives, or None."""
    if calls(node, LOOKUPS):
        return node.args[1]
    gather = gathered(node)
    return gather[1] if gather is not None and value(gather[0]).dim() == 2 else None


def match(ids: Node) -> NgramIds:
    """The roles behind `ids`, verified; raises `Declined` with the reason otherwise."""
    nodes = cone([ids], set())
    multipliers, sizes, offsets = _one_dimensional_leaves(ids, nodes)
    partings: list[Parting] = []
    reasons: list[str] = []
    for tokens, context in _token_cuts(ids, nodes):
        leaves = {tokens, multipliers, sizes, offsets} | ({context} if context is not None else set())
        if open_inputs([ids], leaves):
            continue
        inside = cone([ids], leaves)
        for eos in _eos_candidates(inside):
            candidate = NgramIds(ids, tokens, context, multipliers, sizes, offsets, eos)
            try:
                question = signature(inside, tokens, context, candidate.tables, eos, ids)
                if asked_once(ids.graph, question, partial(_equals_reference, candidate, inside)):
                    return _unread_inside(candidate, inside)
                partings.append(_where_it_parts(candidate, inside))
            except (probe.Unprobeable, ValueError) as error:
                reasons.append(str(error))
    if partings:
        furthest = max(partings, key=lambda parting: parting.stage)
        raise Declined(f"{ids.name} differs from n-gram ids at every token cut{furthest.text}", furthest.node)
    raise Declined(reasons[-1] if reasons else f"{ids.name} is no function of tokens and of three vectors alone")


def _unread_inside(candidate: NgramIds, inside: list[Node]) -> NgramIds:
    sources = {candidate.tokens} | ({candidate.context} if candidate.context is not None else set())
    interior = {n for n in depends_on(inside, sources) if not calls(n, COLUMNS)}
    reader = outside_reader(interior - {candidate.ids}, inside)
    if reader is not None:
        raise Declined(f"{reader[0].name} inside the ids is read by {reader[1].name}")
    return candidate


def _one_dimensional_leaves(ids: Node, nodes: list[Node]) -> tuple[Node, Node, Node]:
    remainders = [n for n in nodes if calls(n, REMAINDERS)]
    divisors = _vectors([n.args[1] for n in remainders])
    dividends = _vectors([n.args[0] for n in remainders]) - divisors
    rest = _vectors([ids]) - divisors - dividends
    for role, found in (("sizes", divisors), ("multipliers", dividends), ("offsets", rest)):
        if not found:
            raise Declined(f"no one-dimensional tensor holds the {role}, which the op reads from one")
        if len(found) > 1:
            raise Declined(f"{len(found)} one-dimensional tensors could be the {role}")
    return dividends.pop(), divisors.pop(), rest.pop()


def _vectors(roots: list[Node]) -> set[Node]:
    return {n for n in open_inputs(roots, set()) if value(n).dim() == 1 and value(n).dtype in INTEGERS}


def _token_cuts(ids: Node, nodes: list[Node]) -> Iterator[tuple[Node, Node | None]]:
    """Possible (tokens, context), nearest to the ids first: the operands of a concatenation, or tokens alone."""
    integers = [n for n in (*reversed(nodes), *open_inputs([ids], set())) if is_tensor(n)]
    for node in integers:
        if value(node).dim() != 2 or value(node).dtype not in INTEGERS:
            continue
        if calls(node, {aten.cat.default}) and len(node.args[0]) == 2 and (*node.args[1:], 0)[0] in (-1, 1):
            context, tokens = (_uncast(n) for n in node.args[0])
            if dims(tokens) == dims(ids)[:2]:
                yield tokens, None if calls(context, {aten.full.default}) else context
        if dims(node) == dims(ids)[:2]:
            yield _uncast(node), None


def _uncast(node: Node) -> Node:
    """int32 tokens behind a cast to int64; other types keep their cast, which is part of what eager does."""
    while calls(node, CASTS) and value(node.args[0]).dtype in INTEGERS:
        node = node.args[0]
    return node


def check_token_type(tokens: Node) -> None:
    """Raise ValueError where the tokens are an input of the graph of a type that token ids do not have."""
    given = tokens
    while calls(given, CASTS | {aten.where.self}):
        given = given.args[given.target is aten.where.self]  # what is chosen where the mask is True
    if given.op == "placeholder" and value(given).dtype not in INTEGERS:
        raise ValueError(f"input_ids, which are hashed to n-gram ids, are {value(given).dtype}; pass int32 or int64")


def _eos_candidates(inside: list[Node]) -> list[int]:
    """The constants that tokens are compared with, then every other one."""
    compared = [n for n in inside if calls(n, {aten.eq.Scalar, aten.eq.Tensor})]
    return list(dict.fromkeys([*probe.constants(compared), *probe.constants(inside)]))


def _leaves_and_tables(candidate: NgramIds) -> tuple[list[Node], torch.Generator, dict[Node, torch.Tensor]]:
    """(leaves that hold tokens, where to draw from, drawn multipliers, sizes and offsets)"""
    heads, orders = value(candidate.sizes).shape[0], value(candidate.multipliers).shape[0] - 1
    if isinstance(heads, torch.SymInt) or isinstance(orders, torch.SymInt) or orders < 1 or heads % orders:
        raise probe.Unprobeable(f"{heads} sizes are no whole number of heads for each of {orders} orders")
    generator = torch.Generator().manual_seed(0)
    shapes = {n: tuple(value(n).shape) for n in candidate.tables}
    tables = {
        candidate.multipliers: torch.randint(1, 2**61, shapes[candidate.multipliers], generator=generator) * 2 + 1,
        candidate.sizes: torch.randint(900, 2**25, shapes[candidate.sizes], generator=generator),
        candidate.offsets: torch.randint(0, 2**40, shapes[candidate.offsets], generator=generator),
    }
    leaves = [candidate.tokens] + ([candidate.context] if candidate.context is not None else [])
    return leaves, generator, tables


def _equals_reference(candidate: NgramIds, inside: list[Node]) -> bool:
    leaves, generator, env = _leaves_and_tables(candidate)
    near = {c + d for c in probe.constants(inside) for d in (-1, 0, 1)}
    for sizes in probe.size_assignments([*leaves, *inside], leaves[1:]):
        drawn = _draw_tokens(candidate, leaves, sizes, near, generator)
        if not _matches(candidate, inside, sizes, env, drawn):
            return False
    return True


def _where_it_parts(candidate: NgramIds, inside: list[Node]) -> Parting:
    """The first node that differs from the op, on one batch of tokens."""
    leaves, generator, env = _leaves_and_tables(candidate)
    sizes = probe.size_assignments([*leaves, *inside], leaves[1:])[0]
    drawn = _draw_tokens(candidate, leaves, sizes, {candidate.eos}, generator)
    run = probe.Probe(sizes, env={**env, **{leaf: tokens[0] for leaf, tokens in drawn.items()}})
    run.run(inside)
    tokens, context = [*(run.env[leaf] for leaf in leaves), None][:2]
    multipliers, head_sizes, offsets = (env[n] for n in candidate.tables)
    expected = stages(tokens, context, multipliers, head_sizes, offsets, candidate.eos)
    length = run.env[candidate.ids].shape[1]
    # Some compute the context's positions too, and drop them at the end.
    values = {n: t[:, -length:] if isinstance(t, torch.Tensor) and t.dim() > 1 else t for n, t in run.env.items()}
    return where_they_part(inside, values, expected, "ids", torch.equal)


def _draw_tokens(candidate: NgramIds, leaves: list[Node], sizes: dict, near: set[int], generator: torch.Generator):
    """Batches of every integer leaf: half the tokens near a constant of the cone, the rest anything, negatives too."""
    probe_sizes = probe.Probe(sizes)
    positions = max(1, torch.Size(probe_sizes.shape(candidate.ids)[:2]).numel())
    batches = -(-PROBE_POSITIONS // positions)
    pool = torch.tensor(sorted(near | {candidate.eos}))
    drawn = {}
    for leaf in leaves:
        shape = (batches, *probe_sizes.shape(leaf))
        anything = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator)
        special = pool[torch.randint(len(pool), shape, generator=generator)]
        eos = torch.full(shape, candidate.eos)
        kind = torch.rand(shape, generator=generator)
        tensor = torch.where(kind < 0.4, anything, torch.where(kind < 0.7, special, eos))
        drawn[leaf] = tensor.to(value(leaf).dtype)
    return drawn


def _matches(candidate: NgramIds, inside: list[Node], sizes: dict, env: dict, drawn: dict[Node, torch.Tensor]) -> bool:
    def run(*batch: torch.Tensor) -> torch.Tensor:
        one = probe.Probe(sizes, env={**env, **dict(zip(drawn, batch))})
        one.run(inside)
        return one.env[candidate.ids]

    tensors = list(drawn.values())
    if tensors[0].shape[0] == 1:
        actual = run(*(t[0] for t in tensors))[None]
    else:
        actual = torch.func.vmap(run)(*tensors)
    flat = [t.flatten(0, 1) for t in tensors]
    expected = torch.ops.ple.ngram_ids(
        flat[0], flat[1] if len(flat) > 1 else None, *(env[n] for n in candidate.tables), candidate.eos
    )
    return torch.equal(actual.flatten(0, 1), expected)
