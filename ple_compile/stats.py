"""Run-time counters. What compiled code adds to them is known from sizes alone: nothing waits for the device."""

from ple_compile.tables import hot_rows

_COUNTED = ("ple_executions", "rows_looked_up", "host_table_bytes")
_counts = dict.fromkeys(_COUNTED, 0)
_hits_before = 0


def count_call(*, ple_executions: int, rows_looked_up: int, host_table_bytes: int) -> None:
    """Add what one call of a compiled function did."""
    _counts["ple_executions"] += ple_executions
    _counts["rows_looked_up"] += rows_looked_up
    _counts["host_table_bytes"] += host_table_bytes


def stats() -> dict[str, int]:
    """Counters since import or `reset_stats()`.

    ple_executions: PLE layers run with their PLE ops fused, one per layer and call of a compiled function; replays of
    a CUDA graph that the user captured around compiled code run no Python and are not counted.
    rows_looked_up: rows that those calls looked up in n-gram tables, repeated ones counted each time.
    host_table_bytes: bytes of those rows that lie in page-locked host memory, which the GPU reads over PCIe unless the
        cache of hot rows holds them (shards of a table, of which each rank reads its part, are not counted).
    hot_row_hits: rows found in the caches that `offload_tables(gpu_cache_bytes=...)` made. Reading it waits for the
        device, where there is such a cache.
    """
    return {**_counts, "hot_row_hits": _hits() - _hits_before}


def reset_stats() -> None:
    """Set every counter of `stats()` to zero."""
    restore_stats(dict.fromkeys((*_COUNTED, "hot_row_hits"), 0))


def restore_stats(values: dict[str, int]) -> None:
    """Put counters back to what `stats()` said earlier."""
    global _hits_before
    _counts.update({name: values[name] for name in _COUNTED})
    _hits_before = _hits() - values["hot_row_hits"]


def _hits() -> int:
    return sum(cache.counts()["hits"] for cache in hot_rows.caches())
