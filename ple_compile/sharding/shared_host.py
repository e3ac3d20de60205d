"""Host memory that several processes of one node map, so that replicas keep one copy of a shard between them."""

import os
import uuid

import torch
import torch.distributed as dist
from torch import Tensor

_FOLDER = "/dev/shm"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def node_name() -> str:
    """The same in all processes of one machine, containers included, and different between machines."""
    with open(_BOOT_ID) as file:
        return file.read().strip()


def empty_shared(rows: int, width: int, dtype: torch.dtype, group: dist.ProcessGroup) -> tuple[Tensor, bool]:
    """One [rows, width] tensor for all ranks of the group on this node, and whether this rank is to fill it.

    Collective over the group, whose ranks may be on several nodes: each node has its own copy. The memory is freed with
    the last process that maps it; no file is left behind.
    """
    offers: list[tuple[str, str] | None] = [None] * group.size()
    dist.all_gather_object(offers, (node_name(), os.path.join(_FOLDER, f"ple-{uuid.uuid4()}")), group=group)
    leader = next(i for i, offer in enumerate(offers) if offer is not None and offer[0] == node_name())
    path, nbytes = offers[leader][1], rows * width * dtype.itemsize  # type: ignore[index]
    first = leader == dist.get_rank(group)
    if first:
        with open(path, "xb") as file:
            file.truncate(nbytes)
    dist.barrier(group)
    shared = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    dist.barrier(group)
    if first:
        os.unlink(path)
    return shared.view(dtype).view(rows, width), first
