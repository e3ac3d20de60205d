"""Faults on a GPU, with the real allocator and the real Triton: a clear error, nothing lost, the next call works."""

import pytest
import torch
import triton
import triton.language as tl
from ple_inputs import make_inputs
from torch import Tensor
from triton.compiler.errors import CompilationError

from ple_compile.ops import gate_conv, lookup_async
from ple_compile.tables import hot_rows, pinning
from tests.faults import fail_at
from tests.ple_cases import Case


@triton.jit
def does_not_compile_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), tl.no_such_function(x_ptr))


def compilation_error() -> Exception:
    """What Triton's own compiler raises."""
    with pytest.raises(CompilationError) as caught:
        does_not_compile_kernel[(1,)](torch.empty(8, device="cuda"), BLOCK=8)
    return caught.value


def fill_the_gpu() -> None:
    """Ask for more than there is, as a step that does not fit would."""
    free, total = torch.cuda.mem_get_info()
    torch.empty(2 * total, dtype=torch.uint8, device="cuda")


def out_of_memory() -> Exception:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fill_the_gpu()
    return caught.value


def assert_state_kept(case: Case, ours: object, eagers: object) -> None:
    for mine, eager in zip(case.states(ours), case.states(eagers)):
        torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("error", [out_of_memory, compilation_error])
@torch.no_grad()
def test_a_step_that_fails(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch, error: object) -> None:
    """In the last of the layer's kernels; the states are those of the step before."""
    case = Case(model="reference", cache="dynamic_filled")
    layer = case.layer()
    ours, eagers = case.new_cache(layer), case.new_cache(layer)
    ours, eagers = (cache._replace(conv=cache.conv.cuda(), context=cache.context.cuda()) for cache in (ours, eagers))
    layer.cuda()
    inputs = [x.cuda() if isinstance(x, Tensor) else x for x in case.inputs()]
    compiled = torch.compile(case.call, backend="ple")
    compiled(layer, *inputs, ours), case.call(layer, *inputs, eagers)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with monkeypatch.context() as patch, pytest.raises(type(error())):
        fail_at(patch, gate_conv, "run", 1, error)
        compiled(layer, *inputs, ours)
    torch.cuda.synchronize()
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    assert_state_kept(case, ours, eagers)
    torch.testing.assert_close(compiled(layer, *inputs, ours), case.call(layer, *inputs, eagers), rtol=1e-4, atol=1e-4)
    assert_state_kept(case, ours, eagers)


def test_a_kernel_that_does_not_compile_leaves_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(2, 5, 64, 2, 4, 3, 9, device="cuda")
    state, tuning = inputs.state.clone(), gate_conv.Tuning(few_tokens=0)
    with monkeypatch.context() as patch, pytest.raises(CompilationError):
        fail_at(patch, gate_conv.state_kernel, "run", 1, compilation_error)
        gate_conv.run(inputs, inputs.state, tuning)
    torch.cuda.synchronize()
    assert torch.equal(inputs.state, state)
    expected = gate_conv.reference_update(*inputs, 9)
    out = gate_conv.run(inputs, inputs.state, tuning)
    torch.testing.assert_close((out, inputs.state), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kernel", ["probe", "fetch", "release"])
def test_a_lookup_on_the_side_stream_that_fails(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Its cache of hot rows is empty and free afterwards, and no stream waits for ever."""
    table = torch.randn(50_000, 160).bfloat16()
    pinning.page_lock(table)
    cache = hot_rows.attach(table, 2**20, torch.device("cuda", torch.cuda.current_device()))
    ids = torch.randint(0, 500, (4096,), device="cuda")
    with monkeypatch.context() as patch, pytest.raises(CompilationError):
        fail_at(patch, getattr(hot_rows, f"{kernel}_kernel"), "run", 1, compilation_error)
        lookup_async.start_on_cuda(table, ids)
    torch.cuda.synchronize()
    assert not cache.holds(torch.arange(50_000, device="cuda")).any()
    for _ in range(3):
        rows = lookup_async.wait_on_cuda(lookup_async.start_on_cuda(table, ids), table, ids)
        assert torch.equal(rows.cpu(), table[ids.cpu()])
    assert cache.holds(ids).any()
