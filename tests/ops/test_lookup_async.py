"""The CUDA halves of a lookup on streams that only note what is launched on them; kernels run in the interpreter."""

from collections.abc import Callable

import pytest
import torch

from ple_compile.ops import _host_reads, lookup, lookup_async


class Stream:
    """Notes in `events` which stream waits for which, and what runs while it is the current one."""

    device = torch.device("cpu")

    def __init__(self, name: str, events: list[str]):
        self.name, self.events = name, events

    def wait_stream(self, other: "Stream") -> None:
        self.events.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        return f"all of {self.name}"

    def wait_event(self, event: str) -> None:
        self.events.append(f"{self.name} waits for {event}")

    def __enter__(self) -> None:
        self.events.append(f"on {self.name}")

    def __exit__(self, *_: object) -> None:
        self.events.append("on main")


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
    monkeypatch.setattr(_host_reads, "address_order", noting("order", _host_reads.address_order))
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
    forked = ["side waits for main", "on side", "gather", "on main", "main waits for all of side"]
    assert events == ["order"] * ordered + forked


def test_nothing_is_launched_for_no_ids(events: list[str]) -> None:
    table, ids = torch.randn(50, 8), torch.zeros(0, 4, dtype=torch.int64)
    flight = lookup_async.start_on_cuda(table, ids)
    assert lookup_async.wait_on_cuda(flight, table, ids).shape == (0, 4, 8)
    assert events == ["side waits for main", "main waits for all of side"]
