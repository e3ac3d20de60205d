"""Every kernel once or a few times, small and with odd shapes, for NVIDIA's compute-sanitizer:

    for tool in memcheck racecheck initcheck synccheck; do
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool --error-exitcode 9 python -m tests.sanitized
    done

Names of the functions below, as arguments, leave the others out.
Without PyTorch's caching allocator each tensor is an allocation of its own, so that a read one element too far is seen.
racecheck looks at shared memory only; tests/gpu/test_gate_conv_gpu.py looks for races on the state in global memory.
Results are compared in tests/gpu; here a kernel must only run. Kernels between devices are left out.
"""

import itertools
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ple_compile.ops import (
    _host_reads,
    chunk_gated_delta_rule,
    dequantized_lookup,
    gate,
    gate_conv,
    local_ids,
    lookup,
    lookup_async,
    ngram_ids,
    ngram_lookup,
    pack_ids,
    packed_gate_conv,
    packed_ngram_ids,
    short_conv,
)
from ple_compile.tables import hot_rows, pinning
from ple_compile.tables.formats import FORMATS

sys.path.insert(0, str(Path(__file__).parent))

from packed_inputs import BATCHES, draw
from ple_inputs import make_inputs

EOS, HEADS, ROWS = 3, 6, 997
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def hashes() -> tuple[Tensor, Tensor, Tensor]:
    sizes = torch.tensor([ROWS // HEADS - head for head in range(HEADS)], device="cuda")
    return torch.tensor([23703573157769, 9876543210987, 13579], device="cuda"), sizes, sizes.cumsum(0) - sizes


def ids_and_lookups() -> None:
    table = torch.randn(ROWS, 20, device="cuda").bfloat16()
    for batch, length, context_len in ((1, 1, 2), (3, 5, 0), (2, 1021, 1)):
        tokens = torch.randint(0, 99, (batch, length), device="cuda")
        context = torch.randint(0, 99, (batch, context_len), device="cuda")
        ids = ngram_ids.launch(tokens, context, *hashes(), EOS)
        lookup.launch(table, ids)
        ngram_lookup.launch(table, tokens, context, *hashes(), EOS)


def quantized_lookups() -> None:
    ids = torch.randint(0, ROWS, (37, HEADS), device="cuda")
    for name, kind in FORMATS.items():
        module = kind(ROWS, 48, dtype=torch.bfloat16, device="cuda")
        for parameter in module.parameters():
            parameter.data.view(torch.uint8).fill_(1)
        table_scale = module.weight_scale_2 if name == "nvfp4" else None
        arguments = (module.weight, module.weight_scale, table_scale, ids, torch.float32, torch.bfloat16)
        dequantized_lookup.launch(*arguments)


def host_lookups() -> None:
    table = torch.randn(ROWS, 20).bfloat16()
    pinning.page_lock(table)
    few, many = (torch.randint(0, ROWS, (n, HEADS), device="cuda") for n in (7, _host_reads.ORDERED_FROM // HEADS + 1))
    for ids in (few, many):
        lookup_async.lookup_wait(lookup_async.lookup_start(table, ids), table, ids)
    hot_rows.attach(table, 20_000, torch.device("cuda", 0))
    for _ in range(3):
        lookup.launch(table, many)
    torch.cuda.synchronize()


def gates_and_convolutions() -> None:
    shapes = ((1, 1, 96, 4, 4, 3, 9), (2, 257, 24, 3, 4, 3, 12), (5, 33, 96, 8, 2, 4, 4), (1, 70, 2560, 4, 4, 3, None))
    plans = (
        gate_conv.Tuning(),
        gate_conv.Tuning(few_tokens=1 << 30, few_rows=1 << 30),
        gate_conv.Tuning(few_tokens=0, few_rows=0, conv_programs=1),
        gate_conv.Tuning(few_tokens=0, few_rows=0, conv_programs=1 << 20, conv_steps=2),
    )
    for shape, dtype in itertools.product(shapes, DTYPES):
        inputs = make_inputs(*shape, dtype=dtype, mask=torch.bool if shape[0] > 1 else None)
        columns = shape[-1] or (shape[4] - 1) * shape[5]
        gate.launch(*inputs[:6], inputs.mask, inputs.eps, inputs.eps_tensors, inputs.gate_dtype)
        short_conv.launch(inputs.key, inputs.conv_weight, inputs.state, inputs.dilation)
        for plan in plans:
            state = torch.empty(shape[0], shape[2] * shape[3], columns, dtype=dtype, device="cuda")
            gate_conv.run(inputs, state, plan)


def packed_batches() -> None:
    for (name, batch), dtype, pool in itertools.product(BATCHES.items(), DTYPES, ("dense", "channels", "view")):
        inputs = draw(batch, 24, 3, 4, 3, dtype=dtype, pool=pool, boundaries="speculative" not in name)
        packed_gate_conv.launch(*inputs)
    starts = torch.tensor([0, 3, 3, 10], device="cuda")
    tokens, context = (torch.randint(0, 99, shape, device="cuda") for shape in ((10,), (3, 2)))
    packed_ngram_ids.launch(tokens, starts, context, *hashes(), EOS)


def the_rest() -> None:
    ids = torch.randint(0, ROWS, (3, 11), device="cuda")
    pack_ids.pack(ids.view(-1), 40, True)
    local_ids.locate(ids, 3, True, 100, 200)
    local_ids.counts_fit(ids, 3, ROWS)
    q, k = (torch.randn(2, 130, 2, 32, device="cuda") for _ in range(2))
    v, g, beta = torch.randn(2, 130, 4, 32).cuda(), -torch.rand(2, 130, 4).cuda(), torch.rand(2, 130, 4).cuda()
    chunk_gated_delta_rule.launch(q, k, v, g, beta, None, 64, True)


GROUPS = (ids_and_lookups, quantized_lookups, host_lookups, gates_and_convolutions, packed_batches, the_rest)


def fill_the_end_of_scalars() -> None:
    """window_kernel reads past the last token, and uses nothing of it: initcheck looks at all but that end."""
    real = gate_conv.take

    def take(
        steps: Any, out: Tensor, state: Any, scalars: Tensor | None, key: Tensor, value: Tensor, *inputs: Any
    ) -> None:
        if scalars is not None:
            scalars[2 * out.numel() // value.shape[-1] :] = 0
        real(steps, out, state, scalars, key, value, *inputs)

    for module in (gate_conv, packed_gate_conv):
        module.take = take  # type: ignore[attr-defined]


def main(names: list[str]) -> None:
    random.seed(0)
    torch.manual_seed(0)
    fill_the_end_of_scalars()
    for kernels in [group for group in GROUPS if not names or group.__name__ in names]:
        kernels()
        torch.cuda.synchronize()
        print(kernels.__name__, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
