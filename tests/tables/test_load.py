"""load_tables: every row lands once where it belongs, whatever the layout; whatever is wrong is named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ple_compile.tables import load as load_module
from ple_compile.tables.load import fill, load_tables
from ple_compile.tables.offload import is_offloaded, offload_tables
from ple_compile.tables.save import save_tables
from ple_compile.tables.tensor_file import read_header
from tests.checkpoints import table_rows, write_checkpoint, write_index
from tests.tables.test_offload import NGrams

ROWS, WIDTH = 130, 32
BASE = "model.layers.1.ple.rows"


class Model(nn.Module):
    """The table is called model.layers.1.ple.rows.weight."""

    def __init__(self, rows=ROWS, width=WIDTH, dtype=torch.bfloat16, device="meta", **settings):
        super().__init__()
        self.model = nn.Module()
        layers = [nn.Module(), nn.Module()]
        self.model.layers = nn.ModuleList(layers)
        layers[1].ple = NGrams(rows, width, **settings).to(dtype).to(device)

    @property
    def ngrams(self):
        return self.model.layers[1].ple

    @property
    def table(self):
        return self.ngrams.rows


def rewrite(file, **changes):
    """Change tensors of a file; None removes one."""
    tensors = {**load_file(file), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


@pytest.mark.parametrize("num_parts, num_files", [(1, 1), (2, 1), (7, 3), (130, 4), (12, 12)])
@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("base", [BASE, "model.language_model.layers.1.ple.rows", "layers.1.ple.rows"])
def test_parts_in_files(tmp_path, num_parts, num_files, index, base):
    write_checkpoint(
        tmp_path, ROWS, WIDTH, num_parts=num_parts, num_files=num_files, index=index, base=base,
        others={"model.layers.1.ple.other.weight": torch.zeros(3)},
    )  # fmt: skip
    model = Model()
    assert load_tables(model, tmp_path) == ["model.layers.1.ple.rows.weight"]
    assert torch.equal(model.table.weight, table_rows(0, ROWS, WIDTH)) and model.table.weight.device.type == "cpu"
    assert type(model.table) is nn.Embedding and model.ngrams.seeds.is_meta


def test_into_the_memory_that_is_there(tmp_path):
    write_checkpoint(tmp_path, ROWS, WIDTH, num_parts=3, base=BASE)
    model = Model(device="cpu")
    weight, address, version = model.table.weight, model.table.weight.data_ptr(), model.table.weight._version
    load_tables(model, str(tmp_path))
    assert model.table.weight is weight and weight.data_ptr() == address and weight._version > version
    assert torch.equal(weight, table_rows(0, ROWS, WIDTH))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_into_page_locked_memory(driver, tmp_path, device):
    write_checkpoint(tmp_path, ROWS, WIDTH, num_parts=3, base=BASE)
    model = Model(device=device)
    offload_tables(model)
    address = model.table.weight.data_ptr()
    load_tables(model, tmp_path)
    assert model.table.weight.data_ptr() == address and driver.covers(model.table.weight)
    assert torch.equal(model.table.weight, table_rows(0, ROWS, WIDTH)) and is_offloaded(model.table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_converts_to_the_models_type(tmp_path, dtype):
    write_checkpoint(tmp_path, ROWS, WIDTH, num_parts=3, base=BASE)
    model = Model(dtype=dtype)
    load_tables(model, tmp_path)
    assert torch.equal(model.table.weight, table_rows(0, ROWS, WIDTH, dtype))


@pytest.mark.parametrize("value", [1e5, -65520.0])
def test_a_number_beyond_the_range_of_the_models_type(tmp_path, value):
    """bf16 holds it, fp16 does not; infinity in the file stays what it is."""
    (file,) = write_checkpoint(tmp_path, ROWS, WIDTH, num_parts=1, base=BASE)
    ((name, table),) = load_file(file).items()
    table[5, 0], table[77, 3] = float("inf"), value
    rewrite(file, **{name: table})
    with pytest.raises(ValueError, match=rf"{name} in .* holds {table[77, 3].item()} in row 77, which torch.float16"):
        load_tables(Model(dtype=torch.float16), tmp_path)
    model = Model()
    load_tables(model, tmp_path)
    assert torch.equal(model.table.weight, table)


def test_each_row_is_read_once_and_in_blocks(tmp_path, monkeypatch):
    read, read_rows = [], load_module.read_rows
    monkeypatch.setattr(load_module, "_BLOCK_BYTES", 7 * WIDTH * 2)
    monkeypatch.setattr(
        load_module, "read_rows", lambda part, *rows: read.append((part.name, *rows[:2])) or read_rows(part, *rows)
    )
    write_checkpoint(tmp_path, ROWS, WIDTH, num_parts=3, base=BASE)
    model = Model()
    load_tables(model, tmp_path)
    rows = [(name, row) for name, start, stop in read for row in range(start, stop)]
    assert len(rows) == len(set(rows)) == ROWS and max(stop - start for _, start, stop in read) == 7
    assert torch.equal(model.table.weight, table_rows(0, ROWS, WIDTH))


@pytest.mark.parametrize("rows", [(0, 0), (0, 130), (3, 4), (40, 91), (44, 88), (129, 130), (130, 130)])
def test_a_range_of_rows(tmp_path, rows):
    (file,) = write_checkpoint(tmp_path, ROWS, WIDTH, num_parts=3, base=BASE)
    parts = [read_header(file)[f"{BASE}.shard_{i}.weight"] for i in range(3)]
    target = torch.empty(rows[1] - rows[0], WIDTH, dtype=torch.bfloat16)
    fill(target, parts, rows)
    assert torch.equal(target, table_rows(*rows, WIDTH))


def test_two_tables_and_a_tied_one(tmp_path):
    model = Model()
    layers = model.model.layers
    layers[0].ple, layers[1].more = (NGrams(rows, WIDTH).bfloat16().to("meta") for rows in (70, ROWS))
    layers[1].more.rows.weight = model.table.weight
    write_checkpoint(tmp_path, ROWS, WIDTH, num_parts=3, base=BASE, index=False)
    for number, (name, rows) in enumerate([("0.ple", 70), ("1.more", ROWS)]):
        save_file({f"model.layers.{name}.rows.weight": table_rows(0, rows, WIDTH)}, tmp_path / f"{number}.safetensors")
    assert len(load_tables(model, tmp_path)) == 3
    assert torch.equal(layers[0].ple.rows.weight, table_rows(0, 70, WIDTH))
    assert torch.equal(layers[1].more.rows.weight, table_rows(0, ROWS, WIDTH))
    assert layers[1].more.rows.weight is model.table.weight


def test_released_names_of_transformers_model(tmp_path):
    pytest.importorskip("transformers")
    from tests.tiny_models import tiny_model

    model = tiny_model().bfloat16()
    name = "model.layers.1.ple.ple_embedding.ngram_embedding.weight"
    rows, width = model.get_parameter(name).shape
    write_checkpoint(tmp_path, rows, width, num_parts=5, num_files=2)
    assert load_tables(model, tmp_path) == [name]
    assert torch.equal(model.get_parameter(name), table_rows(0, rows, width))


# What is wrong with a checkpoint, and the words that the error must have.
FAULTS = {
    "missing part": (
        lambda files: rewrite(files[1], **{f"{BASE}.shard_3.weight": None}),
        rf"{BASE}.shard_3.weight is missing in .*parts 0 to 5",
    ),
    "missing last part": (
        lambda files: rewrite(files[2], **{f"{BASE}.shard_5.weight": None}),
        r"has 110 rows in 5 parts, the last is .*shard_4.weight in .*00003.*has 130, so 20 are missing",
    ),
    "a part twice": (
        lambda files: rewrite(files[0], **{f"{BASE}.shard_3.weight": table_rows(0, 22, WIDTH)}),
        rf"{BASE}.shard_3.weight in .*00002-of-00003.safetensors is there twice, also as .*00001-of-00003",
    ),
    "a part under two names": (
        lambda files: rewrite(files[0], **{f"{BASE}.shard_03.weight": table_rows(0, 22, WIDTH)}),
        r"shard_0?3.weight in .* is there twice, also as .*shard_0?3.weight in",
    ),
    "whole and in parts": (
        lambda files: rewrite(files[0], **{f"{BASE}.weight": table_rows(0, ROWS, WIDTH)}),
        rf"{BASE}.weight in .*00001.* overlaps {BASE}.shard_0.weight in .*: the table is there whole and in parts",
    ),
    "too narrow": (
        lambda files: rewrite(files[1], **{f"{BASE}.shard_2.weight": table_rows(0, 22, WIDTH - 1)}),
        rf"{BASE}.shard_2.weight in .*00002.* has shape \(22, 31\); \(rows, 32\) is needed",
    ),
    "too high": (
        lambda files: rewrite(files[1], **{f"{BASE}.shard_2.weight": table_rows(0, 23, WIDTH)}),
        r"has 131 rows in 6 parts.*so 1 are too many; parts overlap",
    ),
    "flat": (
        lambda files: rewrite(files[1], **{f"{BASE}.shard_2.weight": torch.zeros(22 * WIDTH).bfloat16()}),
        r"shard_2.weight in .*00002.* has shape \(704,\)",
    ),
    "another type": (
        lambda files: rewrite(files[1], **{f"{BASE}.shard_2.weight": table_rows(0, 22, WIDTH, torch.float32)}),
        r"shard_2.weight in .* is torch.float32 and .*shard_0.weight in .* is torch.bfloat16",
    ),
    "integers": (
        lambda files: [
            rewrite(f, **{k: v.view(torch.int16) for k, v in load_file(f).items()}) for f in files
        ],
        r"shard_0.weight in .* is torch.int16, which is no format of a table",
    ),
    "e4m3 without a scale": (
        lambda files: [
            rewrite(f, **{k: v.to(torch.float8_e4m3fn) for k, v in load_file(f).items()}) for f in files
        ],
        rf"shard_0.weight in .* is torch.float8_e4m3fn and there is no {BASE}.weight_scale",
    ),
    "cut off": (
        lambda files: files[1].write_bytes(files[1].read_bytes()[:-1]),
        r"shard_3.weight in .*00002.* ends at byte \d+ of a file of \d+; the file is cut off",
    ),
    "no safetensors file": (lambda files: files[1].write_bytes(b"\x80\x04pickle"), r"00002.* is no safetensors file"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_named(tmp_path, fault):
    spoil, message = FAULTS[fault]
    spoil(write_checkpoint(tmp_path, ROWS, WIDTH, num_parts=6, num_files=3, base=BASE, index=False))
    model = Model()
    with pytest.raises(ValueError, match=message):
        load_tables(model, tmp_path)
    assert model.table.weight.is_meta


def header(**entries):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def test_damaged_headers(tmp_path):
    file, name = tmp_path / "model.safetensors", f"{BASE}.weight"
    whole = {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}
    cases = {
        header(**{name: {**whole, "data_offsets": [0, 6]}}) + bytes(8): "has shape .* and 6 bytes",
        header(**{name: {**whole, "shape": [-1, 2]}}) + bytes(8): "describes .*ngram|describes model.layers.1.ple.rows",
        header(**{name: whole, "other": {**whole, "data_offsets": [4, 12]}}) + bytes(12): "other in .* overlaps",
        header(**{name: {"dtype": "BF16"}}) + bytes(8): "describes",
        b"\xff" * 8 + b"{}": "is no safetensors file, or is cut off",
        (4).to_bytes(8, "little") + b"nope": "damaged",
        (2).to_bytes(8, "little") + b"[]": "damaged: it is a list",
        header(**{name: {**whole, "dtype": ["BF16"]}}) + bytes(8): "describes .*'BF16'.*; download it again",
        header(**{name: {**whole, "shape": [True, 4]}}) + bytes(8): "describes .*True.*; download it again",
        header(**{name: {**whole, "dtype": "F4", "data_offsets": [8, 0]}}) + bytes(8): "describes .*F4",
        header(**{name: {**whole, "dtype": "F4"}}) + bytes(8): "rows.weight in .* is F4, which is no format of a table",
        (20_000).to_bytes(8, "little") + b"[" * 20_000: "the header of .*model.safetensors is damaged: .*; download",
        (3).to_bytes(8, "little") + b'"\xff"': "the header of .*model.safetensors is damaged: .*; download it again",
        header(a=1).replace(b'"a": 1', b'"a":1,"a":2').replace(b"\x08", b"\x0d"): "a is there twice",
    }
    for content, message in cases.items():
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_tables(Model(), tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "\xff", "[" * 20_000]
)
def test_a_damaged_index(tmp_path, text):
    write_checkpoint(tmp_path, ROWS, WIDTH, base=BASE)
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin1")
    for call in (load_tables, save_tables):
        with pytest.raises(ValueError, match="index.json is damaged: it has no weight_map .*; download it again"):
            call(Model(device="cpu"), tmp_path)


def test_the_index_counts(tmp_path):
    """Files that it does not list are not read; files and tensors that it lists must be there."""
    files = write_checkpoint(tmp_path, ROWS, WIDTH, num_parts=4, num_files=2, base=BASE)
    save_file({f"{BASE}.weight": torch.zeros(5)}, tmp_path / "consolidated.safetensors")
    model = Model()
    load_tables(model, tmp_path)
    assert torch.equal(model.table.weight, table_rows(0, ROWS, WIDTH))
    rewrite(files[1], **{f"{BASE}.shard_3.weight": None})
    with pytest.raises(ValueError, match=r"shard_3.weight is missing in .*00002-of-00002"):
        load_tables(Model(), tmp_path)
    files[1].unlink()
    with pytest.raises(ValueError, match=r"00002-of-00002.safetensors is missing, with .*shard_2.weight"):
        load_tables(Model(), tmp_path)


def test_directories_without_a_table(tmp_path):
    (file,) = write_checkpoint(tmp_path / "checkpoint", ROWS, WIDTH, base=BASE)
    for path in (file, tmp_path / "misspelt", "organisation/model"):
        with pytest.raises(ValueError, match=f"{path} is no directory on this machine"):
            load_tables(Model(), path)
    with pytest.raises(ValueError, match="no safetensors files"):
        load_tables(Model(), tmp_path)
    torch.save({f"{BASE}.weight": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no safetensors files, the only kind that is read"):
        load_tables(Model(), tmp_path)
    write_checkpoint(tmp_path, ROWS, WIDTH, base="model.layers.2.ple.rows")
    with pytest.raises(ValueError, match="has no tensor of that name for model.layers.1.ple.rows.weight"):
        load_tables(Model(), tmp_path)
    with pytest.raises(ValueError, match="Linear has no n-gram table"):
        load_tables(nn.Linear(2, 2), tmp_path)
    with pytest.raises(ValueError, match="'fp5' is unknown"):
        load_tables(Model(), tmp_path, format="fp5")


def test_a_name_that_fits_two_tables(tmp_path):
    write_checkpoint(tmp_path, ROWS, WIDTH, base=f"a.{BASE}", index=False)
    save_file({f"b.{BASE}.weight": torch.zeros(3, 2)}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=rf"[ab].{BASE}, [ab].{BASE} for {BASE}.weight; one table"):
        load_tables(Model(), tmp_path)


def test_a_failed_load_puts_the_tables_back(tmp_path):
    good, bad, ids = tmp_path / "good", tmp_path / "bad", torch.arange(ROWS)
    model = Model()
    model.model.layers[0].ple = NGrams(70, WIDTH).bfloat16()
    for directory in (good, bad):
        write_checkpoint(directory, ROWS, WIDTH, num_parts=3, base=BASE, index=False)
        save_file({"model.layers.0.ple.rows.weight": table_rows(0, 70, WIDTH)}, directory / "first.safetensors")
    load_tables(model, good, format="mmap")
    first, second = model.model.layers[0].ple.rows, model.table
    (file,) = bad.glob("model-*")
    rewrite(file, **{f"{BASE}.shard_1.weight": torch.full((44, WIDTH), torch.nan).bfloat16()})
    with pytest.raises(ValueError, match="has NaN or infinite values"):
        load_tables(model, bad, format="fp8")
    assert model.model.layers[0].ple.rows is first and model.table is second
    assert torch.equal(model.table(ids), table_rows(0, ROWS, WIDTH))


def test_an_interrupted_load_leaves_the_table_on_the_meta_device(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, ROWS, WIDTH, num_parts=3, base=BASE)
    model = Model()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(load_module, "read_rows", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        load_tables(model, tmp_path)
    assert model.table.weight.is_meta


def test_index_of_another_checkpoint(tmp_path):
    write_checkpoint(tmp_path, ROWS, WIDTH, base=BASE)
    write_index(tmp_path, {f"{BASE}.shard_0.weight": "model-00001-of-00001.safetensors"})
    with pytest.raises(
        ValueError, match=rf"{BASE}.shard_0.weight is missing in .*00001-of-00001.*says that it is there"
    ):
        load_tables(Model(), tmp_path)
