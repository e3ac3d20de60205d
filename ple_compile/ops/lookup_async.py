"""A lookup in two halves: `lookup_start` begins to fetch the rows on a side stream, `lookup_wait` hands them over.

    flight = ple.lookup_start(table, ids)
    ...                                        anything else
    rows = ple.lookup_wait(flight, table, ids) # equals ple.lookup(table, ids)

The flight is a copy of the ids that stands for the transfer: it carries the rows' buffer and the event to wait for as
a Python attribute, so the wait can hand over that very buffer, without a copy and without an output that aliases a
graph-visible input. Its data dependence states the order. Nothing is shared between two flights.

Where both streams are free, the caller's next kernel would win the race for the device, and one that fills it keeps
the few programs of the fetch waiting: the caller's stream goes on when the side stream has come to the fetch. (Not
where another flight is in the air: this fetch comes after that one, for which the caller must not wait.)

Memory and streams: the buffer is allocated on the caller's stream before the fork and released on it after the join.
The side stream gets the one kernel that takes long, and reads the copy: Inductor may give start and wait a buffer each
with the same ids, and then reuses the start's while the transfer runs. What comes before that kernel is launched on the
caller's stream in the start, what comes after it in the wait. Each caller's stream has its own side stream, so a
CUDA-graph capture forks and joins inside itself: start and wait belong into one capture. A wait on another stream than
its start's hands over a copy, since that stream may allocate from the pool of a CUDA graph (Inductor's warm-up does). A
flight that is dropped without its wait joins when it is dropped. A wait whose flight arrives without its buffer (it was
waited for before) fetches the rows itself.

The CPU does the whole lookup in the start.
"""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from ple_compile.ops import _stalls, lookup
from ple_compile.ops._host_reads import Gather
from ple_compile.ops._library import define

# `torch.Stream` rather than `torch.cuda.Stream`, whose Python layers cost several times as much host time.
_SIDE_STREAMS: dict[torch.Stream, torch.Stream] = {}
# The transfer that each side stream was given last.
_NEWEST: "weakref.WeakValueDictionary[torch.Stream, _Transfer]" = weakref.WeakValueDictionary()


@dataclass(eq=False)
class _Transfer:
    """Rows that a side stream is writing, and what it reads meanwhile."""

    rows: Tensor
    gather: Gather  # holds what the side stream reads, until the join
    main: torch.Stream
    done: torch.Event
    captured: bool
    joined: bool = False

    def join(self) -> Tensor:
        current = torch.accelerator.current_stream(self.rows.device)
        _stalls.wait(current, self.done)
        self.joined = True
        self.gather.finish()
        if current == self.main:
            return self.rows
        self.rows.record_stream(current)
        return self.rows.clone()

    def __del__(self) -> None:
        if not self.joined:
            self.main.wait_event(self.done)


def start_on_cpu(table: Tensor, ids: Tensor) -> Tensor:
    flight = ids.clone(memory_format=torch.contiguous_format)
    flight.__dict__["rows"] = lookup.reference(table, ids)
    return flight


def wait_on_cpu(flight: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    rows = flight.__dict__.pop("rows", None)
    _stalls.no_wait()
    return lookup.reference(table, ids) if rows is None else rows


def start_on_cuda(table: Tensor, ids: Tensor) -> Tensor:
    lookup.check_arguments(table, ids)
    rows = lookup.empty_rows(table, ids)
    flight = ids.clone(memory_format=torch.contiguous_format)
    gather = lookup.prepared(rows, table, flight.detach())  # the flight itself would hold itself, through its transfer
    main = torch.accelerator.current_stream(ids.device)
    side = _side_stream(main)
    newest = _NEWEST.get(side)
    side.wait_stream(main)
    forked = side.record_event()
    try:
        with side:
            gather.fetch()
    except BaseException:
        main.wait_event(side.record_event())  # what was launched by then writes to memory that is freed now
        raise
    if newest is None or newest.joined:
        main.wait_event(forked)
    captured = torch.cuda.is_current_stream_capturing()
    transfer = _Transfer(rows, gather, main, side.record_event(), captured)
    flight.__dict__["transfer"] = _NEWEST[side] = transfer
    return flight


def wait_on_cuda(flight: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    transfer = flight.__dict__.get("transfer")
    if transfer is None:
        return lookup.launch(table, ids)
    if torch.cuda.is_current_stream_capturing() and not transfer.captured:
        raise RuntimeError(
            "lookup_wait: the lookup was started outside the CUDA graph that is being captured, so replays would miss "
            "it; capture its start too (Inductor does when the table is its CUDA view rather than a CPU tensor)"
        )
    del flight.__dict__["transfer"]
    return transfer.join()


def _side_stream(main: torch.Stream) -> torch.Stream:
    if main not in _SIDE_STREAMS:
        # High priority: its few programs must find a place beside kernels that fill the device.
        _SIDE_STREAMS[main] = torch.Stream(main.device, priority=-1)
    return _SIDE_STREAMS[main]


def fake_start(table: Tensor, ids: Tensor) -> Tensor:
    return torch.empty_like(ids, memory_format=torch.contiguous_format)


def fake_wait(flight: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    return lookup.fake(table, ids)


lookup_start = define(
    "lookup_start(Tensor table, Tensor ids) -> Tensor", cpu=start_on_cpu, cuda=start_on_cuda, fake=fake_start
)
lookup_wait = define(
    "lookup_wait(Tensor flight, Tensor table, Tensor ids) -> Tensor",
    cpu=wait_on_cpu,
    cuda=wait_on_cuda,
    fake=fake_wait,
)
