"""ple::dequantized_lookup against plain PyTorch; the kernels run in Triton's interpreter."""

import functools

import pytest
import torch
from torch.testing._internal.common_quantized import _floatx_unpacked_to_f32

from ple_compile.ops import dequantized_lookup as op

IMPLEMENTATIONS = [op.reference, op.launch]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
REAL_ROWS, REAL_WIDTH = 320_001_536, 160


def fp8_table(rows, width):
    """Random bytes: every code, the NaNs included."""
    return torch.randint(0, 256, (rows, width), dtype=torch.uint8).view(torch.float8_e4m3fn)


def nvfp4_table(rows, width):
    scale = (torch.rand(rows, width // 16) * 100 + 0.01).to(torch.float8_e4m3fn)
    return torch.randint(0, 256, (rows, width // 2), dtype=torch.uint8), scale, torch.tensor([3.1e-3])


def nvfp4_rows(table, scale, table_scale, ids, dtype):
    packed = table[ids]
    codes = torch.stack([packed % 16, packed // 16], dim=-1).flatten(-2)
    values = _floatx_unpacked_to_f32(codes, 2, 1)
    return (values * scale[ids].float().repeat_interleave(16, -1) * table_scale).to(dtype)


def assert_same(rows, expected, truncated=False):
    """Equal bits, NaNs as one; `truncated` where Triton's interpreter, which truncates to bfloat16, took part."""
    assert rows.dtype == expected.dtype and rows.is_contiguous()
    assert torch.equal(rows.isnan(), expected.isnan())
    rows, expected = rows.nan_to_num(0), expected.nan_to_num(0)
    assert torch.equal(rows.signbit(), expected.signbit())
    if truncated:
        torch.testing.assert_close(rows.double(), expected.double(), rtol=2**-6, atol=0)
    else:
        assert torch.equal(rows, expected)


def truncates(implementation, *dtypes):
    return implementation is op.launch and torch.bfloat16 in dtypes


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_e4m3_byte_decodes_as_pytorch_does(implementation, dtype):
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    rows = implementation(table, torch.ones(1, dtype=dtype), None, torch.arange(256), dtype, dtype)
    assert_same(rows, table.to(dtype))
    assert rows.isnan().sum() == 2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_e2m1_code_decodes_as_pytorch_does(implementation):
    low, high = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    table = (low + 16 * high).to(torch.uint8).reshape(32, 8)
    scale = torch.ones(32, 1).to(torch.float8_e4m3fn)
    rows = implementation(table, scale, torch.ones(1), torch.arange(32), torch.float32, torch.float32)
    pairs = torch.stack([low, high], dim=-1).to(torch.uint8).reshape(32, 16)
    assert_same(rows, _floatx_unpacked_to_f32(pairs, 2, 1))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_group_scale_decodes_as_pytorch_does(implementation):
    table = torch.full((256, 8), 0x22, dtype=torch.uint8)  # ones
    scale = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    rows = implementation(table, scale, torch.ones(1), torch.arange(256), torch.float32, torch.float32)
    assert_same(rows, scale.float().expand(256, 16).contiguous())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale_shape", [(), (1,), (97,), (97, 1)], ids=str)
def test_e4m3_rounds_to_the_scale_then_to_the_result(implementation, dtype, scale_dtype, scale_shape):
    table, ids = fp8_table(97, 20), torch.randint(0, 97, (2, 5, 3))
    scale = (torch.rand(scale_shape) + 0.5).to(scale_dtype)
    factor = scale.reshape(-1).expand(97)[ids, None] if scale.numel() == 97 else scale
    rows = implementation(table, scale, None, ids, scale_dtype, dtype)
    expected = (table[ids].to(scale_dtype) * factor).to(dtype)
    assert_same(rows, expected, truncates(implementation, dtype, scale_dtype))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", [16, 48, 160])
def test_nvfp4(implementation, dtype, width):
    table, scale, table_scale = nvfp4_table(97, width)
    ids = torch.randint(0, 97, (2, 5, 3))
    rows = implementation(table, scale, table_scale, ids, torch.float32, dtype)
    assert_same(rows, nvfp4_rows(table, scale, table_scale, ids, dtype), truncates(implementation, dtype))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,), (200,), (3, 0), (0,)], ids=str)
def test_any_shape_of_ids(implementation, ids_dtype, shape):
    table, scale, ids = fp8_table(50, 20), torch.rand(50) + 0.5, torch.randint(0, 50, shape, dtype=ids_dtype)
    rows = implementation(table, scale, None, ids, torch.float32, torch.float16)
    assert_same(rows, (table[ids.long()].float() * scale[ids.long(), None]).half())
    table, scale, table_scale = nvfp4_table(50, 32)
    rows = implementation(table, scale, table_scale, ids, torch.float32, torch.float16)
    assert_same(rows, nvfp4_rows(table, scale, table_scale, ids.long(), torch.float16))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_strided_ids_tables_and_scales(implementation):
    table, scale, ids = fp8_table(60, 33)[::2, 1:30], torch.rand(90)[::3], torch.randint(0, 30, (7, 9, 2))[..., 0].T
    expected = (table[ids].float() * scale[ids, None]).half()
    assert_same(implementation(table, scale, None, ids, torch.float32, torch.float16), expected)
    table, scale, table_scale = nvfp4_table(60, 64)
    table, scale = table[::2, 8:24], scale[::2, 1:3]
    expected = nvfp4_rows(table, scale, table_scale, ids, torch.float32)
    assert_same(implementation(table, scale, table_scale, ids, torch.float32, torch.float32), expected)


def test_kernels_read_only_the_table():
    ids = torch.tensor([-1, 10, 0, 9, -(2**63), 2**63 - 1, 2**31, -(2**31) - 1])
    wanted = torch.tensor([0.0, 0, 2, 2, 0, 0, 0, 0])
    whole = torch.full((30, 16), 7.0).to(torch.float8_e4m3fn)
    whole[10:20] = 1.0
    scale = torch.full((30,), torch.nan)
    scale[10:20] = 2.0
    for factor in (scale[10:20], torch.tensor([2.0])):
        assert torch.equal(op.launch(whole[10:20], factor, None, ids, torch.float32, torch.float32)[:, 3], wanted)
    packed = torch.full((30, 8), 0x77, dtype=torch.uint8)
    packed[10:20] = 0x22
    groups = torch.full((30, 1), torch.nan).to(torch.float8_e4m3fn)
    groups[10:20] = 1.0
    rows = op.launch(packed[10:20], groups[10:20], torch.tensor([2.0]), ids, torch.float32, torch.float32)
    assert torch.equal(rows[:, 3], wanted)
    with pytest.raises(ValueError, match="6 of 8 ids lie outside"):
        op.reference(whole[10:20], scale[10:20], None, ids, torch.float32, torch.float32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_table_of_the_released_size(implementation, tmp_path):
    """320,001,536 rows of 160 in a sparse file: every byte offset past 2**31 and 2**32 is right."""
    picked = torch.tensor([0, 13_421_772, 13_421_773, 2**31 // 80 + 1, 2**32 // 80 + 1, REAL_ROWS // 2, REAL_ROWS - 1])
    for width, dtype in ((REAL_WIDTH, torch.float8_e4m3fn), (REAL_WIDTH // 2, torch.uint8)):
        size = REAL_ROWS * width
        file = tmp_path / f"{width}"
        with open(file, "wb") as sparse:
            sparse.truncate(size)
            for number, row in enumerate(picked.tolist()):
                sparse.seek(row * width)
                sparse.write(bytes([number + 0x31]) * width)
        table = torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8).view(REAL_ROWS, width).view(dtype)
        stored = (torch.arange(len(picked)) + 0x31).to(torch.uint8)
        if dtype is torch.float8_e4m3fn:
            rows = implementation(table, torch.ones(1), None, picked, torch.float32, torch.float32)
            assert torch.equal(rows, stored.view(dtype).float()[:, None].expand(-1, REAL_WIDTH))
        else:
            groups = sparse_ones(tmp_path / "scale", picked)
            rows = implementation(table, groups, torch.ones(1), picked, torch.float32, torch.float32)
            assert torch.equal(rows[:, 0], _floatx_unpacked_to_f32(stored % 16, 2, 1))
            assert torch.equal(rows[:, -1], _floatx_unpacked_to_f32(stored // 16, 2, 1))


def sparse_ones(file, picked):
    """[REAL_ROWS, 10] e4m3 that is 1.0 in the picked rows."""
    with open(file, "wb") as sparse:
        sparse.truncate(REAL_ROWS * 10)
        for row in picked.tolist():
            sparse.seek(row * 10)
            sparse.write(bytes([0x38]) * 10)
    mapped = torch.from_file(str(file), shared=True, size=REAL_ROWS * 10, dtype=torch.uint8)
    return mapped.view(REAL_ROWS, 10).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_refusals(implementation):
    table, ids = fp8_table(10, 16), torch.zeros(3, dtype=torch.int64)
    for bad in (torch.ones(9), torch.ones(10, 16), torch.ones(1, dtype=torch.float64)):
        with pytest.raises(ValueError, match="no known format"):
            implementation(table, bad, None, ids, torch.float32, torch.float32)
    with pytest.raises(ValueError, match="no known format"):
        implementation(torch.randn(10, 16), torch.ones(1), None, ids, torch.float32, torch.float32)
    packed, scale, table_scale = nvfp4_table(10, 16)
    with pytest.raises(ValueError, match="no known format"):
        implementation(packed, scale[:9], table_scale, ids, torch.float32, torch.float32)
    with pytest.raises(ValueError, match="rows of torch.float32, torch.float64"):
        implementation(table, torch.ones(1), None, ids, torch.float32, torch.float64)
    with pytest.raises(ValueError, match="ids are torch.float32"):
        implementation(table, torch.ones(1), None, torch.zeros(1), torch.float32, torch.float32)


def test_a_scale_elsewhere_is_refused():
    ids = torch.zeros(1, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match="scale is on cpu, not page-locked"):
        op.check_arguments(fp8_table(3, 4).to("meta"), torch.ones(1), None, ids, torch.float32, torch.float16)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    table, scale = fp8_table(97, 20), torch.rand(97, 1)

    @torch.compile(fullgraph=True, dynamic=dynamic)
    def layer(ids):
        return torch.ops.ple.dequantized_lookup(table, scale, None, ids + 1, torch.float32, torch.bfloat16)

    for tokens in (4, 7):
        ids = torch.randint(0, 96, (tokens,))
        assert_same(layer(ids), op.reference(table, scale, None, ids + 1, torch.float32, torch.bfloat16))


def test_operator_contracts():
    ids = torch.randint(0, 12, (2, 3))
    table = torch.randn(12, 16).to(torch.float8_e4m3fn)
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # no schema check of e4m3
    opcheck = functools.partial(torch.library.opcheck, op.dequantized_lookup, test_utils=checks)
    opcheck((table, torch.rand(12), None, ids, torch.float32, torch.bfloat16))
    opcheck((*nvfp4_table(12, 16), ids, torch.float32, torch.float32))
