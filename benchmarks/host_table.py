"""Host-resident tables on one GPU: bandwidth, what runs beside, prefetch, hot rows on real text.

    python benchmarks/real_text.py --out tokens.npz        # once, two minutes of CPU
    python benchmarks/host_table.py --tokens tokens.npz    # JSON to host_table.json, tables in Markdown to stdout
    python benchmarks/host_table.py --tokens tokens.npz --tables layer --layer-tokens 8192    # the other rows stay

Needs a CUDA device, host memory for the table (`--rows`, 320 bytes each) and room for a copy of it on the GPU (the
"table on GPU" column is left out when it does not fit). Times are medians of wall time between two synchronisations.

The layer table runs a step of two layers, compiled: products of the released width that take as long as the lookup and
at least 0.6 ms, then the lookup of real text and its use; 16 steps between two synchronisations, so that the host runs
ahead as it does in a model. (At 64 tokens a layer of the released model reads some 365 of its 512 experts, 3.6 GB.)
"lookup hidden" is the share of the lookup's time that prefetching takes away:
(host - prefetched) / (host - layer alone).
"""

import argparse
import itertools
import json
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import real_text
import torch
import triton
from torch import Tensor, nn

from ple_compile.measuring.timing import graph_microseconds
from ple_compile.ops.lookup import HOST_CHOICES, empty_rows, lookup, run
from ple_compile.ops.ngram_ids import ngram_ids
from ple_compile.tables import hot_rows
from ple_compile.tables.offload import offload_tables

HIDDEN, WIDTH, HEADS, TOKENS, MODES = 2560, 160, 16, (1, 64, 8192), ("default", "reduce-overhead")
TABLES = ("rate", "neighbour", "layer", "hot_rows")
# Enough that no cache of the host holds the rows of a batch when it comes again.
NUM_BATCHES = 48
LAYER_US = 600.0
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


class Text(NamedTuple):
    """Two streams of token ids that share no document."""

    filling: Tensor
    measuring: Tensor


def check(rows: Tensor, ids: Tensor) -> None:
    if not torch.equal(rows.view(torch.int64)[..., 0], ids):
        raise AssertionError("a lookup returned other rows than those asked for")


def measure(step: Callable[[int], object], samples: int = 35, together: int = 1) -> float:
    """Median microseconds of `step(batch)`, so many of them between two synchronisations."""
    batches = itertools.cycle(range(NUM_BATCHES))
    for _ in range(5):
        step(next(batches))
    times = []
    for _ in range(samples):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(together):
            step(next(batches))
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / together)
    return statistics.median(times) * 1e6


def draw(model: NGrams, tokens: int) -> list[Tensor]:
    return [torch.randint(0, model.table.num_embeddings, (tokens, HEADS), device="cuda") for _ in range(NUM_BATCHES)]


def measure_rate(model: NGrams, tokens: int) -> dict:
    table, batches = model.table.weight, draw(model, tokens)
    check(lookup(table, batches[0]), batches[0])
    microseconds = measure(lambda i: lookup(table, batches[i]))
    plain = measure(lambda i: plain_lookup(table, batches[i]))
    rows = tokens * HEADS
    return {
        "tokens": tokens,
        "us": microseconds,
        "million_rows_per_s": rows / microseconds,
        "plain_us": plain,
        "plain_million_rows_per_s": rows / plain,
    }


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
                lookup(table, batches[i])
        beside.append(products())
        torch.cuda.synchronize()
    together = statistics.median(beside)
    return {"alone_us": alone, "beside_us": together, "slowdown_percent": 100 * (together / alone - 1)}


class Work(nn.Module):
    """Products that take at least as long as a lookup: hidden states of the released width, widened so far that a
    product takes longer than its launch."""

    def __init__(self, tokens: int, microseconds: float):
        super().__init__()
        wide = 4 * HIDDEN if tokens > 1024 else 32 * HIDDEN
        self.weight = nn.Parameter(torch.randn(HIDDEN, wide, device="cuda", dtype=torch.bfloat16) / HIDDEN**0.5)
        self.requires_grad_(False)
        self.hidden = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.repeats = 1
        self.repeats = math.ceil(max(microseconds, LAYER_US) / graph_microseconds(lambda _: self(self.hidden), 8))

    def forward(self, hidden: Tensor) -> Tensor:
        for _ in range(self.repeats):
            hidden = (hidden @ self.weight)[:, :HIDDEN]
        return hidden


