"""The hot-row cache: exact whatever happens to it; kernels run in Triton's interpreter."""

import gc

import pytest
import torch
from triton.runtime.errors import OutOfResources

import ple_compile
from ple_compile.stats import restore_stats
from ple_compile.tables import hot_rows
from ple_compile.tables.hot_rows import HotRows
from tests.faults import does_not_compile, fail_at

ROWS, WIDTH = 5000, 20
ROW_BYTES = WIDTH * 2
SET_BYTES = 8 * (ROW_BYTES + 8)


@pytest.fixture
def table():
    torch.manual_seed(0)
    return torch.randint(0, 256, (ROWS, ROW_BYTES), dtype=torch.uint8).view(torch.bfloat16)


def zipf(count, seed, exponent=1.2, rows=ROWS):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.arange(1, rows + 1, dtype=torch.float64) ** -exponent
    ids = torch.multinomial(weights, count, replacement=True, generator=generator)
    return ids * 2654435761 % rows


def draw_distinct(count, seed):
    """Ids that are each seen once, none of them below 100."""
    return 100 + torch.randperm(ROWS - 100, generator=torch.Generator().manual_seed(seed))[:count]


def look_up(cache, table, ids):
    rows = torch.full((*ids.shape, table.shape[1]), 7.0, dtype=table.dtype)
    gather = cache.prepared(rows, table, ids)
    gather.fetch()
    gather.finish()
    return rows


def assert_exact(cache, table, ids):
    rows = look_up(cache, table, ids)
    assert torch.equal(rows.view(torch.uint8), table[ids.long()].view(torch.uint8))
    assert cache._state[0] == 0, "the cache was not given back"


@pytest.mark.parametrize("num_sets", [1, 3, 40, 1000])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_exact_over_many_batches(table, num_sets, ids_dtype):
    cache = HotRows(table, num_sets * SET_BYTES, "cpu")
    assert cache.num_sets == num_sets
    for seed in range(4):
        assert_exact(cache, table, zipf(700, seed).to(ids_dtype).view(70, 10))


def test_rows_outside_the_table_are_zeros(table):
    cache = HotRows(table, 40 * SET_BYTES, "cpu")
    for seed in range(4):
        ids = zipf(700, seed).view(70, 10)
        assert_exact(cache, table, ids)
    ids[0, :3] = torch.tensor([-1, ROWS, 2**40])
    rows = look_up(cache, table, ids)
    assert rows[0, :3].view(torch.uint8).count_nonzero() == 0
    assert torch.equal(rows[1:].view(torch.uint8), table[ids[1:]].view(torch.uint8))


def test_counts_and_each_row_is_fetched_once(table):
    cache = HotRows(table, 1000 * SET_BYTES, "cpu")
    ids = zipf(1000, 0)
    distinct = ids.unique().numel()
    assert distinct < 600
    assert_exact(cache, table, ids)
    assert cache.counts() == {"looked_up": 1000, "hits": 0, "fetched": distinct}
    kept = cache.holds(ids)
    assert kept.float().mean() > 0.95
    cache.reset_counts()
    assert_exact(cache, table, ids)
    counts = cache.counts()
    assert counts["hits"] == kept.sum() and counts["fetched"] == ids[~kept].unique().numel()


def test_a_full_batch_of_one_row(table):
    cache = HotRows(table, 4 * SET_BYTES, "cpu")
    ids = torch.full((600,), 4321)
    for hits in (0, 600):
        cache.reset_counts()
        assert_exact(cache, table, ids)
        assert cache.counts()["hits"] == hits and cache.counts()["fetched"] == (hits == 0)


def test_used_rows_stay_and_others_make_room(table):
    cache = HotRows(table, 8 * SET_BYTES, "cpu")
    hot = torch.arange(24)
    for _ in range(6):
        assert_exact(cache, table, hot)
    kept = hot[cache.holds(hot)]
    assert kept.numel() >= 20
    for seed in range(3):
        assert_exact(cache, table, draw_distinct(100, seed))
    assert cache.holds(kept).float().mean() > 0.9
    # Counts wear off: what nobody asks for any more gives way to what is in use now.
    for seed in range(25):
        for _ in range(2):
            assert_exact(cache, table, draw_distinct(120, seed))
    assert cache.holds(kept).float().mean() < 0.5


def test_counts_of_a_word_never_run_over(table):
    cache = HotRows(table, 2 * SET_BYTES, "cpu")
    for _ in range(40):
        assert_exact(cache, table, torch.tensor([7, 7, 8]))
    words = cache.words[: 2 * 8]
    held = words[(words & (2**40 - 1)) == 7]
    assert held.numel() == 1 and held.item() >> 40 & 0xFF == 15 and held.item() >> 48 & 0xFFFF == 1


