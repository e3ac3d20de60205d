"""Host-resident tables on one GPU: bandwidth, what runs beside, prefetch, hot rows on real text.

    python benchmarks/real_text.py --out tokens.npz        # once, two minutes of CPU
    python benchmarks/host_table.py --tokens tokens.npz    # JSON to host_table.json, tables in Markdown to stdout

Needs a CUDA device, host memory for the table (`--rows`, 320 bytes each) and room for a copy of it on the GPU (the
"table on GPU" rows are left out when it does not fit). Times are medians of wall time between two synchronisations.
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import real_text
import torch
import triton
from torch import Tensor, nn

from ple_compile.ops.lookup import HOST_PROGRAMS, lookup
from ple_compile.ops.lookup_async import lookup_start, lookup_wait
from ple_compile.ops.ngram_ids import ngram_ids
from ple_compile.tables import hot_rows
from ple_compile.tables.offload import offload_tables

WIDTH, HEADS, TOKENS = 160, 16, (1, 64, 8192)
MULTIPLIERS = (23703573157769, 9876543210987, 1357913579135)


class NGrams(nn.Module):
    """A table of the released width, bf16, each row's first eight bytes its own id."""

    def __init__(self, rows: int):
        super().__init__()
        sizes = torch.tensor([rows // HEADS - 2 * head - 1 for head in range(HEADS)])
        self.register_buffer("multipliers", torch.tensor(MULTIPLIERS))
        self.register_buffer("sizes", sizes)
        self.register_buffer("offsets", sizes.cumsum(0) - sizes)
        weight = torch.zeros(rows, WIDTH, dtype=torch.bfloat16)
        weight.view(torch.int64)[:, 0] = torch.arange(rows)
        self.table = nn.Embedding(rows, WIDTH, _weight=weight).requires_grad_(False)

    def ids(self, tokens: Tensor) -> Tensor:
        return ngram_ids(tokens[None], None, self.multipliers, self.sizes, self.offsets, real_text.EOS)[0]


def check(rows: Tensor, ids: Tensor) -> None:
    if not torch.equal(rows.view(torch.int64)[..., 0], ids):
        raise AssertionError("a lookup returned other rows than those asked for")


def measure(step: Callable[[int], object], repeats: int = 30) -> float:
    """Median microseconds of `step(i)`."""
    for i in range(5):
        step(i)
    times = []
    for i in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(i)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def draw(model: NGrams, tokens: int, count: int = 8) -> list[Tensor]:
    return [torch.randint(0, model.table.num_embeddings, (tokens, HEADS), device="cuda") for _ in range(count)]


def measure_rate(model: NGrams, tokens: int) -> dict:
    table, batches = model.table.weight, draw(model, tokens)
    check(lookup(table, batches[0]), batches[0])
    microseconds = measure(lambda i: lookup(table, batches[i % 8]))
    return {"tokens": tokens, "us": microseconds, "million_rows_per_s": tokens * HEADS / microseconds}


def measure_neighbour(model: NGrams) -> dict:
    """A large bf16 product alone, and while lookups follow one another on a side stream."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    table, batches, side = model.table.weight, draw(model, 8192), torch.cuda.Stream()

    def products() -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            a @ a
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 20 * 1000

    products()
    alone = statistics.median(products() for _ in range(5))
    beside = []
    for _ in range(5):
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for i in range(16):  # longer than the products take
                lookup(table, batches[i % 8])
        beside.append(products())
        torch.cuda.synchronize()
    together = statistics.median(beside)
    return {"alone_us": alone, "beside_us": together, "slowdown_percent": 100 * (together / alone - 1)}


def measure_layer(model: NGrams, gpu_table: Tensor | None, tokens: int) -> dict:
    """A lookup behind a layer of real work that takes about as long as the lookup."""
    table, batches = model.table.weight, draw(model, tokens)
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    one_product = measure(lambda i: weight @ weight)
    repeats = max(1, round(measure(lambda i: lookup(table, batches[i % 8])) / one_product))

    def layer() -> None:
        for _ in range(repeats):
            weight @ weight

    def on_cpu(i: int) -> Tensor:
        layer()
        return nn.functional.embedding(batches[i % 8].cpu(), table).cuda()

    def exposed(i: int, table: Tensor = table) -> Tensor:
        layer()
        return lookup(table, batches[i % 8])

    def prefetched(i: int) -> Tensor:
        flight = lookup_start(table, batches[i % 8])
        layer()
        return lookup_wait(flight, table, batches[i % 8])

    ways: dict[str, Callable[[int], Tensor]] = {
        "host, CPU gather": on_cpu,
        "host, UVA": exposed,
        "host, UVA prefetched": prefetched,
    }
    if gpu_table is not None:
        ways = {"table on GPU": lambda i: exposed(i, gpu_table), **ways}
    for way in ways.values():
        check(way(0), batches[0])
    alone = measure(lambda i: layer())
    times = {name: measure(way) for name, way in ways.items()}
    hidden = (times["host, UVA"] - times["host, UVA prefetched"]) / (times["host, UVA"] - alone)
    return {"tokens": tokens, "layer alone": alone, **times, "hidden_percent": 100 * hidden}


def measure_replays(table: Tensor, batches: list[Tensor]) -> float:
    """Median microseconds of a captured lookup; every replay gets ids it has not seen, so there is no warm-up."""
    ids = batches[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = lookup(table, ids)
    times = []
    for batch in batches[1:]:
        ids.copy_(batch)
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        check(rows, batch)
    return statistics.median(times) * 1e6


def measure_hot_rows(model: NGrams, tokens_file: Path | None, shares: list[float]) -> list[dict]:
    """Fill on one text, measure on another: batches of 8,192 tokens."""
    filling, measuring = (stream.cuda() for stream in real_text.load_tokens(tokens_file))
    batches = [model.ids(part).contiguous() for part in measuring.split(8192)[:-1]]
    table, results = model.table.weight, []
    plain = measure_replays(table, batches)
    for share in shares:
        nbytes = int(share / 100 * table.nbytes)
        offload_tables(model, gpu_cache_bytes=nbytes)
        cache = hot_rows.cache_of(table, batches[0].device)
        assert cache is not None
        for part in filling.split(8192):
            lookup(table, model.ids(part))
        held = torch.stack([cache.holds(ids).float().mean(0) for ids in batches]).mean(0)
        cache.reset_counts()
        for ids in batches[: len(batches) // 2]:
            check(lookup(table, ids), ids)
        counts = cache.counts()
        microseconds = measure_replays(table, batches[len(batches) // 2 :])
        results.append(
            {
                "cache_percent": share,
                "hit_percent_2grams": 100 * held[: HEADS // 2].mean().item(),
                "hit_percent_3grams": 100 * held[HEADS // 2 :].mean().item(),
                "fetched_percent": 100 * counts["fetched"] / counts["looked_up"],
                "plain_us": plain,
                "cached_us": microseconds,
                "speedup": plain / microseconds,
            }
        )
        offload_tables(model)
    return results


def environment() -> dict:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return {
        "gpu": torch.cuda.get_device_name(),
        "host": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit.stdout.strip() or "unknown",
        "programs": HOST_PROGRAMS,
    }


def markdown(rows: list[dict]) -> str:
    cells = [[f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=110_000_000, help="rows of the table; the default is 32.8 GiB")
    parser.add_argument("--tokens", type=Path, help="made by real_text.py; made afresh when left out")
    parser.add_argument("--cache-percent", type=float, nargs="+", default=[0.5, 1, 2, 4, 8])
    parser.add_argument("--out", type=Path, default=Path("host_table.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("host_table.py measures a GPU: no CUDA device found")

    model = NGrams(options.rows)
    started = time.perf_counter()
    offload_tables(model.cuda())
    pin_seconds = time.perf_counter() - started
    free = torch.cuda.mem_get_info()[0]
    fits = model.table.weight.nbytes < free - 8 * 2**30
    gpu_table = model.table.weight.detach().to("cuda") if fits else None
    report: dict[str, Any] = {
        "environment": environment(),
        "table_gib": model.table.weight.nbytes / 2**30,
        "page_lock_seconds_per_gib": pin_seconds / (model.table.weight.nbytes / 2**30),
        "rate": [measure_rate(model, tokens) for tokens in (*TOKENS, 32768)],
        "neighbour": measure_neighbour(model),
        "layer": [measure_layer(model, gpu_table, tokens) for tokens in TOKENS],
    }
    del gpu_table
    report["hot_rows"] = measure_hot_rows(model, options.tokens, options.cache_percent)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    for title, rows in (("rate", report["rate"]), ("layer", report["layer"]), ("hot rows", report["hot_rows"])):
        print(f"\n### {title}\n\n{markdown(rows)}")
    print("\n### neighbour\n\n" + markdown([report["neighbour"]]))


if __name__ == "__main__":
    main()
