"""Run-time counters. What compiled code adds to them is known from sizes alone: nothing waits for the device."""

from ple_compile.ops import _stalls
from ple_compile.tables import hot_rows

_counts = dict.fromkeys(
    ("ple_executions", "rows_looked_up", "host_table_bytes", "bytes_from_other_ranks", "prefetched_lookups"), 0
)
_hits_before = 0


def count_call(**counts: int) -> None:
    """Add what one call of a compiled function did."""
    for name, count in counts.items():
        _counts[name] += count


def stats() -> dict[str, int]:
    """Counters since import or `reset_stats()`.

    ple_executions: PLE layers run with their PLE ops fused (the gate, and no fusion declined), one per layer and call
        of a compiled function; replays of a CUDA graph that the user captured around compiled code run no Python and
        are not counted.
    rows_looked_up: rows that those calls looked up in n-gram tables, repeated ones counted each time.
    host_table_bytes: bytes of those rows that lie in page-locked host memory, which the GPU reads over PCIe unless the
        cache of hot rows holds them (shards of a table, of which each rank reads its part, are not counted).
    bytes_from_other_ranks: bytes that this rank received from other ranks for its lookups in sharded tables: rows, and
        ids where the lowering sends them. Computed, not measured: collectives count as rings, padding included, ids as
        spread evenly over the rows, and, where it matters (`all_to_all`, lookups that were not lowered), other ranks as
        looking up as many rows as this one. Inside a node they come over NVLink, where there is one.
    prefetched_lookups: lookups in host tables that were started ahead of their use, and waited for.
    hot_row_hits: rows found in the caches that `offload_tables(gpu_cache_bytes=...)` made. Reading it waits for the
        device, where there is such a cache.

    After `reset_stats(stalls=True)` also, and reading them waits for the device:

    timed_waits: waits for prefetched lookups whose stall was measured. Fewer than `prefetched_lookups` where CUDA
        graphs replay: nothing is known of the stalls there.
    stall_us: microseconds that the GPU stood still in those waits, all together, because rows were not there yet. Each
        wait adds the time between two neighbouring events even if they were. On a CPU it is 0.
    """
    return {**_counts, "hot_row_hits": _hits() - _hits_before, **_stalls.read()}


def reset_stats(*, stalls: bool = False) -> None:
    """Set every counter of `stats()` to zero; with `stalls`, measure until the next reset how long prefetched lookups
    keep the GPU waiting, by two events around each wait."""
    zeros = dict.fromkeys((*_counts, "hot_row_hits"), 0)
    restore_stats({**zeros, "timed_waits": 0, "stall_us": 0} if stalls else zeros)


def restore_stats(values: dict[str, int]) -> None:
    """Put counters back to what `stats()` said earlier."""
    global _hits_before
    _counts.update({name: values[name] for name in _counts})
    _hits_before = _hits() - values["hot_row_hits"]
    _stalls.measure("stall_us" in values, timed=values.get("timed_waits", 0), microseconds=values.get("stall_us", 0))


def _hits() -> int:
    return sum(cache.counts()["hits"] for cache in hot_rows.caches())
