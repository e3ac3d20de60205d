"""Real process groups: a function on a few ranks, each a process, and what each of them returned."""

import datetime
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

# Processes are forked from a server that has imported the package once and run nothing.
_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["torch", "ple_compile.sharding.shard", "ple_compile.passes.lower_lookup"])
# With a GPU in the machine these imports look at it, and CUDA refuses a process that was forked after that.
_SPAWNED = multiprocessing.get_context("spawn")

DIED = "the process ended without a result"


def run_ranks(num_ranks: int, function: Callable, *args: Any, timeout: float = 60, backend: str = "gloo") -> list[Any]:
    """`function(rank, *args)` on every rank; a list of results, or of the exceptions' texts. `timeout` is the group's.

    A rank that ends without either gives DIED. With NCCL in `backend`, each rank has a device of its own.
    """
    context = _SPAWNED if "nccl" in backend else _FORKED
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(num_ranks):
            receive, send = context.Pipe(duplex=False)
            arguments = (send, f"{folder}/store", rank, num_ranks, timeout, backend, function, args)
            processes.append(context.Process(target=_run, args=arguments))
            processes[-1].start()
            send.close()
            ends.append(receive)
        results = [_receive(end) for end in ends]
        for process in processes:
            process.join()
        return results


def _receive(end: Connection) -> Any:
    try:
        return end.recv()
    except EOFError:
        return DIED


def _run(
    send: Connection,
    store: str,
    rank: int,
    num_ranks: int,
    timeout: float,
    backend: str,
    function: Callable,
    args: tuple,
) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=timeout),
    )
    try:
        send.send(function(rank, *args))
    except Exception:  # any failure is the result: the test tells which it expects
        send.send(traceback.format_exc())
    send.close()
    # A rank that waits for one that failed must see it leave.
    os._exit(0)
