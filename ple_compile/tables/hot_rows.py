"""The most used rows of a host table, kept in GPU memory and filled by the lookups themselves.

Set-associative: a row may lie in any of 8 ways of the one set that its id hashes to. One int64 word per way says what
it holds: 40 bits of row id, 8 bits of count, 16 bits of the batch that put it there. A hit adds one to the count, at
most once per batch. A miss takes a free way of its set, or one whose count is zero; when there is none, it takes one
from every count of the set and is not kept. So a row seen once makes room for the next, and a row seen again stays
for as many such misses as it was hit.

One lookup is eight launches, none of which the host waits for:
    prepare  take the cache for this lookup, clear the table of the election and the counts of the leaders
    probe    per id: a hit, or the election of one leader among the positions that miss the same row; leaders choose a
             way and write its word (words only: the data that hits point at stays until `fetch`)
    (scan, place   list the leaders by the address of their rows: `_address_order`)
    hits     copy rows out of the cache
    fetch    leaders' rows from the host, into the result and into the ways they chose; a bounded grid, which may run
             beside other work
    release  give the cache back
    follow   copy the leaders' rows to the other positions

Exact by construction: a word stamped with this batch is no hit for this batch, since its data is not there yet; words
change by compare-and-swap only; and a lookup that finds the cache taken by a lookup on another stream goes without.
Rows are copies: after a change of the table in place, `clear` (a lookup from Python sees the table's version change
and clears, as every call of compiled code does; the replay of a CUDA graph that the user captured cannot).
"""

import contextlib
import weakref
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ple_compile.ops import _address_order, _host_reads
from ple_compile.ops._address_order import UNLISTED, bucket_of
from ple_compile.ops._sizes import cdiv, next_power_of_2
from ple_compile.ops._words import in_words, word_type

WAYS = tl.constexpr(8)
# Below this many ids the fixed cost of the launches is larger than what the cache saves.
MIN_IDS = 2048

_ID_MASK = tl.constexpr((1 << 40) - 1)  # also the id of a free way
_COUNT_ONE = tl.constexpr(1 << 40)
_COUNT_MAX = tl.constexpr(15)
_HASH = tl.constexpr(-7046029254386353131)  # 2**64 / golden ratio, as int64
# Idle lanes of a compare-and-swap point behind the real cells, each at its own: one address for all would be a queue.
_IDLE_CELLS = tl.constexpr(256)
_NO_WAY = tl.constexpr(1 << 20)  # a rank above every count
# What `source` says of a position that is neither a hit (its cell) nor a follower (-2 - leader).
_LEADER = tl.constexpr(-1)
_OUTSIDE = tl.constexpr(-(2**31))

# Address of the table's first row, and device -> its cache.
_CACHES: dict[tuple[int, torch.device], "HotRows"] = {}
# Replaced caches whose memory CUDA graphs that were captured with them read at every replay.
_RETIRED: dict[tuple[int, torch.device], list["HotRows"]] = {}


