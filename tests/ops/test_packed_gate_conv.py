"""ple::packed_gate_conv_ and ple::packed_short_conv: references against the reference model, kernels against both."""

import pytest
import torch
from packed_inputs import BATCHES, Batch, draw
from ple_inputs import assert_close_to_exact, new_seed, share_equal

from examples.reference.packed import PackedBatch
from examples.reference.packed import columns_at as model_columns_at
from examples.reference.packed import short_conv as model_short_conv
from examples.reference.packed import store_columns as model_store_columns
from ple_compile.ops import gate as gate_op
from ple_compile.ops import packed_gate_conv as op
from ple_compile.ops import packed_short_conv as conv_op

# Each launch plan, whatever the defaults choose: many short chains, or three long ones that cross every request; single
# tokens in one launch, or in two.
PLANS = {
    "short": {"conv_programs": 1 << 20, "conv_steps": 2, "few_rows": 1 << 30},
    "long": {"conv_programs": 1, "few_rows": 0},
}
POOLS = ("channels", "view")
CASES = [name for name in BATCHES if name not in ("nothing", "no_tokens")]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fresh tensors hold NaN, so an element that a kernel forgets is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def copied(inputs: op.Inputs) -> op.Inputs:
    pool = torch.empty_strided(
        inputs.pool.shape, inputs.pool.stride(), dtype=inputs.pool.dtype, device=inputs.pool.device
    )
    return inputs._replace(pool=pool.copy_(inputs.pool))


def to_float64(inputs: op.Inputs) -> op.Inputs:
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
    return op.Inputs(*wide)._replace(gate_dtype=torch.float64)


