import pytest
import torch

from ple_compile.ops import chunk_gated_delta_rule as op
from ple_compile.whole_graph.delta_rule import make_chunk_rule
from tests.whole_graph.tiny_qwen4exp import modeling

rule = make_chunk_rule(modeling.torch_chunk_gated_delta_rule)
# The kernel runs in Triton's interpreter.
IMPLEMENTATIONS = [op.reference, op.launch]
LENGTHS = (1, 3, 64, 65, 150)


def draw(length: int, dtype=torch.float32, num_key_heads=2, state=False, value_dim=64, requires_grad=False):
    generator = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    inputs = dict(
        query=normal(2, length, num_key_heads, 32),
        key=normal(2, length, num_key_heads, 32),
        value=normal(2, length, 2, value_dim),
        g=-torch.rand(2, length, 2, generator=generator),
        beta=torch.rand(2, length, 2, generator=generator).to(dtype),
        initial_state=torch.randn(2, 2, 32, value_dim, generator=generator) if state else None,
    )
    for x in inputs.values():
        if x is not None:
            x.requires_grad_(requires_grad)
    return inputs


def original(**inputs):
    """5.17 repeats the key heads outside of the function, 5.24 inside."""
    groups = inputs["value"].shape[2] // inputs["key"].shape[2]
    repeated = {name: inputs[name].repeat_interleave(groups, dim=2) for name in ("query", "key")}
    return modeling.torch_chunk_gated_delta_rule(**{**inputs, **repeated})


def relative(actual, expected):
    return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("num_key_heads", [1, 2])
@pytest.mark.parametrize("length", LENGTHS)
def test_equals_transformers_within_float32_rounding(implementation, length, num_key_heads, state):
    inputs = draw(length, num_key_heads=num_key_heads, state=state)
    settings = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
    for actual, expected in zip(
        implementation(**inputs, chunk_size=64, normalize=True), original(**inputs, **settings)
    ):
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        assert relative(actual, expected) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_differs_by_at_most_one_rounding(dtype):
    inputs = draw(100, dtype)
    actual, state = rule(**inputs, use_qk_l2norm_in_kernel=True)
    expected, _ = original(**inputs, use_qk_l2norm_in_kernel=True)
    assert state is None and actual.dtype == dtype
    assert relative(actual, expected) <= torch.finfo(dtype).eps


@pytest.mark.parametrize(("chunk_size", "value_dim"), [(20, 64), (64, 24)])
def test_other_sizes_take_the_plain_scan(monkeypatch, chunk_size, value_dim):
    monkeypatch.setattr(op, "scan_launch", None)
    inputs = draw(50, value_dim=value_dim)
    assert (
        relative(
            op.launch(**inputs, chunk_size=chunk_size, normalize=True)[0],
            op.reference(**inputs, chunk_size=chunk_size, normalize=True)[0],
        )
        == 0
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_normalisation_and_with_another_chunk_size(implementation):
    inputs = draw(50)
    inputs["key"] = inputs["key"] * 0.1
    expected, _ = original(**inputs, chunk_size=16)
    actual, _ = implementation(**inputs, chunk_size=16, normalize=False)
    assert relative(actual, expected) < 2e-6


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_state_given_is_not_written(implementation):
    inputs = draw(70, state=True)
    before = inputs["initial_state"].clone()
    implementation(**inputs, chunk_size=64, normalize=True)
    torch.testing.assert_close(inputs["initial_state"], before, rtol=0, atol=0)


def test_gradients_are_those_of_transformers():
    gradients = []
    for function in (rule, original):
        inputs = draw(70, requires_grad=True)
        out, _ = function(**inputs, use_qk_l2norm_in_kernel=True)
        out.square().sum().backward()
        gradients.append([x.grad for x in inputs.values() if x is not None])
    for actual, expected in zip(*gradients):
        assert torch.equal(actual, expected)


@torch.no_grad()
def test_one_graph_for_every_number_of_chunks():
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(rule, backend=count, fullgraph=True, dynamic=True)
    # Not 2 first: sizes that coincide share a symbol, and the batch is 2.
    for length in (3, 64, 65, 200, 500):
        inputs = draw(length)
        actual, _ = compiled(**inputs, use_qk_l2norm_in_kernel=True)
        assert relative(actual, original(**inputs, use_qk_l2norm_in_kernel=True)[0]) < 2e-6
    assert len(graphs) == 1


@pytest.mark.parametrize("state", [False, True])
def test_op_is_well_formed(state):
    inputs = draw(70, torch.bfloat16, num_key_heads=1, state=state)
    torch.library.opcheck(torch.ops.ple.chunk_gated_delta_rule.default, (*inputs.values(), 64, True))
