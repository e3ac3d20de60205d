"""Packed batches at the released widths: ids, and gate + norms + convolution + residuals + states, against vLLM's.

    python benchmarks/packed.py                             # JSON to packed.json, tables in Markdown to stdout
    python benchmarks/packed.py --peer benchmarks/peers     # with vLLM's kernels (see benchmarks/peer.py)
    python benchmarks/packed.py --sweep                     # launch choices of decoding instead, to packed-sweep.json

bf16; medians over CUDA-graph replays, per call, with inputs and pools that rotate through more memory than the L2
cache holds. Each batch runs with both layouts of the pool: [slots, C, W] with a channel's columns together, as the
reference model has it, and with a column's channels together, as vLLM allocates it.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import peer
import torch
from torch import Tensor

from ple_compile.measuring.layer import CHANNELS, DILATION, DTYPE, EPS, WIDTH, WINDOW, Layer, random
from ple_compile.measuring.timing import copy_bytes_per_microsecond, environment, graph_microseconds, markdown, num_sets
from ple_compile.ops import packed_gate_conv as op
from ple_compile.ops.packed_ngram_ids import packed_ngram_ids

HEADS, EOS = 8, 248_044


@dataclass(frozen=True)
class Batch:
    name: str
    lengths: tuple[int, ...]
    with_state: int = 0  # the first so many requests have earlier state

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def decoding(self) -> bool:
        return self.with_state == len(self.lengths) == self.tokens


BATCHES = (
    *(Batch(f"decode, {count} requests", (1,) * count, count) for count in (1, 8, 64, 256)),
    Batch("prefill, 1 x 8,192", (8192,)),
    Batch("prefill, 64 x 128", (128,) * 64),
    Batch("4 decodes + 2 x 2,000", (1,) * 4 + (2000,) * 2, 4),
)


class Requests:
    """A batch's index tensors; request r has slot r + 1."""

    def __init__(self, batch: Batch):
        count = len(batch.lengths)
        self.starts = torch.tensor([0, *batch.lengths]).cumsum(0).int().cuda()
        self.slots = torch.arange(1, count + 1, dtype=torch.int32, device="cuda")
        self.has = torch.arange(count, device="cuda") < batch.with_state


