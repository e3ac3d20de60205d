"""The PLE kernels at the released widths: eager, stock Inductor, ours, and vLLM's where a peer is given.

    python benchmarks/kernels.py                            # JSON to kernels.json, tables in Markdown to stdout
    python benchmarks/kernels.py --peer benchmarks/peers    # with vLLM's kernels (see benchmarks/peer.py)
    python benchmarks/kernels.py --sweep prefill            # gate_conv's launch choices instead; and --sweep decode

Work: gate + three norms + dilated convolution + both residual adds in bf16, a sequence without state; and the same
for single tokens with the state moved on. Every time is the median over CUDA-graph replays, per call, with inputs
that rotate through more memory than the L2 cache holds.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import launch_choices
import peer
import torch
from torch import Tensor

from ple_compile.measuring.layer import CHANNELS, DILATION, DTYPE, EPS, WIDTH, WINDOW, Layer, draw
from ple_compile.measuring.timing import copy_bytes_per_microsecond, environment, graph_microseconds, markdown
from ple_compile.ops import gate_conv as op

TOKENS = (1, 64, 1024, 8192)
DECODE_BATCHES = (1, 64)


def floor_bytes(batch: int, tokens: int, state: bool) -> int:
    """Every tensor moved once: key, value, hidden in, out; with a state, it in and out."""
    return 2 * batch * (tokens * (3 * CHANNELS + WIDTH) + (2 * CHANNELS * WINDOW if state else 0))


def measure(layer: Layer, batch: int, tokens: int, state: bool, folder: str | None, bandwidth: float) -> dict:
    sets = draw(batch, tokens, state)

    def time(call: Callable[..., object]) -> float:
        return graph_microseconds(lambda i: call(*sets[i]), len(sets))

    def ours(*tensors: Tensor) -> Tensor:
        return op.gate_conv_update_(*layer.inputs(*tensors)) if state else op.gate_conv(*layer.inputs(*tensors))

    torch._dynamo.reset()
    compiled = torch.compile(layer.eager, dynamic=False)
    check(layer, sets[0], ours, bit_equal=True)
    row: dict[str, float | int | str | None] = {
        "work": "decode, state" if state else "prefill",
        "batch": batch,
        "tokens": tokens,
        "eager": time(layer.eager),
        "inductor": time(compiled),
        "ours": time(ours),
    }
    if folder is not None:
        for name, pdl in (("vllm, dependent launch", True), ("vllm", False)):
            step = peer_step(layer, folder, pdl, sets, state)
            check(layer, sets[1], step, bit_equal=False)
            row[name] = time(step)
    row["floor"] = floor_bytes(batch, tokens, state) / bandwidth
    return row


def check(layer: Layer, tensors: tuple[Tensor, ...], step: Callable[..., Tensor], bit_equal: bool) -> None:
    """Whoever is timed computes what eager computes. One gate that rounds the other way changes its whole row."""
    expected = layer.eager(*(t.clone() for t in tensors))
    actual = step(*tensors).view(expected.shape)
    torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)
    differ = (actual != expected).double().mean().item()
    if bit_equal and differ > max(0.001, 2 * WIDTH / expected.numel()):
        raise AssertionError(f"{differ:.4%} of the outputs are not bit-equal to eager")


def peer_step(layer: Layer, folder: str, pdl: bool, sets: list, state: bool) -> Callable[..., Tensor]:
    """vLLM's two kernels on the same inputs (without the batch dimension); its state pool's slot 0 means none."""
    weights = {"norm_key": layer.norm_key, "norm_query": layer.norm_query, "norm_conv": layer.norm_conv}
    theirs = peer.Layer(peer.load(folder, pdl), {**weights, "conv": layer.conv[:, 0]}, EPS, DILATION)
    batch, tokens = sets[0][0].shape[:2]
    if state:
        # Pools that rotate like ours: slots 1 to batch of one pool for every set.
        pools = {id(s[3]): torch.cat([torch.zeros_like(s[3][:1]), s[3]]) for s in sets}
        slots = torch.arange(1, batch + 1, dtype=torch.int32, device="cuda")
        return lambda key, value, hidden, old: theirs.decode(
            key[:, 0], value[:, 0], hidden[:, 0], pools[id(old)], slots
        )
    pool = torch.zeros(2, CHANNELS, WINDOW, dtype=DTYPE, device="cuda")
    bounds = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    return lambda key, value, hidden: theirs.prefill(key[0], value[0], hidden[0], pool, bounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help=f"folder that holds {peer.FILE}, or 'installed'")
    parser.add_argument("--sweep", choices=list(launch_choices.SWEEPS), help="time gate_conv's launch choices instead")
    parser.add_argument("--out", type=Path, help="the JSON file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("kernels.py measures a GPU: no CUDA device found")
    torch.manual_seed(0)
    layer = Layer()
    report: dict = {"environment": environment()}
    with torch.no_grad():
        if options.sweep:
            tables = launch_choices.SWEEPS[options.sweep](layer)
        else:
            bandwidth = copy_bytes_per_microsecond()
            report["copy_gb_per_s"] = bandwidth / 1e3
            work = [(1, tokens, False) for tokens in TOKENS] + [(batch, 1, True) for batch in DECODE_BATCHES]
            tables = {"gate + conv, us": [measure(layer, *w, options.peer, bandwidth) for w in work]}
    report |= tables
    out = options.out or Path(f"kernels-{options.sweep}.json" if options.sweep else "kernels.json")
    out.write_text(json.dumps(report, indent=2) + "\n")
    for title, rows in tables.items():
        print(f"\n### {title}\n\n{markdown(rows)}")


if __name__ == "__main__":
    main()
