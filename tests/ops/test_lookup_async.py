"""The CUDA halves of a lookup on streams that only note what is launched on them; kernels run in the interpreter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ple_compile.ops import _address_order, _host_reads, lookup, lookup_async
from ple_compile.tables import hot_rows


class Stream:
    """Notes in `events` which stream waits for which, and what runs while it is the current one."""

    device = torch.device("cpu")

    def __init__(self, name: str, events: list[str]):
        self.name, self.events = name, events
        self.recorded = 0

    def wait_stream(self, other: "Stream") -> None:
        self.events.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.recorded += 1
        self.events.append(f"{self.name} records {self.recorded}")
        return f"{self.recorded} of {self.name}"

    def wait_event(self, event: str) -> None:
        self.events.append(f"{self.name} waits for {event}")

    def __enter__(self) -> None:
        self.events.append(f"on {self.name}")

    def __exit__(self, *_: object) -> None:
        self.events.append("on main")


# The main stream goes on when the side stream has come to the gather, and later waits for all of it.
FORK = ["side waits for main", "side records 1", "on side"]
JOIN = ["on main", "main waits for 1 of side", "side records 2", "main waits for 2 of side"]

KERNELS = [f"{name}_kernel" for name in ("prepare", "probe", "hits", "fetch", "release", "follow")]


class Noting:
    """A kernel that notes its launches in `events`."""

    def __init__(self, name: str, kernel: Any, events: list[str]):
        self.name, self.kernel, self.events = name, kernel, events

    def __getitem__(self, grid: tuple) -> Any:
        self.events.append(self.name)
        return self.kernel[grid]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    noted: list[str] = []
    main, side = Stream("main", noted), Stream("side", noted)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(lookup_async, "_side_stream", lambda stream: side)

    def noting(name: str, function: Callable) -> Callable:
        return lambda *args: (noted.append(name), function(*args))[1]

    monkeypatch.setattr(lookup, "run", noting("gather", lookup.run))
    monkeypatch.setattr(_address_order, "address_order", noting("order", _address_order.address_order))
    return noted


@pytest.mark.parametrize("ordered", [False, True])
def test_only_the_gather_runs_on_the_side_stream(
    events: list[str], ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_host_reads, "ORDERED_FROM", 20 if ordered else 21)
    table, ids = torch.randn(5000, 8), torch.randint(0, 5000, (10, 4))[::2]
    expected = table[ids]
    flight = lookup_async.start_on_cuda(table, ids)
    ids.zero_()  # the caller may write to them from here on
    rows = lookup_async.wait_on_cuda(flight, table, ids)
    assert torch.equal(rows, expected)
    assert events == ["order"] * ordered + [*FORK, "gather", *JOIN]


def test_a_start_does_not_wait_for_an_earlier_flight(events: list[str]) -> None:
    """The side stream comes to a second fetch after the first one: the caller waits for neither before it must."""
    table, ids = torch.randn(50, 8), torch.randint(0, 50, (3, 4))
    start = ["side waits for main", "side records {}", "on side", "gather", "on main", "side records {}"]
    first = lookup_async.start_on_cuda(table, ids)
    assert events == [*FORK, "gather", "on main", "main waits for 1 of side", "side records 2"]
    events.clear()
    second = lookup_async.start_on_cuda(table, ids)
    assert events == [event.format(number) for event, number in zip(start, (0, 3, 0, 0, 0, 4))]
    for flight in (second, first):
        assert torch.equal(lookup_async.wait_on_cuda(flight, table, ids), table[ids])
    events.clear()
    lookup_async.start_on_cuda(table, ids)  # the flight is dropped, and joins
    assert events[-3:] == ["main waits for 5 of side", "side records 6", "main waits for 6 of side"]


def test_nothing_is_launched_for_no_ids(events: list[str]) -> None:
    table, ids = torch.randn(50, 8), torch.zeros(0, 4, dtype=torch.int64)
    flight = lookup_async.start_on_cuda(table, ids)
    assert lookup_async.wait_on_cuda(flight, table, ids).shape == (0, 4, 8)
    assert events == [*FORK, *JOIN]


def test_with_hot_rows_only_the_fetch_runs_beside(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes before it is launched by the start, what comes after it by the wait."""
    for name in KERNELS:
        kernel = getattr(hot_rows, name)
        monkeypatch.setattr(hot_rows, name, Noting(name.removesuffix("_kernel"), kernel, events))
    monkeypatch.setattr(hot_rows, "MIN_IDS", 1)
    monkeypatch.setattr(lookup.pinning, "is_host_memory", lambda table: True)
    table, ids = torch.randn(5000, 8), torch.randint(0, 50, (20, 4))
    cache = hot_rows.attach(table, 4096, torch.device("cpu"))
    flight = lookup_async.start_on_cuda(table, ids)
    assert torch.equal(lookup_async.wait_on_cuda(flight, table, ids), table[ids])
    assert events == ["prepare", "probe", "hits", *FORK, "fetch", "release", *JOIN, "follow"]
    assert cache.counts()["looked_up"] == 80
    hot_rows.detach(table)
