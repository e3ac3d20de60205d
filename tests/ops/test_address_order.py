"""The counting sort: every listed id once, at its own position, buckets in order."""

import pytest
import torch

from ple_compile.ops import _address_order as op


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_ids, num_rows", [(1, 1), (7, 20_000), (3000, 20_000), (3000, 50), (2100, 320_001_536)])
def test_every_id_once_and_by_bucket(num_ids, num_rows, ids_dtype):
    ids = torch.randint(0, num_rows, (num_ids,), dtype=ids_dtype)
    ordered, positions = op.address_order(ids, num_rows)
    assert ordered.dtype == ids_dtype and positions.dtype == torch.int32
    assert positions.sort().values.tolist() == list(range(num_ids))
    assert torch.equal(ordered, ids[positions.long()])
    assert num_ids == 1 or (ordered >> op.bucket_shift(num_rows)).diff().min() >= 0


def test_one_row_many_times():
    ids = torch.full((5000,), 19_999)
    ordered, positions = op.address_order(ids, 20_000)
    assert torch.equal(ordered, ids) and positions.unique().numel() == 5000


def test_ids_outside_the_table_keep_their_positions():
    ids = torch.randint(0, 20_000, (3000,))
    ids[::7], ids[3::7] = -1, 2**62
    ordered, positions = op.address_order(ids, 20_000)
    assert positions.unique().numel() == 3000 and torch.equal(ordered, ids[positions.long()])


def test_only_ids_with_a_rank_are_listed():
    ids, ranks = torch.tensor([9000, 5, 19_000, 5, 9000]), torch.tensor([0, -1, 0, -1, 1], dtype=torch.int32)
    counts = torch.zeros(op.NUM_COUNTS, dtype=torch.int32)
    for id, count in ((9000, 2), (19_000, 1)):
        counts[id >> op.bucket_shift(20_000)] += count
    ordered, positions = op.listed(ids, ranks, counts, 20_000)
    assert counts[-1] == 3
    assert ordered[:3].tolist() == [9000, 9000, 19_000] and positions[:3].tolist() == [0, 4, 2]


@pytest.mark.parametrize("num_rows", [1, 2, 2**14, 2**14 + 1, 320_001_536])
def test_buckets(num_rows):
    last = (num_rows - 1) >> op.bucket_shift(num_rows)
    assert last < op.NUM_BUCKETS and (last >= op.NUM_BUCKETS // 2 or last == num_rows - 1)
