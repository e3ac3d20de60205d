"""Every private part of `torch.distributed` that sharding uses, in one place."""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# DistributedDataParallel leaves the parameters alone that the module it is given names here.
IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"


def resolve_group(name: str) -> dist.ProcessGroup:
    return distributed_c10d._resolve_process_group(distributed_c10d.GroupName(name))


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The key-value store that only this group's ranks write to."""
    return distributed_c10d._get_process_group_store(group)


def world() -> dist.ProcessGroup:
    """The group of all ranks."""
    return distributed_c10d._get_default_group()


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The group's, or that of all ranks where it is shorter: the axes of a DeviceMesh have PyTorch's default."""
    return min(g._get_backend(g._device_types[0]).options._timeout for g in (group, world()))


def supports(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group's collectives take tensors of this device."""
    return torch.device(device.type) in group._device_types


def flatten(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """The mesh of `axes` as one dimension, the last axis varying fastest."""
    return mesh[axes[0]] if len(axes) == 1 else mesh[axes]._flatten()


def row_sharded(local: Tensor, mesh: DeviceMesh, num_rows: int) -> DTensor:
    """A DTensor on the same memory as `local`, wherever it lies: `DTensor.from_local` would move a host shard."""
    shape = torch.Size([num_rows, local.shape[1]])
    meta = TensorMeta(shape, (local.shape[1], 1), local.dtype)
    return DTensor(local, DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)


def empty_symmetric(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Device memory that the other ranks can map; every rank must allocate the same size."""
    return symmetric_memory.empty(rows, width, dtype=dtype, device=device)


def exchange_pointers(shard: Tensor, group: dist.ProcessGroup) -> tuple[object, list[int]]:
    """Map every rank's shard into this process. The addresses are valid as long as the handle lives. Collective."""
    handle = symmetric_memory.rendezvous(shard, group)
    allocations = handle.buffer_ptrs
    # A shard may lie anywhere in its allocation: recent releases take symmetric memory from a pool.
    offsets: list[int] = [0] * group.size()
    dist.all_gather_object(offsets, shard.data_ptr() - allocations[group.rank()], group=group)
    return handle, [start + offset for start, offset in zip(allocations, offsets)]
