"""ple::kv_proj: one GEMM over two parameters that share one storage, whatever happens to them in between."""

import copy

import pytest
import torch
from torch import nn

from ple_compile import merged_weights
from ple_compile.ops import kv_proj


class Projections(nn.Module):
    def __init__(self, embed=16, keys=40, values=12, dtype=torch.float32):
        super().__init__()
        self.key_proj = nn.Linear(embed, keys, bias=False, dtype=dtype)
        self.value_proj = nn.Linear(embed, values, bias=False, dtype=dtype)

    def forward(self, x):
        return torch.ops.ple.kv_proj(x, self.key_proj.weight, self.value_proj.weight) * 1

    def expected(self, x):
        return torch.cat([self.key_proj(x), self.value_proj(x)], dim=-1)

    def is_merged(self):
        return merged_weights.merged_view(self.key_proj.weight, self.value_proj.weight) is not None


@pytest.fixture(params=["plain", "compiled"])
def projections(request):
    torch.manual_seed(0)
    torch._dynamo.reset()
    module = Projections()
    if request.param == "compiled":
        module.compile(fullgraph=True)
    return module


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def assert_equal(module, x):
    torch.testing.assert_close(module(x), module.expected(x))


def test_merges_without_touching_anything_but_addresses(projections):
    weights = [projections.key_proj.weight, projections.value_proj.weight]
    values, versions = [w.clone() for w in weights], [w._version for w in weights]
    names, x = list(projections.state_dict()), torch.randn(3, 5, 16)
    assert not projections.is_merged()
    assert_equal(projections, x)
    assert projections.is_merged()
    assert weights[0] is projections.key_proj.weight and weights[1] is projections.value_proj.weight
    assert all(type(w) is nn.Parameter and w.is_leaf and w.requires_grad for w in weights)
    assert [w._version for w in weights] == versions and list(projections.state_dict()) == names
    assert all(torch.equal(w, value) for w, value in zip(weights, values))
    # No memory beside the pair itself.
    assert weights[0].untyped_storage().nbytes() == sum(w.nbytes for w in weights)


def test_is_one_gemm_and_stays_where_it_is(projections):
    x = torch.randn(3, 5, 16)
    projections(x)
    address = projections.key_proj.weight.data_ptr()
    with torch.profiler.profile() as profile:
        projections(x)
    gemms = [event.name for event in profile.events() if event.name in ("aten::mm", "aten::addmm", "aten::bmm")]
    assert gemms == ["aten::mm"]
    assert projections.key_proj.weight.data_ptr() == address


UPDATES = {
    "in place": lambda m: m.value_proj.weight.mul_(2),
    "load_state_dict": lambda m: m.load_state_dict({k: torch.randn_like(v) for k, v in m.state_dict().items()}),
    "assign": lambda m: m.load_state_dict(
        {k: torch.randn_like(v) for k, v in m.state_dict().items()}, strict=True, assign=True
    ),
    "swap both": lambda m: [setattr(p, "data", torch.randn_like(p)) for p in m.parameters()],
    "swap key": lambda m: setattr(m.key_proj.weight, "data", torch.randn_like(m.key_proj.weight)),
    "swap value": lambda m: setattr(m.value_proj.weight, "data", torch.randn_like(m.value_proj.weight)),
    "to float64": lambda m: m.to(torch.float64),
    "to bfloat16": lambda m: m.to(torch.bfloat16),
    "optimizer": lambda m: step(m),
}


