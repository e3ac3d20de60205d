"""ple::kv_proj on the device: memory, CUDA graphs, and updates under `reduce-overhead`."""

import pytest
import torch
from torch import nn

import ple_compile.ops.kv_proj  # noqa: F401
from ple_compile import merged_weights


class Projections(nn.Module):
    def __init__(self, embed=2560, keys=10240, values=2560, dtype=torch.bfloat16):
        super().__init__()
        self.key_proj = nn.Linear(embed, keys, bias=False, dtype=dtype, device="cuda")
        self.value_proj = nn.Linear(embed, values, bias=False, dtype=dtype, device="cuda")

    def forward(self, x):
        return torch.ops.ple.kv_proj(x, self.key_proj.weight, self.value_proj.weight) * 1

    def expected(self, x):
        return torch.cat([self.key_proj(x), self.value_proj(x)], dim=-1)

    def is_merged(self):
        return merged_weights.merged_view(self.key_proj.weight, self.value_proj.weight) is not None


@pytest.fixture(autouse=True)
def no_grad():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def test_memory_of_the_pair_is_all_there_is():
    module, x = Projections(), torch.randn(4, 2560, device="cuda", dtype=torch.bfloat16)
    module.expected(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    pair = sum(p.nbytes for p in module.parameters())
    torch.cuda.reset_peak_memory_stats()
    torch.testing.assert_close(module(x), module.expected(x))
    assert module.is_merged()
    assert torch.cuda.max_memory_allocated() <= before + pair + 2**20
    assert torch.cuda.memory_allocated() <= before + 2**20


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_updates_take_effect_when_compiled(mode):
    module, x = Projections(256, 512, 128), torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(module, mode=mode, fullgraph=True)

    def check():
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled(x).clone(), module.expected(x))

    check()
    # Merged on the first call, before anything is captured.
    assert module.is_merged()
    module.value_proj.weight.mul_(2)
    check()
    module.load_state_dict({name: torch.randn_like(value) for name, value in module.state_dict().items()})
    check()
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter)
    check()
    module.float()
    x = x.float()
    check()
    assert module.is_merged()


def test_inside_a_capture_nothing_moves():
    module, x = Projections(256, 512, 128), torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
    module.expected(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.ple.kv_proj(x, module.key_proj.weight, module.value_proj.weight)
    assert not module.is_merged()
    x.normal_()
    graph.replay()
    torch.testing.assert_close(out, module.expected(x))


def test_merged_before_a_capture_is_one_gemm_in_it():
    module, x = Projections(256, 512, 128), torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
    module(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.ple.kv_proj(x, module.key_proj.weight, module.value_proj.weight)
    module.key_proj.weight.mul_(3)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(out, module.expected(x))
