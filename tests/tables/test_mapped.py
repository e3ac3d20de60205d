"""format="mmap": the table stays in its files, and lookups are those of a table in memory."""

import copy
import pickle
import resource

import pytest
import torch

import ple_compile
from ple_compile import upstream
from ple_compile.tables import mapped_rows
from ple_compile.tables.formats import FORMATS, FP8Embedding, NVFP4Embedding, RowScaledFP8Embedding
from ple_compile.tables.load import load_tables
from ple_compile.tables.mapped import MappedEmbedding
from ple_compile.tables.mapped_rows import MappedRows
from ple_compile.tables.offload import is_offloaded, offload_tables
from ple_compile.tables.quantize import quantize_tables
from ple_compile.tables.save import save_tables
from ple_compile.tables.tensor_file import read_header
from tests.checkpoints import table_rows, write_checkpoint
from tests.tables.test_load import BASE, ROWS, WIDTH, Model, rewrite
from tests.tables.test_load_quantized import write_quantized
from tests.tiny_models import prompt, tiny_model


@pytest.fixture
def mapped(tmp_path):
    write_checkpoint(tmp_path, ROWS, WIDTH, num_parts=7, num_files=3, base=BASE)
    model = Model()
    load_tables(model, tmp_path, format="mmap")
    return model


def draw(*shape, dtype=torch.int64):
    return torch.randint(0, ROWS, shape, dtype=dtype)