def step(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("update", UPDATES)
def test_an_update_takes_effect(projections, update):
    x = torch.randn(3, 5, 16)
    before = projections(x)
    UPDATES[update](projections)
    dtype = projections.key_proj.weight.dtype
    after = projections(x.to(dtype))
    torch.testing.assert_close(after, projections.expected(x.to(dtype)))
    assert after.dtype != before.dtype or not torch.equal(before, after)
    # "swap value" leaves the key in the old, twice as large storage: two GEMMs from then on, still right.
    assert projections.is_merged() == (update not in ("swap key", "swap value"))


def test_swapping_one_then_the_other_merges_again(projections):
    x = torch.randn(3, 5, 16)
    projections(x)
    for linear in (projections.value_proj, projections.key_proj):
        linear.weight.data = torch.randn_like(linear.weight)
        assert_equal(projections, x)
    assert projections.is_merged()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_stay_trainable(projections, mode):
    x = torch.randn(3, 16)
    with mode():
        projections(x)
    assert projections.is_merged() and not projections.key_proj.weight.is_inference()
    with torch.enable_grad():
        projections.expected(x).sum().backward()
    assert projections.key_proj.weight.grad.shape == projections.key_proj.weight.shape


def test_deep_copy_is_independent(projections):
    x = torch.randn(3, 16)
    projections(x)
    clone = copy.deepcopy(projections)
    clone.key_proj.weight.zero_()
    assert_equal(projections, x)
    assert_equal(clone, x)
    assert clone.key_proj.weight.data_ptr() != projections.key_proj.weight.data_ptr()


def tie(module):
    module.value_proj.weight = module.key_proj.weight


def tie_elsewhere(module):
    module.other = nn.Parameter(module.value_proj.weight.detach())


def slice_of_larger(module):
    module.key_proj.weight.data = torch.randn(80, 16)[:40]


def not_contiguous(module):
    module.key_proj.weight.data = torch.randn(16, 40).T


def from_inference_mode(module):
    with torch.inference_mode():
        module.key_proj.weight = nn.Parameter(torch.randn(40, 16))


def unaligned(module):
    module.key_proj.weight = nn.Parameter(torch.randn(5, 15))
    module.value_proj.weight = nn.Parameter(torch.randn(7, 15))


@pytest.mark.parametrize(
    "prepare, reason",
    [
        (tie, "tied"),
        (tie_elsewhere, "another tensor shares"),
        (slice_of_larger, "larger storage"),
        (not_contiguous, "contiguous"),
        (from_inference_mode, "inference mode"),
        (unaligned, "300 bytes"),
    ],
)
def test_left_apart(projections, prepare, reason):
    prepare(projections)
    addresses = [p.data_ptr() for p in projections.parameters()]
    assert reason in merged_weights.why_separate(projections.key_proj.weight, projections.value_proj.weight)
    x = torch.randn(3, 5, projections.key_proj.weight.shape[1])
    assert_equal(projections, x)
    assert [p.data_ptr() for p in projections.parameters()] == addresses


def test_temporaries_and_recorded_gradients_are_left_apart():
    module = Projections()
    weights = module.key_proj.weight, module.value_proj.weight
    assert "plain parameters" in merged_weights.why_separate(*(w.clone() for w in weights))
    with torch.enable_grad():
        assert "autograd" in merged_weights.why_separate(*weights)
    state = module.state_dict()
    assert "shares" in merged_weights.why_separate(*weights)
    del state
    assert merged_weights.why_separate(*weights) is None


def test_autocast_does_not_change_the_type():
    module, x = Projections(), torch.randn(3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        kv = torch.ops.ple.kv_proj(x, module.key_proj.weight, module.value_proj.weight)
    torch.testing.assert_close(kv, module.expected(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(16,), (0, 16), (2, 0, 16), (1, 16), (2, 3, 4, 16)])
@pytest.mark.parametrize("merged", [True, False])
def test_shapes_and_types(dtype, shape, merged):
    module, x = Projections(dtype=dtype), torch.randn(shape, dtype=dtype)
    weights = [module.key_proj.weight, module.value_proj.weight]
    kv = torch.ops.ple.kv_proj(x, *(weights if merged else [w.clone() for w in weights]))
    assert kv.is_contiguous() and module.is_merged() == merged
    torch.testing.assert_close(kv, kv_proj.reference(x, *weights))
    strided = torch.randn(*shape, 2, dtype=dtype)[..., 0]
    torch.testing.assert_close(torch.ops.ple.kv_proj(strided, *weights), kv_proj.reference(strided, *weights))


def test_bad_inputs_name_the_argument():
    module = Projections()
    weights = [module.key_proj.weight, module.value_proj.weight]
    with pytest.raises(ValueError, match=r"key_weight has shape \(40, 16\) and x \(3, 8\)"):
        torch.ops.ple.kv_proj(torch.randn(3, 8), *weights)
    with pytest.raises(ValueError, match="key_weight is torch.float32 and x torch.bfloat16"):
        torch.ops.ple.kv_proj(torch.randn(3, 16, dtype=torch.bfloat16), *weights)


def test_operator_contract():
    for weights in ((torch.randn(8, 4), torch.randn(3, 4)), (nn.Parameter(torch.randn(8, 4)), torch.randn(3, 4))):
        torch.library.opcheck(torch.ops.ple.kv_proj.default, (torch.randn(2, 5, 4), *weights))
