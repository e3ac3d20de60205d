"""Launches by layout: what is worked out once, what must be worked out again, and what a failure leaves behind."""

import pytest
import torch
import triton
import triton.language as tl
from ple_inputs import make_inputs

from ple_compile.ops import _launches, gate_conv
from ple_compile.ops._launches import Launch, Plans, Roles, layout, take


class Compiled:
    """Stands for what Triton returns from a first launch on a device."""

    def __init__(self, calls):
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *args: self.calls.append((grid, args))


class Kernel:
    """Compiles at its first launch, which may fail."""

    arg_names = ["out_ptr", "x_ptr", "stride", "WIDTH", "FLAG"]

    def __init__(self, failures=0):
        self.first, self.later, self.failures = [], [], failures

    def __getitem__(self, grid):
        def launch(*args, **constants):
            if self.failures:
                self.failures -= 1
                raise RuntimeError("does not compile")
            self.first.append((grid, args, constants))
            return Compiled(self.later)

        return launch


def test_later_launches_pass_every_parameter_in_order():
    kernel, tensors = Kernel(), (torch.zeros(1), None)
    launch = Launch(kernel, 7, 5, FLAG=True, num_warps=2, WIDTH=64)
    launch(*tensors)
    other = (torch.ones(1), torch.ones(2))
    launch(*other)
    assert kernel.first == [((7, 1, 1), (*tensors, 5), {"FLAG": True, "num_warps": 2, "WIDTH": 64})]
    assert kernel.later == [((7, 1, 1), (*other, 5, 64, True))]


def test_a_kernel_that_did_not_compile_is_asked_again():
    kernel = Kernel(failures=1)
    launch = Launch(kernel, 1, 5, WIDTH=64, FLAG=False)
    with pytest.raises(RuntimeError, match="does not compile"):
        launch(None, None)
    launch(None, None)
    assert len(kernel.first) == 1 and not kernel.later


@triton.jit
def add_kernel(out_ptr, x_ptr, length, STEP: tl.constexpr):
    index = tl.arange(0, 8)
    x = tl.load(x_ptr + index, mask=index < length, other=0)
    tl.store(out_ptr + index, x + STEP, mask=index < length)


def test_a_kernel_runs_every_time():
    x, launch = torch.arange(5), Launch(add_kernel, 1, 5, STEP=3)
    for _ in range(3):
        out = torch.zeros_like(x)
        launch(out, x)
        x = out
    assert x.tolist() == [9, 10, 11, 12, 13]


LIKE = torch.zeros(64, dtype=torch.int16)[:32].view(4, 8)


@pytest.mark.parametrize(
    "other",
    [
        LIKE.int(),
        LIKE.view(torch.float16),
        LIKE.view(8, 4),
        LIKE.t().contiguous().t(),
        LIKE[None],
        torch.zeros(64, dtype=torch.int16)[1:33].view(4, 8),
        None,
    ],
    ids=["wider", "type", "shape", "strides", "dimensions", "alignment", "none"],
)
def test_what_makes_another_layout(other):
    first = torch.zeros(1)
    assert layout(first, LIKE) == layout(first, LIKE.clone())
    assert layout(first, LIKE) != layout(first, other)


def test_plans_are_made_once_and_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(_launches, "MOST_PLANS", 3)
    made, plans = [], Plans()

    def make(x):
        made.append(x)
        return -x

    for x in (1, 2, 1, 3, 2, 4, 4, 1):  # the fourth finds no room: all go
        assert plans.find(x, make, x) == -x
    assert made == [1, 2, 3, 4, 1]


def test_a_plan_that_failed_is_made_again():
    plans = Plans()
    with pytest.raises(ValueError):
        plans.find("key", int, "no number")
    assert plans.find("key", int, "3") == 3


def test_a_step_picks_its_tensors_by_their_roles():
    seen, roles = [], Roles("out", "x", "weight")
    steps = [roles.step(lambda *tensors: seen.append(tensors), "weight", "none", "out"), roles.step(seen.append, "x")]
    take([steps[0]], 1, 2, 3)
    assert seen == [(3, None, 1)]
    with pytest.raises(ValueError):
        roles.step(seen.append, "bias")


def test_an_op_plans_a_layout_once(monkeypatch):
    inputs = make_inputs(2, 5, 24, 2, 4, 3, 9)
    planned, made = gate_conv.planned, []
    monkeypatch.setattr(gate_conv, "_PLANS", Plans())
    monkeypatch.setattr(gate_conv, "planned", lambda *args: made.append(1) or planned(*args))
    for _ in range(2):  # other numbers, the same layout
        key, hidden = torch.randn_like(inputs.key), torch.randn_like(inputs.hidden)
        again = inputs._replace(key=key, hidden=hidden)
        torch.testing.assert_close(gate_conv.launch(*again), gate_conv.reference(*again), rtol=1e-4, atol=1e-5)
    assert len(made) == 1
    for change in ({"dilation": 2}, {"add_hidden": not inputs.add_hidden}, {"eps": [0.5] * 3}, {"state": None}):
        other = inputs._replace(**change)
        torch.testing.assert_close(gate_conv.launch(*other), gate_conv.reference(*other), rtol=1e-4, atol=1e-5)
    assert len(made) == 5
    strided = inputs._replace(
        key=inputs.key.mT.contiguous().mT, norm_conv_weight=inputs.norm_conv_weight.repeat(2)[::2]
    )
    for _ in range(2):
        torch.testing.assert_close(gate_conv.launch(*strided), gate_conv.reference(*strided), rtol=1e-4, atol=1e-5)
    assert len(made) == 6
