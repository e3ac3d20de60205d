"""Find the n-gram ids of packed requests: as in ngram_ids.py, over a batch dimension that holds every request's tokens.

What is left when the tables and the tokens are found is `query_start_loc` [R + 1] and the context [R or more, N - 1],
which their shapes tell apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from ple_compile.matching import ngram_ids, probe
from ple_compile.matching.candidates import Declined
from ple_compile.matching.graph import calls, cone, depends_on, dims, is_tensor, open_inputs, outside_reader, value
from ple_compile.matching.packed_batch import draw_starts, sizes_of_batches

MOST_RUNS = 64
CHEAP = 12  # runs at every other size


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
        for leaves in _roles(ids, tokens, nodes):
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


def _roles(ids: Node, tokens: Node, nodes: list[Node]) -> Iterator[tuple[Node, Node, Node, Node, Node, Node]]:
    """(tokens, query_start_loc, context, multipliers, sizes, offsets), where what is left fits these roles."""
    left = [n for n in open_inputs([ids], {tokens}) if n is not tokens]
    if any(value(n).dtype not in ngram_ids.INTEGERS for n in left):
        return
    matrices = [n for n in left if value(n).dim() == 2]
    vectors = [n for n in left if value(n).dim() == 1]
    if len(matrices) != 1 or len(matrices) + len(vectors) != len(left):
        return
    (context,) = matrices
    before = dims(context)[1]
    remainders = [n for n in nodes if calls(n, ngram_ids.REMAINDERS)]
    sizes = set(open_inputs([n.args[1] for n in remainders], {tokens})) & set(vectors)
    hashed = set(open_inputs([n.args[0] for n in remainders], {tokens})) & set(vectors) - sizes
    offsets = set(vectors) - sizes - hashed
    if len(sizes) != 1 or len(offsets) != 1 or len(hashed) != 2:
        return
    for multipliers in sorted(hashed):
        (starts,) = hashed - {multipliers}
        if dims(multipliers)[0] == one_more(before):
            yield tokens, starts, context, multipliers, min(sizes), min(offsets)


def one_more(size: int | tuple[int, ...]) -> int | tuple[int, ...]:
    """The size, as `dims` gives it, that is one larger."""
    return size + 1 if isinstance(size, int) else tuple(n + 1 for n in size)


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
