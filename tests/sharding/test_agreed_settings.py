"""shard_tables and load_tables mean the same on every rank, or raise on every rank; wrappers leave shards alone."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ple_compile.sharding import _upstream
from ple_compile.sharding.shard import shard_tables
from ple_compile.tables.load import load_tables
from tests.sharding.lowered import NGrams
from tests.sharding.ranks import run_ranks
from tests.tables.test_load import Model

IDS = torch.arange(20)

# What rank 1 does otherwise than rank 0.
OTHERWISE = {
    "rows": {"rows": 24},
    "dtype": {"dtype": torch.float32},
    "tokens": {"same_tokens": False},
    "axis": {"axis": ("dp", "tp")},
    "tables": {"rows": 20, "tables": 2},
}


def shard(rows=20, dtype=torch.bfloat16, axis="tp", same_tokens=True, tables=1):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(*(NGrams(rows, dtype=dtype) for _ in range(tables)))
    classes = [type(ngrams.rows) for ngrams in model]
    try:
        shard_tables(model, mesh, axis, same_tokens=same_tokens)
    finally:
        assert [type(ngrams.rows) for ngrams in model] == classes


def shard_otherwise(rank, otherwise):
    shard(**(otherwise if rank == 1 else {}))


@pytest.mark.parametrize("name", OTHERWISE)
def test_other_tables_or_settings_on_one_rank(name):
    for text in run_ranks(2, shard_otherwise, OTHERWISE[name], timeout=20):
        assert "ValueError: shard_tables: the ranks have different tables, or asked for different things" in text
        assert "rank 0: " in text and "rank 1: " in text and "rows.weight (20, 8) torch.bfloat16" in text


def refused_on_one(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = NGrams(20)
    if rank == 1:
        model.rows.max_norm = 1.0
    shard_tables(model, mesh)


def test_a_table_that_one_rank_refuses():
    told, refused = run_ranks(2, refused_on_one, timeout=20)
    assert "shard_tables: rank 1 failed, so this one has stopped too: ValueError" in told
    assert "rows.weight has max_norm" in refused


def folder_missing(rank, shape, axis):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = Model()
    if axis is not None:
        shard_tables(model, mesh, axis)
    load_tables(model, f"missing-{rank}", mesh)


@pytest.mark.parametrize("shape, axis", [((2, 1), ("dp", "tp")), ((2, 1), None), ((2, 1), "dp")])
def test_a_fault_reaches_every_rank_of_the_mesh(shape, axis):
    for text in run_ranks(2, folder_missing, shape, axis, timeout=20):
        assert "Error" in text and "missing-" in text


def wrapped(rank, wrapper):
    torch.manual_seed(0)
    expected = NGrams(20)
    model = nn.Sequential(NGrams(20), nn.Linear(8, 8))
    model[0].load_state_dict(expected.state_dict())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    shard_tables(model, mesh, "dp", same_tokens=False)
    if wrapper == "ddp":
        DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=mesh, ignored_params={model[0].rows.weight})
    return torch.equal(model[0](IDS), expected(IDS))


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_wrappers_leave_the_shards_alone(wrapper):
    assert run_ranks(2, wrapped, wrapper) == [True, True]


def absent(rank):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = NGrams(20)
    shard_tables(model, mesh, "tp")
    own, axis = (_upstream.timeout_of(group) for group in (_upstream.world(), mesh.get_group("tp")))
    assert own == axis == timedelta(seconds=4)
    if rank == 1:
        time.sleep(8)
        os._exit(0)
    model(IDS)


def test_an_axis_of_the_mesh_waits_no_longer_than_all_ranks():
    waits, _ = run_ranks(2, absent, timeout=4)
    assert "eager lookup of rows.weight: ranks [1] of the group did not come within its timeout" in waits


def arguments(rank):
    told = []
    unnamed, named = init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    for call in (
        lambda: shard_tables(NGrams(20), None),
        lambda: shard_tables(NGrams(20), dist.group.WORLD),
        lambda: shard_tables(NGrams(20), named, 0),
        lambda: shard_tables(NGrams(20), unnamed),
        lambda: load_tables(Model(), ".", named),
    ):
        try:
            call()
        except ValueError as error:
            told.append(str(error))
    return told


def test_what_is_no_mesh_or_axis(tmp_path, monkeypatch):
    from tests.checkpoints import write_checkpoint
    from tests.tables.test_load import BASE, ROWS, WIDTH

    write_checkpoint(tmp_path, ROWS, WIDTH, num_parts=2, num_files=1, base=BASE)
    monkeypatch.chdir(tmp_path)
    (told,) = run_ranks(1, arguments)
    wanted = (
        "mesh is a NoneType; pass a torch.distributed DeviceMesh",
        "mesh is a ProcessGroup; pass",
        "axis is 0; name one mesh axis",
        "give it mesh_dim_names",
        "call shard_tables(model, mesh, axis) first",
    )
    assert len(told) == len(wanted)
    for text, part in zip(told, wanted):
        assert part in text
