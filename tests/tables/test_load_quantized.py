"""load_tables with quantised tables: every format and its scales, read as stored or made while reading."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ple_compile.tables import pinning
from ple_compile.tables.formats import E4M3, FP8Embedding, NVFP4Embedding, RowScaledFP8Embedding
from ple_compile.tables.load import load_tables
from ple_compile.tables.offload import is_offloaded, offload_tables
from ple_compile.tables.quantize import quantize_tables
from tests.checkpoints import table_rows, write_checkpoint
from tests.tables.test_formats import quantized
from tests.tables.test_load import BASE, ROWS, WIDTH, Model, rewrite


def write_quantized(directory, cls, num_parts=1):
    """A quantised checkpoint in parts; returns the module with the same table."""
    module, _ = quantized(cls, ROWS, WIDTH)
    step, tensors = -(-ROWS // num_parts), {}
    for name, tensor in module.state_dict().items():
        parts = tensor.split(step) if name in cls.row_parameters and num_parts > 1 else [tensor]
        for number, part in enumerate(parts):
            key = f"{BASE}.{name}" if len(parts) == 1 else f"{BASE}.shard_{number}.{name}"
            tensors[key] = part.clone()
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    return module


@pytest.mark.parametrize("cls", [FP8Embedding, RowScaledFP8Embedding, NVFP4Embedding])
@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("named", [False, True])
def test_quantised_checkpoints(tmp_path, cls, num_parts, device, named):
    expected = write_quantized(tmp_path, cls, num_parts)
    model = Model(device=device)
    load_tables(model, tmp_path, format=cls.format if named else None)
    assert type(model.table) is cls and model.table.activation_dtype == torch.bfloat16
    ids = torch.arange(ROWS)
    assert torch.equal(model.table(ids), expected(ids))
    load_tables(model, tmp_path)
    assert torch.equal(model.table(ids), expected(ids))


def test_fp8_into_transformers_module(tmp_path):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    expected = write_quantized(tmp_path, FP8Embedding, 3)
    model = Model(dtype=torch.float32)
    with torch.device("meta"):
        model.ngrams.rows = fp8.FP8Embedding(ROWS, WIDTH)
    load_tables(model, tmp_path)
    assert type(model.table) is fp8.FP8Embedding
    assert torch.equal(model.table(torch.arange(ROWS)), expected.float()(torch.arange(ROWS)))


@pytest.mark.parametrize("cls", [FP8Embedding, RowScaledFP8Embedding, NVFP4Embedding])
def test_quantises_while_it_reads(tmp_path, cls):
    write_checkpoint(tmp_path, ROWS, WIDTH, num_parts=3, base=BASE)
    model = Model()
    load_tables(model, tmp_path, format=cls.format)
    rows, original = model.table(torch.arange(ROWS)), table_rows(0, ROWS, WIDTH)
    assert type(model.table) is cls and rows.dtype == torch.bfloat16
    assert (rows - original).float().norm() < 0.12 * original.float().norm()


def test_quantised_and_offloaded(driver, tmp_path):
    expected = write_quantized(tmp_path, RowScaledFP8Embedding, 2)
    model = Model(device="cpu")
    offload_tables(model)
    load_tables(model, tmp_path)
    assert is_offloaded(model.table) and isinstance(model.table, RowScaledFP8Embedding)
    assert pinning.is_page_locked(model.table.weight)
    assert torch.equal(model.table(torch.arange(ROWS)), expected(torch.arange(ROWS)))


@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf, -1.0])
def test_a_bad_scale_in_the_checkpoint(tmp_path, bad):
    write_quantized(tmp_path, FP8Embedding)
    rewrite(tmp_path / "model.safetensors", **{f"{BASE}.weight_scale": torch.tensor([bad]).bfloat16()})
    with pytest.raises(ValueError, match=rf"the weight_scale of {BASE}.weight has values from"):
        load_tables(Model(), tmp_path)


@pytest.mark.parametrize("cls", [FP8Embedding, RowScaledFP8Embedding, NVFP4Embedding])
def test_a_bad_scale_leaves_the_values_of_a_table_in_memory(tmp_path, cls):
    write_quantized(tmp_path, cls)
    model = Model()
    load_tables(model, tmp_path)
    before, expected = dict(model.table._parameters), model.table(torch.arange(ROWS))
    name = "weight_scale_2" if cls is NVFP4Embedding else "weight_scale"
    scale = torch.ones_like(model.table.get_parameter(name))
    scale[-1] = 0
    rewrite(
        tmp_path / "model.safetensors",
        **{f"{BASE}.{name}": scale, f"{BASE}.weight": torch.zeros_like(model.table.weight)},
    )
    with pytest.raises(ValueError, match=f"the {name} of {BASE}.weight has values from"):
        load_tables(model, tmp_path)
    assert model.table._parameters == before and torch.equal(model.table(torch.arange(ROWS)), expected)


def test_a_scale_that_the_type_of_the_module_does_not_hold(tmp_path):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    write_quantized(tmp_path, FP8Embedding)
    rewrite(tmp_path / "model.safetensors", **{f"{BASE}.weight_scale": torch.tensor([1e-9])})
    model = Model(dtype=torch.float32)
    model.ngrams.rows = fp8.FP8Embedding(ROWS, WIDTH)
    model.table.weight_scale.data = model.table.weight_scale.data.half()
    with pytest.raises(ValueError, match="the weight_scale of .* has values from 0.0 to 0.0"):
        load_tables(model, tmp_path)


@pytest.mark.parametrize(
    "kind, extra", [(torch.bfloat16, "weight_scale"), (torch.bfloat16, "weight_scale_2"), (E4M3, "weight_scale_2")]
)
def test_a_scale_of_another_format(tmp_path, kind, extra):
    rows = table_rows(0, ROWS, WIDTH).to(kind)
    scales = {
        f"{BASE}.{name}": torch.tensor([0.5]) for name in {"weight_scale"} | {extra} if kind == E4M3 or name == extra
    }
    save_file({f"{BASE}.weight": rows, **scales}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{extra} in .* does not go with .*weight in .*, which is .* no {extra}$"):
        load_tables(Model(), tmp_path)


def test_one_scale_where_each_group_has_its_own(tmp_path):
    write_quantized(tmp_path, NVFP4Embedding)
    rewrite(tmp_path / "model.safetensors", **{f"{BASE}.weight_scale": torch.ones(1).to(E4M3)})
    with pytest.raises(ValueError, match=r"weight_scale in .* has shape \(1,\); \(rows, 2\) is needed"):
        load_tables(Model(), tmp_path)


def test_one_scale_for_each_part(tmp_path):
    write_quantized(tmp_path, RowScaledFP8Embedding, 2)
    scales = {f"{BASE}.shard_{part}.weight_scale": torch.ones(1) for part in range(2)}
    rewrite(tmp_path / "model.safetensors", **scales)
    with pytest.raises(ValueError, match=r"shard_0.weight_scale in .* has shape \(1,\); \(rows, 1\) is needed"):
        load_tables(Model(), tmp_path)


def test_a_single_scale_of_integers(tmp_path):
    write_quantized(tmp_path, FP8Embedding)
    rewrite(tmp_path / "model.safetensors", **{f"{BASE}.weight_scale": torch.ones(1, dtype=torch.int32)})
    with pytest.raises(ValueError, match="weight_scale in .* is torch.int32; torch.float32 is needed"):
        load_tables(Model(), tmp_path)


def test_missing_scales(tmp_path):
    for cls, name in ((FP8Embedding, "weight_scale"), (NVFP4Embedding, "weight_scale_2")):
        write_quantized(tmp_path, cls)
        rewrite(tmp_path / "model.safetensors", **{f"{BASE}.{name}": None})
        with pytest.raises(ValueError, match=rf"{BASE}.weight in .*{name}"):
            load_tables(Model(), tmp_path)
    write_quantized(tmp_path, RowScaledFP8Embedding, 4)
    rewrite(tmp_path / "model.safetensors", **{f"{BASE}.shard_2.weight_scale": None})
    with pytest.raises(ValueError, match=rf"{BASE}.shard_2.weight_scale is missing"):
        load_tables(Model(), tmp_path)


def test_formats_that_do_not_go_together(tmp_path):
    write_quantized(tmp_path, FP8Embedding)
    with pytest.raises(ValueError, match="is fp8, not nvfp4; load it as it is"):
        load_tables(Model(), tmp_path, format="nvfp4")
    model = Model()
    load_tables(model, tmp_path)
    plain = tmp_path / "plain"
    write_checkpoint(plain, ROWS, WIDTH, base=BASE)
    with pytest.raises(ValueError, match="is torch.float8_e4m3fn and .* is torch.bfloat16; pass format="):
        load_tables(model, plain)
    load_tables(model, plain, format="fp8")
    model = Model()
    model.table.weight = nn.Parameter(model.table.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match="is torch.float8_e4m3fn and .* is torch.bfloat16; pass format="):
        load_tables(model, plain)


def test_a_scale_of_an_unknown_type(tmp_path):
    write_quantized(tmp_path, FP8Embedding)
    file = tmp_path / "model.safetensors"
    rewrite(file, **{f"{BASE}.weight_scale": torch.ones(1, dtype=torch.uint8)})
    file.write_bytes(file.read_bytes().replace(b'"U8"', b'"E8"'))
    with pytest.raises(ValueError, match="weight_scale in .* is E8, which is no format"):
        load_tables(Model(), tmp_path)


class Doubling(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * 2


def doubling_class(table):
    table.__class__ = Doubling


def doubling_hook(table):
    table.register_forward_hook(lambda module, arguments, rows: rows * 2)


def shifting_hook(table):
    table.register_forward_pre_hook(lambda module, arguments: (arguments[0] + 1,))


def patched(table):
    table.forward = lambda ids: nn.Embedding.forward(table, ids) * 2


def bounded(table):
    table.max_norm = 1.0


CHANGES = {
    "quantize_tables": lambda model, directory: quantize_tables(model, "fp8"),
    "format": lambda model, directory: load_tables(model, directory / "plain", format="fp8_row"),
    "mmap": lambda model, directory: load_tables(model, directory / "plain", format="mmap"),
    "stored": lambda model, directory: load_tables(model, directory / "fp8"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "extend, extra",
    [
        (doubling_class, "Doubling with a forward of its own"),
        (doubling_hook, "Embedding with forward hooks"),
        (shifting_hook, "Embedding with forward hooks"),
        (patched, "Embedding with a forward of its own"),
        (bounded, "Embedding with max_norm"),
    ],
)
def test_what_an_embedding_does_beside_looking_up_is_not_lost(tmp_path, change, extend, extra):
    write_quantized(tmp_path / "fp8", FP8Embedding)
    write_checkpoint(tmp_path / "plain", ROWS, WIDTH, base=BASE)
    model = Model(device="cpu")
    table = model.table
    extend(table)
    with pytest.raises(ValueError, match=f"{BASE}.weight is in a {extra}, which would be lost in another format"):
        CHANGES[change](model, tmp_path)
    assert model.table is table
    load_tables(model, tmp_path / "plain")
    assert torch.equal(table.weight, table_rows(0, ROWS, WIDTH))


def test_a_table_that_accelerate_moves_is_quantised():
    model = Model(device="cpu")
    model.table._hf_hook, model.table.forward = object(), model.table.forward
    quantize_tables(model, "fp8")
    assert isinstance(model.table, FP8Embedding)
