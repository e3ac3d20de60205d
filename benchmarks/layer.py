"""One whole PLE layer at the released widths: against vLLM's chain of the same work, and against transformers' eager.

    python benchmarks/layer.py                            # JSON to layer.json, tables in Markdown to stdout
    python benchmarks/layer.py --peer benchmarks/peers    # with vLLM's kernels (see benchmarks/peer.py)
    python benchmarks/layer.py --tables transformers --ways eager "ours, reduce-overhead" --tokens 1 8192

bf16, the table 8 M rows. Three tables, times in microseconds:
- "chain": ids, lookup, merged kv GEMM, gate, norms, convolution, both residual adds, as `backend="ple"` compiles them
  and by vLLM's kernels with `index_select` and the same GEMM between them. Medians over replays of one CUDA graph,
  inputs rotate; prefill is a sequence without state, decode one token for each request, its state moved on. Ratio:
  ours / the faster of vLLM's two, both less the GEMM's own time.
- "transformers": its PLE layer, a call's wall time between synchronisations, inputs rotate. A table on the CPU is
  pageable for eager and stock Inductor, page-locked by `offload_tables` for ours. Speedup: eager / the faster of ours.
- "launches": kernels and copies on the GPU in one call of that layer.
A cell that could not be measured is null, and stderr says why.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import peer
import peer_chain
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextPLELayer

from ple_compile import offload_tables, stats
from ple_compile.measuring.compare import check
from ple_compile.measuring.layer import EOS, HEADS, VOCABULARY, WIDTH, Sizes, WholeLayer
from ple_compile.measuring.timing import environment, markdown, microseconds, wall_microseconds
from ple_compile.ops import ngram_ids
from ple_compile.tables.find import find_tables
from ple_compile.upstream import counters

TOKENS, MOST_REQUESTS = (1, 64, 8192), 64
TABLES = ("chain", "transformers", "launches")
WAYS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "inductor": {"backend": "inductor"},
    "inductor, reduce-overhead": {"backend": "inductor", "mode": "reduce-overhead"},
    "ours": {"backend": "ple", "options": {"strict": True}},
    "ours, reduce-overhead": {"backend": "ple", "options": {"strict": True, "mode": "reduce-overhead"}},
}


def attempt(cell: str, measure: Callable[[], Any]) -> Any:
    """What `measure` returns, or None and a line on stderr: what one way cannot do must not cost the other figures."""
    try:
        return measure()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        print(f"{cell}: {type(error).__name__}: {reason}", file=sys.stderr, flush=True)
        return None


def compiled(call: Any, way: str) -> Any:
    torch._dynamo.reset()
    settings = WAYS[way]
    return call if settings is None else torch.compile(call, dynamic=False, fullgraph=True, **settings)


def check_fused(call: Callable[..., Tensor], inputs: tuple) -> Tensor:
    before = stats()["ple_executions"]
    result = call(*inputs)
    if stats()["ple_executions"] == before:
        raise RuntimeError("the layer did not run fused")
    return result


class Chain(WholeLayer):
    """The whole layer, with the two tokens before and the convolution's state where it decodes."""

    def forward(
        self, hidden: Tensor, tokens: Tensor, context: Tensor | None = None, state: Tensor | None = None
    ) -> Tensor:
        hashes = (self.rows.multipliers, self.rows.head_sizes, self.rows.offsets)
        rows = self.rows.table(ngram_ids.reference(tokens, context, *hashes, EOS)).flatten(-2)
        return self.behind.eager(self.key_proj(rows), self.value_proj(rows), hidden, state)


def draw_tokens(sizes: Sizes, *shape: int) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, device=sizes.device)


def draw(sizes: Sizes, batch: int, tokens: int, state: bool) -> list[tuple[Tensor, ...]]:
    """Sets of (hidden, tokens[, context, state]). The GEMM's weights alone push everything else out of L2."""
    window = (sizes.kernel - 1) * sizes.dilation
    sets: list[tuple[Tensor, ...]] = []
    for _ in range(16 if batch * tokens <= 1024 else 4):
        inputs = sizes.random(batch, tokens, sizes.channels), draw_tokens(sizes, batch, tokens)
        past = (draw_tokens(sizes, batch, 2), sizes.random(batch, sizes.channels, window)) if state else ()
        sets.append((*inputs, *past))
    return sets


def measure_chain(model: Chain, batch: int, tokens: int, state: bool, folder: str | None) -> dict[str, Any]:
    sizes = model.behind.sizes
    sets, device = draw(sizes, batch, tokens, state), torch.device(sizes.device)
    expected = model(*(t.clone() for t in sets[0]))
    name = f"chain, {batch} x {tokens} tokens"

    def theirs(pdl: bool) -> float:
        step = peer_chain.step(model, folder or "", pdl, sets)
        check("vllm", step(0).view(expected.shape), expected)
        return microseconds(step, len(sets), device)

    def ours() -> float:
        call = compiled(model, "ours")
        check("ours", check_fused(call, tuple(t.clone() for t in sets[0])), expected)
        return microseconds(lambda i: call(*sets[i]), len(sets), device)

    def gemm() -> float:
        merged = torch.cat([model.key_proj.weight, model.value_proj.weight])
        inputs = [sizes.random(batch, tokens, sizes.hidden) for _ in sets]
        return microseconds(lambda i: F.linear(inputs[i], merged), len(inputs), device)

    row: dict[str, Any] = {"work": "decode, state" if state else "prefill", "batch": batch, "tokens": tokens}
    for pdl in (True, False) if folder else ():
        way = "vllm, dependent launch" if pdl else "vllm"
        row[way] = attempt(f"{name}, {way}", partial(theirs, pdl))
    row |= {"ours": attempt(f"{name}, ours", ours), "kv GEMM": attempt(f"{name}, kv GEMM", gemm)}
    peers = [row[way] for way in ("vllm, dependent launch", "vllm") if row.get(way) is not None]
    if peers and row["ours"] is not None and row["kv GEMM"] is not None:
        row |= {"vllm less GEMM": min(peers) - row["kv GEMM"], "ours less GEMM": row["ours"] - row["kv GEMM"]}
        row["ratio"] = f"{row['ours less GEMM'] / row['vllm less GEMM']:.2f}"
    return row


