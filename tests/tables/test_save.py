"""save_tables: what it writes is a checkpoint, for load_tables, for safetensors, and for transformers."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ple_compile.tables import save as save_module
from ple_compile.tables.formats import FORMATS
from ple_compile.tables.load import load_tables
from ple_compile.tables.offload import offload_tables
from ple_compile.tables.parts import INDEX
from ple_compile.tables.quantize import quantize_tables
from ple_compile.tables.save import save_tables
from ple_compile.tables.tensor_file import TensorWriter
from tests.checkpoints import table_rows, write_checkpoint
from tests.tables.test_formats import quantized
from tests.tables.test_load import BASE, ROWS, WIDTH, Model


def filled():
    model = Model(device="cpu")
    with torch.no_grad():
        model.table.weight.copy_(table_rows(0, ROWS, WIDTH))
    return model


@pytest.mark.parametrize("num_parts, num_files", [(1, 1), (2, 2), (7, 4), (100, 3), (130, 3)])
def test_parts_are_those_of_torch_chunk(tmp_path, num_parts, num_files, monkeypatch):
    monkeypatch.setattr(save_module, "_FILE_BYTES", 3000)
    monkeypatch.setattr(save_module, "_BLOCK_BYTES", 500)
    files = save_tables(filled(), tmp_path, num_parts=num_parts)
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    chunks = table_rows(0, ROWS, WIDTH).chunk(num_parts)
    names = [f"{BASE}.shard_{i}.weight" for i in range(len(chunks))] if num_parts > 1 else [f"{BASE}.weight"]
    assert tensors.keys() == set(names)
    assert all(torch.equal(tensors[name], chunk) for name, chunk in zip(names, chunks))
    sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files]
    assert max(sizes) <= max(3000, chunks[0].nbytes) and len(files) == num_files
    model = Model()
    load_tables(model, tmp_path)
    assert torch.equal(model.table.weight, table_rows(0, ROWS, WIDTH))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows, width, num_parts", [(ROWS, WIDTH, 1), (ROWS, WIDTH, 3), (1, WIDTH, 1), (1, 16, 1)])
def test_quantised_tables(tmp_path, name, rows, width, num_parts):
    model = Model(rows, width)
    model.ngrams.rows = quantized(FORMATS[name], rows, width)[0]
    expected = model.table(torch.arange(rows))
    save_tables(model, tmp_path, num_parts)
    for format in (None, "mmap"):
        model = Model(rows, width)
        load_tables(model, tmp_path, format=format)
        assert torch.equal(model.table(torch.arange(rows)), expected)
        assert (type(model.table) if format is None else model.table.quantized) is FORMATS[name]


def test_a_table_in_files_and_an_offloaded_one(driver, tmp_path):
    first, second, third = tmp_path / "1", tmp_path / "2", tmp_path / "3"
    save_tables(filled(), first, 4)
    model = Model()
    load_tables(model, first, format="mmap")
    save_tables(model, second, 3)
    model = Model()
    load_tables(model, second)
    offload_tables(model)
    save_tables(model, third)
    assert torch.equal(load_file(next(third.glob("*.safetensors")))[f"{BASE}.weight"], table_rows(0, ROWS, WIDTH))


def test_transformers_loads_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    from tests.tiny_models import prompt, tiny_model

    model = tiny_model(ple_layer_ids=(1, 3), split_ngram_parts=3)
    state = model.state_dict()
    rest = {name: tensor for name, tensor in state.items() if "ngram_embedding.weight" not in name}
    model.save_pretrained(tmp_path, state_dict=rest)
    save_tables(model, tmp_path, num_parts=3)
    loaded, report = transformers.Qwen4ExpForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in state.items())
    with torch.no_grad():
        torch.testing.assert_close(loaded(prompt(7)).logits, model(prompt(7)).logits)
    fresh = tiny_model(ple_layer_ids=(1, 3))
    load_tables(fresh, tmp_path)
    name = "model.layers.2.ple.ple_embedding.ngram_embedding.weight"
    assert torch.equal(fresh.state_dict()[name], state[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_transformers_loads_fp8_into_its_own_module(tmp_path, dtype, num_parts):
    transformers = pytest.importorskip("transformers")
    from tests.tiny_models import prompt, shallow_model

    shallow_model().save_pretrained(tmp_path / "plain")
    # From a checkpoint: `to(bfloat16)` would round the rotary frequencies too, which from_pretrained keeps in float32.
    model = transformers.Qwen4ExpForCausalLM.from_pretrained(tmp_path / "plain", dtype=dtype)
    quantize_tables(model, "fp8")
    rest = {name: tensor for name, tensor in model.state_dict().items() if "ngram_embedding." not in name}
    model.config.quantization_config = {
        "quant_method": "fp8",
        "modules_to_convert": ["ngram_embedding"],
        "modules_to_not_convert": [name for name, module in model.named_modules() if isinstance(module, nn.Linear)],
    }
    model.save_pretrained(tmp_path / "fp8", state_dict=rest)
    save_tables(model, tmp_path / "fp8", num_parts)
    loaded = transformers.Qwen4ExpForCausalLM.from_pretrained(tmp_path / "fp8", dtype=dtype)
    table = loaded.model.layers[0].ple.ple_embedding.ngram_embedding
    assert type(table).__module__.startswith("transformers.") and table.weight.dtype == torch.float8_e4m3fn
    with torch.no_grad():
        assert torch.equal(loaded(prompt(7)).logits, model(prompt(7)).logits)


def test_what_transformers_saves_is_loaded(tmp_path):
    pytest.importorskip("transformers")
    from tests.tiny_models import tiny_model

    model = tiny_model(split_ngram_parts=3)
    model.save_pretrained(tmp_path)
    name = "model.layers.1.ple.ple_embedding.ngram_embedding.weight"
    fresh = tiny_model()
    with torch.no_grad():
        fresh.get_parameter(name).zero_()
    load_tables(fresh, tmp_path)
    assert torch.equal(fresh.get_parameter(name), model.get_parameter(name))


def stopped(monkeypatch, owner, name, number):
    """In a context of patches: call `number` of a function, counted from zero, is interrupted."""
    function, calls = getattr(owner, name), []

    def stopping(*args):
        if len(calls) == number:
            raise KeyboardInterrupt
        calls.append(args)
        return function(*args)

    monkeypatch.setattr(owner, name, stopping)
    return pytest.raises(KeyboardInterrupt)


@pytest.mark.parametrize("rest", [False, True])
def test_what_is_unfinished_does_not_load(tmp_path, monkeypatch, rest):
    if rest:
        write_checkpoint(tmp_path, 5, 2, base="model.norm")
    with monkeypatch.context() as patch, stopped(patch, TensorWriter, "write_rows", 2):
        save_tables(filled(), tmp_path, 3)
    (part,) = tmp_path.glob("ngram*.part")
    assert part.name == "ngram_tables-00001-of-00001.safetensors.part"
    with pytest.raises(ValueError, match=r"ngram_tables.progress says that save_tables was stopped here; finish it"):
        load_tables(Model(), tmp_path)
    assert_saves(tmp_path, 3)


def assert_saves(directory, num_parts):
    save_tables(filled(), directory, num_parts)
    model = Model()
    load_tables(model, directory)
    assert torch.equal(model.table.weight, table_rows(0, ROWS, WIDTH))
    listed = set(json.loads((directory / INDEX).read_text())["weight_map"].values())
    assert {file.name for file in directory.iterdir()} == {INDEX, *listed}


STOPS = {
    "in the second file": (TensorWriter, "write_rows", 3),
    "between two files": (os, "replace", 1),
    "before the single file is renamed": (Path, "rename", 0),
    "before the index": (os, "replace", 4),
    "after the index": (Path, "unlink", 0),
}


@pytest.mark.parametrize("moment", STOPS)
def test_a_call_that_was_stopped_begins_anew(tmp_path, monkeypatch, moment):
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(save_module, "_FILE_BYTES", 3000)
    with monkeypatch.context() as patch, stopped(patch, *STOPS[moment]):
        save_tables(filled(), tmp_path, 7)
    with pytest.raises(ValueError, match="save_tables was stopped here"):
        load_tables(Model(), tmp_path)
    assert_saves(tmp_path, 2)


@pytest.mark.parametrize("text", [b"", b"\xff", b"/\n..\n"])
def test_a_damaged_note(tmp_path, text):
    (tmp_path / "ngram_tables.progress").write_bytes(text)
    assert_saves(tmp_path, 2)


def test_a_refused_call_changes_nothing(tmp_path):
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    for parts in (0, 131, 1.5, "4", None):
        with pytest.raises(ValueError, match=f"num_parts is {parts!r}; .* has 130 rows"):
            save_tables(filled(), tmp_path, parts)
    with pytest.raises(ValueError, match="is on the meta device"):
        save_tables(Model(), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_another_models_tables_are_not_overwritten(tmp_path):
    save_tables(filled(), tmp_path)
    other = nn.Module()
    other.first = filled()
    with pytest.raises(ValueError, match="ngram_tables-00001-of-00001.safetensors is there already"):
        save_tables(other, tmp_path)


def test_a_directory_that_has_the_table_already(tmp_path):
    save_tables(filled(), tmp_path, 3)
    with pytest.raises(
        ValueError, match=rf"ngram_tables-00001-of-00001.safetensors holds {BASE}.shard_0.weight already"
    ):
        save_tables(filled(), tmp_path, 3)


def test_the_rest_of_a_model_without_an_index(tmp_path):
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    save_tables(filled(), tmp_path, 3)
    model = Model()
    load_tables(model, tmp_path)
    assert torch.equal(model.table.weight, table_rows(0, ROWS, WIDTH))
    index = (tmp_path / "model.safetensors.index.json").read_text()
    assert '"model.norm.weight": "model-00001-of-00001.safetensors"' in index
    assert f'"total_size": {12 + ROWS * WIDTH * 2}' in index


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="is on the meta device; load it first"):
        save_tables(Model(), tmp_path)
    with pytest.raises(ValueError, match="Linear has no n-gram table"):
        save_tables(torch.nn.Linear(2, 2), tmp_path)
    for parts in (0, 131):
        with pytest.raises(ValueError, match=f"num_parts is {parts}; .* has 130 rows"):
            save_tables(filled(), tmp_path, parts)
