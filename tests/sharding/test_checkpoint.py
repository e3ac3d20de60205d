"""A sharded table through torch.distributed.checkpoint, from and to any number of ranks; and shared host memory."""

import os

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import init_device_mesh

from ple_compile.sharding.shard import shard_tables
from ple_compile.sharding.shared_host import empty_shared
from tests.sharding.lowered import NGrams, random_table, same_bytes
from tests.sharding.ranks import run_ranks

ROWS = 11


def mesh_of(num_ranks):
    return init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))


def save(rank, num_ranks, folder):
    module = NGrams(ROWS)
    module.rows.weight.data.copy_(random_table(ROWS, 8, torch.bfloat16))
    shard_tables(module, mesh_of(num_ranks))
    checkpoint.save(module.state_dict(), checkpoint_id=folder)


def load(rank, num_ranks, folder):
    """Into a module that never held the table; the bytes of this rank's rows land in its shard directly."""
    with torch.device("meta"):
        module = NGrams(ROWS)
    shard_tables(module, mesh_of(num_ranks))
    module.seeds, module.moduli, module.starts = (torch.empty_like(b, device="cpu") for b in module.buffers())
    checkpoint.load(module.state_dict(), checkpoint_id=folder)
    layout = module.rows.layout
    expected = random_table(ROWS, 8, torch.bfloat16)[layout.first_row :][: layout.num_local_rows]
    assert same_bytes(module.rows.weight[: layout.num_local_rows], expected)
    assert module.seeds.tolist() == [0, 1, 2]
    return layout.num_local_rows


@pytest.mark.parametrize("before, after", [(2, 3), (4, 2)])
def test_round_trip(before, after, tmp_path):
    assert run_ranks(before, save, before, str(tmp_path)) == [None] * before
    kept = run_ranks(after, load, after, str(tmp_path))
    assert kept == [4, 4, 3] if after == 3 else kept == [6, 5]


def share(rank):
    group = mesh_of(3).get_group()
    before = set(os.listdir("/dev/shm"))
    shared, first = empty_shared(4, 2, torch.bfloat16, group)
    if first:
        shared.fill_(7)
    torch.distributed.barrier(group)
    left = [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("ple-")]
    assert shared.shape == (4, 2) and (shared == 7).all() and not left
    torch.distributed.barrier(group)
    if rank == 2:
        shared[1] = 9
    torch.distributed.barrier(group)
    return first, shared[1, 0].item()


def test_replicas_on_one_node_share_memory():
    assert run_ranks(3, share) == [(True, 9.0), (False, 9.0), (False, 9.0)]