def released_layer(sizes: Sizes) -> Any:
    config = Qwen4ExpTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes.hidden,
        num_hidden_layers=2,
        layer_types=["linear_attention"] * 2,
        ple_layer_ids=[2],
        ngram_vocab_size_base=sizes.rows // HEADS,
        hc_count=sizes.streams,
        eos_token_id=EOS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    )
    torch.set_default_dtype(sizes.dtype)
    with torch.device(sizes.device):
        layer = Qwen4ExpTextPLELayer(config, 1, 0).eval()
    torch.set_default_dtype(torch.float32)
    for name, parameter in layer.named_parameters():
        torch.nn.init.normal_(parameter, std=0.02 if "proj" in name else 0.5)
    return layer


def ready(layer: Any, way: str, sets: list[tuple[Tensor, Tensor]]) -> Callable[[int], None]:
    """A call on the i-th set and the wait for it, once the way has given what eager gives."""
    skips = counters["inductor"]["cudagraph_skips"]
    call, on_gpu = compiled(layer.forward, way), sets[0][0].is_cuda
    first = (*sets[0], None)
    check(way, check_fused(call, first) if "ours" in way else call(*first), layer(*first))
    if on_gpu and counters["inductor"]["cudagraph_skips"] > skips:
        raise RuntimeError("Inductor made no CUDA graph")

    def step(i: int) -> None:
        call(*sets[i], None)
        if on_gpu:
            torch.cuda.synchronize()

    return step


def wall_time(layer: Any, way: str, sets: list[tuple[Tensor, Tensor]]) -> float:
    return wall_microseconds(ready(layer, way, sets), len(sets))


def launches(layer: Any, way: str, sets: list[tuple[Tensor, Tensor]]) -> int:
    step = ready(layer, way, sets)
    step(0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(1)
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def measure_layer(sizes: Sizes, tokens: list[int], ways: Iterable[str], measure: Callable[..., Any]) -> list[dict]:
    """A row for each place of the table and number of tokens, with what `measure` says of each way."""
    layer, on_gpu, rows = released_layer(sizes), sizes.device != "cpu", []
    drawn = {
        count: [(sizes.random(1, count, sizes.channels), draw_tokens(sizes, 1, count)) for _ in range(8)]
        for count in tokens
    }
    for place in ("GPU", "CPU") if on_gpu else ("CPU",):
        if on_gpu and place == "CPU":
            (table,) = find_tables(layer)
            table.weight.data = table.weight.data.cpu()
        here: list[dict[str, Any]] = [{"table on": place, "tokens": count} for count in tokens]
        for way in ways:  # ours after the others: a table that is page-locked stays so
            if on_gpu and place == "CPU" and "ours" in way:
                attempt("offload_tables", partial(offload_tables, layer))
            for row in here:
                cell = f"{measure.__name__}, table on {place}, {row['tokens']} tokens, {way}"
                row[way] = attempt(cell, partial(measure, layer, way, drawn[row["tokens"]]))
        rows += here
    return rows


def add_speedup(row: dict[str, Any]) -> None:
    ours = [row[way] for way in WAYS if "ours" in way and row.get(way) is not None]
    row["speedup"] = f"{row['eager'] / min(ours):.1f}" if ours and row.get("eager") is not None else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help=f"folder that holds {peer.FILE}, or 'installed'")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="of transformers' layer")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--rows", type=int, default=8_000_000, help="rows of the table")
    parser.add_argument("--hidden", type=int, default=WIDTH)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--out", type=Path, default=Path("layer.json"))
    options = parser.parse_args()
    sizes = Sizes(hidden=options.hidden, rows=options.rows, device=options.device)
    torch.manual_seed(0)
    report: dict[str, Any] = {"environment": environment(sizes.device) | {"transformers": transformers.__version__}}
    tables: dict[str, list[dict]] = {f"{name}, us": [] for name in options.tables if name != "launches"}

    def store() -> None:
        options.out.write_text(json.dumps(report | tables, indent=2) + "\n")

    with torch.no_grad():
        if "chain" in options.tables:
            model = Chain(sizes).eval()
            work = [(1, count, False) for count in options.tokens]
            work += [(count, 1, True) for count in options.tokens if count <= MOST_REQUESTS]
            for batch, tokens, state in work:
                tables["chain, us"].append(measure_chain(model, batch, tokens, state, options.peer))
                store()
            del model
        if "transformers" in options.tables:
            tables["transformers, us"] = measure_layer(sizes, options.tokens, options.ways, wall_time)
            for row in tables["transformers, us"]:
                add_speedup(row)
            store()
        # Last: a profiler that ran once may slow what follows.
        if "launches" in options.tables and sizes.device != "cpu":
            ways = [way for way in options.ways if "reduce-overhead" not in way]
            tables["launches"] = measure_layer(sizes, options.tokens, ways, launches)
            store()
    for title, rows in tables.items():
        print(f"\n### {title}\n\n{markdown(rows)}" if rows else "")


if __name__ == "__main__":
    main()
