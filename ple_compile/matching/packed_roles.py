"""Which index tensors a pool's update reads: inputs of the graph, or what the graph computes of others.

Servers keep lengths and counts, and a model may compute `has_initial_state = num_computed > 0` of them, or the starts
as a sum of lengths. Where the inputs themselves do not fit the roles, every cut through the graph is one that does.
"""

import itertools
from collections.abc import Iterator

import torch
from torch.fx import Node

from ple_compile.matching import ngram_ids
from ple_compile.matching.candidates import Declined
from ple_compile.matching.graph import calls, cone, depends_on, dims, is_tensor, open_inputs, value
from ple_compile.matching.pool_updates import STEPS

MOST_ROLES = 6  # ways to read one update, or one lookup's ids, that are tried

Roles = tuple[Node, Node, Node, Node | None]  # starts, slots, flags, accepted


def is_view_or_index(node: Node) -> bool:
    """What a model may ask for anew at every use: `states[layer]`, `num_computed > 0`."""
    if calls(node, STEPS):
        return True
    return not node.is_impure() and value(node).dim() == 1 and value(node).dtype in (torch.bool, *ngram_ids.INTEGERS)


def find_roles(new: Node, pool: Node, x: Node, slots: Node) -> Iterator[Roles]:
    """(query_start_loc, state_indices, has_initial_state, num_accepted_tokens) that `new` may be computed from.

    Raises `Declined` where there is none.
    """
    left = [n for n in open_inputs([new], {pool, x, slots}) if n is not x]
    found: set[Roles] = set()
    for roles in itertools.chain(_given(slots, left), _computed(new, {pool, x, slots}, slots)):
        if roles not in found:
            found.add(roles)
            yield roles
    if not found:
        names = ", ".join(n.name for n in left)
        raise Declined(
            f"the pool's update reads {names}, and nothing computed of these is query_start_loc, has_initial_state and "
            "accepted tokens"
        )


def _given(slots: Node, left: list[Node]) -> list[Roles]:
    # What is only indexed by request may have a size of its own in the graph: the op's check makes it theirs.
    count = dims(slots)
    flags = [n for n in left if value(n).dtype == torch.bool and value(n).dim() == 1]
    integers = [n for n in left if value(n).dtype in ngram_ids.INTEGERS and value(n).dim() == 1]
    starts = [n for n in integers if dims(n)[0] == one_more(count[0])]
    accepted = [n for n in integers if n not in starts]
    if len(count) != 1 or len(starts) != 1 or len(flags) != 1 or len(accepted) > 1 or len(left) > 2 + len(accepted):
        return []
    return [(starts[0], slots, flags[0], accepted[0] if accepted else None)]


def _computed(new: Node, leaves: set[Node], slots: Node) -> Iterator[Roles]:
    """Vectors on the way to `new` that leave nothing else open; those nearest the inputs first."""
    inside = cone([new], leaves)
    dependent = depends_on(inside, leaves - {slots})
    apart = [n for n in inside if n not in dependent]
    vectors = [n for n in (*open_inputs([new], leaves), *apart) if is_tensor(n) and value(n).dim() == 1]
    integers = [n for n in vectors if value(n).dtype in ngram_ids.INTEGERS]
    all_starts = [n for n in integers if dims(n)[0] == one_more(dims(slots)[0])]
    all_flags = [n for n in vectors if value(n).dtype == torch.bool]
    all_accepted = [n for n in integers if n not in all_starts]
    for starts, flags, accepted in itertools.product(all_starts, all_flags, [None, *all_accepted]):
        chosen = {n for n in (starts, flags, accepted) if n is not None}
        if open_inputs([new], leaves | chosen) or reached(new, leaves | chosen) != leaves | chosen:
            continue
        yield starts, slots, flags, accepted


def reached(new: Node, leaves: set[Node]) -> set[Node]:
    """Those of `leaves` that `new` is computed from."""
    return {n for node in cone([new], leaves) for n in node.all_input_nodes if n in leaves}


def one_more(size: int | tuple[int, ...]) -> int | tuple[int, ...]:
    """The size, as `dims` gives it, that is one larger."""
    return size + 1 if isinstance(size, int) else tuple(n + 1 for n in size)
