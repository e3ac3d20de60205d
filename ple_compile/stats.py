"""Run-time counters."""

_ple_executions = 0


def count_executions(layers: int) -> None:
    global _ple_executions
    _ple_executions += layers


def stats() -> dict[str, int]:
    """Counters since import or `reset_stats()`.

    ple_executions: PLE layers run with their PLE ops fused, one per layer and call of a compiled function; replays of
    a CUDA graph that the user captured around compiled code run no Python and are not counted.
    """
    return {"ple_executions": _ple_executions}


def reset_stats() -> None:
    """Set every counter of `stats()` to zero."""
    global _ple_executions
    _ple_executions = 0


def restore_stats(values: dict[str, int]) -> None:
    """Put counters back to what `stats()` said earlier."""
    global _ple_executions
    _ple_executions = values["ple_executions"]
