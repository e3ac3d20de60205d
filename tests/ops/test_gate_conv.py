import pytest
import torch
from ple_inputs import assert_close_to_exact, eager_gate_conv, make_inputs, share_equal, to_float64

from ple_compile.ops.gate_conv import (
    Tuning,
    gate_conv,
    gate_conv_update,
    gate_conv_update_,
    launch,
    launch_update,
    launch_update_,
    reference,
    reference_update,
    reference_update_,
    run,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Each launch plan, whatever the defaults choose: one launch; two with one program along a sequence; with many.
PLANS = {
    "few": Tuning(few_tokens=1 << 30, few_rows=1 << 30),
    "whole": Tuning(few_tokens=0, few_rows=0, conv_programs=1),
    "pieces": Tuning(few_tokens=0, few_rows=0, conv_programs=1 << 20, conv_steps=2),
}
# batch, seq, width, streams, kernel, dilation, state columns
CASES = [
    (2, 5, 24, 2, 4, 3, None),
    (1, 13, 40, 2, 4, 3, 9),
    (1, 11, 32, 3, 3, 2, 6),
    (3, 2, 16, 2, 2, 4, 4),
    (2, 1, 96, 2, 4, 3, 9),
    (2, 1, 24, 2, 4, 3, None),
]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fresh tensors hold NaN, so an element that a kernel forgets is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def window_of(inputs):
    return (inputs.conv_weight.shape[-1] - 1) * inputs.dilation if inputs.state is None else inputs.state.shape[-1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_reference_is_eager_bit_for_bit(case, dtype):
    for options in ({}, {"mask": torch.bool}, {"autocast": True}, {"add_hidden": False}):
        inputs = make_inputs(*case, dtype=dtype, device="cpu", **options)
        window = window_of(inputs)
        out, state = eager_gate_conv(inputs, window)
        assert torch.equal(reference(*inputs), out)
        actual = reference_update(*inputs, window)
        assert torch.equal(actual[0], out) and torch.equal(actual[1], state) and actual[1].is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_is_the_transformers_layer_bit_for_bit(dtype):
    """Two calls through one cache, the second with a padding mask; only the n-gram lookup is replaced."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4

    from ple_compile.ops.gate_conv import Inputs

    config = transformers.models.qwen4_exp.Qwen4ExpTextConfig(
        hidden_size=24, ple_embed_dim=32, hc_count=2, ple_layer_ids=[1], num_hidden_layers=1, heads_per_ngram=1,
        ngram_vocab_size_base=64, vocab_size=64, eos_token_id=3, layer_types=["linear_attention"],
    )  # fmt: skip
    layer = qwen4.Qwen4ExpTextPLELayer(config, layer_idx=0, ple_layer_index=0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer = layer.to(dtype).eval()
    cache = transformers.DynamicCache(config=config)
    state = None
    for seq, mask in ((7, None), (4, torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]))):
        embeddings, hidden = torch.randn(2, seq, 32).to(dtype), torch.randn(2, seq, 48).to(dtype)
        layer.ple_embedding.forward = lambda ids, cache, rows=embeddings: rows
        with torch.no_grad():
            expected = hidden + layer(hidden, None, cache, conv_mask=mask)
            inputs = Inputs(
                layer.key_proj(embeddings), layer.value_proj(embeddings), hidden, layer.norm_key.weight,
                layer.norm_query.weight, layer.norm_conv.weight, layer.conv1d.weight, mask, state,
                [config.rms_norm_eps] * 3, [], dtype, config.ngram_size, True,
            )  # fmt: skip
            out, state = reference_update(*inputs, layer.short_conv_state_len)
        assert torch.equal(out, expected)
        assert torch.equal(state, cache.layers[0].conv_states[1])


@pytest.mark.parametrize(
    "case, dtype, plan",
    # 16 bits have the more roundings: every plan; the others in turns.
    [(case, torch.bfloat16, plan) for case in CASES for plan in PLANS]
    + [(case, torch.float32, plan) for case, plan in zip(CASES, [*PLANS, *PLANS])]
    + [(CASES[2], torch.float16, "few"), (CASES[3], torch.float16, "pieces")],
    ids=str,
)
def test_kernels(case, dtype, plan):
    inputs = make_inputs(*case, dtype=dtype, mask=torch.bool if case[1] % 2 else None)
    window = window_of(inputs)
    exact = reference_update(*to_float64(inputs), window)
    eager = eager_gate_conv(inputs, window)
    new_state = torch.empty(eager[1].shape, dtype=dtype, device=eager[1].device)
    out = run(inputs, new_state, PLANS[plan])
    for actual, expected, oracle in zip((out, new_state), eager, exact, strict=True):
        assert_close_to_exact(actual, expected, oracle, dtype)


@pytest.mark.parametrize("plan", PLANS)
def test_the_state_may_be_unwanted(plan):
    inputs = make_inputs(*CASES[3])
    new_state = torch.empty(window_of(inputs), device=inputs.key.device).expand(3, 32, -1).clone()
    assert torch.equal(run(inputs, None, PLANS[plan]), run(inputs, new_state, PLANS[plan]))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "options", [{"autocast": True, "plain": True}, {"add_hidden": False}, {"plain": True, "mask": torch.int64}], ids=str
)
def test_kernels_round_where_eager_rounds(plan, options):
    inputs = make_inputs(1, 14, 16, 2, 4, 3, 9, dtype=torch.bfloat16, seed=3, **options)
    expected, _ = eager_gate_conv(inputs, 9)
    actual = run(inputs, None, PLANS[plan])
    assert actual.dtype == expected.dtype
    if actual.dtype == torch.bfloat16:
        assert share_equal(actual, expected) >= 0.999
    else:
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("seq, plan", [(1, "few"), (2, "whole"), (9, "pieces"), (13, "few"), (13, "whole")])
def test_state_in_place(seq, plan):
    """The old state is read by every token before it is overwritten; strides and storage stay."""
    inputs = make_inputs(2, seq, 8, 2, 4, 3, 11)
    window = inputs.state.shape[-1]
    new_state = torch.empty(inputs.state.shape, device=inputs.state.device)
    expected = run(inputs, new_state, PLANS[plan])
    pointer, strides = inputs.state.data_ptr(), inputs.state.stride()
    assert torch.equal(run(inputs, inputs.state, PLANS[plan]), expected)
    assert torch.equal(inputs.state, new_state)
    assert (inputs.state.data_ptr(), inputs.state.stride()) == (pointer, strides) and window == 11


def test_state_may_be_wider_or_narrower_than_the_context():
    for columns, window in ((9, 4), (12, 12), (9, 14), (None, 3), (None, 20)):
        inputs = make_inputs(2, 5, 24, 2, 4, 3, columns)
        expected = eager_gate_conv(inputs._replace(state=inputs.state), window)[1]
        actual = launch_update(*inputs, window)[1]
        assert actual.shape[-1] == window and actual.is_contiguous()
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_tokens(shape):
    inputs = make_inputs(*shape, 24, 2, 4, 3, 9)
    for implementation in (reference_update, launch_update):
        out, state = implementation(*inputs, 9)
        assert out.shape == (*shape, 48) and torch.equal(state, inputs.state)
    for implementation in (reference_update_, launch_update_):
        before = inputs.state.clone()
        implementation(*inputs)
        assert torch.equal(inputs.state, before)
    assert launch_update(*inputs._replace(state=None), 9)[1].eq(0).all()


def test_two_chunks_equal_one():
    """A sequence in two calls through the state gives the outputs of one call."""
    inputs = make_inputs(2, 12, 24, 2)
    whole = launch(*inputs)
    names = ("key", "value", "hidden")
    first = inputs._replace(**{n: getattr(inputs, n)[:, :5] for n in names})
    second = inputs._replace(**{n: getattr(inputs, n)[:, 5:] for n in names})
    out, state = launch_update(*first, 9)
    torch.testing.assert_close(out, whole[:, :5], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(launch_update_(*second._replace(state=state)), whole[:, 5:], rtol=1e-5, atol=1e-5)


def test_float64_takes_the_reference_path():
    inputs = to_float64(make_inputs(1, 4, 24, 2, 4, 3, 9))
    assert torch.equal(launch(*inputs), reference(*inputs))


@pytest.mark.parametrize("options", [{}, {"mask": torch.bool, "dtype": torch.bfloat16}], ids=str)
def test_opcheck(options):
    inputs = make_inputs(2, 3, 24, 2, 4, 3, 9, **options)
    torch.library.opcheck(gate_conv, tuple(inputs))
    torch.library.opcheck(gate_conv, tuple(inputs._replace(state=None)))
    torch.library.opcheck(gate_conv_update, (*inputs, 9))
    torch.library.opcheck(gate_conv_update_, tuple(inputs))


def test_a_state_too_short_for_the_taps_is_refused():
    inputs = make_inputs(1, 2, 24, 2, 4, 3, 9)
    with pytest.raises(ValueError, match="with at least .* = 9 columns"):
        launch(*inputs._replace(state=inputs.state[..., 1:]))


def test_window_wider_than_the_history_is_refused():
    inputs = make_inputs(1, 2, 24, 2, 4, 3, 9, device="cpu")
    with pytest.raises(ValueError, match="window 12 .* at most their sum"):
        reference_update(*inputs, 12)
