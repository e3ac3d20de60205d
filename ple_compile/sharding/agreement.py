"""All ranks of a group look rows up in the same way, or all of them raise.

Ranks that disagree (a pass that applied here and not there, one rank eager) would issue different collectives: a hang,
or rows of nonsense. So before a rank looks a table up in a way that it has not used before, it says so in the group's
key-value store and reads what the others say. Later lookups cost one dictionary read and no communication, and nothing
is asked of the device, so this also works while a CUDA graph is captured.
"""

import weakref

import torch.distributed as dist

from ple_compile.sharding import _upstream

# What each group has agreed on, in order. The order is the same on every rank, since each runs the same program.
_AGREED: "weakref.WeakKeyDictionary[dist.ProcessGroup, list[str]]" = weakref.WeakKeyDictionary()


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


def _exchange(group: dist.ProcessGroup, step: int, what: str) -> None:
    store, ranks = _upstream.store_of(group), range(group.size())
    keys = [f"ple_compile/agree/{step}/{rank}" for rank in ranks]
    store.set(keys[group.rank()], what)
    try:
        store.wait(keys, _upstream.timeout_of(group))
    except RuntimeError as error:
        missing = [rank for rank in ranks if not store.check([keys[rank]])]
        raise RuntimeError(
            f"{what}: ranks {missing} of the group did not come within its timeout. Either they have ended, or they "
            "look rows up in another way; compile the model with the same options on every rank"
        ) from error
    said = [store.get(key).decode() for key in keys]
    if len(set(said)) > 1:
        lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(said))
        raise RuntimeError(
            f"the ranks of the group look rows up in different ways:\n{lines}\nCompile the model with the same options "
            "on every rank; ple_compile.explain says why the pass declined where it did"
        )
