"""Find the n-gram ids of packed requests: as in ngram_ids.py, over a batch dimension that holds every request's tokens.

What is left when the tables and the tokens are found is `query_start_loc` [R + 1] and the context [R or more, N - 1],
which their shapes tell apart. Both may be computed in the graph, of lengths and of a table of tokens.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from ple_compile.matching import ngram_ids, probe
from ple_compile.matching.candidates import Declined
from ple_compile.matching.graph import calls, cone, depends_on, dims, is_tensor, open_inputs, outside_reader, value
from ple_compile.matching.packed_batch import draw_starts, sizes_of_batches
from ple_compile.matching.packed_roles import MOST_ROLES, one_more, reached

MOST_RUNS = 64
CHEAP = 12  # runs at every other size

Roles = tuple[Node, Node, Node, Node, Node, Node]


@dataclass(frozen=True)
class PackedIds:
    """An ids candidate: leaves by role and the node it replaces."""

    ids: Node
    tokens: Node
    query_start_loc: Node
    context: Node
    multipliers: Node
    sizes: Node
    offsets: Node
    eos: int

    @property
    def leaves(self) -> list[Node]:
        return [self.tokens, self.query_start_loc, self.context, self.multipliers, self.sizes, self.offsets]


def match(ids: Node) -> PackedIds:
    """The roles behind `ids` [tokens, heads], verified; raises `Declined` with the reason otherwise."""
    nodes = cone([ids], set())
    reason = f"{ids.name} differs from n-gram ids of packed requests at every token cut"
    for tokens in _token_cuts(ids, nodes):
        for leaves in itertools.islice(_roles(ids, tokens, nodes), MOST_ROLES):
            inside = cone([ids], set(leaves))
            for eos in ngram_ids._eos_candidates(inside):
                candidate = PackedIds(ids, *leaves, eos)
                try:
                    if _equals_reference(candidate, inside):
                        return _unread_inside(candidate, inside)
                except (probe.Unprobeable, ValueError, IndexError) as error:
                    reason = str(error)
    raise Declined(reason)


def _token_cuts(ids: Node, nodes: list[Node]) -> Iterator[Node]:
    """Integer vectors as long as the ids, nearest to them first."""
    found: set[Node] = set()
    for node in (*reversed(nodes), *open_inputs([ids], set())):
        if is_tensor(node) and value(node).dtype in ngram_ids.INTEGERS and dims(node) == dims(ids)[:1]:
            node = ngram_ids._uncast(node)
            if node not in found:
                found.add(node)
                yield node


def _roles(ids: Node, tokens: Node, nodes: list[Node]) -> Iterator[Roles]:
    """(tokens, query_start_loc, context, multipliers, sizes, offsets) that leave nothing else open.

    Starts and context are inputs of the graph, or what it computes of others; those nearest the inputs come first.
    """
    left = [n for n in open_inputs([ids], {tokens}) if n is not tokens and value(n).dtype in ngram_ids.INTEGERS]
    inside = cone([ids], {tokens})
    dependent = depends_on(inside, {tokens})
    apart = [n for n in inside if n not in dependent]
    integers = [n for n in (*left, *apart) if is_tensor(n) and value(n).dtype in ngram_ids.INTEGERS]
    vectors = [n for n in integers if value(n).dim() == 1]
    remainders = [n for n in nodes if calls(n, ngram_ids.REMAINDERS)]
    under = {i: open_inputs([n.args[i] for n in remainders], {tokens}) for i in (0, 1)}
    sizes = [n for n in under[1] if n in vectors]
    offsets = [n for n in left if n in vectors and n not in under[0] and n not in under[1]]
    if len(sizes) != 1 or len(offsets) != 1:
        return
    for context in (n for n in integers if value(n).dim() == 2):
        for multipliers in (n for n in left if n in vectors and dims(n)[0] == one_more(dims(context)[1])):
            for starts in vectors:
                # What is only indexed by request may have a size of its own in the graph.
                fits = starts in left and context in left or dims(starts)[0] == one_more(dims(context)[0])
                leaves = {tokens, starts, context, multipliers, sizes[0], offsets[0]}
                if fits and len(leaves) == 6 and not open_inputs([ids], leaves) and reached(ids, leaves) == leaves:
                    yield tokens, starts, context, multipliers, sizes[0], offsets[0]


def _unread_inside(candidate: PackedIds, inside: list[Node]) -> PackedIds:
    interior = {n for n in depends_on(inside, {candidate.tokens}) if n is not candidate.ids}
    reader = outside_reader([n for n in interior if dims(n)[-1:] == dims(candidate.ids)[-1:]], inside)
    if reader is not None:
        raise Declined(f"{reader[0].name} inside the ids is read by {reader[1].name}")
    return candidate


def _equals_reference(candidate: PackedIds, inside: list[Node]) -> bool:
    heads, orders = dims(candidate.sizes)[0], dims(candidate.context)[1]
    if not isinstance(heads, int) or not isinstance(orders, int) or orders < 1 or heads % orders:
        return False
    generator = torch.Generator().manual_seed(0)
    tables = {
        candidate.multipliers: torch.randint(1, 2**61, (orders + 1,), generator=generator) * 2 + 1,
        candidate.sizes: torch.randint(900, 2**25, (heads,), generator=generator),
        candidate.offsets: torch.randint(0, 2**40, (heads,), generator=generator),
    }
    near = {c + d for c in probe.constants(inside) for d in (-1, 0, 1)}
    pool = torch.tensor(sorted(near | {candidate.eos}))

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        anything = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator)
        special = pool[torch.randint(len(pool), shape, generator=generator)]
        kind = torch.rand(shape, generator=generator)
        return torch.where(kind < 0.4, anything, torch.where(kind < 0.7, special, candidate.eos))

    probed = False
    every = sizes_of_batches([*candidate.leaves, *inside], candidate.tokens, [candidate.context])
    for i, sizes in enumerate(every):
        shape = probe.Probe(sizes).shape
        num_tokens, num_requests = shape(candidate.tokens)[0], shape(candidate.query_start_loc)[0] - 1
        rows = shape(candidate.context)[0]
        if rows < num_requests:
            continue  # sizes that no call has, though nothing in the graph says so
        enough = -(-ngram_ids.PROBE_POSITIONS // max(num_tokens, 1))
        for kind in range(min(MOST_RUNS if i == 0 else CHEAP, max(enough, 4))):
            drawn = {
                candidate.tokens: draw((num_tokens,)),
                candidate.query_start_loc: draw_starts(num_tokens, num_requests, generator, kind),
                candidate.context: draw((rows, orders)),
            }
            env = {n: t.to(value(n).dtype) for n, t in drawn.items()} | tables
            run = probe.Probe(sizes, env=dict(env))
            run.run(inside)
            expected = torch.ops.ple.packed_ngram_ids(*(env[n] for n in candidate.leaves), candidate.eos)
            if not torch.equal(run.env[candidate.ids], expected):
                return False
            probed = True
    return probed
