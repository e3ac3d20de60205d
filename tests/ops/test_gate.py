import pytest
import torch
from ple_inputs import assert_close_to_exact, eager_gate, make_inputs, share_equal, to_float64

from ple_compile.ops.gate import gate, launch, planned, reference

# batch, seq, width, streams
SHAPES = [(2, 5, 24, 4), (1, 3, 96, 2), (1, 2, 1000, 3), (3, 1, 8, 8)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fresh tensors hold NaN, so an element that a kernel forgets is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def arguments(inputs):
    return (*inputs[:6], inputs.mask, inputs.eps, inputs.eps_tensors, inputs.gate_dtype, inputs.plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_eager_bit_for_bit(shape, dtype):
    for options in ({}, {"mask": torch.bool}, {"mask": torch.float32}, {"autocast": True}, {"plain": True}):
        inputs = make_inputs(*shape, dtype=dtype, device="cpu", **options)
        for actual, expected in zip(reference(*arguments(inputs)), eager_gate(inputs), strict=True):
            assert torch.equal(actual, expected) and actual.dtype == expected.dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "options", [{}, {"mask": torch.int64}, {"mask": torch.float32, "plain": True}, {"autocast": True}], ids=str
)
def test_kernel(shape, dtype, options):
    inputs = make_inputs(*shape, dtype=dtype, **options)
    exact = reference(*arguments(to_float64(inputs)))
    for actual, eager, oracle in zip(launch(*arguments(inputs)), eager_gate(inputs), exact, strict=True):
        assert actual.is_contiguous()
        assert_close_to_exact(actual, eager, oracle, dtype)


@pytest.mark.parametrize("rows, num_warps", [(1, 1), (2, 1), (4, 2)])
def test_kernel_rounds_where_eager_rounds(rows, num_warps):
    inputs = make_inputs(1, 7, 64, 2, dtype=torch.bfloat16, seed=5)
    gated = torch.empty(inputs.key.shape, dtype=torch.bfloat16, device=inputs.key.device)
    normed = torch.empty_like(gated)
    kernel = planned(*inputs[:3], None, inputs.eps, torch.bfloat16, False, full=True, rows=rows, num_warps=num_warps)
    kernel(gated, normed, None, *inputs[:6], None)
    for actual, expected in zip((gated, normed), eager_gate(inputs), strict=True):
        assert share_equal(actual, expected) >= 0.999


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype):
    """Zero dot products give exactly 0.5; tiny ones are clamped; NaN and infinity spread as in eager."""
    inputs = make_inputs(1, 6, 16, 2, dtype=dtype, seed=1)
    key, value, hidden = inputs.key.clone(), inputs.value.clone(), inputs.hidden.clone()
    key[0, 0] = 0
    key[0, 1], hidden[0, 1] = 1e-4, 1e-4
    key[0, 2, 3] = float("nan")
    hidden[0, 3, 20] = float("inf")
    value[0, 4, 0] = float("nan")
    value[0, 5, 1] = -float("inf")
    inputs = inputs._replace(key=key, value=value, hidden=hidden)
    for actual, expected in zip(launch(*arguments(inputs)), eager_gate(inputs), strict=True):
        assert torch.equal(actual.isnan(), expected.isnan())
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=torch.finfo(dtype).eps * 2, atol=1e-6)
    gated, _ = launch(*arguments(inputs))
    assert torch.equal(gated[0, 0], (0.5 * value[0, 0]).repeat(2))


@pytest.mark.parametrize("shape", [(0, 3, 24, 2), (2, 0, 24, 2)])
def test_no_tokens(shape):
    for implementation in (reference, launch):
        gated, normed = implementation(*arguments(make_inputs(*shape)))
        assert gated.shape == normed.shape == (*shape[:2], shape[2] * shape[3])


@pytest.mark.parametrize("leading", [(6,), (2, 3), (1, 2, 3)])
def test_any_number_of_leading_dimensions(leading):
    inputs = make_inputs(1, 6, 24, 2, mask=torch.bool)
    expected = reference(*arguments(inputs))
    shaped = inputs._replace(
        **{n: getattr(inputs, n)[0].unflatten(0, leading) for n in ("key", "value", "hidden", "mask")}
    )
    for actual, whole in zip(launch(*arguments(shaped)), expected, strict=True):
        torch.testing.assert_close(actual, whole[0].unflatten(0, leading), rtol=1e-5, atol=1e-5)


def test_eps_tensors_override():
    inputs = make_inputs(1, 2, 24, 2, device="cpu")
    tensors = [torch.tensor(e, dtype=torch.float64) for e in (0.5, 0.25, 0.125)]
    expected = reference(*arguments(inputs._replace(eps=[0.5, 0.25, 0.125])))
    actual = gate(*arguments(inputs._replace(eps=[0.0, 0.0, 0.0], eps_tensors=tensors)))
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_opcheck():
    for options in ({}, {"mask": torch.bool, "dtype": torch.bfloat16}, {"autocast": True, "dtype": torch.bfloat16}):
        torch.library.opcheck(gate, arguments(make_inputs(2, 3, 24, 2, **options)))


def test_mismatched_shapes_name_the_tensors():
    inputs = make_inputs(1, 2, 24, 2, device="cpu")
    with pytest.raises(ValueError, match="key.*hidden.*value"):
        reference(*arguments(inputs._replace(hidden=inputs.hidden[..., :-1])))
    with pytest.raises(ValueError, match="multiple"):
        reference(*arguments(inputs._replace(value=inputs.value[..., :-1])))
    with pytest.raises(ValueError, match="norm weight"):
        reference(*arguments(inputs._replace(norm_conv_weight=inputs.norm_conv_weight[:-1])))
