"""All ranks of a group look rows up in the same way, or all of them raise.

Ranks that disagree (a pass that applied here and not there, one rank eager) would issue different collectives: a hang,
or rows of nonsense. So before a rank looks a table up in a way that it has not used before, it says so in the group's
key-value store and reads what the others say. Later lookups cost one dictionary read and no communication, and nothing
is asked of the device, so this also works while a CUDA graph is captured. Work that fails on one rank fails on all in
the same way (`succeeding_together`).
"""

import contextlib
import weakref
from collections.abc import Iterator

import torch.distributed as dist

from ple_compile.sharding import _upstream

# What each group has agreed on, in order. The order is the same on every rank, since each runs the same program.
_AGREED: "weakref.WeakKeyDictionary[dist.ProcessGroup, list[str]]" = weakref.WeakKeyDictionary()
# How many blocks each group has begun together.
_BLOCKS: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()
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
def succeeding_together(group: dist.ProcessGroup | None, what: str) -> Iterator[None]:
    """A block that ends without an error on every rank of the group or on none; without a group, on this one.

    A rank that fails says so and raises at once; one that does not waits for the others, no longer than the group's
    timeout, and raises ValueError where one has failed.
    """
    if group is None or dist.get_backend(group) == "fake":
        yield
        return
    number = _BLOCKS.get(group, 0)
    _BLOCKS[group] = number + 1
    store, keys = _upstream.store_of(group), [f"ple_compile/together/{number}/{rank}" for rank in range(group.size())]
    try:
        yield
    except BaseException as error:
        store.set(keys[group.rank()], f"{type(error).__name__}: {error}")
        raise
    store.set(keys[group.rank()], _DONE)
    said = _heard(group, keys, what)
    failed = [rank for rank, text in enumerate(said) if text != _DONE]
    if failed:
        raise ValueError(f"{what}: rank {failed[0]} failed, so this one has stopped too: {said[failed[0]]}")


def _exchange(group: dist.ProcessGroup, step: int, what: str) -> None:
    keys = [f"ple_compile/agree/{step}/{rank}" for rank in range(group.size())]
    _upstream.store_of(group).set(keys[group.rank()], what)
    said = _heard(group, keys, what)
    if len(set(said)) > 1:
        lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(said))
        raise RuntimeError(
            f"the ranks of the group look rows up in different ways:\n{lines}\nCompile the model with the same options "
            "on every rank; ple_compile.explain says why the pass declined where it did"
        )


def _heard(group: dist.ProcessGroup, keys: list[str], what: str) -> list[str]:
    """What each rank says under its key, once all have."""
    store = _upstream.store_of(group)
    try:
        store.wait(keys, _upstream.timeout_of(group))
    except RuntimeError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise RuntimeError(
            f"{what}: ranks {missing} of the group did not come within its timeout. Either they have ended, or they do "
            "something else: call the same functions on every rank, and compile with the same options"
        ) from error
    return [store.get(key).decode() for key in keys]
