"""The unfused quantised embeddings: exact decoding, one rounding, bytes that survive casts, scales that are checked."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.testing._internal.common_quantized import _f32_to_floatx_unpacked, _floatx_unpacked_to_f32

from ple_compile.tables import formats, scales
from ple_compile.tables.formats import FORMATS, FP8Embedding, NVFP4Embedding, RowScaledFP8Embedding
from ple_compile.tables.mapped import MappedEmbedding
from ple_compile.tables.mapped_rows import MappedRows
from ple_compile.tables.scales import check_scales
from ple_compile.tables.tensor_file import read_header
from tests.tables.test_offload import Model

CLASSES = list(FORMATS.values())


def quantized(cls, rows=64, width=32, dtype=torch.bfloat16, seed=0):
    """(module, the rows that it was made of)."""
    values = (torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)
    module = cls(rows, width, dtype=dtype)
    table_scale = cls.table_scale(values.abs().max().item())
    stored = cls.encode(values, table_scale)
    if table_scale is not None:
        stored[module.table_parameters[0]] = table_scale
    assert module.load_state_dict(stored) and {k: v.dtype for k, v in module.state_dict().items()} == {
        k: v.dtype for k, v in stored.items()
    }
    return module, values


def test_every_e2m1_code():
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(formats.decode_e2m1(codes), _floatx_unpacked_to_f32(codes, 2, 1))
    assert formats.decode_e2m1(codes[8:9]).signbit()


def test_rounding_to_e2m1_is_pytorchs():
    values = torch.cat([torch.randn(10_000) * 3, torch.arange(-8, 8, 0.125)])
    assert torch.equal(formats._to_e2m1(values), _f32_to_floatx_unpacked(values, 2, 1))


def test_every_e4m3_byte():
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(16, 16)
    module = FP8Embedding(16, 16, dtype=torch.float32)
    module.load_state_dict({"weight": table, "weight_scale": torch.ones(1)})
    assert torch.equal(module(torch.arange(16)).view(torch.int32), table.float().view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls, worst", [(FP8Embedding, 0.03), (RowScaledFP8Embedding, 0.03), (NVFP4Embedding, 0.11)])
def test_error_of_a_normal_table(cls, worst, dtype):
    module, values = quantized(cls, rows=500, dtype=dtype)
    rows = module(torch.arange(500))
    assert rows.dtype == dtype and (rows - values).float().norm() < worst * values.float().norm()


def in_transformers(module, dtype):
    """Transformers' module with the same table; it casts the scale to the type of its model."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    theirs = fp8.FP8Embedding(64, 32)
    theirs.weight_scale.data = theirs.weight_scale.data.to(dtype)
    theirs.load_state_dict(module.state_dict(), strict=True)
    return theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_computes_what_transformers_does(dtype):
    module, _ = quantized(FP8Embedding, dtype=dtype)
    theirs, ids = in_transformers(module, dtype), torch.randint(0, 64, (2, 3))
    assert module.weight_scale.dtype == torch.float32
    assert theirs(ids).dtype == dtype and torch.equal(theirs(ids), module(ids))


@pytest.mark.parametrize("largest", [1e-45, 3e-30, 0.0123, 0.1, 1.0, 447.9, 65504.0, torch.finfo(torch.float32).max])
def test_the_scale_of_fp8_is_a_bfloat16_and_no_larger_than_needed(largest):
    scale = FP8Embedding.table_scale(largest)
    assert scale.dtype == torch.float32 and scale > 0 and torch.equal(scale, scale.bfloat16().float())
    assert largest < 1e-30 or 0.99 * largest < scale.double() * 448 <= largest


def test_a_float32_scale_promotes_in_transformers_and_is_rounded_once_in_ours():
    module, _ = quantized(FP8Embedding, dtype=torch.bfloat16)
    module.load_state_dict({**module.state_dict(), "weight_scale": torch.tensor([0.00123456])})
    ids = torch.arange(64)
    assert module(ids).dtype == torch.bfloat16
    assert torch.equal(module(ids), in_transformers(module, torch.float32)(ids).bfloat16())


@pytest.mark.parametrize("cls", CLASSES)
def test_rounds_once(cls):
    module, _ = quantized(cls)
    name = scale_name(module)
    module.load_state_dict({**module.state_dict(), name: module.get_parameter(name) * 1.00123})
    exact = copy.deepcopy(module).float()
    ids = torch.arange(64)
    assert exact(ids).dtype == torch.float32 and torch.equal(module(ids), exact(ids).bfloat16())


