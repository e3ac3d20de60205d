"""Fused gather and dequantisation on the device: the bits of plain PyTorch, from device and from host tables."""

import pytest
import torch

from ple_compile.ops import dequantized_lookup as op
from tests.gpu import synchronisation

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ROWS, WIDTH = 50_000, 160


def assert_same(rows, expected):
    assert rows.is_cuda and rows.is_contiguous() and rows.dtype == expected.dtype
    rows = rows.cpu()
    assert torch.equal(rows.isnan(), expected.isnan())
    assert torch.equal(rows.nan_to_num(0).signbit(), expected.nan_to_num(0).signbit())
    assert torch.equal(rows.nan_to_num(0), expected.nan_to_num(0))


def place(tensors, on_host):
    return [tensor.pin_memory() if on_host else tensor.cuda() for tensor in tensors]


def bytes_of(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_e4m3_byte(dtype):
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    ids = torch.arange(256)
    rows = torch.ops.ple.dequantized_lookup(table.cuda(), torch.ones(1).cuda(), None, ids.cuda(), dtype, dtype)
    assert_same(rows, table.to(dtype))


def test_every_pair_of_e2m1_codes():
    table, scale = torch.arange(256, dtype=torch.uint8).reshape(32, 8), torch.ones(32, 1).to(torch.float8_e4m3fn)
    arguments = table, scale, torch.ones(1)
    rows = torch.ops.ple.dequantized_lookup(
        *(a.cuda() for a in arguments), torch.arange(32).cuda(), torch.float32, torch.float32
    )
    assert_same(rows, op.reference(*arguments, torch.arange(32), torch.float32, torch.float32))


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("width", [1, 20, WIDTH])
def test_e4m3(on_host, dtype, scale_dtype, per_row, width):
    table = bytes_of(977, width).view(torch.float8_e4m3fn)
    scale = (torch.rand(977 if per_row else 1) * 2e-2 + 1e-4).to(scale_dtype)
    (placed,), placed_scale = place([table], on_host), scale.cuda()
    for ids in (torch.randint(0, 977, (3, 5)), torch.randint(0, 977, (8192, 16)).int()):
        rows = torch.ops.ple.dequantized_lookup(placed, placed_scale, None, ids.cuda(), scale_dtype, dtype)
        assert_same(rows, op.reference(table, scale, None, ids, scale_dtype, dtype))


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", [16, 48, WIDTH])
def test_nvfp4(on_host, dtype, width):
    table, scale = bytes_of(977, width // 2), bytes_of(977, width // 16).view(torch.float8_e4m3fn)
    table_scale = torch.tensor([3.7e-4])
    placed = [*place([table, scale], on_host), table_scale.cuda()]
    for ids in (torch.randint(0, 977, (3, 5)), torch.randint(0, 977, (8192, 16)).int()):
        rows = torch.ops.ple.dequantized_lookup(*placed, ids.cuda(), torch.float32, dtype)
        assert_same(rows, op.reference(table, scale, table_scale, ids, torch.float32, dtype))


def test_scales_on_the_host_too():
    table, scale = bytes_of(ROWS, WIDTH).view(torch.float8_e4m3fn), torch.rand(ROWS, 1)
    ids = torch.randint(0, ROWS, (512, 16))
    for factor in (scale, scale[:1]):
        placed = [table.pin_memory(), factor.pin_memory()]
        rows = torch.ops.ple.dequantized_lookup(*placed, None, ids.cuda(), torch.float32, torch.bfloat16)
        assert_same(rows, op.reference(table, factor, None, ids, torch.float32, torch.bfloat16))


def test_a_pageable_scale_or_table_is_refused():
    table, ids = bytes_of(10, 16).view(torch.float8_e4m3fn), torch.zeros(2, dtype=torch.int64, device="cuda")
    with pytest.raises(ValueError, match="scale is on cpu"):
        torch.ops.ple.dequantized_lookup(table.cuda(), torch.ones(1), None, ids, torch.float32, torch.bfloat16)
    with pytest.raises(ValueError, match="pageable"):
        torch.ops.ple.dequantized_lookup(table, torch.ones(1).cuda(), None, ids, torch.float32, torch.bfloat16)


def test_ids_outside_read_nothing():
    ids = torch.tensor([-1, 977, 0, 976, -(2**63), 2**63 - 1], device="cuda")
    table, scale = torch.full((977, 16), 1.0).to(torch.float8_e4m3fn).cuda(), torch.full((977,), 2.0).cuda()
    rows = torch.ops.ple.dequantized_lookup(table, scale, None, ids, torch.float32, torch.float32)
    assert rows[:, 0].tolist() == [0, 0, 2, 2, 0, 0]
    packed, groups = torch.full((977, 8), 0x22, dtype=torch.uint8).cuda(), torch.ones(977, 1).to(torch.float8_e4m3fn)
    rows = torch.ops.ple.dequantized_lookup(packed, groups.cuda(), scale[:1], ids, torch.float32, torch.float32)
    assert rows[:, 0].tolist() == [0, 0, 2, 2, 0, 0]


def test_offsets_beyond_32_bits():
    """Rows past the 2**32nd byte of a device table, without writing all of it."""
    rows = 2**32 // WIDTH + 1000
    table = torch.empty(rows, WIDTH, dtype=torch.uint8, device="cuda")
    picked = torch.tensor([0, 2**31 // WIDTH, 2**31 // WIDTH + 1, rows - 1], device="cuda")
    table[picked] = torch.tensor([0x38, 0x40, 0x48, 0x50], dtype=torch.uint8, device="cuda")[:, None]
    one = torch.ones(1, device="cuda")
    found = torch.ops.ple.dequantized_lookup(
        table.view(torch.float8_e4m3fn), one, None, picked, torch.float32, torch.float32
    )
    assert found[:, 0].tolist() == [1, 2, 4, 8] and found[:, -1].tolist() == [1, 2, 4, 8]


def test_captured_in_a_cuda_graph_and_without_synchronisation():
    table, scale = bytes_of(ROWS, WIDTH).view(torch.float8_e4m3fn).cuda(), torch.rand(1).cuda()
    ids = torch.randint(0, ROWS, (64, 16), device="cuda")
    torch.ops.ple.dequantized_lookup(table, scale, None, ids, torch.float32, torch.bfloat16)
    with synchronisation.forbidden():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows = torch.ops.ple.dequantized_lookup(table, scale, None, ids, torch.float32, torch.bfloat16)
    for _ in range(3):
        ids.random_(0, ROWS)
        graph.replay()
        assert_same(rows, op.reference(table.cpu(), scale.cpu(), None, ids.cpu(), torch.float32, torch.bfloat16))
