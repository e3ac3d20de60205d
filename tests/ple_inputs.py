"""Random inputs of the gate and convolution ops, and eager PyTorch spelled out op by op as transformers' layer does."""

import math
import os
import secrets

import torch
import torch.nn.functional as F
from torch import Tensor

from ple_compile.ops.gate_conv import Inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU the kernels run in Triton's interpreter


def new_seed() -> int:
    """A fresh seed, printed so that a failure can be repeated with PLE_TEST_SEED."""
    seed = int(os.environ.get("PLE_TEST_SEED", 0)) or secrets.randbits(31)
    print(f"PLE_TEST_SEED={seed}")
    return seed


def make_inputs(
    batch: int,
    seq: int,
    width: int,
    streams: int,
    kernel: int = 4,
    dilation: int = 3,
    columns: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    mask: torch.dtype | None = None,
    autocast: bool = False,
    add_hidden: bool = True,
    plain: bool = False,
    seed: int | None = None,
    device: str = DEVICE,
) -> Inputs:
    """Key and value are views of one projection, hidden and state strided views of larger tensors.

    `autocast`: key, value and the conv weight in `dtype`, hidden and the norm weights in float32, the dot in float32.
    """
    generator = torch.Generator().manual_seed(new_seed() if seed is None else seed)

    def random(*shape: int, dtype: torch.dtype = dtype, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    wide = torch.float32 if autocast else dtype
    channels = streams * width
    projected = random(batch, seq, channels + width)
    hidden = random(batch, seq, 2 * channels, dtype=wide)[..., :channels]
    state = None
    if columns is not None:
        state = random(batch, columns, channels, dtype=wide).transpose(1, 2)
    padding = None
    if mask is not None:
        padding = (torch.rand(batch, 2 * seq, generator=generator) < 0.7).to(device, mask)[:, ::2]
    return Inputs(
        key=projected[..., :channels],
        value=projected[..., channels:],
        hidden=hidden,
        norm_key_weight=random(channels, dtype=wide, scale=0.2),
        norm_query_weight=random(channels, dtype=wide, scale=0.2),
        norm_conv_weight=random(channels, dtype=wide, scale=0.2),
        conv_weight=random(channels, 1, kernel, scale=0.5),
        mask=padding,
        state=state,
        eps=[1e-6, 2e-6, 3e-6],
        eps_tensors=[],
        gate_dtype=wide,
        dilation=dilation,
        add_hidden=add_hidden,
        plain=plain,
    )


def to_float64(inputs: Inputs) -> Inputs:
    """The same numbers in float64: the oracle's inputs."""
    wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
    return Inputs(*wide)._replace(gate_dtype=torch.float64)


def eager_gate(inputs: Inputs) -> tuple[Tensor, Tensor]:
    width = inputs.value.shape[-1]

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        groups = x.float().reshape(*x.shape[:-1], -1, width)
        groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
        return (groups.flatten(-2) * (weight.float() if inputs.plain else 1.0 + weight.float())).type_as(x)

    kn = norm(inputs.key, inputs.norm_key_weight, inputs.eps[0]).unflatten(-1, (-1, width))
    qn = norm(inputs.hidden, inputs.norm_query_weight, inputs.eps[1]).unflatten(-1, (-1, width))
    gate = (kn * qn).to(inputs.gate_dtype).sum(dim=-1, keepdim=True) / math.sqrt(width)
    gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
    gated = (torch.sigmoid(gate) * inputs.value.unsqueeze(-2)).flatten(-2)
    normed = norm(gated, inputs.norm_conv_weight, inputs.eps[2])
    if inputs.mask is not None:
        gated = (gated * inputs.mask[:, :, None]).to(gated.dtype)
        normed = (normed * inputs.mask[:, :, None]).to(normed.dtype)
    return gated, normed


def eager_gate_conv(inputs: Inputs, window: int) -> tuple[Tensor, Tensor]:
    """Output and new state."""
    gated, normed = eager_gate(inputs)
    weight = inputs.conv_weight
    left = (weight.shape[-1] - 1) * inputs.dilation
    columns = normed.transpose(1, 2)
    past = columns.new_zeros(*columns.shape[:2], window) if inputs.state is None else inputs.state
    history = torch.cat([past, columns], dim=-1)
    padded = F.pad(history, (left, 0))[..., -(left + columns.shape[-1]) :]
    convolved = F.conv1d(padded.to(weight.dtype), weight, groups=weight.shape[0], dilation=inputs.dilation)
    out = gated + F.silu(convolved).transpose(1, 2)
    return (inputs.hidden + out if inputs.add_hidden else out), history[..., history.shape[-1] - window :]


def assert_close_to_exact(actual: Tensor, eager: Tensor, exact: Tensor, coarsest: torch.dtype | None = None) -> None:
    """Low precision: error against float64 no larger than eager's own plus one rounding. float32: within 2e-5 of eager,
    relative to the largest value (near d = 0 the square root enlarges what the order of a sum leaves).

    `coarsest`: the coarsest dtype that something inside rounds to, where that is not the result's own.
    """
    assert actual.dtype == eager.dtype and actual.shape == eager.shape
    if not actual.numel():
        return
    coarsest = coarsest or actual.dtype
    largest = exact.abs().max()
    if coarsest == torch.float32:
        assert (actual - eager).abs().max() <= 2e-5 * largest
        return
    error = (actual.double() - exact).abs().max()
    own = (eager.double() - exact).abs().max()
    assert error <= own + torch.finfo(coarsest).eps * largest, (error, own)


def share_equal(actual: Tensor, expected: Tensor) -> float:
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    return same.double().mean().item()
