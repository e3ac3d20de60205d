"""n-gram ids and their rows from a table on the GPU: one launch against ids and `index_select`.

    python benchmarks/lookup.py                  # JSON to lookup.json, a table in Markdown to stdout

16 rows of 320 bytes per token; the table takes 32.8 GiB. Medians over CUDA-graph replays; every call has ids of its
own. `index_select` gets ids that exist already, and `floor` is twice the rows' bytes at the bandwidth of a large copy.

The second table looks the same ids up in tables of every format, as many rows, which bf16 rows come out of.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ple_compile.measuring.timing import copy_bytes_per_microsecond, environment, graph_microseconds, markdown
from ple_compile.ops.dequantized_lookup import dequantized_lookup
from ple_compile.ops.lookup import lookup
from ple_compile.ops.ngram_ids import ngram_ids
from ple_compile.ops.ngram_lookup import ngram_lookup
from ple_compile.tables.formats import FORMATS

WIDTH, HEADS, VOCABULARY, EOS = 160, 16, 248_320, 3
MULTIPLIERS = (23703573157769, 9876543210987, 1357913579135)
TOKENS = (1, 64, 1024, 8192)
CALLS = 16


def make_table(rows: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """bf16 rows whose first eight bytes are their number; multipliers, sizes and offsets over all of them."""
    table = torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
    table.view(torch.int64)[:, 0] = torch.arange(rows, device="cuda")
    sizes = torch.tensor([rows // HEADS - 2 * head - 1 for head in range(HEADS)], device="cuda")
    return table, (torch.tensor(MULTIPLIERS, device="cuda"), sizes, sizes.cumsum(0) - sizes)


def measure(table: Tensor, hashes: tuple[Tensor, Tensor, Tensor], tokens: int, bandwidth: float) -> dict:
    batches = [torch.randint(0, VOCABULARY, (1, tokens), device="cuda") for _ in range(CALLS)]
    ids = [ngram_ids(batch, None, *hashes, EOS).view(-1) for batch in batches]
    rows = ngram_lookup(table, batches[0], None, *hashes, EOS)
    torch.testing.assert_close(rows.view(-1, WIDTH).view(torch.int64)[:, 0], ids[0], rtol=0, atol=0)
    steps = {
        "index_select": lambda i: table.index_select(0, ids[i]),
        "ids, index_select": lambda i: table.index_select(0, ngram_ids(batches[i], None, *hashes, EOS).view(-1)),
        "ids": lambda i: ngram_ids(batches[i], None, *hashes, EOS),
        "ple::lookup": lambda i: lookup(table, ids[i]),
        "ple::ngram_lookup": lambda i: ngram_lookup(table, batches[i], None, *hashes, EOS),
    }
    times = {name: graph_microseconds(step, CALLS) for name, step in steps.items()}
    ratio = times["ple::ngram_lookup"] / times["index_select"]
    return {"tokens": tokens, **times, "ratio": f"{ratio:.2f}", "floor": 2 * tokens * HEADS * WIDTH * 2 / bandwidth}


def quantized(name: str, rows: int) -> Callable[[Tensor], Tensor]:
    """A lookup in a table of random bytes."""
    module = FORMATS[name](rows, WIDTH, dtype=torch.bfloat16, device="cuda")
    words = module.weight.data.view(torch.uint8).view(torch.int64)
    words.random_()
    for scale in ("weight_scale", "weight_scale_2"):
        if hasattr(module, scale):
            module.get_parameter(scale).data.fill_(0.5)
    table_scale = module.weight_scale_2 if name == "nvfp4" else None
    tensors, dtypes = (module.weight, module.weight_scale, table_scale), (torch.float32, torch.bfloat16)
    return lambda ids: dequantized_lookup(*tensors, ids, *dtypes)


def measure_formats(rows: int, bandwidth: float) -> list[dict]:
    """One row per number of tokens; a table at a time, so that all of them fit."""
    batches = {n: [torch.randint(0, rows, (n * HEADS,), device="cuda") for _ in range(CALLS)] for n in TOKENS}
    results: list[dict] = [{"tokens": tokens} for tokens in TOKENS]
    stored = {"bf16": 2 * WIDTH, "fp8": WIDTH, "fp8_row": WIDTH + 4, "nvfp4": WIDTH // 2 + WIDTH // 16}
    for name, row_bytes in stored.items():
        if name == "bf16":
            table = torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
            look_up: Callable[[Tensor], Tensor] = partial(lookup, table)
        else:
            look_up = quantized(name, rows)
        for result in results:
            ids = batches[result["tokens"]]
            result[name] = graph_microseconds(lambda i: look_up(ids[i]), CALLS)  # noqa: B023
            result[f"{name} floor"] = result["tokens"] * HEADS * (row_bytes + 2 * WIDTH) / bandwidth
        table = look_up = None  # type: ignore[assignment]
        torch.cuda.empty_cache()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=110_000_000, help="rows of the table")
    parser.add_argument("--out", type=Path, default=Path("lookup.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("lookup.py measures a GPU: no CUDA device found")
    torch.manual_seed(0)
    bandwidth = copy_bytes_per_microsecond()
    table, hashes = make_table(options.rows)
    rows = [measure(table, hashes, tokens, bandwidth) for tokens in TOKENS]
    report = {"environment": environment(), "table_gib": table.nbytes / 2**30, "lookup, us": rows}
    del table
    torch.cuda.empty_cache()
    report["formats, us"] = measure_formats(options.rows, bandwidth)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    for title in ("lookup, us", "formats, us"):
        print(f"\n### {title}\n\n{markdown(report[title])}")


if __name__ == "__main__":
    main()
