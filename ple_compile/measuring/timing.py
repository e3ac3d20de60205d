"""What every measurement shares: time per call, the copy bandwidth, the environment, tables."""

import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton

L2_BYTES = 60 * 2**20  # more than any GPU's here: inputs that rotate through it are always read from memory
_CPU_SECONDS = 0.5  # for which a step is repeated on the CPU


def num_sets(bytes_per_call: int) -> int:
    """How many sets of inputs make sure that none is still in L2 when its turn comes again."""
    return max(2, -(-L2_BYTES // bytes_per_call))


def microseconds(step: Callable[[int], object], calls: int, device: torch.device) -> float:
    """Per call of `step(0) .. step(calls - 1)`: replays of a CUDA graph on a GPU, wall time on a CPU."""
    return graph_microseconds(step, calls) if device.type == "cuda" else wall_microseconds(step, calls)


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


def wall_microseconds(step: Callable[[int], object], calls: int) -> float:
    """Median wall time of a step on the CPU, over at least five steps and half a second."""
    for i in range(min(3, calls)):
        step(i)
    times: list[float] = []
    while len(times) < 5 or (sum(times) < _CPU_SECONDS and len(times) < 1000):
        start = time.perf_counter()
        step(len(times) % calls)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def copy_bytes_per_microsecond(device: torch.device | str = "cuda") -> float:
    """Bytes read plus bytes written by a large copy, the faster of the copy's and an elementwise operation's."""
    device = torch.device(device)
    source = torch.empty(2**27 if device.type == "cuda" else 2**23, dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    ways = (lambda _: target.copy_(source), lambda _: torch.bitwise_not(source, out=target))
    return 2 * source.nbytes / min(microseconds(way, 4, device) for way in ways)


def environment(device: torch.device | str = "cuda") -> dict[str, str]:
    """Hardware, versions and commit of a measurement."""
    on_gpu = torch.device(device).type == "cuda"
    found = {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "none",
        "host": _processor(),
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": _commit(),
        "command": " ".join(sys.argv),
    }
    return found if on_gpu else found | {"threads": str(torch.get_num_threads())}


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    for line in described.read_text().splitlines() if described.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Of the checkout that this package lies in; "unknown" where it is installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file() or shutil.which("git") is None:
        return "unknown"
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=root)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def markdown(rows: Sequence[dict]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        cells = [row.get(name) for name in columns]
        lines.append(["-" if c is None else f"{c:.1f}" if isinstance(c, float) else str(c) for c in cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