class HotRows:
    """The cache of one table on one device."""

    def __init__(self, table: Tensor, nbytes: int, device: torch.device | str):
        row_bytes = table.shape[1] * table.element_size()
        self.num_sets = num_sets(table, nbytes)
        self._table = weakref.ref(table)
        self._version = _version(table)
        self._layout = _layout(table)
        self._captured = False
        cells = self.num_sets * WAYS.value
        self.rows = torch.empty((cells, row_bytes), dtype=torch.uint8, device=device)
        self.words = torch.full((cells + _IDLE_CELLS.value,), _ID_MASK.value, dtype=torch.int64, device=device)
        self._state = torch.zeros(2, dtype=torch.int32, device=device)  # taken, batch number
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)

    def counts(self) -> dict[str, int]:
        """Rows looked up, found here, and fetched from the host since the last `reset_counts`. Synchronises."""
        looked_up, hits, fetched = self._counts.tolist()
        return {"looked_up": looked_up, "hits": hits, "fetched": fetched}

    def reset_counts(self) -> None:
        self._counts.zero_()

    def clear(self) -> None:
        """Forget every row. Waits for the lookups in flight."""
        if self.words.is_cuda:
            torch.cuda.synchronize(self.words.device)
        self.words.fill_(_ID_MASK.value)
        if self.words.is_cuda:
            torch.cuda.synchronize(self.words.device)
        table = self._table()
        if table is not None:
            self._version = _version(table)

    def holds(self, ids: Tensor) -> Tensor:
        """Which ids a lookup would find now."""
        hashed = (ids.long() * _HASH.value) >> 32 & 0xFFFFFFFF
        sets = hashed * self.num_sets >> 32
        held = self.words[: -_IDLE_CELLS.value].view(self.num_sets, WAYS.value) & _ID_MASK.value
        return (held[sets] == ids[..., None]).any(-1)

    def is_current(self) -> bool:
        """Whether the cached rows are the table's; clears them when the table was changed in place."""
        table = self._table()
        if table is None or table.data_ptr() != self._layout[0]:
            return False
        if _version(table) == self._version:
            return True
        if self.words.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        self.clear()
        return True

    def serve(self, table: Tensor) -> None:
        """Begin anew, empty, for the same memory; `table` may be another tensor on it."""
        self._table = weakref.ref(table)
        self.clear()

    def prepared(self, rows: Tensor, table: Tensor, ids: Tensor) -> _host_reads.Gather:
        """The lookup of contiguous `ids`, not empty, into contiguous `rows`."""
        self._captured |= self.words.is_cuda and torch.cuda.is_current_stream_capturing()
        with self._emptied_on_failure():
            return self._prepared(rows, table, ids)

    @contextlib.contextmanager
    def _emptied_on_failure(self) -> Iterator[None]:
        """No word outlives a failure whose row was not fetched, nor does a cache stay taken that nobody gives back."""
        try:
            yield
        except BaseException:
            # Of what a capture records nothing has run.
            if not (self.words.is_cuda and torch.cuda.is_current_stream_capturing()):
                self.clear()
                self._state.zero_()
            raise

    def _prepared(self, rows: Tensor, table: Tensor, ids: Tensor) -> _host_reads.Gather:
        num_ids, num_rows = ids.numel(), table.shape[0]
        num_cells = next_power_of_2(2 * num_ids)
        num_counts = _address_order.NUM_COUNTS
        cleared = ids.new_empty(num_counts + num_cells + _IDLE_CELLS.value, dtype=torch.int32)
        counts, election = cleared[:num_counts], cleared[num_counts:]
        header = ids.new_empty(2, dtype=torch.int32)  # this lookup has the cache, batch number
        source, claim, ranks = (ids.new_empty(num_ids, dtype=torch.int32) for _ in range(3))

        prepare_kernel[(cdiv(cleared.numel(), 1024),)](cleared, header, self._state, cleared.numel(), BLOCK=1024)
        # As many ids as threads, so that no two threads hold the same lane of a compare-and-swap.
        probe_kernel[(cdiv(num_ids, _IDLE_CELLS.value),)](
            source,
            claim,
            ranks,
            counts,
            election,
            header,
            self._counts,
            self.words,
            ids,
            num_ids,
            num_rows,
            _address_order.bucket_shift(num_rows),
            self.num_sets,
            num_cells,
            num_warps=_IDLE_CELLS.value // 32,
        )
        leading, leaders = _address_order.listed(ids, ranks, counts, num_rows)

        word = word_type(table)
        row_words = in_words(table.shape[1], table, word)
        block_words = next_power_of_2(row_words)
        block_rows = max(1, min(_host_reads.MOST_ROWS, _host_reads.TILE_WORDS // block_words))
        tile = dict(
            WORD=word,
            ROW_WORDS=row_words,
            BLOCK_ROWS=block_rows,
            BLOCK_WORDS=block_words,
            num_warps=_host_reads.NUM_WARPS,
        )
        blocks = cdiv(num_ids, block_rows)
        host = min(_host_reads.PROGRAMS, blocks)
        stride = in_words(table.stride(0), table, word)
        hits_kernel[(blocks,)](rows, self.rows, source, num_ids, **tile)

        def fetch() -> None:
            with self._emptied_on_failure():
                fetch_kernel[(host,)](
                    rows,
                    self.rows,
                    table,
                    leading,
                    leaders,
                    claim,
                    counts[-1:],
                    host * block_rows,
                    ROW_STRIDE=stride,
                    **tile,
                )
                release_kernel[(1,)](header, self._state)

        return _host_reads.Gather(fetch, lambda: follow_kernel[(blocks,)](rows, source, num_ids, **tile))


def num_sets(table: Tensor, nbytes: int) -> int:
    """How many sets of rows a cache of `nbytes` has. Raises ValueError where that is none, or the table too long."""
    row_bytes = table.shape[1] * table.element_size()
    set_bytes = WAYS.value * (row_bytes + 8)
    count, most = nbytes // set_bytes, (2**31 - 1) // WAYS.value
    if not 1 <= count <= most:
        raise ValueError(
            f"gpu_cache_bytes: {nbytes} bytes make {count} sets of {WAYS.value} rows of {row_bytes} bytes; pass "
            f"{set_bytes} to {most * set_bytes} bytes for each table, or 0 for no cache"
        )
    if table.shape[0] >= _ID_MASK.value:
        raise ValueError(f"gpu_cache_bytes: {table.shape[0]} rows are too many for a cache; pass 0")
    return count


def attach(table: Tensor, nbytes: int, device: torch.device) -> HotRows:
    """Give the table a cache on the device, in place of earlier ones; it goes with the table's memory.

    One that is there already and is as large stays where it is, emptied.
    """
    key, sets = (table.data_ptr(), device), num_sets(table, nbytes)
    present = _CACHES.get(key)
    kept = present is not None and present.num_sets == sets and present._layout == _layout(table)
    _drop([other for other in _keys(table) if other != key or not kept])
    if present is not None and kept:
        present.serve(table)
        return present
    cache = _CACHES[key] = HotRows(table, nbytes, device)
    weakref.finalize(table.untyped_storage(), _forget, key, weakref.ref(cache)).atexit = False
    return cache


def caches() -> list[HotRows]:
    """Every cache there is."""
    return [*_CACHES.values(), *(cache for retired in _RETIRED.values() for cache in retired)]


def detach(table: Tensor) -> None:
    """Take the table's caches away."""
    _drop(_keys(table))


def clear(table: Tensor) -> None:
    """Empty the table's caches: for a write that lookups cannot see."""
    for cache in _of(table):
        cache.clear()


def drop_outdated(table: Tensor) -> None:
    """Empty those of the table's caches that hold rows of an earlier state of it."""
    for cache in _of(table):
        cache.is_current()


def cache_of(table: Tensor, device: torch.device) -> HotRows | None:
    """The table's cache on the device; the table may be the host tensor or its CUDA view, but no part of it."""
    if not _CACHES:
        return None
    cache = _CACHES.get((table.data_ptr(), device))
    return cache if cache is not None and cache._layout == _layout(table) else None


def _keys(table: Tensor) -> list[tuple[int, torch.device]]:
    address = table.data_ptr()
    return [key for key in _CACHES if key[0] == address]


def _of(table: Tensor) -> list[HotRows]:
    address = table.data_ptr()
    return [cache for cache in caches() if cache._layout[0] == address]


def _drop(keys: list[tuple[int, torch.device]]) -> None:
    for key in keys:
        cache = _CACHES.pop(key)
        if cache._captured:
            cache.clear()
            _RETIRED.setdefault(key, []).append(cache)


def _forget(key: tuple[int, torch.device], cache: "weakref.ref[HotRows]") -> None:
    gone = cache()
    if gone is not None and _CACHES.get(key) is gone:
        del _CACHES[key]
    if gone in (retired := _RETIRED.get(key, [])):
        retired.remove(gone)
        if not retired:
            del _RETIRED[key]


def _layout(table: Tensor) -> tuple[int, int, int, int]:
    """What a row id means: first row, distance of rows, their bytes, their number."""
    size = table.element_size()
    return table.data_ptr(), table.stride(0) * size, table.shape[1] * size, table.shape[0]


def _version(table: Tensor) -> int:
    return 0 if table.is_inference() else table._version


@triton.jit(do_not_specialize=["num_cells"])
def prepare_kernel(cleared_ptr, header_ptr, state_ptr, num_cells, BLOCK: tl.constexpr):
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(cleared_ptr + cell, tl.zeros([BLOCK], tl.int32), mask=cell < num_cells)
    if tl.program_id(0) == 0:
        taken = tl.atomic_cas(state_ptr, 0, 1)
        # Batch numbers run from 1 to 65535: 0 belongs to free ways.
        batch = tl.load(state_ptr + 1) % 65535 + 1
        if taken == 0:
            tl.store(state_ptr + 1, batch)
        tl.store(header_ptr, 1 - taken)
        tl.store(header_ptr + 1, batch)


@triton.jit
def release_kernel(header_ptr, state_ptr):
    if tl.load(header_ptr) == 1:
        tl.atomic_xchg(state_ptr, 0)


@triton.jit(do_not_specialize=["num_ids", "num_rows", "shift", "num_sets", "num_cells"])
def probe_kernel(
    source_ptr,
    claim_ptr,
    ranks_ptr,
    counts_ptr,
    election_ptr,
    header_ptr,
    totals_ptr,
    words_ptr,
    ids_ptr,
    num_ids,
    num_rows,
    shift,
    num_sets,
    num_cells,
):
    BLOCK: tl.constexpr = _IDLE_CELLS
    lane = tl.arange(0, BLOCK)
    index = tl.program_id(0) * BLOCK + lane
    row = tl.load(ids_ptr + index, mask=index < num_ids, other=-1).to(tl.int64)
    inside = (row >= 0) & (row < num_rows)
    # Loaded per lane: Triton's interpreter turns a mask combined with a scalar condition into integers.
    searched = inside & (tl.load(header_ptr + 0 * lane) == 1)
    batch = tl.load(header_ptr + 1).to(tl.int64)
    hashed = row * _HASH

    # Look through the ways of the row's set; remember the cheapest one that this batch has not taken.
    first = ((((hashed >> 32) & 0xFFFFFFFF) * num_sets) >> 32) * WAYS
    idle_cell = (num_sets * WAYS + lane).to(tl.int64)
    hit = index < 0
    hit_cell, hit_word = idle_cell, tl.zeros([BLOCK], tl.int64)
    cheapest_cell, cheapest_word = idle_cell, tl.zeros([BLOCK], tl.int64)
    cheapest_rank = tl.zeros([BLOCK], tl.int64) + _NO_WAY
    for way in tl.static_range(WAYS):
        word = tl.load(words_ptr + first + way, mask=searched, other=_ID_MASK)
        held = word & _ID_MASK
        count = (word >> 40) & 0xFF
        not_yet = ((word >> 48) & 0xFFFF) != batch
        match = searched & (held == row) & not_yet
        hit_cell, hit_word = tl.where(match, first + way, hit_cell), tl.where(match, word, hit_word)
        hit = hit | match
        rank = tl.where(held == _ID_MASK, -1, count)
        cheaper = searched & not_yet & (rank < cheapest_rank)
        cheapest_cell, cheapest_word = (
            tl.where(cheaper, first + way, cheapest_cell),
            tl.where(cheaper, word, cheapest_word),
        )
        cheapest_rank = tl.where(cheaper, rank, cheapest_rank)

    # Idle lanes compare with a word that no cell ever holds.
    counted = hit & (((hit_word >> 40) & 0xFF) < _COUNT_MAX)
    tl.atomic_cas(
        words_ptr + tl.where(counted, hit_cell, idle_cell), tl.where(counted, hit_word, -1), hit_word + _COUNT_ONE
    )

    # Election by open addressing: the first position to enter a row's cell leads the others.
    waiting = inside & ~hit
    leads = index < 0
    leader = index
    cell = ((hashed >> 33) & (num_cells - 1)).to(tl.int32)
    while tl.max(waiting.to(tl.int32), axis=0) > 0:
        entry = election_ptr + tl.where(waiting, cell, num_cells + lane)
        before = tl.atomic_cas(entry, tl.where(waiting, 0, -1), index + 1)
        won = waiting & (before == 0)
        other = tl.load(ids_ptr + before - 1, mask=waiting & (before > 0), other=-1).to(tl.int64)
        follows = waiting & (before > 0) & (other == row)
        leader = tl.where(follows, before - 1, leader)
        leads = leads | won
        waiting = waiting & ~(won | follows)
        cell = (cell + 1) & (num_cells - 1)

    wanted = index < num_ids
    rank = tl.atomic_add(counts_ptr + bucket_of(row, shift), 1, mask=leads)
    tl.store(ranks_ptr + index, tl.where(leads, rank, UNLISTED), mask=wanted)

    # Leaders take a free way or one whose count is zero; whoever comes second goes without.
    takes = leads & (cheapest_rank <= 0)
    found = tl.atomic_cas(
        words_ptr + tl.where(takes, cheapest_cell, idle_cell),
        tl.where(takes, cheapest_word, -1),
        (batch << 48) | row,
    )
    claimed = takes & (found == cheapest_word)
    # Where there is none, the whole set ages.
    ages = leads & (cheapest_rank > 0) & (cheapest_rank < _NO_WAY)
    for way in tl.static_range(WAYS):
        word = tl.load(words_ptr + first + way, mask=ages, other=_ID_MASK)
        lowers = ages & (((word >> 40) & 0xFF) > 0) & (((word >> 48) & 0xFFFF) != batch)
        tl.atomic_cas(
            words_ptr + tl.where(lowers, first + way, idle_cell), tl.where(lowers, word, -1), word - _COUNT_ONE
        )

    source = tl.where(hit, hit_cell.to(tl.int32), tl.where(leads, _LEADER, -2 - leader))
    tl.store(source_ptr + index, tl.where(inside, source, _OUTSIDE), mask=wanted)
    tl.store(claim_ptr + index, tl.where(claimed, cheapest_cell.to(tl.int32), -1), mask=wanted)
    tl.atomic_add(totals_ptr, tl.sum(inside.to(tl.int64), axis=0))
    tl.atomic_add(totals_ptr + 1, tl.sum(hit.to(tl.int64), axis=0))
    tl.atomic_add(totals_ptr + 2, tl.sum(leads.to(tl.int64), axis=0))


@triton.jit(do_not_specialize=["step"])
def fetch_kernel(
    rows_ptr,
    cache_ptr,
    table_ptr,
    leading_ptr,
    leaders_ptr,
    claim_ptr,
    num_leaders_ptr,
    step,
    ROW_STRIDE: tl.constexpr,
    WORD: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    table_words = table_ptr.to(tl.pointer_type(WORD))
    row_words = rows_ptr.to(tl.pointer_type(WORD))
    cache_words = cache_ptr.to(tl.pointer_type(WORD))
    word = tl.arange(0, BLOCK_WORDS)
    real_word = (word < ROW_WORDS)[None, :]
    num_leaders = tl.load(num_leaders_ptr)
    start = tl.program_id(0) * BLOCK_ROWS
    place = start + tl.arange(0, BLOCK_ROWS)
    row = tl.load(leading_ptr + place, mask=place < num_leaders, other=0).to(tl.int64)
    while start < num_leaders:
        wanted = place < num_leaders
        words = tl.load(
            table_words + row[:, None] * ROW_STRIDE + word[None, :], mask=wanted[:, None] & real_word, other=0
        )
        position = tl.load(leaders_ptr + place, mask=wanted, other=0).to(tl.int64)
        claim = tl.load(claim_ptr + position, mask=wanted, other=-1).to(tl.int64)
        # The next ids arrive while these rows are on their way.
        start += step
        place += step
        row = tl.load(leading_ptr + place, mask=place < num_leaders, other=0).to(tl.int64)
        tl.store(row_words + position[:, None] * ROW_WORDS + word[None, :], words, mask=wanted[:, None] & real_word)
        tl.store(
            cache_words + claim[:, None] * ROW_WORDS + word[None, :], words, mask=(claim >= 0)[:, None] & real_word
        )


@triton.jit(do_not_specialize=["num_ids"])
def hits_kernel(
    rows_ptr,
    cache_ptr,
    source_ptr,
    num_ids,
    WORD: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """Rows of ids outside the table become zeros."""
    index = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    source = tl.load(source_ptr + index, mask=index < num_ids, other=_LEADER).to(tl.int64)
    outside = source == _OUTSIDE
    copy_rows(rows_ptr, index, cache_ptr, source, source >= 0, outside, WORD, ROW_WORDS, BLOCK_WORDS)


@triton.jit(do_not_specialize=["num_ids"])
def follow_kernel(
    rows_ptr,
    source_ptr,
    num_ids,
    WORD: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    source = tl.load(source_ptr + index, mask=index < num_ids, other=_LEADER).to(tl.int64)
    follows = (source < _LEADER) & (source > _OUTSIDE)
    copy_rows(rows_ptr, index, rows_ptr, -2 - source, follows, index < 0, WORD, ROW_WORDS, BLOCK_WORDS)


@triton.jit
def copy_rows(
    rows_ptr,
    index,
    from_ptr,
    source,
    copied,
    zeroed,
    WORD: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    word = tl.arange(0, BLOCK_WORDS)[None, :]
    words = tl.load(
        from_ptr.to(tl.pointer_type(WORD)) + source[:, None] * ROW_WORDS + word,
        mask=copied[:, None] & (word < ROW_WORDS),
        other=0,
    )
    tl.store(
        rows_ptr.to(tl.pointer_type(WORD)) + index.to(tl.int64)[:, None] * ROW_WORDS + word,
        words,
        mask=(copied | zeroed)[:, None] & (word < ROW_WORDS),
    )