def draw(batch: Batch, channels_together: bool) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Sets of (key, value, hidden, pool); key and value are views of one projection."""
    tokens, slots = batch.tokens, len(batch.lengths) + 1
    sets = []
    for _ in range(num_sets(2 * (tokens * (2 * CHANNELS + WIDTH) + slots * CHANNELS * WINDOW))):
        projected = random(tokens, CHANNELS + WIDTH)
        shape = (slots, WINDOW, CHANNELS) if channels_together else (slots, CHANNELS, WINDOW)
        pool = random(*shape)
        pool = pool.mT if channels_together else pool
        sets.append((projected[:, :CHANNELS], projected[:, CHANNELS:], random(tokens, CHANNELS), pool))
    return sets


def ours_inputs(layer: Layer, requests: Requests, *tensors: Tensor) -> op.Inputs:
    key, value, hidden, pool = tensors
    return op.Inputs(
        key, value, hidden, layer.norm_key, layer.norm_query, layer.norm_conv, layer.conv, pool, requests.starts,
        requests.slots, requests.has, None, None, [EPS] * 3, [], DTYPE, DILATION, True,
    )  # fmt: skip


def ours(layer: Layer, requests: Requests) -> Callable[..., Tensor]:
    return lambda *tensors: op.packed_gate_conv_(*ours_inputs(layer, requests, *tensors))[0]


def theirs(layer: Layer, requests: Requests, kernels: ModuleType, decoding: bool) -> Callable[..., Tensor]:
    how = {"mode": "decode"}
    if not decoding:
        how = {"mode": "prefill", "query_start_loc": requests.starts, "has_initial_states": requests.has}

    def call(key: Tensor, value: Tensor, hidden: Tensor, pool: Tensor) -> Tensor:
        norms = (layer.norm_key, layer.norm_query, layer.norm_conv)
        gated, normed = kernels.ple_gate(key, value, hidden, *norms, EPS)
        kernels.ple_conv(normed, gated, pool, layer.conv[:, 0], requests.slots, hidden, dilation=DILATION, **how)
        return gated

    return call


def check(mine: Callable[..., Tensor], other: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> None:
    """Both sides compute the same, states included, before they are timed."""
    results = []
    for call in (mine, other):
        pool = tensors[3].clone(memory_format=torch.preserve_format)
        results.append((call(*tensors[:3], pool), pool[1:]))
    for a, b in zip(*results):
        equal = (a == b).double().mean().item()
        if equal < 0.99:
            raise AssertionError(f"only {equal:.4%} of the values are bit-equal to the peer's")


def measure(layer: Layer, batch: Batch, channels_together: bool, folder: str | None, bandwidth: float) -> dict:
    requests, sets = Requests(batch), draw(batch, channels_together)

    def time(call: Callable[..., Tensor]) -> float:
        return graph_microseconds(lambda i: call(*sets[i]), len(sets))

    mine = ours(layer, requests)
    row: dict[str, float | int | str | None] = {
        "batch": batch.name,
        "together in the pool": "channels" if channels_together else "columns",
        "ours": time(mine),
    }
    for pdl in (True, False) if folder else ():
        other = theirs(layer, requests, peer.load(folder or "", pdl), batch.decoding)
        check(mine, other, sets[0])
        row["vllm, dependent launch" if pdl else "vllm"] = time(other)
    states = len(batch.lengths) + batch.with_state  # every request's is written
    row["floor"] = 2 * (batch.tokens * (3 * CHANNELS + WIDTH) + states * CHANNELS * WINDOW) / bandwidth
    return row


def measure_ids(batch: Batch, folder: str | None) -> dict:
    requests = Requests(batch)
    tokens = torch.randint(0, 248_320, (batch.tokens,), dtype=torch.int32, device="cuda")
    context = torch.randint(0, 248_320, (len(batch.lengths), 2), dtype=torch.int32, device="cuda")
    multipliers = torch.tensor([23703573157769, 9876543210987, 1357913579135], device="cuda")
    sizes = torch.tensor([20_000_003 + 10 * head for head in range(2 * HEADS)], device="cuda")
    tables = (multipliers, sizes, sizes.cumsum(0) - sizes)

    def mine() -> Tensor:
        return packed_ngram_ids(tokens, requests.starts, context, *tables, EOS)

    row: dict[str, float | str] = {"batch": batch.name, "ours": graph_microseconds(lambda _: mine(), 20)}
    for pdl in (True, False) if folder else ():
        kernels = peer.load(folder or "", pdl)

        def other(kernels: ModuleType = kernels) -> Tensor:
            return kernels.ple_ngram_ids(tokens, requests.starts, context, *tables, EOS, HEADS)

        if not torch.equal(mine(), other()):
            raise AssertionError(f"{batch.name}: the ids differ from the peer's")
        row["vllm, dependent launch" if pdl else "vllm"] = graph_microseconds(lambda _: other(), 20)
    return row


def sweep(layer: Layer) -> list[dict]:
    """Decoding in one launch or two, with other widths of a program and other numbers of warps."""
    rows = []
    for batch in BATCHES[:4]:
        for together in (False, True):
            sets = draw(batch, together)
            row: dict[str, float | str] = {"batch": batch.name, "together": "channels" if together else "columns"}
            inputs = [ours_inputs(layer, Requests(batch), *tensors) for tensors in sets]
            tuning = op.tuned("packed_gate_conv", op.PACKED, inputs[0].value)
            for programs in (132, 528) if len(batch.lengths) <= 64 else ():
                chosen = tuning._replace(few_rows=1 << 30, few_programs=programs)
                row[f"one launch, {programs} programs"] = time_inputs(inputs, chosen)
            for block, warps in ((256, 4), (512, 4), (512, 8), (1024, 8)):
                chosen = tuning._replace(few_rows=0, step_block=block, step_warps=warps)
                row[f"two, {block} channels, {warps} warps"] = time_inputs(inputs, chosen)
            rows.append(row)
    return rows


def time_inputs(inputs: list[op.Inputs], tuning: op.Tuning) -> float:
    return graph_microseconds(lambda i: op.run(inputs[i], tuning), len(inputs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help=f"folder that holds {peer.FILE}, or 'installed'")
    parser.add_argument("--sweep", action="store_true", help="time decoding's launch choices instead")
    parser.add_argument("--out", type=Path, help="the JSON file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("packed.py measures a GPU: no CUDA device found")
    torch.manual_seed(0)
    layer = Layer()
    report: dict = {"environment": environment()}
    with torch.no_grad():
        if options.sweep:
            tables = {"decoding, us": sweep(layer)}
        else:
            bandwidth = copy_bytes_per_microsecond()
            report["copy_gb_per_s"] = bandwidth / 1e3
            rows = [measure(layer, b, together, options.peer, bandwidth) for b in BATCHES for together in (False, True)]
            tables = {"gate + conv + state, us": rows, "ids, us": [measure_ids(b, options.peer) for b in BATCHES]}
    report |= tables
    out = options.out or Path("packed-sweep.json" if options.sweep else "packed.json")
    out.write_text(json.dumps(report, indent=2) + "\n")
    for title, rows in tables.items():
        print(f"\n### {title}\n\n{markdown(rows)}")


if __name__ == "__main__":
    main()
