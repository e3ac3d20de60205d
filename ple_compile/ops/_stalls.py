"""How long streams stand still at `ple::lookup_wait`; measured only between `measure(True)` and `measure(False)`.

A pair of timing events stands around each wait: the first is reached when all earlier work of the stream is done, the
second when the rows are there too. Nothing waits for the device until `read`, which waits for the last pair. Events in
a CUDA graph carry no times, so a wait that is captured is not measured, nor are its replays.
"""

from collections import deque

import torch

_measuring = False
_pairs: deque[tuple[torch.Event, torch.Event]] = deque()
_timed = 0
_milliseconds = 0.0


def measure(on: bool, *, timed: int = 0, microseconds: int = 0) -> None:
    """Switch measuring on or off, and go on from these totals; waits that were not read yet are forgotten."""
    global _measuring, _timed, _milliseconds
    _measuring, _timed, _milliseconds = on, timed, microseconds / 1000
    _pairs.clear()


def wait(stream: torch.Stream, event: torch.Event) -> None:
    """Let `stream` wait for `event`."""
    if not _measuring or torch.cuda.is_current_stream_capturing():
        stream.wait_event(event)
        return
    before, after = (torch.Event(stream.device, enable_timing=True) for _ in range(2))
    stream.record_event(before)
    stream.wait_event(event)
    stream.record_event(after)
    _pairs.append((before, after))
    while _pairs and _pairs[0][1].query():
        _add_first()


def no_wait() -> None:
    """Rows that were there before they were asked for: what the CPU does."""
    global _timed
    _timed += _measuring


def read() -> dict[str, int]:
    """Waits measured and the time they took; nothing where none is asked for."""
    while _pairs:
        _pairs[0][1].synchronize()
        _add_first()
    return {"timed_waits": _timed, "stall_us": round(1000 * _milliseconds)} if _measuring else {}


def _add_first() -> None:
    global _timed, _milliseconds
    before, after = _pairs.popleft()
    _timed += 1
    _milliseconds += before.elapsed_time(after)
