"""One PLE layer, or several in a row: eager, stock Inductor and this package, timed on one device."""

import torch
from torch import Tensor

from ple_compile.measuring.layer import VOCABULARY, Sizes, Stack, floor_bytes
from ple_compile.measuring.timing import copy_bytes_per_microsecond, microseconds, num_sets
from ple_compile.stats import stats
from ple_compile.tables.progress import Steps

WAYS = ("eager", "inductor", "ours")
_BACKENDS = {"inductor": "inductor", "ours": "ple"}
_FARTHEST = 0.02  # Inductor keeps float32 where eager rounds to bf16

Inputs = list[tuple[Tensor, Tensor]]  # hidden and tokens


@torch.no_grad()
def compare(sizes: Sizes, num_layers: int, tokens: list[int]) -> list[dict[str, float]]:
    """A row for each number of tokens: microseconds of every way, what moving the bytes alone takes, layers fused."""
    device = torch.device(sizes.device)
    steps = Steps("bench", len(tokens) * len(WAYS) + 1)
    steps.begin("copy bandwidth")
    bandwidth = copy_bytes_per_microsecond(device)
    torch.manual_seed(0)
    model = Stack(sizes, num_layers).eval()
    rows = []
    for count in tokens:
        inputs, row = draw_inputs(sizes, num_layers, count), {"tokens": float(count)}
        for way in WAYS:
            steps.begin(f"{count} tokens, {way}")
            row |= time_way(way, model, inputs, device)
        rows.append(row | {"tokens": count, "floor": floor_bytes(sizes, num_layers, count) / bandwidth})
    steps.end()
    return rows


def draw_inputs(sizes: Sizes, num_layers: int, tokens: int) -> Inputs:
    count = num_sets(floor_bytes(sizes, num_layers, tokens)) if sizes.device != "cpu" else 2
    shape = (1, tokens)
    return [
        (sizes.random(*shape, sizes.channels), torch.randint(0, VOCABULARY, shape, device=sizes.device))
        for _ in range(count)
    ]


def time_way(way: str, model: Stack, inputs: Inputs, device: torch.device) -> dict[str, float]:
    """Its time, once it has given what eager gives; for "ours" also how many layers ran fused."""
    torch._dynamo.reset()
    call = model if way == "eager" else torch.compile(model, backend=_BACKENDS[way], dynamic=False)
    before = stats()["ple_executions"]
    check(way, call(*inputs[0]), model(*inputs[0]))
    fused = {"fused": stats()["ple_executions"] - before} if way == "ours" else {}
    return {way: microseconds(lambda i: call(*inputs[i]), len(inputs), device), **fused}


def check(way: str, actual: Tensor, expected: Tensor) -> None:
    """Raise where a way computes something else than eager: its time would say nothing."""
    actual, expected = actual.float(), expected.float()
    distance = (torch.linalg.vector_norm(actual - expected) / torch.linalg.vector_norm(expected)).item()
    if not distance < _FARTHEST:  # NaN is not
        raise RuntimeError(
            f"{way} gives another result than eager on {actual.device}: relative distance {distance:.3g}"
        )
