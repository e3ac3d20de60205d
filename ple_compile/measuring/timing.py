"""What every benchmark here shares: timing by CUDA-graph replay, the copy bandwidth, the environment, tables."""

import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton

L2_BYTES = 60 * 2**20  # more than any GPU's here: inputs that rotate through it are always read from memory


def num_sets(bytes_per_call: int) -> int:
    """How many sets of inputs make sure that none is still in L2 when its turn comes again."""
    return max(2, -(-L2_BYTES // bytes_per_call))


def graph_microseconds(step: Callable[[int], object], calls: int, replays: int = 15) -> float:
    """Median over replays of one captured graph with `step(0) .. step(calls - 1)`, per call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(min(3, calls)):
            step(i)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            step(i)
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    del graph
    return statistics.median(times)


def copy_bytes_per_microsecond() -> float:
    """Bytes read plus bytes written by a large copy, the faster of the driver's and an elementwise kernel's."""
    source = torch.empty(2**27, dtype=torch.int64, device="cuda")
    target = torch.empty_like(source)
    ways = (lambda _: target.copy_(source), lambda _: torch.bitwise_not(source, out=target))
    return 2 * source.nbytes / min(graph_microseconds(way, calls=4) for way in ways)


def environment() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return {
        "gpu": torch.cuda.get_device_name(),
        "host": platform.processor() or platform.machine(),
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit.stdout.strip() or "unknown",
        "command": " ".join(sys.argv),
    }


def markdown(rows: Sequence[dict]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        cells = [row.get(name) for name in columns]
        lines.append(["-" if c is None else f"{c:.1f}" if isinstance(c, float) else str(c) for c in cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
