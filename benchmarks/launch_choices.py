"""Times of gate_conv's launch choices (ple_compile.ops.gate_conv.Tuning), for kernels.py --sweep."""

from itertools import product

import torch
from layer import DTYPE, EPS, STREAMS, Layer, draw
from measure import graph_microseconds

from ple_compile.ops import gate as gate_op
from ple_compile.ops.gate_conv import TUNED, Inputs, Tuning, launch_window, run

ALL = 1 << 30


def time(inputs: list[Inputs], tuning: Tuning) -> float:
    return graph_microseconds(lambda i: run(inputs[i], inputs[i].state, tuning), len(inputs))


def few_tokens(layer: Layer, batch: int, tokens: int, state: bool) -> list[dict]:
    """One launch against two."""
    inputs = [layer.inputs(*tensors) for tensors in draw(batch, tokens, state)]
    rows = []
    two = None if state else time(inputs, TUNED._replace(few_tokens=0))
    for warps, programs in product((4, 8, 16), (132, 264, 528, 1056)):
        tuning = TUNED._replace(few_tokens=ALL, few_warps=warps, few_programs=programs)
        one = time(inputs, tuning)
        rows.append(
            {"batch": batch, "tokens": tokens, "warps": warps, "programs": programs, "us": one, "two launches": two}
        )
    return rows


def gate_pass(inputs: list[Inputs], scalars: torch.Tensor) -> list[dict]:
    rows = []
    for warps, tile_rows in product((1, 2, 4, 8), (1, 2)):

        def step(i: int, warps: int = warps, tile_rows: int = tile_rows) -> None:
            gate_op.launch_gate(
                *inputs[i][:6], None, [EPS] * 3, DTYPE, scalars=scalars, num_warps=warps, rows=tile_rows
            )

        microseconds = graph_microseconds(step, len(inputs))
        rows.append({"tokens": scalars.shape[-1], "warps": warps, "rows": tile_rows, "us": microseconds})
    return rows


def convolution_pass(inputs: list[Inputs], scalars: torch.Tensor) -> list[dict]:
    rows = []
    outs = [torch.empty_like(i.hidden) for i in inputs]
    tokens = scalars.shape[-1]
    tiles = ((128, 4), (256, 4), (256, 8), (512, 4), (512, 8), (512, 16))
    for (block, vector), programs in product(tiles, (512, 1024, 2048, 4096, 8192, 16384)):
        tuning = TUNED._replace(conv_block=block, conv_vector=vector, conv_programs=programs)

        def step(i: int, tuning: Tuning = tuning) -> None:
            launch_window(inputs[i], outs[i], scalars, 0, tokens, tuning)

        microseconds = graph_microseconds(step, len(inputs))
        rows.append({"tokens": tokens, "block": block, "vector": vector, "programs": programs, "us": microseconds})
    return rows


def both_passes(inputs: list[Inputs], tuning: Tuning) -> list[dict]:
    """In one pair of launches, and in chunks small enough that the second launch finds `hidden` in L2."""
    tokens = inputs[0].key.shape[1]
    rows = []
    for chunk, programs in product((512, 1024, 1536, 2048, 4096, ALL), (1024, 2048, tuning.conv_programs)):
        if chunk < tokens or chunk == ALL:
            microseconds = time(inputs, tuning._replace(chunk=chunk, conv_programs=programs))
            rows.append({"tokens": tokens, "chunk": min(chunk, tokens), "programs": programs, "us": microseconds})
    return rows


def sweep(layer: Layer) -> dict[str, list[dict]]:
    report: dict[str, list[dict]] = {"few tokens": [], "gate pass": [], "convolution pass": [], "both passes": []}
    for tokens in (1, 2, 8, 16, 32, 64, 128):
        report["few tokens"] += few_tokens(layer, 1, tokens, state=False)
    for batch in (1, 64):
        report["few tokens"] += few_tokens(layer, batch, 1, state=True)
    for tokens in (64, 1024, 8192):
        inputs = [layer.inputs(*tensors) for tensors in draw(1, tokens)]
        scalars = torch.rand(2, STREAMS, tokens, device="cuda")
        gate, conv = gate_pass(inputs, scalars), convolution_pass(inputs, scalars)
        best_gate, best_conv = (min(rows, key=lambda row: row["us"]) for rows in (gate, conv))
        tuning = TUNED._replace(
            few_tokens=0,
            gate_warps=best_gate["warps"],
            gate_rows=best_gate["rows"],
            conv_block=best_conv["block"],
            conv_vector=best_conv["vector"],
            conv_programs=best_conv["programs"],
        )
        report["gate pass"] += gate
        report["convolution pass"] += conv
        report["both passes"] += both_passes(inputs, tuning)
    return report