def scale_name(module):
    """The float32 scale."""
    return "weight_scale_2" if isinstance(module, NVFP4Embedding) else "weight_scale"


@pytest.mark.parametrize("cls", CLASSES)
def test_casting_the_module_keeps_the_bytes(cls):
    module, _ = quantized(cls)
    before = {name: p.clone() for name, p in module.named_parameters()}
    module.to(torch.float16)
    for name, parameter in module.named_parameters():
        assert parameter.dtype == before[name].dtype
        assert torch.equal(parameter.view(torch.uint8), before[name].view(torch.uint8))
    assert module(torch.arange(3)).dtype == torch.float16
    module._apply(torch.clone).to("meta")
    assert module.weight.is_meta and module.weight.dtype == before["weight"].dtype


@pytest.mark.parametrize("cls", CLASSES)
def test_extreme_rows(cls):
    """Zeros, one huge value, and values at the edge of float32's range stay finite, zeros exactly zero."""
    values = torch.zeros(5, 32)
    values[1, 3], values[2], values[3, 5] = 3e38, 1e-38, -1e-45
    values[4] = torch.randn(32, generator=torch.Generator().manual_seed(0))
    table_scale = cls.table_scale(values.abs().max().item())
    stored = cls.encode(values, table_scale)
    if table_scale is not None:
        stored["weight_scale" if cls is FP8Embedding else "weight_scale_2"] = table_scale
    rows = cls.decode(stored, torch.float32)
    assert rows.isfinite().all() and not rows[0].any()
    assert abs(rows[1, 3] / 3e38 - 1) < 0.08
    assert cls is not RowScaledFP8Embedding or (rows[4] - values[4]).norm() < 0.03 * values[4].norm()


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf, -1.0])
def test_a_bad_scale_is_refused_at_first_use_and_when_loaded(cls, bad):
    module, _ = quantized(cls)
    name = scale_name(module)
    state = {key: value.clone() for key, value in module.state_dict().items()}
    module(torch.tensor([1]))
    with torch.no_grad():
        module.get_parameter(name)[-1:] = bad
    with pytest.raises(ValueError, match=f"the {name} of the table"):
        module(torch.tensor([1]))
    state[name] = module.get_parameter(name).clone()
    with pytest.raises(RuntimeError, match=f"the {name} of weight has values"):
        module.load_state_dict(state)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_scale_that_was_never_loaded_is_refused(cls):
    model = Model()
    model.block["ngrams"].rows = cls(64, 16)
    with pytest.raises(ValueError, match=r"of block.ngrams.rows.weight has values from nan.*never loaded"):
        check_scales(model)
    with pytest.raises(ValueError, match="never loaded"):
        model.table(torch.tensor([1]))
    state = {name: tensor for name, tensor in quantized(cls)[0].state_dict().items() if name == "weight"}
    with pytest.raises(RuntimeError, match="never loaded"):
        cls(64, 32).load_state_dict(state, strict=False)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("mapped", [False, True])
def test_memory_that_to_empty_gave_is_no_scale(tmp_path, monkeypatch, cls, mapped):
    module = quantized(cls, 4, 32)[0]
    if mapped:
        save_file(module.state_dict(), tmp_path / "model.safetensors")
        stored = read_header(tmp_path / "model.safetensors")
        rows = {key: MappedRows([stored[key]]) for key in cls.row_parameters}
        singles = {key: getattr(module, key).detach() for key in module.table_parameters}
        module = MappedEmbedding(rows, singles, cls, 32, torch.float32)
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: empty_like(*args, **kwargs).zero_().add_(1))
    module.to("meta").to_empty(device="cpu")
    for key in module.scale_names:
        assert getattr(module, key).isnan().all()
    if module.scale_names:
        with pytest.raises(ValueError, match="NaN means that it was never loaded"):
            module(torch.tensor([1]))


def test_a_group_scale_of_zero_is_legal_and_one_of_nan_is_not():
    module, _ = quantized(NVFP4Embedding)
    scale = module.weight_scale.detach()
    scale[0, 0] = 0.0
    scales.check_scale("t", scale)
    scale[5, 1] = torch.nan
    with pytest.raises(ValueError, match="nan.* a wrong one in row 5"):
        scales.check_scale("t", scale)
    with pytest.raises(ValueError, match="from 0.0 to 0.0"):
        scales.check_scale("t", scale.zero_())