def run(function, inputs: op.Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, exported, the pool afterwards) on a copy of the pool with the same strides."""
    inputs = copied(inputs)
    return (*function(*inputs), inputs.pool)


def assert_same(actual, expected, exact, coarsest=None):
    """NaN, which stands for what nobody may touch, in the same places; elsewhere close to the exact numbers."""
    for ours, eager, wide in zip(actual, expected, exact, strict=True):
        assert torch.equal(ours.isnan(), eager.isnan())
        assert_close_to_exact(ours.nan_to_num(), eager.nan_to_num(), wide.nan_to_num(), coarsest)
    assert not actual[0].isnan().any() and not actual[1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BATCHES)
def test_reference_is_the_reference_model(name, dtype):
    inputs = draw(BATCHES[name], 24, 2, dtype=dtype, boundaries=True, pool="view", device="cpu")
    out, exported, pool = run(op.reference, inputs)
    if inputs.key.shape[0] == 0:
        assert out.shape == inputs.key.shape and exported.shape == (1, 48, 9) and not exported.any()
        assert torch.equal(pool.nan_to_num(), inputs.pool.nan_to_num())
        return
    gated, normed = gate_op.reference(*inputs[:6], None, inputs.eps, [], dtype)
    batch = PackedBatch(
        inputs.query_start_loc, torch.empty(0), inputs.state_indices, inputs.has_initial_state,
        inputs.num_accepted_tokens,
    )  # fmt: skip
    expected_pool = inputs.pool.clone()
    convolved = model_short_conv(normed, inputs.conv_weight, inputs.dilation, expected_pool, batch)
    assert torch.equal(out, inputs.hidden + (gated + convolved))
    assert torch.equal(exported, model_columns_at(normed, inputs.reach, expected_pool, batch, inputs.boundaries))
    model_store_columns(normed, inputs.reach, expected_pool, batch)
    assert torch.equal(pool.nan_to_num(7.0), expected_pool.nan_to_num(7.0))


@pytest.mark.parametrize(
    "name, pool, boundaries",
    [case for i, n in enumerate(CASES) for case in ((n, "dense", i % 2 == 0), (n, POOLS[i // 2 % 2], i % 2 == 1))],
)
def test_kernels(name, pool, boundaries):
    """Every batch with and without exported states, in two layouts of the pool; int32 and int64 indices in turns."""
    seed = new_seed()
    index_dtype = torch.int32 if pool == "dense" else torch.int64
    inputs = draw(BATCHES[name], 24, 2, pool=pool, boundaries=boundaries, index_dtype=index_dtype, seed=seed)
    expected, exact = run(op.reference, inputs), run(op.reference, to_float64(inputs))
    before = (inputs.pool.data_ptr(), inputs.pool.stride())
    assert_same(run(op.launch, inputs), expected, exact)
    assert (inputs.pool.data_ptr(), inputs.pool.stride()) == before


def planned(plan: str, inputs: op.Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return op.run(inputs, op.tuned("packed_gate_conv", op.PACKED, inputs.value)._replace(**PLANS[plan]))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", [n for n in CASES if "speculative" not in n] + ["speculative_mixed"])
def test_every_launch_plan(name, plan):
    inputs = draw(BATCHES[name], 40, 2, dilation=2, kernel=3, pool="channels")
    actual = run(lambda *args: planned(plan, op.Inputs(*args)), inputs)
    assert_same(actual, run(op.reference, inputs), run(op.reference, to_float64(inputs)))


@pytest.mark.parametrize("plan", PLANS)
def test_three_launches_for_what_one_could_do(plan, monkeypatch):
    monkeypatch.setattr(op, "WALK_WHERE_TOKENS_ARE_AS_MANY_AS_REQUESTS", False)
    for name in ("decode", "decode_and_more_tokens", "speculative_decode"):
        inputs = draw(BATCHES[name], 24, 2)
        actual = run(lambda *args: planned(plan, op.Inputs(*args)), inputs)
        assert_same(actual, run(op.reference, inputs), run(op.reference, to_float64(inputs)))


@pytest.mark.parametrize(
    "options", [{}, {"autocast": True}, {"add_hidden": False}, {"plain": True, "dtype": torch.float16}], ids=str
)
@pytest.mark.parametrize("name", ["decode", "chunks"])
def test_kernels_round_where_eager_rounds(name, options):
    options = {"dtype": torch.bfloat16, **options}
    inputs = draw(BATCHES[name], 32, 2, seed=3, **options)
    actual, expected = run(op.launch, inputs), run(op.reference, inputs)
    assert_same(actual, expected, run(op.reference, to_float64(inputs)), options["dtype"])
    if actual[0].dtype == torch.bfloat16:
        assert all(share_equal(a, e) >= 0.999 for a, e in zip(actual, expected, strict=True) if a.numel())


@pytest.mark.parametrize("shape", [(96, 1, 2, 4), (24, 3, 4, 2), (33, 2, 4, 3)], ids=str)
def test_other_widths_and_taps(shape):
    width, streams, kernel, dilation = shape
    for name in ("decode", "speculative"):
        inputs = draw(BATCHES[name], width, streams, kernel, dilation)
        assert_same(run(op.launch, inputs), run(op.reference, inputs), run(op.reference, to_float64(inputs)))


def test_what_the_kernels_can_do_is_theirs(monkeypatch):
    inputs = draw(BATCHES["decode"], 24, 2)
    expected = run(op.reference, inputs)
    monkeypatch.setattr(op, "reference", None)
    torch.testing.assert_close(run(op.launch, inputs), expected, equal_nan=True)


@pytest.mark.parametrize("name", ["nothing", "no_tokens"])
def test_no_tokens_no_launch(name, monkeypatch):
    monkeypatch.setattr(op, "take", None)
    inputs = draw(BATCHES[name], 24, 2, boundaries=True)
    for function in (op.reference, op.launch):
        out, exported, pool = run(function, inputs)
        assert out.shape == (0, 48) and exported.shape == (1, 48, 9) and not exported.any()
        assert torch.equal(pool.nan_to_num(), inputs.pool.nan_to_num())


def test_any_split_into_chunks_equals_one_shot():
    """And the columns exported at the split points are the states that the chunks leave behind."""
    cuts = [0, 5, 6, 17, 20, 33]
    whole = draw(Batch((33,), fresh=(0,)), 24, 2)._replace(boundaries=torch.tensor(cuts[1:]))
    out, exported, pool = run(op.launch, whole)
    chunked = copied(whole)._replace(boundaries=None)
    for i, (start, end) in enumerate(zip(cuts, cuts[1:])):
        rows = {n: getattr(chunked, n)[start:end] for n in ("key", "value", "hidden")}
        piece = chunked._replace(
            **rows, query_start_loc=torch.tensor([0, end - start]), has_initial_state=torch.tensor([start > 0])
        )
        assert torch.allclose(op.launch(*piece)[0], out[start:end], rtol=1e-5, atol=1e-5)
        assert torch.allclose(chunked.pool[1], exported[i], rtol=1e-5, atol=1e-6)
    assert torch.allclose(chunked.pool[1], pool[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["chunks", "speculative_mixed", "decode_without_slots"])
def test_short_conv_alone(name):
    inputs = draw(BATCHES[name], 24, 2, pool="view")
    x = inputs.hidden.clone()
    args = (inputs.conv_weight, inputs.pool, *inputs.requests, inputs.dilation)
    expected = conv_op.reference(x, *args)
    exact = conv_op.reference(x.double(), *(a.double() if i < 2 else a for i, a in enumerate(args)))
    before = inputs.pool.nan_to_num()
    assert_close_to_exact(conv_op.launch(x, *args), expected, exact)
    assert torch.equal(inputs.pool.nan_to_num(), before)
    low = draw(BATCHES[name], 24, 2, dtype=torch.bfloat16)
    args = (low.hidden, low.conv_weight, low.pool, *low.requests, low.dilation)
    assert share_equal(conv_op.launch(*args), conv_op.reference(*args)) >= 0.999


def test_float64_takes_the_reference_path():
    inputs = to_float64(draw(BATCHES["chunks"], 24, 2))
    for ours, theirs in zip(run(op.launch, inputs), run(op.reference, inputs), strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


def test_opcheck():
    inputs = draw(BATCHES["speculative_mixed"], 24, 2, boundaries=True)
    inputs = inputs._replace(pool=inputs.pool.nan_to_num())
    torch.library.opcheck(op.packed_gate_conv_, tuple(inputs))
    args = (inputs.hidden, inputs.conv_weight, inputs.pool, *inputs.requests, inputs.dilation)
    torch.library.opcheck(conv_op.packed_short_conv, args)


def test_bad_inputs_name_the_argument():
    inputs = draw(BATCHES["chunks"], 24, 2, device="cpu")
    for changes, message in (
        ({"state_indices": inputs.state_indices[:2]}, "state_indices has shape .2,.; query_start_loc tells of 6"),
        ({"pool": inputs.pool[:, :, :8]}, "window of at least .* = 9"),
        ({"pool": inputs.pool.half()}, "a pool of torch.float16 cannot hold columns of torch.float32"),
        ({"boundaries": torch.ones(2)}, "boundaries is torch.float32 .2,.; pass int32 or int64"),
        ({"query_start_loc": inputs.query_start_loc.float()}, "query_start_loc is torch.float32"),
        ({"conv_weight": inputs.conv_weight[..., :1]}, "1 tap has no state"),
    ):
        with pytest.raises(ValueError, match=message):
            op.reference(*inputs._replace(**changes))
