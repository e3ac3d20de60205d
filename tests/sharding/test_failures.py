"""Ranks that disagree, do not come or die: an error that says so on every rank that is left, never a hang."""

import os

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ple_compile.sharding.shard import shard_tables
from tests.sharding.lowered import NGrams, compiled, traced
from tests.sharding.ranks import DIED, run_ranks

IDS = torch.arange(8).view(2, 4)


def sharded(axis="tp", same_tokens=True):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    module = NGrams(20)
    shard_tables(module, mesh, axis, same_tokens=same_tokens)
    return module


def on_two_ranks(rank):
    module = NGrams(20)
    weight = module.rows.weight
    try:
        shard_tables(module, DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",)))
    finally:
        if rank == 2:
            assert module.rows.weight is weight
    return module.rows.weight.shape[0]


def test_a_rank_outside_the_mesh():
    *inside, outside = run_ranks(3, on_two_ranks)
    assert inside == [10, 10]
    assert "shard_tables: rank 2 is not in the mesh, which has the ranks [0, 1]; call it on those alone" in outside


def disagree(rank, ways):
    module = sharded()
    if ways[rank] == "eager":
        return module(IDS)
    return traced(module, ways[rank], IDS)(IDS)


@pytest.mark.parametrize("ways", [("all_reduce", "eager"), ("eager", "reduce_scatter"), ("all_to_all", "all_reduce")])
def test_a_pass_that_did_not_apply_everywhere(ways):
    for text in run_ranks(2, disagree, ways):
        assert "RuntimeError: the ranks of the group look rows up in different ways" in text
        assert f"rank 0: {ways[0]} lookup of rows.weight" in text
        assert f"rank 1: {ways[1]} lookup of rows.weight" in text


def disagree_later(rank):
    module = sharded()
    module(IDS)
    if rank == 1:
        return module(IDS)
    return traced(module, "reduce_scatter", IDS)(IDS)


def test_a_pass_that_applied_later_on_one_rank():
    waits, reduces = run_ranks(2, disagree_later, timeout=4)
    assert "reduce_scatter lookup of rows.weight: ranks [1] of the group did not come" in waits
    assert "eager lookup of rows.weight: all-reduce of rows failed" in reduces


def die(rank, lowering):
    module = sharded("dp", same_tokens=False)
    call = traced(module, lowering, IDS)
    call(IDS)
    if rank == 1:
        os._exit(1)
    for _ in range(3):
        call(IDS)


@pytest.mark.parametrize("lowering", ["all_reduce", "reduce_scatter", "all_to_all"])
def test_a_rank_that_dies(lowering):
    survivor, dead = run_ranks(2, die, lowering, timeout=20)
    assert dead == DIED
    assert f"RuntimeError: {lowering} lookup of rows.weight" in survivor and "failed; a rank of the group" in survivor


def too_many(rank, lowering, crowded):
    """Rank `crowded` has one token more than the limit, in a graph of its own, after a step in which all was well."""
    module = sharded("dp", same_tokens=False)
    call = compiled(module, lowering, max_tokens=3)
    with torch.no_grad():
        call(IDS)
        return call(torch.zeros(4, 4, dtype=torch.int64) if rank == crowded else IDS)


@pytest.mark.parametrize("lowering, crowded", [("all_reduce", 0), ("reduce_scatter", 1)])
def test_more_tokens_than_the_limit_is_an_error_on_all_ranks(lowering, crowded):
    for text in run_ranks(2, too_many, lowering, crowded):
        assert (
            f"ValueError: {lowering} lookup of rows.weight, up to 3 tokens: a rank has 16 ids and the buffers hold 12"
            in text
        )
        assert "Config.etp_max_tokens" in text


def another_limit(rank, lowering):
    module = sharded("dp", same_tokens=False)
    return traced(module, lowering, IDS, max_tokens=8 * (1 + rank))(IDS)


@pytest.mark.parametrize("lowering", ["all_reduce", "reduce_scatter"])
def test_another_limit_on_one_rank(lowering):
    for text in run_ranks(2, another_limit, lowering, timeout=20):
        assert "RuntimeError: the ranks of the group look rows up in different ways" in text
        assert f"rank 0: {lowering} lookup of rows.weight, up to 8 tokens" in text
        assert f"rank 1: {lowering} lookup of rows.weight, up to 16 tokens" in text