def test_batch_numbers_wrap_around(table):
    cache = HotRows(table, 40 * SET_BYTES, "cpu")
    for batch in (65533, 32766):  # around the sign bit of the word, and around the wrap
        cache._state[1] = batch
        for seed in range(5):
            assert_exact(cache, table, zipf(300, seed))
            assert 1 <= cache._state[1] <= 65535


def test_a_lookup_that_finds_the_cache_taken_goes_without(table):
    cache = HotRows(table, 40 * SET_BYTES, "cpu")
    look_up(cache, table, zipf(300, 0))
    cache._state[0] = 1  # a lookup on another stream
    words, rows = cache.words.clone(), cache.rows.clone()
    cache.reset_counts()
    ids = zipf(300, 0)
    assert torch.equal(look_up(cache, table, ids).view(torch.uint8), table[ids].view(torch.uint8))
    assert torch.equal(cache.words, words) and torch.equal(cache.rows, rows) and cache._state[0] == 1
    assert cache.counts() == {"looked_up": 300, "hits": 0, "fetched": ids.unique().numel()}


def test_ids_outside_the_table(table):
    cache = HotRows(table, 40 * SET_BYTES, "cpu")
    ids = torch.tensor([-1, ROWS, 5, 2**40 - 1, -(2**63), 2**63 - 1, 6])
    for _ in range(2):
        rows = look_up(cache, table, ids)
        assert torch.equal(rows[[2, 6]].view(torch.uint8), table[[5, 6]].view(torch.uint8))
        assert not rows[[0, 1, 3, 4, 5]].view(torch.uint8).any()
    assert cache.counts()["looked_up"] == 4


def test_a_change_of_the_table_in_place_clears(table):
    cache = HotRows(table, 400 * SET_BYTES, "cpu")
    ids = zipf(300, 0)
    look_up(cache, table, ids)
    table.zero_()
    assert cache.is_current() and not cache.holds(ids).any()
    assert_exact(cache, table, ids)
    assert cache.is_current() and cache.holds(ids).any()


def test_hits_are_in_the_stats(table):
    """What `reset_stats` and `explain` put back is the sum over all caches."""
    before = ple_compile.stats()
    cache = hot_rows.attach(table, 40 * SET_BYTES, torch.device("cpu"))
    ids = torch.zeros(30, dtype=torch.int64)
    look_up(cache, table, ids)
    look_up(cache, table, ids)
    assert ple_compile.stats()["hot_row_hits"] == before["hot_row_hits"] + 30
    restore_stats(before)
    assert ple_compile.stats() == before
    ple_compile.reset_stats()
    assert not any(ple_compile.stats().values())
    look_up(cache, table, ids[:5])
    assert ple_compile.stats()["hot_row_hits"] == 5


def test_found_by_address(table):
    device = torch.device("cpu")
    assert hot_rows.cache_of(table, device) is None
    cache = hot_rows.attach(table, 40 * SET_BYTES, device)
    assert hot_rows.cache_of(table, device) is cache and hot_rows.cache_of(table.detach(), device) is cache
    # Row 0 of a part, or of another shape, is another row.
    assert hot_rows.cache_of(table[1:], device) is None and hot_rows.cache_of(table[:, :10], device) is None
    again = hot_rows.attach(table, 20 * SET_BYTES, device)
    assert hot_rows.cache_of(table, device) is again


def test_nothing_is_left_of_a_dead_table():
    gc.collect()  # Triton's interpreter keeps its arguments in cycles
    assert not hot_rows._CACHES
    table = torch.randn(10, 4)
    hot_rows.attach(table, 10_000, torch.device("cpu"))
    hot_rows.attach(table, 20_000, torch.device("cpu"))
    assert len(hot_rows._CACHES) == 1
    del table
    gc.collect()
    assert not hot_rows._CACHES
    table = torch.randn(10, 4)
    hot_rows.attach(table, 10_000, torch.device("cpu"))
    hot_rows.detach(table)
    assert not hot_rows._CACHES


@pytest.mark.parametrize("kernel", ["probe", "hits", "fetch", "release"])
def test_a_lookup_that_fails_midway_leaves_an_empty_cache_that_works(table, kernel, monkeypatch):
    """Neither words whose rows were never fetched, nor a cache that is taken for ever."""
    cache, ids = HotRows(table, 1000 * SET_BYTES, "cpu"), zipf(700, 0)
    look_up(cache, table, ids)
    with monkeypatch.context() as patch, pytest.raises(OutOfResources):
        fail_at(patch, getattr(hot_rows, f"{kernel}_kernel"), "run", 1, does_not_compile)
        look_up(cache, table, zipf(700, 1))
    assert not cache.holds(torch.arange(ROWS)).any()
    for seed in range(1, 4):
        assert_exact(cache, table, zipf(700, seed))
    assert cache.holds(zipf(700, 3)).any()


def test_too_small_a_cache_is_refused(table):
    with pytest.raises(ValueError, match=f"gpu_cache_bytes: 100 bytes make 0 sets.*pass {SET_BYTES} to"):
        HotRows(table, 100, "cpu")