class Gather(nn.Module):
    """A lookup as transformers writes it, wherever the table is; none without one."""

    def __init__(self, model: NGrams, table: nn.Embedding | None):
        super().__init__()
        self.model, self.table = model, table

    def forward(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        if self.table is None:
            return hidden, tokens + 1
        ids = self.model.ids(tokens)
        return hidden, self.table(ids.to(self.table.weight.device)).to(ids.device).flatten(-2)


class Step(nn.Module):
    def __init__(self, work: Work, gather: Gather):
        super().__init__()
        self.layers = nn.ModuleList([work, gather])

    def forward(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers[1](self.layers[0](hidden), tokens)


@torch.no_grad()
def measure_layer(model: NGrams, gpu_table: nn.Embedding | None, text: Text, tokens: int, mode: str) -> dict:
    """One row of the layer table. The hot rows are 2 % of the table, filled on other text than they are measured on."""
    batches = list(text.measuring[: NUM_BATCHES * tokens].split(tokens))
    ids = [model.ids(batch) for batch in batches]
    work = Work(tokens, measure(lambda i: lookup(model.table.weight, ids[i])))
    hidden = work.hidden

    def step_time(table: nn.Embedding | None, eager: bool = False, **options: Any) -> float:
        torch._dynamo.reset()
        step: Any = Step(work, Gather(model, table))
        if not eager:
            step = torch.compile(step, backend="ple", fullgraph=True, dynamic=False, options={"mode": mode, **options})
        for i in range(3 if table is not None else 0):
            check(step(hidden, batches[i])[1].view(tokens, HEADS, WIDTH), ids[i])
        return measure(lambda i: step(hidden, batches[i]), samples=7, together=16)

    row: dict[str, Any] = {"tokens": tokens, "mode": mode, "layer alone": step_time(None)}
    if gpu_table is not None:
        row["table on GPU"] = step_time(gpu_table)
    row["host, CPU gather"] = step_time(model.table, eager=True)
    row["host"] = step_time(model.table, prefetch_lookup=False)
    row["host, prefetched"] = step_time(model.table, strict=True)
    row["host, prefetched, hot rows"] = None
    if tokens * HEADS >= hot_rows.MIN_IDS:
        fill(model, text, share=2)
        row["host, prefetched, hot rows"] = step_time(model.table, strict=True)
        offload_tables(model)
    row["lookup hidden %"] = 100 * (row["host"] - row["host, prefetched"]) / (row["host"] - row["layer alone"])
    return row


def plain_lookup(table: Tensor, ids: Tensor) -> Tensor:
    """Rows over the bus as the ids come: neither sorted nor cached."""
    rows = empty_rows(table, ids)
    run(rows, table, ids, HOST_CHOICES)
    return rows


def measure_replays(table: Tensor, batches: list[Tensor], look_up: Callable[..., Tensor] = lookup) -> float:
    """Median microseconds of a captured lookup; every replay gets ids it has not seen, so there is no warm-up."""
    ids = batches[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = look_up(table, ids)
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


def fill(model: NGrams, text: Text, share: float) -> hot_rows.HotRows:
    """Give the table a cache of `share` percent of its bytes, and let it see the filling text."""
    table = model.table.weight
    offload_tables(model, gpu_cache_bytes=int(share / 100 * table.nbytes))
    cache = hot_rows.cache_of(table, torch.device("cuda", torch.cuda.current_device()))
    assert cache is not None
    for part in text.filling.split(8192):
        lookup(table, model.ids(part))
    return cache


def measure_hot_rows(model: NGrams, text: Text, shares: list[float]) -> list[dict]:
    """Fill on one text, measure on another: batches of 8,192 tokens."""
    batches = [model.ids(part).contiguous() for part in text.measuring.split(8192)[:-1]]
    table, results = model.table.weight, []
    plain, ordered = measure_replays(table, batches, plain_lookup), measure_replays(table, batches)
    for share in shares:
        cache = fill(model, text, share)
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
                "by_address_us": ordered,
                "cached_us": microseconds,
                "speedup": plain / microseconds,
                "speedup_by_address": ordered / microseconds,
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
        "programs": HOST_CHOICES.programs,
    }


def markdown(rows: list[dict]) -> str:
    def cell(value: object) -> str:
        return "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)

    lines = [list(rows[0]), ["---"] * len(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=110_000_000, help="rows of the table; the default is 32.8 GiB")
    parser.add_argument("--tokens", type=Path, help="made by real_text.py; made afresh when left out")
    parser.add_argument("--cache-percent", type=float, nargs="+", default=[0.5, 1, 2, 4, 8])
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--layer-tokens", type=int, nargs="+", default=list(TOKENS), help="of the layer table")
    parser.add_argument("--out", type=Path, default=Path("host_table.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("host_table.py measures a GPU: no CUDA device found")

    text = Text(*(stream.cuda() for stream in real_text.load_tokens(options.tokens)))
    model = NGrams(options.rows)
    started = time.perf_counter()
    offload_tables(model.cuda())
    pin_seconds = time.perf_counter() - started
    weight = model.table.weight
    gpu_table = None
    if weight.nbytes < torch.cuda.mem_get_info()[0] - 16 * 2**30:
        gpu_table = nn.Embedding(1, WIDTH, device="cuda", dtype=weight.dtype).requires_grad_(False)
        gpu_table.weight.data = weight.detach().cuda()
    report: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    report |= {"environment": environment(), "table_gib": weight.nbytes / 2**30}
    report["page_lock_seconds_per_gib"] = pin_seconds / report["table_gib"]
    tables: dict[str, Callable[[], list[dict]]] = {
        "rate": lambda: [measure_rate(model, tokens) for tokens in (*TOKENS, 32768)],
        "neighbour": lambda: [measure_neighbour(model)],
        "layer": lambda: [
            measure_layer(model, gpu_table, text, tokens, mode) for tokens in options.layer_tokens for mode in MODES
        ],
        "hot_rows": lambda: measure_hot_rows(model, text, options.cache_percent),
    }
    for title in options.tables:
        if title == "hot_rows":
            gpu_table = None
        kept = report.get(title, []) if title == "layer" else []
        rows = [{**row, "commit": report["environment"]["commit"]} for row in tables[title]()]
        report[title] = [row for row in kept if row["tokens"] not in options.layer_tokens] + rows
        options.out.write_text(json.dumps(report, indent=2) + "\n")
        print(f"\n### {title}\n\n{markdown(rows)}")


if __name__ == "__main__":
    main()
