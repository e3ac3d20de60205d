"""Packed batches on the device: kernels against the reference, CUDA graphs with changing contents, and memory."""

import pytest
import torch
from packed_inputs import BATCHES, Batch, draw
from packed_replays import ReplayedStep
from ple_inputs import assert_close_to_exact, share_equal

from examples.reference import flash_next
from examples.reference.packed import PackedBatch, PackedPLE
from ple_compile.ops import packed_gate_conv as op
from ple_compile.ops import packed_ngram_ids as ids_op
from ple_compile.ops import packed_short_conv as conv_op
from tests.gpu import synchronisation

EOS = 3
# width, streams, taps, dilation; type; how the pool lies in memory
KERNELS = [
    ((2560, 4, 4, 3), torch.bfloat16, "dense"),
    ((2560, 4, 4, 3), torch.bfloat16, "channels"),
    ((2560, 4, 4, 3), torch.float16, "view"),
    ((2560, 4, 4, 3), torch.float32, "dense"),
    ((1000, 2, 4, 3), torch.bfloat16, "channels"),
    ((96, 2, 3, 2), torch.float32, "view"),
]
LARGE = {
    "decode": Batch((1,) * 64, fresh=(5,), slots=tuple(0 if r % 9 == 4 else r + 1 for r in range(64))),
    "decode of many": Batch((1,) * 300),
    "prefill": Batch((700, 1, 0, 333), fresh=(0, 2)),
    "mixed": Batch((1, 1, 500, 1, 40, 0, 2), fresh=(2,), slots=(7, 1, 2, 0, 4, 5, 3)),
    "speculative": Batch((4,) * 32, accepted=(1, 2, 3, 4) * 8),
}


