"""The kernels of sharded lookups in Triton's interpreter: they equal the plain PyTorch of their ops."""

import itertools

import pytest
import torch
import triton

from ple_compile.ops import local_ids, pack_ids, peer_lookup
from ple_compile.sharding.topology import Layout
from tests.sharding.fake import fake_mesh
from tests.sharding.lowered import random_table, same_bytes

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them on the device")


@pytest.fixture(autouse=True)
def interpreter():
    assert triton.knobs.runtime.interpret
    with fake_mesh(tp=3):
        yield


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("given, size", [(0, 0), (0, 3), (5, 5), (5, 9), (9, 5), (1500, 2100)])
def test_pack_ids(given, size, counted, dtype):
    ids = torch.randint(0, 2**31 - 1, (given,), dtype=dtype)
    expected = pack_ids.reference(ids, size, counted, "0", "test")
    assert same_bytes(pack_ids.pack(ids, size, counted), expected)
    assert expected.tolist() == [given] * counted + (ids.tolist() + [-1] * size)[:size]


@pytest.mark.parametrize("counted, sources", [(False, 1), (True, 1), (True, 3)])
@pytest.mark.parametrize("size", [0, 1, 7, 1200])
def test_local_ids(size, counted, sources):
    ids = torch.randint(-3, 100, (sources, size + counted))
    if counted:
        ids[:, 0] = 1
    for first, rows in ((0, 40), (40, 40), (80, 0)):
        local, mine = local_ids.locate(ids, sources, counted, first, rows)
        expected = local_ids.reference(ids, sources, counted, size + 1, first, rows, "0", "test")
        assert same_bytes(local, expected[0]) and same_bytes(mine, expected[1])
        kept = ids[:, int(counted) :].flatten()
        assert (
            torch.equal(kept[mine] - first, local[mine])
            and mine.sum() == ((kept >= first) & (kept < first + rows)).sum()
        )


@pytest.mark.parametrize("sources", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts_fit(sources, dtype):
    ids = torch.full((sources, 4), 99, dtype=dtype)
    for largest, fits in ((7, 1), (8, 1), (9, 0)):
        ids[:, 0] = torch.arange(largest - sources + 1, largest + 1)
        assert local_ids.counts_fit(ids.flip(0).contiguous(), sources, 8, turns=3) == fits


@pytest.mark.parametrize(
    "width, dtype", [(160, torch.bfloat16), (160, torch.uint8), (3, torch.bfloat16), (5, torch.uint8)]
)
@pytest.mark.parametrize("rows, num_ranks", [(101, 3), (5, 4), (64, 2)])
def test_peer_lookup(rows, num_ranks, width, dtype):
    """Shards of one process stand for those of several: the kernel sees addresses."""
    table, shards = random_table(rows, width, dtype), []
    for rank in range(num_ranks):
        layout = Layout(rows, rank, num_ranks, num_ranks, "table", "0", "", "0")
        shard = torch.zeros(layout.rows_per_rank, width, dtype=dtype)
        shard[: layout.num_local_rows] = table[layout.first_row :][: layout.num_local_rows]
        shards.append(shard)
    peers = torch.tensor([shard.data_ptr() for shard in shards])
    per_rank = shards[0].shape[0]
    edges = [e + d for e, d in itertools.product(range(0, rows + 1, per_rank), (-1, 0, 1)) if 0 <= e + d < rows]
    ids = torch.tensor([*edges, rows - 1])
    for given in (ids, ids.int(), ids[:0], ids.expand(2, -1)):
        for shard in shards[:2]:
            assert same_bytes(peer_lookup.launch(shard, given, peers, rows, "0", "test"), table[given.long()])
    outside = peer_lookup.launch(shards[0], torch.tensor([-1, rows, 2**40, -(2**40)]), peers, rows, "0", "test")
    assert not outside.view(torch.uint8).any()


def test_peer_lookup_refuses_what_it_cannot_read():
    shard, peers = torch.zeros(2, 4), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="pass integers"):
        peer_lookup.launch(shard, torch.zeros(1), peers, 2, "0", "test")
    with pytest.raises(ValueError, match="shard, ids and peers lie on"):
        peer_lookup.launch(shard, torch.zeros(1, dtype=torch.int64, device="meta"), peers, 2, "0", "test")
    with pytest.raises(ValueError, match="choose another Config.etp_lowering"):
        torch.ops.ple.peer_lookup(shard, torch.zeros(1, dtype=torch.int64), peers, 2, "0", "test")