def test_extremes_of_float8():
    for byte in range(256):
        scale = torch.tensor([byte, 8], dtype=torch.uint8).view(torch.float8_e4m3fn)
        found, expected = scales._extremes(scale), scale.float().aminmax()
        assert torch.equal(torch.tensor(found).nan_to_num(-1), torch.stack(list(expected)).nan_to_num(-1))


def test_each_row_spans_the_range_of_float8():
    module, values = quantized(RowScaledFP8Embedding, dtype=torch.float32)
    largest = torch.finfo(torch.float8_e4m3fn).max
    torch.testing.assert_close(module.weight_scale * largest, values.abs().amax(1, keepdim=True))


def test_a_table_without_rows_has_no_scales_to_check():
    module = RowScaledFP8Embedding(0, 8, dtype=torch.bfloat16)
    assert module(torch.empty(0, dtype=torch.int64)).shape == (0, 8)


def test_an_fp8_table_without_any_scale_is_refused():
    model = Model()
    model.table.weight = nn.Parameter(torch.zeros(64, 8).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match="block.ngrams.rows.weight is torch.float8_e4m3fn and has no weight_scale"):
        check_scales(model)


def test_transformers_module_is_checked_too():
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    model = Model(embedding=fp8.FP8Embedding)
    check_scales(model)
    model.table.weight_scale.data.zero_()
    with pytest.raises(ValueError, match="weight_scale of block.ngrams.rows.weight"):
        check_scales(model)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("absent", ["none", "deleted", "meta"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_scale_that_is_absent_is_refused(cls, absent, compiled):
    module, _ = quantized(cls)
    for name in cls.scale_names:
        broken = copy.deepcopy(module)
        if absent == "deleted":
            delattr(broken, name)
        else:
            scale = None if absent == "none" else nn.Parameter(broken.get_parameter(name).to("meta"), False)
            setattr(broken, name, scale)
        call = torch.compile(broken, backend="aot_eager") if compiled else broken
        with pytest.raises(
            ValueError, match=f"has no {name}|the {name} of the table is on the meta device: it was never"
        ):
            call(torch.arange(3))
    torch._dynamo.reset()  # a frame that raised is not compiled again


def test_other_parameters_of_a_users_table_are_no_scales():
    class Shifted(nn.Embedding):
        def __init__(self, rows, width):
            super().__init__(rows, width)
            self.shift = nn.Parameter(torch.zeros(width))

    check_scales(Model(embedding=Shifted))


def test_a_scale_is_looked_at_once_until_it_changes(monkeypatch):
    seen, check = [], scales.check_scale
    monkeypatch.setattr(scales, "check_scale", lambda what, scale: seen.append(what) or check(what, scale))
    module, _ = quantized(RowScaledFP8Embedding)
    ids = torch.arange(3)
    for change in (
        lambda: None,
        lambda: module.weight_scale.mul_(2),
        lambda: module.load_state_dict(module.state_dict()),
    ):
        with torch.no_grad():
            change()
        seen.clear()
        module(ids)
        module(ids)
        assert len(seen) == 1
    module.weight_scale.data = module.weight_scale.detach().clone()
    module(ids)
    assert len(seen) == 2
    check_scales(module)
    with torch.no_grad():
        module.weight_scale[7] = 0
    with pytest.raises(ValueError, match="a wrong one in row 7"):
        module(ids)
    with pytest.raises(ValueError, match="a wrong one in row 7"):
        module(ids)


def test_names():
    with pytest.raises(ValueError, match="'fp4' is unknown; it is one of fp8, fp8_row, nvfp4"):
        formats.format_class("fp4")
    with pytest.raises(ValueError, match="rows of 24 values"):
        NVFP4Embedding(4, 24)
    assert "format=nvfp4" in repr(NVFP4Embedding(4, 32))


@pytest.mark.parametrize("cls", CLASSES)
def test_compiles_without_a_graph_break(cls):
    module, _ = quantized(cls)
    ids = torch.randint(0, 64, (2, 3))
    assert torch.equal(torch.compile(module, backend="aot_eager", fullgraph=True)(ids), module(ids))


def test_a_state_dict_tells_once_how_it_is_loaded(caplog):
    formats._tell_how_to_load.cache_clear()
    model = torch.nn.Sequential(CLASSES[0](16, 32))
    for _ in range(2):
        model.state_dict()
    (message,) = caplog.messages
    assert "holds 0.weight as stored in fp8" in message and "ple_compile.load_tables" in message
