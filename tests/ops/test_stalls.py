"""Stalls at `lookup_wait`, on streams and events that only keep time."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

import ple_compile
from ple_compile.ops import lookup_async
from ple_compile.ops._host_reads import Gather
from ple_compile.stats import restore_stats


@dataclasses.dataclass(eq=False)
class Event:
    """Happens at `at`, on a device that has come as far as `Device.now`."""

    device: object = None
    enable_timing: bool = False
    at: float = 0.0

    def query(self) -> bool:
        return self.at <= Device.now

    def synchronize(self) -> None:
        Device.now = max(Device.now, self.at)

    def elapsed_time(self, end: "Event") -> float:
        assert self.enable_timing and end.enable_timing and end.query()
        return end.at - self.at


class Device:
    now = 0.0


class Stream:
    device, at = torch.device("cpu"), 0.0

    def record_event(self, event: Event) -> None:
        event.at = self.at

    def wait_event(self, event: Event) -> None:
        self.at = max(self.at, event.at)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    main = Stream()
    monkeypatch.setattr(Device, "now", 0.0)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield main
    ple_compile.reset_stats()


def wait(stream: Stream, *, rows_at: float) -> None:
    """A lookup whose rows arrive at `rows_at`, in milliseconds, is waited for."""
    rows, flight = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    flight.transfer = lookup_async._Transfer(rows, Gather(lambda: None), stream, Event(at=rows_at), captured=False)
    assert lookup_async.wait_on_cuda(flight, rows, rows) is rows


def stalls() -> tuple[int, int]:
    found = ple_compile.stats()
    return found["timed_waits"], found["stall_us"]


def test_the_time_between_the_wait_and_the_rows(stream: Stream) -> None:
    ple_compile.reset_stats(stalls=True)
    wait(stream, rows_at=2.5)
    stream.at = 10
    wait(stream, rows_at=9.0)  # there already
    assert Device.now == 0, "a wait waited for the device"
    assert stalls() == (2, 2500) and Device.now == 10
    wait(stream, rows_at=10.25)
    assert stalls() == (3, 2750)
    ple_compile.reset_stats(stalls=True)
    assert stalls() == (0, 0)


def test_finished_pairs_are_not_kept(stream: Stream) -> None:
    ple_compile.reset_stats(stalls=True)
    for step in range(5):
        wait(stream, rows_at=step + 1)
        Device.now = stream.at
    assert len(lookup_async._stalls._pairs) == 1


def test_nothing_is_recorded_unasked_or_while_a_graph_is_captured(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(event: Event) -> None:
        raise AssertionError("recorded")

    monkeypatch.setattr(stream, "record_event", refuse)
    ple_compile.reset_stats(stalls=True)
    ple_compile.reset_stats()
    wait(stream, rows_at=1)
    assert stream.at == 1 and "timed_waits" not in ple_compile.stats()
    ple_compile.reset_stats(stalls=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    flight = torch.zeros(1, dtype=torch.int64)
    flight.transfer = lookup_async._Transfer(flight, Gather(lambda: None), stream, Event(at=3.0), captured=True)
    lookup_async.wait_on_cuda(flight, flight, flight)
    assert stream.at == 3 and stalls() == (0, 0)


def test_stalls_are_put_back(stream: Stream) -> None:
    """What `explain` does around the call that it watches."""
    ple_compile.reset_stats(stalls=True)
    wait(stream, rows_at=2.0)
    before = ple_compile.stats()
    wait(stream, rows_at=5.0)
    restore_stats(before)
    assert ple_compile.stats() == before
    wait(stream, rows_at=6.0)
    assert stalls() == (2, 3000)
