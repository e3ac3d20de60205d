"""A kernel that does not compile, or finds no memory: the states are as they were, and the next call is right."""

import pytest
import torch
from packed_inputs import BATCHES, draw
from ple_inputs import make_inputs
from triton.runtime.errors import OutOfResources

from ple_compile import merged_weights
from ple_compile.ops import gate, gate_conv, kv_proj, packed_gate_conv
from tests.faults import does_not_compile, fail_at, out_of_memory

# Of each launch plan every kernel, the last of which writes the state.
UPDATES = [
    (1, gate_conv.Tuning(few_rows=1 << 30), [gate_conv.few_tokens_kernel]),
    (1, gate_conv.Tuning(few_rows=0), [gate.gate_kernel, gate_conv.few_tokens_kernel]),
    (5, gate_conv.Tuning(few_tokens=1 << 30), [gate_conv.few_tokens_kernel, gate_conv.state_kernel]),
    (5, gate_conv.Tuning(few_tokens=0), [gate.gate_kernel, gate_conv.window_kernel, gate_conv.state_kernel]),
]
PACKED = [
    ("decode", {"few_rows": 1 << 30}, [packed_gate_conv.decode_kernel]),
    ("decode", {"few_rows": 0}, [gate.gate_kernel, packed_gate_conv.decode_kernel]),
    ("chunks", {}, [gate.gate_kernel, packed_gate_conv.window_kernel, packed_gate_conv.columns_kernel]),
]


@pytest.mark.parametrize("seq, tuning, kernels", UPDATES)
def test_the_state_of_a_layer(seq, tuning, kernels, monkeypatch):
    inputs = make_inputs(2, seq, 24, 2, 4, 3, 9)
    for kernel in kernels:
        state = inputs.state.clone()
        with monkeypatch.context() as patch, pytest.raises(OutOfResources, match="shared memory"):
            fail_at(patch, kernel, "run", 1, does_not_compile)
            gate_conv.run(inputs, inputs.state, tuning)
        assert torch.equal(inputs.state, state)
    expected = gate_conv.reference_update(*inputs, 9)
    out = gate_conv.run(inputs, inputs.state, tuning)
    torch.testing.assert_close((out, inputs.state), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch, tuning, kernels", PACKED)
def test_the_pool_of_states(batch, tuning, kernels, monkeypatch):
    inputs, tuning = draw(BATCHES[batch], 24, 2), packed_gate_conv.PACKED._replace(**tuning)
    pool = inputs.pool.clone()
    for kernel in kernels:
        with monkeypatch.context() as patch, pytest.raises(OutOfResources, match="shared memory"):
            fail_at(patch, kernel, "run", 1, does_not_compile)
            packed_gate_conv.run(inputs, tuning)
        torch.testing.assert_close(inputs.pool, pool, rtol=0, atol=0, equal_nan=True)
    packed_gate_conv.run(inputs, tuning)
    after = inputs.pool.clone()
    inputs.pool.copy_(pool)
    packed_gate_conv.reference(*inputs)
    torch.testing.assert_close(after, inputs.pool, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_weights_that_find_no_room_to_be_merged(monkeypatch, caplog):
    key, value = (torch.nn.Parameter(torch.randn(rows, 8), requires_grad=False) for rows in (16, 4))
    x, before = torch.randn(3, 8), [(w.data_ptr(), w.tolist()) for w in (key, value)]
    fail_at(monkeypatch, merged_weights, "_allocate", 1, out_of_memory)
    for _ in range(2):  # the second one does not try again
        torch.testing.assert_close(kv_proj.project(x, key, value), kv_proj.reference(x, key, value))
    assert [(w.data_ptr(), w.tolist()) for w in (key, value)] == before
    assert "no memory was free" in merged_weights.why_separate(key, value)
    (warning,) = caplog.messages
    assert "merge_kv_proj: 0.0 MiB for the key and value projection" in warning
