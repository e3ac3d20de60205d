"""Lookups in a sharded table: each lowering, the same ids on all ranks, own ids, uneven numbers of tokens.

    torchrun --nproc-per-node 2 -m benchmarks.etp --json etp-2.json
    torchrun --nproc-per-node 4 -m benchmarks.etp --json etp-4.json

Compiled with backend="ple"; rows of 320 B, 16 a token, ids spread evenly over the table. Uneven: all but the first
data-parallel rank have an eighth of the tokens. Times are the slowest rank's
median over replays of a CUDA graph of several lookups, each with ids of its own; `all_to_all` cannot be captured and is
timed between two events, launches and host reads included. `local` is the gather from a whole table on each GPU.
"""

import argparse
import functools
import json
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import ple_compile  # noqa: F401  (registers the backend)
from ple_compile.measuring.timing import environment, graph_microseconds, markdown, num_sets
from ple_compile.sharding.shard import shard_tables

HEADS, WIDTH = 16, 160
LOWERINGS = ("all_reduce", "reduce_scatter", "all_to_all", "peer")


class NGrams(nn.Module):
    """A table beside buffers such as an n-gram hash has, by which `shard_tables` knows it."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("multipliers", torch.arange(3))
        self.register_buffer("sizes", torch.full((HEADS,), rows // HEADS))
        self.register_buffer("offsets", torch.arange(HEADS))
        self.rows = nn.Embedding(rows, WIDTH, dtype=torch.bfloat16, device="cuda")

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids)


def topologies(num_ranks: int) -> dict[str, tuple[dict[str, int], str | tuple[str, str], bool]]:
    """Name -> (mesh axes, axis of the table, whether the last axis has the same tokens)."""
    found: dict[str, tuple[dict[str, int], str | tuple[str, str], bool]] = {
        f"tp {num_ranks}": ({"tp": num_ranks}, "tp", True),
        f"dp {num_ranks}": ({"dp": num_ranks}, "dp", False),
    }
    if num_ranks == 4:
        found["dp 2 x tp 2"] = ({"dp": 2, "tp": 2}, ("dp", "tp"), True)
    return found


def event_microseconds(step: Callable[[int], object], calls: int, replays: int = 15) -> float:
    times = []
    for replay in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for i in range(calls):
            step(i)
        end.record()
        end.synchronize()
        if replay >= 3:
            times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def slowest(microseconds: float) -> float:
    value = torch.tensor(microseconds, device="cuda")
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def measure(module: nn.Module, lowering: str, tokens: int, limit: int, rows: int, seed: int) -> float:
    torch._dynamo.reset()
    options: dict = {"etp_lowering": lowering, "etp_max_tokens": limit, "strict": True} if lowering != "local" else {}
    look_up = torch.compile(module, backend="ple", dynamic=False, options=options)
    generator = torch.Generator(device="cuda").manual_seed(seed)
    calls = min(64, num_sets(limit * HEADS * WIDTH * 2))  # the same on every rank
    ids = [torch.randint(0, rows, (tokens, HEADS), device="cuda", generator=generator) for _ in range(calls)]

    def step(i: int) -> Tensor:
        return look_up(ids[i])

    for _ in range(3):
        step(0)
    torch.cuda.synchronize()
    dist.barrier()
    timed = event_microseconds if lowering == "all_to_all" else graph_microseconds
    return slowest(timed(step, calls))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16_000_001)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 1024, 8192])
    parser.add_argument("--lowerings", nargs="+", default=["local", *LOWERINGS], choices=["local", *LOWERINGS])
    parser.add_argument("--json", help="where rank 0 writes the results")
    args = parser.parse_args()

    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    results = []
    for name, (axes, axis, same_tokens) in topologies(num_ranks).items():
        mesh = init_device_mesh("cuda", tuple(axes.values()), mesh_dim_names=tuple(axes))
        own = not same_tokens or len(axes) == 2
        source = mesh.get_local_rank(next(iter(axes))) if own else 0
        whole = NGrams(args.rows)
        local = {}
        if "local" in args.lowerings:
            local = {tokens: measure(whole, "local", tokens, tokens, args.rows, source) for tokens in args.tokens}
        shard_tables(whole, mesh, axis, same_tokens=same_tokens)
        for uneven in (False, True) if own else (False,):
            for tokens in args.tokens:
                count = tokens // 8 if uneven and source > 0 else tokens
                row = {"ranks": name, "ids": "own, uneven" if uneven else "own" if own else "same", "tokens": tokens}
                if "local" in args.lowerings:
                    row["local"] = local[tokens]
                run = functools.partial(measure, whole, tokens=count, limit=tokens, rows=args.rows, seed=source)
                row |= {lowering: run(lowering) for lowering in args.lowerings if lowering != "local"}
                results.append(row)
                if rank == 0:
                    print(row, flush=True)
        del whole
        torch.cuda.empty_cache()
    if rank == 0:
        print(f"\nmicroseconds for one lookup, {args.rows:,} rows of {WIDTH * 2} B\n\n{markdown(results)}")
        if args.json:
            with open(args.json, "w") as file:
                json.dump({"environment": environment(), "rows": args.rows, "results": results}, file, indent=1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
