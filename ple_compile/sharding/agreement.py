"""All ranks of a group look rows up in the same way, or all of them raise.

Ranks that disagree (a pass that applied here and not there, one rank eager) would issue different collectives: a hang,
or rows of nonsense. So before a rank looks a table up in a way that it has not used before, it says so in the group's
key-value store and reads what the others say. Later lookups cost one dictionary read and no communication, and nothing
is asked of the device, so this also works while a CUDA graph is captured. Work that fails on one rank fails on all in
the same way (`succeeding_together`).
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ple_compile.sharding import _upstream

# What each group has agreed on, in order. The order is the same on every rank, since each runs the same program.
_AGREED: "weakref.WeakKeyDictionary[dist.ProcessGroup, list[str]]" = weakref.WeakKeyDictionary()
# How many blocks the ranks of each mesh have begun together, by the process group that holds them all.
_BLOCKS: "weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]]" = weakref.WeakKeyDictionary()
_DONE = "done"


def agree(group_name: str, what: str) -> None:
    """Return once every rank of the group is about to do `what`; raise on every rank when one does something else.

    Waits no longer than the group's timeout.
    """
    group = _upstream.resolve_group(group_name)
    agreed = _AGREED.setdefault(group, [])
    if what in agreed:
        return
    if dist.get_backend(group) != "fake":
        _exchange(group, len(agreed), what)
    agreed.append(what)


@contextlib.contextmanager
def succeeding_together(mesh: DeviceMesh | None, what: str) -> Iterator[list[str]]:
    """A block that ends without an error on every rank of the mesh or on none; without a mesh, on this one.

    A rank that fails says so and raises at once; one that does not waits for the others, no longer than the timeout of
    the group of all ranks, and raises ValueError where one has failed, or has put other facts into the list; so does a
    rank that is not in the mesh, for which the others do not wait.
    """
    facts: list[str] = []
    if mesh is None or dist.get_backend() == "fake":
        yield facts
        return
    group, ranks, own = _upstream.world(), mesh.mesh.flatten().tolist(), dist.get_rank()
    if own not in ranks:
        raise ValueError(f"{what}: rank {own} is not in the mesh, which has the ranks {ranks}; call it on those alone")
    counts = _BLOCKS.setdefault(group, Counter())
    place = f"ple_compile/together/{'-'.join(map(str, ranks))}"
    keys = [f"{place}/{counts[place]}/{rank}" for rank in ranks]
    counts[place] += 1
    store, mine = _upstream.store_of(group), keys[ranks.index(own)]
    try:
        yield facts
    except BaseException as error:
        store.set(mine, f"{type(error).__name__}: {error}")
        raise
    store.set(mine, "\n".join([_DONE, *facts]))
    said = dict(zip(ranks, _heard(store, keys, ranks, what, _upstream.timeout_of(group))))
    failed = [rank for rank, text in said.items() if text.partition("\n")[0] != _DONE]
    if failed:
        raise ValueError(f"{what}: rank {failed[0]} failed, so this one has stopped too: {said[failed[0]]}")
    if len(set(said.values())) > 1:
        lines = "\n".join(f"  rank {rank}: {', '.join(text.splitlines()[1:])}" for rank, text in said.items())
        raise ValueError(f"{what}: the ranks have different tables, or asked for different things:\n{lines}")


def _exchange(group: dist.ProcessGroup, step: int, what: str) -> None:
    ranks = list(range(group.size()))
    keys = [f"ple_compile/agree/{step}/{rank}" for rank in ranks]
    store = _upstream.store_of(group)
    store.set(keys[group.rank()], what)
    said = _heard(store, keys, ranks, what, _upstream.timeout_of(group))
    if len(set(said)) > 1:
        lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(said))
        raise RuntimeError(
            f"the ranks of the group look rows up in different ways:\n{lines}\nCompile the model with the same options "
            "on every rank; ple_compile.explain says why the pass declined where it did"
        )


def _heard(store: dist.Store, keys: list[str], ranks: list[int], what: str, timeout: timedelta) -> list[str]:
    """What each rank says under its key, once all have."""
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [rank for rank, key in zip(ranks, keys) if not store.check([key])]
        raise RuntimeError(
            f"{what}: ranks {missing} of the group did not come within its timeout. Either they have ended, or they do "
            "something else: call the same functions on every rank, and compile with the same options"
        ) from error
    return [store.get(key).decode() for key in keys]
