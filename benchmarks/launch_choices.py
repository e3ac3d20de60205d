"""Times of gate_conv's launch choices (ple_compile.ops.gate_conv.Tuning), for kernels.py --sweep."""

from itertools import product

import torch

from ple_compile.measuring.layer import Layer, draw
from ple_compile.measuring.timing import graph_microseconds
from ple_compile.ops._launches import take
from ple_compile.ops.gate_conv import Inputs, Tuning, run, scalars_size, scalars_step, window_step

ALL = 1 << 30
PREFILL_TOKENS = (64, 1024, 8192)
TWO_LAUNCHES = Tuning()._replace(few_tokens=0, few_rows=0)


def time(inputs: list[Inputs], tuning: Tuning) -> float:
    return graph_microseconds(lambda i: run(inputs[i], inputs[i].state, tuning), len(inputs))


def best(rows: list[dict]) -> dict:
    return min(rows, key=lambda row: row["us"])


def gate_pass(inputs: list[Inputs], scalars: torch.Tensor, tokens: int) -> list[dict]:
    rows = []
    for warps, registers in [*product((1,), (None, 168, 144, 128)), *product((2,), (None, 96, 80)), (4, None)]:
        tuning = Tuning()._replace(gate_warps=warps, gate_registers=registers)

        steps = (scalars_step(inputs[0], tuning),)

        def step(i: int, steps: tuple = steps) -> None:
            take(steps, None, None, scalars, *inputs[i][:9])

        rows.append({"tokens": tokens, "warps": warps, "registers": registers})
        rows[-1]["us"] = graph_microseconds(step, len(inputs))
    return rows


def convolution_pass(inputs: list[Inputs], scalars: torch.Tensor, tokens: int) -> list[dict]:
    rows = []
    outs = [torch.empty_like(i.hidden) for i in inputs]
    programs = [p for p in (1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 32768) if 4 * tokens >= p // 16]
    for (block, vector), steps, count in product(((128, 4), (256, 8), (256, 4)), (2, 3, 4, 6), programs):
        if vector * steps > 32:
            continue  # more registers than there are
        tuning = Tuning()._replace(
            conv_block=block, conv_vector=vector, conv_steps=steps, conv_programs=count, dependent=False
        )

        steps = (window_step(inputs[0], tuning),)

        def step(i: int, steps: tuple = steps) -> None:
            take(steps, outs[i], None, scalars, *inputs[i][:9])

        rows.append({"tokens": tokens, "block": block, "vector": vector, "steps": steps, "programs": count})
        rows[-1]["us"] = graph_microseconds(step, len(inputs))
    return rows


def prefill(layer: Layer) -> dict[str, list[dict]]:
    report: dict[str, list[dict]] = {"gate pass": [], "convolution pass": [], "both passes": []}
    for tokens in PREFILL_TOKENS:
        inputs = [layer.inputs(*tensors) for tensors in draw(1, tokens)]
        key, value, dilation = inputs[0].key, inputs[0].value, inputs[0].dilation
        rows, longest = key.numel() // value.shape[-1], Tuning()._replace(conv_steps=8)
        scalars = torch.randn(scalars_size(rows, dilation, longest), device=key.device)
        gates, convs = gate_pass(inputs, scalars, tokens), convolution_pass(inputs, scalars, tokens)
        gate, conv = best(gates), best(convs)
        for dependent, programs in product((True, False), (conv["programs"] // 2, conv["programs"])):
            tuning = TWO_LAUNCHES._replace(
                gate_warps=gate["warps"], gate_registers=gate["registers"], conv_block=conv["block"],
                conv_vector=conv["vector"], conv_steps=conv["steps"], conv_programs=programs, dependent=dependent,
            )  # fmt: skip
            row = {"tokens": tokens, "dependent": dependent, "programs": programs, "us": time(inputs, tuning)}
            report["both passes"].append(row)
        report["gate pass"] += gates
        report["convolution pass"] += convs
    return report


def few_tokens(layer: Layer, tokens: int) -> list[dict]:
    """One launch against two."""
    inputs = [layer.inputs(*tensors) for tensors in draw(1, tokens)]
    rows = []
    for warps, programs in product((4, 8), (132, 264)):
        tuning = Tuning()._replace(few_tokens=ALL, few_rows=ALL, few_warps=warps, few_programs=programs)
        rows.append({"tokens": tokens, "launches": 1, "warps": warps, "programs": programs})
        rows[-1]["us"] = time(inputs, tuning)
    for dependent in (True, False):
        rows.append({"tokens": tokens, "launches": 2, "dependent": dependent})
        rows[-1]["us"] = time(inputs, TWO_LAUNCHES._replace(dependent=dependent))
    return rows


def decode(layer: Layer, batch: int) -> list[dict]:
    inputs = [layer.inputs(*tensors) for tensors in draw(batch, 1, state=True)]
    rows = []
    for warps, programs in product((4, 8), (40, 132, 264, 528, ALL)):
        tuning = Tuning()._replace(few_rows=ALL, few_warps=warps, few_programs=programs)
        rows.append({"batch": batch, "launches": 1, "warps": warps, "programs": programs})
        rows[-1]["us"] = time(inputs, tuning)
    for dependent, block, warps in product((True, False), (128, 256, 512), (2, 4, 8)):
        tuning = TWO_LAUNCHES._replace(dependent=dependent, step_block=block, step_warps=warps)
        rows.append({"batch": batch, "launches": 2, "dependent": dependent, "block": block, "warps": warps})
        rows[-1]["us"] = time(inputs, tuning)
    return rows


def decoding(layer: Layer) -> dict[str, list[dict]]:
    return {
        "few tokens": [row for tokens in (8, 16, 32, 64, 128) for row in few_tokens(layer, tokens)],
        "decode, state": [row for batch in (1, 4, 16, 64, 256) for row in decode(layer, batch)],
    }


SWEEPS = {"prefill": prefill, "decode": decoding}