@pytest.mark.parametrize("shape", [(), (1,), (3, 0), (500,), (2, 5, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lookups(mapped, shape, dtype):
    ids = draw(*shape, dtype=dtype)
    rows = mapped.table(ids)
    assert isinstance(mapped.table, MappedEmbedding) and rows.dtype == torch.bfloat16 and rows.is_contiguous()
    assert torch.equal(rows, table_rows(0, ROWS, WIDTH)[ids.long()])


def test_every_row(mapped):
    assert torch.equal(mapped.table(torch.arange(ROWS)), table_rows(0, ROWS, WIDTH))
    assert torch.equal(mapped.table(torch.arange(ROWS).flip(0)), table_rows(0, ROWS, WIDTH).flip(0))


def test_ids_outside_are_refused(mapped):
    for bad in (-1, ROWS, 2**40):
        with pytest.raises(ValueError, match=f"in a table of {ROWS} rows"):
            mapped.table(torch.tensor([3, bad]))
    with pytest.raises(ValueError, match="ids are torch.float32"):
        mapped.table(torch.zeros(2))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_parts", [1, 4])
def test_quantised_files(tmp_path, name, num_parts):
    expected = write_quantized(tmp_path, FORMATS[name], num_parts)
    model = Model()
    load_tables(model, tmp_path, format="mmap")
    ids = draw(40)
    assert model.table(ids).dtype == torch.bfloat16 and torch.equal(model.table(ids), expected(ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_float32_scale_gives_the_rows_of_a_table_in_memory(tmp_path, shape, dtype):
    write_quantized(tmp_path, FP8Embedding)
    rewrite(tmp_path / "model.safetensors", **{f"{BASE}.weight_scale": torch.full(shape, 0.00123456)})
    in_memory, mapped = Model(dtype=dtype), Model(dtype=dtype)
    load_tables(in_memory, tmp_path)
    load_tables(mapped, tmp_path, format="mmap")
    rows, expected = mapped.table(torch.arange(ROWS)), in_memory.table(torch.arange(ROWS))
    assert rows.dtype == expected.dtype == dtype and torch.equal(rows, expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_casts(tmp_path, name, dtype):
    module = write_quantized(tmp_path, FORMATS[name])
    scales = {f"{BASE}.{key}": torch.tensor([1.2345e-4]) for key in module.table_parameters}
    rewrite(tmp_path / "model.safetensors", **scales)
    in_memory, mapped = Model(dtype=torch.float32), Model(dtype=torch.float32)
    load_tables(in_memory, tmp_path)
    load_tables(mapped, tmp_path, format="mmap")
    ids = torch.arange(ROWS)
    for model in (in_memory, mapped):
        model.to(dtype).to(torch.float32)
    assert torch.equal(mapped.table(ids), in_memory.table(ids))
    rows, expected = mapped.to(dtype).table(ids), in_memory.to(dtype).table(ids)
    assert rows.dtype == expected.dtype == dtype and torch.equal(rows, expected)


def test_a_cast_leaves_a_scale_that_float16_does_not_hold(tmp_path):
    module = write_quantized(tmp_path, FP8Embedding)
    rewrite(tmp_path / "model.safetensors", **{f"{BASE}.weight_scale": torch.tensor([1e-9])})
    model = Model()
    load_tables(model, tmp_path, format="mmap")
    expected = (module.weight.float() * 1e-9).half()
    assert expected.any() and torch.equal(model.half().table(torch.arange(ROWS)), expected)


def test_a_scale_that_is_no_number(tmp_path):
    write_quantized(tmp_path, FP8Embedding)
    rewrite(tmp_path / "model.safetensors", **{f"{BASE}.weight_scale": torch.tensor([torch.nan])})
    with pytest.raises(ValueError, match="weight_scale of .* has values from nan"):
        load_tables(Model(), tmp_path, format="mmap")


@pytest.mark.parametrize(
    "cls, bad", [(RowScaledFP8Embedding, [0.0, -1.0, torch.nan, torch.inf]), (NVFP4Embedding, [-1.0, torch.nan])]
)
@pytest.mark.parametrize("format", [None, "mmap"])
def test_a_row_with_a_wrong_scale_is_named(tmp_path, monkeypatch, format, cls, bad):
    module = write_quantized(tmp_path, cls, 4)
    monkeypatch.setattr(mapped_rows, "_BLOCK_BYTES", 256)
    for value in bad:
        scale = module.weight_scale.detach().clone()
        scale[ROWS - 9, -1] = value
        parts = {f"{BASE}.shard_{i}.weight_scale": p.clone() for i, p in enumerate(scale.split(-(-ROWS // 4)))}
        rewrite(tmp_path / "model.safetensors", **parts)
        with pytest.raises(ValueError, match=f"the weight_scale of {BASE}.weight has .* wrong one in row {ROWS - 9};"):
            load_tables(Model(), tmp_path, format=format)


def test_rows_that_are_not_aligned(tmp_path):
    """A header of odd length puts bfloat16 rows at odd addresses."""
    (file,) = write_checkpoint(tmp_path, ROWS, WIDTH, base=BASE, index=False)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    file.write_bytes((length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" " + content[8 + length :])
    assert read_header(file)[f"{BASE}.weight"].offset % 2 == 1
    model = Model()
    load_tables(model, tmp_path, format="mmap")
    assert torch.equal(model.table(torch.arange(ROWS)), table_rows(0, ROWS, WIDTH))


def test_copies_share_the_files_and_pickles_open_them_again(mapped):
    ids = draw(9)
    copied, pickled = copy.deepcopy(mapped), pickle.loads(pickle.dumps(mapped))
    assert copied.table.rows["weight"] is mapped.table.rows["weight"]
    assert pickled.table.rows["weight"].number != mapped.table.rows["weight"].number
    expected = mapped.table(ids)
    del mapped
    assert torch.equal(copied.table(ids), expected) and torch.equal(pickled.table(ids), expected)


def test_a_real_state_dict_does_not_fit(mapped):
    state = {**mapped.state_dict(), "model.layers.1.ple.rows.weight": table_rows(0, ROWS, WIDTH)}
    with pytest.raises(RuntimeError, match="size mismatch for model.layers.1.ple.rows.weight"):
        mapped.load_state_dict(state)


def test_back_into_memory(mapped, tmp_path):
    load_tables(mapped, tmp_path)
    assert type(mapped.table) is torch.nn.Embedding and torch.equal(mapped.table.weight, table_rows(0, ROWS, WIDTH))
    write_quantized(tmp_path / "fp8", FP8Embedding)
    load_tables(mapped, tmp_path / "fp8", format="mmap")
    load_tables(mapped, tmp_path / "fp8")
    assert type(mapped.table) is FP8Embedding


def test_in_the_place_of_an_offloaded_table(driver, tmp_path):
    write_checkpoint(tmp_path, ROWS, WIDTH, base=BASE)
    model = Model(device="cpu")
    offload_tables(model)
    load_tables(model, tmp_path, format="mmap")
    ids = draw(9)
    assert not is_offloaded(model.table) and torch.equal(model.table(ids), table_rows(0, ROWS, WIDTH)[ids])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(mapped, dynamic):
    compiled = torch.compile(mapped.table, fullgraph=True, dynamic=dynamic)
    for count in (5, 8, 13):
        ids = draw(count, 4)
        with torch.no_grad():
            assert torch.equal(compiled(ids), mapped.table(ids))


@pytest.mark.parametrize("format", [None, *FORMATS])
def test_in_a_compiled_model(no_codegen, tmp_path, format):
    kinds = ["linear_attention", "full_attention"]
    model = tiny_model((1,), 2, layer_types=kinds, ple_embed_dim=64).requires_grad_(False)
    if format is not None:
        quantize_tables(model, format)
    save_tables(model, tmp_path, num_parts=3)
    ids = prompt(9)
    with torch.no_grad():
        expected = model(ids).logits
        load_tables(model, tmp_path, format="mmap")
        assert torch.equal(model(ids).logits, expected)
        ple_compile.compile(model, strict=True)
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert upstream.counters["ple_compile"]["fuse_ngram_ids"] == 1


def test_operator_contract(mapped):
    number = mapped.table.rows["weight"].number
    torch.library.opcheck(torch.ops.ple.mapped_lookup.default, (number, draw(3, 2), WIDTH, torch.bfloat16))


def test_memory_of_a_large_table(tmp_path):
    """A sparse file of 48 GiB: looked up within an address space far smaller than what loading it would take."""
    num_rows, width = 320_001_536, 160
    header = b'{"t":{"dtype":"U8","shape":[%d,%d],"data_offsets":[0,%d]}}' % (num_rows, width, num_rows * width)
    picked = torch.tensor([0, 13_421_773, num_rows // 2, num_rows - 1])
    file = tmp_path / "table.safetensors"
    with open(file, "wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + num_rows * width)
        for number, row in enumerate(picked.tolist()):
            stream.seek(8 + len(header) + row * width)
            stream.write(bytes([number + 1]) * width)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = MappedRows([read_header(file)["t"]])
    found = torch.ops.ple.mapped_lookup(rows.number, picked.flip(0), width, torch.uint8)
    assert found[:, 0].tolist() == [4, 3, 2, 1] and found[:, -1].tolist() == [4, 3, 2, 1]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_a_state_dict_without_the_rows_says_so_once(mapped, caplog):
    for _ in range(2):
        (weight,) = (tensor for name, tensor in mapped.state_dict().items() if name.endswith("weight"))
        assert weight.shape == (0, WIDTH)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "weight stays in its files" in message