def run(function, inputs: op.Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pool = torch.empty_strided(inputs.pool.shape, inputs.pool.stride(), dtype=inputs.pool.dtype, device="cuda")
    inputs = inputs._replace(pool=pool.copy_(inputs.pool))
    return (*function(*inputs), inputs.pool)


def to_float64(inputs: op.Inputs) -> op.Inputs:
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
    return op.Inputs(*wide)._replace(gate_dtype=torch.float64)


@pytest.mark.parametrize("shape, dtype, pool", KERNELS, ids=str)
def test_kernels(shape, dtype, pool):
    for i, batch in enumerate((*BATCHES.values(), *LARGE.values())):
        inputs = draw(batch, *shape, dtype=dtype, pool=pool, boundaries=i % 3 == 0)
        expected, exact = run(op.reference, inputs), run(op.reference, to_float64(inputs))
        for ours, eager, wide in zip(run(op.launch, inputs), expected, exact, strict=True):
            assert torch.equal(ours.isnan(), eager.isnan()), batch
            assert_close_to_exact(ours.nan_to_num(), eager.nan_to_num(), wide.nan_to_num())
            if dtype == torch.bfloat16 and ours.numel():
                rows = ours.numel() / shape[0]
                assert 1 - share_equal(ours, eager) <= max(0.001, 4 / rows), batch


PLANS = [
    {"conv_programs": 1, "few_rows": 0},
    {"conv_programs": 1 << 20, "conv_steps": 2, "few_rows": 1 << 30},
    {"dependent": False, "few_rows": 0},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_launch_plan(plan):
    def planned(*args) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = op.Inputs(*args)
        return op.run(inputs, op.tuned("packed_gate_conv", op.PACKED, inputs.value)._replace(**plan))

    for batch in (*BATCHES.values(), *LARGE.values()):
        inputs = draw(batch, 512, 4)
        exact = run(op.reference, to_float64(inputs))
        for ours, eager, wide in zip(run(planned, inputs), run(op.reference, inputs), exact, strict=True):
            assert_close_to_exact(ours.nan_to_num(), eager.nan_to_num(), wide.nan_to_num())


def test_short_conv_alone():
    for batch in (BATCHES["speculative_mixed"], LARGE["mixed"], LARGE["decode"]):
        inputs = draw(batch, 640, 4, dtype=torch.bfloat16, pool="view")
        args = (inputs.hidden, inputs.conv_weight, inputs.pool, *inputs.requests, inputs.dilation)
        assert share_equal(conv_op.launch(*args), conv_op.reference(*args)) >= 0.999


def hashes(device="cuda"):
    sizes = torch.tensor([20000003 + 10 * head for head in range(16)], device=device)
    multipliers = torch.tensor([23703573157769, 9876543210987, 1357913579135], device=device)
    return multipliers, sizes, sizes.cumsum(0) - sizes


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [(1,) * 300, (8192,), (0, 5, 0, 0, 1000, 0), (0,), (), (3,) * 1500], ids=len)
def test_ids(lengths, dtype):
    starts = torch.tensor([0, *lengths]).cumsum(0)
    tokens = torch.randint(-5, 248_320, (sum(lengths),))
    tokens = torch.where(torch.rand(tokens.shape) < 0.2, EOS, tokens)
    context = torch.randint(0, 9, (len(lengths), 2))
    expected = ids_op.reference(tokens, starts, context, *hashes("cpu"), EOS)
    on_device = (t.to("cuda", dtype) for t in (tokens, starts, context))
    assert torch.equal(torch.ops.ple.packed_ngram_ids(*on_device, *hashes(), EOS).cpu(), expected)


def test_no_synchronisation():
    inputs = draw(LARGE["mixed"], 2560, 4, dtype=torch.bfloat16, boundaries=True)
    op.launch(*inputs)
    with synchronisation.forbidden():
        op.launch(*inputs)
        op.launch(*draw_decode(inputs))


def draw_decode(inputs: op.Inputs) -> op.Inputs:
    """The first tokens of `inputs`, one for each request."""
    count = inputs.requests.num_requests
    rows = {name: getattr(inputs, name)[:count] for name in ("key", "value", "hidden")}
    return inputs._replace(**rows, boundaries=None, query_start_loc=torch.arange(count + 1, device="cuda"))


@pytest.mark.parametrize("decode", [True, False], ids=["decode", "mixed"])
def test_thousand_replays_with_changing_contents(decode):
    """One captured step of the compiled layer. Every replay is another batch, and is compared with eager."""
    torch._dynamo.reset()
    step = ReplayedStep("cuda", decode=decode)
    compiled = torch.compile(step.layer, backend="ple", options={"strict": True}, dynamic=True, fullgraph=True)
    with torch.no_grad():
        step.fill()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                compiled(*step.arguments(step.pool))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(*step.arguments(step.pool))
        step.pool.copy_(step.eager_pool)

        def replay():
            graph.replay()
            return out

        step.run(replay, 1000)


def test_memory_of_a_large_batch():
    """25 requests, 32,766 tokens, the longest 9,584, 10,240 channels: below 1 GiB beyond inputs and outputs."""
    torch._dynamo.reset()
    others = [32_766 - 9_584 - 23 * 900, *[900] * 23]
    lengths = [9_584, *others]
    assert sum(lengths) == 32_766 and len(lengths) == 25
    with torch.device("cuda"):
        layer = PackedPLE(flash_next(ngram_vocab_size_base=100_000), 0).to(torch.bfloat16)
        streams = torch.randn(32_766, 10_240, dtype=torch.bfloat16)
        ids = torch.randint(0, 200_000, (32_766,))
        pool = torch.zeros(26, 10_240, 9, dtype=torch.bfloat16)
        batch = PackedBatch(
            torch.tensor([0, *lengths]).cumsum(0).int(),
            torch.full((25, 2), EOS),
            torch.arange(1, 26),
            torch.zeros(25, dtype=torch.bool),
        )
    compiled = torch.compile(layer, backend="ple", options={"strict": True}, dynamic=True, fullgraph=True)
    with torch.no_grad():
        out = compiled(streams, ids, batch, pool)
        del out
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = compiled(streams, ids, batch, pool)
        torch.cuda.synchronize()
    beyond = torch.cuda.max_memory_allocated() - before - out.nbytes
    assert beyond < 2**30, f"{beyond / 2**20:.0f} MiB"
