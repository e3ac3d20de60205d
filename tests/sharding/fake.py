"""A process group of any size in one process: collectives return at once and move nothing."""

import contextlib
import math
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_mesh(rank: int = 0, **axes: int) -> Iterator[DeviceMesh]:
    """The mesh of `axes` (name=size, the last varying fastest) as `rank` sees it."""
    sizes = tuple(axes.values())
    dist.init_process_group("fake", rank=rank, world_size=math.prod(sizes), store=FakeStore())
    try:
        yield init_device_mesh("cpu", sizes, mesh_dim_names=tuple(axes))
    finally:
        dist.destroy_process_group()
