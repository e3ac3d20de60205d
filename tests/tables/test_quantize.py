"""quantize_tables: small errors, told; rows that no format holds refused; killed runs continued."""

import gc
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ple_compile.json_file import with_checksum
from ple_compile.tables import quantize as quantize_module
from ple_compile.tables.find import find_tables
from ple_compile.tables.formats import FORMATS
from ple_compile.tables.load import load_tables
from ple_compile.tables.offload import is_offloaded, offload_tables
from ple_compile.tables.quantize import quantize_tables
from ple_compile.tables.tensor_file import TensorWriter, part_of
from tests.checkpoints import write_checkpoint
from tests.tables.test_load import BASE, Model

ROWS, WIDTH = 300, 32
WORST = {"fp8": 0.03, "fp8_row": 0.03, "nvfp4": 0.11}


def random_model(rows=ROWS, seed=0, **settings):
    model = Model(rows, WIDTH, device="cpu", **settings)
    nn.init.normal_(model.table.weight, std=0.02, generator=torch.Generator().manual_seed(seed))
    return model


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(quantize_module, "_BLOCK_VALUES", 70 * WIDTH)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("to_file", [False, True])
def test_replaces_the_table_and_tells_the_error(tmp_path, format, dtype, to_file):
    model = random_model(dtype=dtype)
    original = model.table.weight.detach().double()
    (error,) = quantize_tables(model, format, path=tmp_path / "q.safetensors" if to_file else None)
    rows = model.table(torch.arange(ROWS))
    assert type(model.table) is FORMATS[format] and rows.dtype == dtype and model.table.weight.shape[0] == ROWS
    assert all(not parameter.requires_grad for parameter in model.table.parameters())
    stored = {name: p.detach() for name, p in model.table.named_parameters()}
    difference = FORMATS[format].decode(stored, torch.float32).double() - original
    by_row = difference.norm(dim=1) / original.norm(dim=1)
    assert (error.table, error.format, error.num_rows) == (f"{BASE}.weight", format, ROWS)
    assert (
        error.overall == pytest.approx((difference.norm() / original.norm()).item()) and error.overall < WORST[format]
    )
    assert error.mean_row == pytest.approx(by_row.mean().item())
    assert error.worst_row == pytest.approx(by_row.max().item()) and error.worst_row_index == by_row.argmax()
    assert error.largest == pytest.approx(difference.abs().max().item())
    assert f"{BASE}.weight as {format}: error" in str(error)


def test_blocks_make_no_difference(monkeypatch):
    for format in FORMATS:
        first, second = random_model(), random_model()
        quantize_tables(first, format)
        monkeypatch.setattr(quantize_module, "_BLOCK_VALUES", 10**9)
        quantize_tables(second, format)
        for name, tensor in first.state_dict().items():
            assert torch.equal(tensor.view(torch.uint8), second.state_dict()[name].view(torch.uint8))


def test_rows_of_zeros_and_a_table_of_zeros():
    for format in FORMATS:
        model = random_model()
        model.table.weight.data[5] = 0
        (error,) = quantize_tables(model, format)
        assert not model.table(torch.tensor([5])).any() and error.overall < WORST[format]
        model = random_model()
        model.table.weight.data.zero_()
        (error,) = quantize_tables(model, format)
        assert error.overall == error.worst_row == 0 and not model.table(torch.arange(ROWS)).any()


def test_a_row_scale_saves_what_one_scale_loses():
    errors = {}
    for format in FORMATS:
        model = random_model()
        model.table.weight.data[7] *= 1e5
        (errors[format],) = quantize_tables(model, format)
    assert errors["fp8_row"].mean_row < 0.03 < errors["fp8"].mean_row
    assert errors["fp8"].worst_row > 0.3 > 5 * errors["fp8_row"].worst_row > 0


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("to_file", [False, True])
def test_rows_that_are_not_finite_are_named(tmp_path, format, bad, to_file):
    model = random_model()
    model.table.weight.data[[123, 130], [3, 4]] = bad
    weight = model.table.weight
    with pytest.raises(ValueError, match=rf"row 123, 130 of {BASE}.weight has NaN or infinite values"):
        quantize_tables(model, format, path=tmp_path / "q.safetensors" if to_file else None)
    assert model.table.weight is weight and type(model.table) is nn.Embedding and not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("to_file", [False, True])
def test_rows_beyond_float32_are_named(tmp_path, format, to_file):
    model = random_model(dtype=torch.float64)
    model.table.weight.data[[123, 130], [3, 4]] = torch.tensor([1e39, -1e300], dtype=torch.float64)
    weight = model.table.weight
    with pytest.raises(
        ValueError, match=rf"row 123, 130 of {BASE}.weight has values beyond 3.403e\+38, .*float32; mend"
    ):
        quantize_tables(model, format, path=tmp_path / "q.safetensors" if to_file else None)
    assert model.table.weight is weight and type(model.table) is nn.Embedding and not list(tmp_path.iterdir())


def test_rows_beyond_the_type_of_the_model_are_named(tmp_path):
    rows = torch.zeros(ROWS, WIDTH)
    rows[7, 3] = 7e4
    save_file({f"{BASE}.weight": rows}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"row 7 of .* has values beyond 6.55e\+04, the largest of torch.float16"):
        load_tables(Model(ROWS, WIDTH, dtype=torch.float16), tmp_path, format="fp8")
    model = Model(ROWS, WIDTH, dtype=torch.bfloat16)
    load_tables(model, tmp_path, format="fp8")
    assert abs(model.table(torch.tensor([7]))[0, 3] / 7e4 - 1) < 0.01


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_largest_values_of_a_type_stay_finite(format, dtype):
    model = random_model(dtype=dtype)
    most = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).max
    model.table.weight.data[[5, 6], [3, 4]] = torch.tensor([most, -most], dtype=dtype)
    quantize_tables(model, format)
    rows = model.table(torch.arange(ROWS))
    assert rows.isfinite().all()
    torch.testing.assert_close(
        rows[[5, 6], [3, 4]].double() / most, torch.tensor([1.0, -1.0]).double(), rtol=0.01, atol=0
    )


def test_the_error_of_values_that_float32_does_not_hold():
    model = random_model(dtype=torch.float64)
    model.table.weight.data[9] = 1e-100
    (error,) = quantize_tables(model, "fp8_row")
    assert error.worst_row == 1 and error.worst_row_index == 9


def test_tied_tables_stay_one():
    model = random_model()
    model.more = Model(ROWS, WIDTH, device="cpu")
    model.more.table.weight = model.table.weight
    assert len(quantize_tables(model, "fp8")) == 1
    assert model.more.table.weight is model.table.weight and model.more.table.weight_scale is model.table.weight_scale


@pytest.mark.parametrize("to_file", [False, True])
def test_an_offloaded_table_stays_so(driver, tmp_path, to_file):
    model, expected = random_model(), random_model()
    offload_tables(model)
    quantize_tables(model, "fp8_row", path=tmp_path / "q.safetensors" if to_file else None)
    quantize_tables(expected, "fp8_row")
    assert is_offloaded(model.table) and driver.covers(model.table.weight)
    assert torch.equal(model.table.weight.view(torch.uint8), expected.table.weight.view(torch.uint8))


def test_the_file_is_a_checkpoint(tmp_path):
    model, path = random_model(), tmp_path / "q.safetensors"
    quantize_tables(model, "nvfp4", path=path)
    tensors = load_file(path)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        f"{BASE}.weight": (ROWS, WIDTH // 2),
        f"{BASE}.weight_scale": (ROWS, WIDTH // 16),
        f"{BASE}.weight_scale_2": (1,),
    }
    fresh = Model(ROWS, WIDTH)
    load_tables(fresh, tmp_path)
    assert torch.equal(fresh.table(torch.arange(ROWS)), model.table(torch.arange(ROWS)))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["q.safetensors"]


class Stop(Exception):
    pass


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("block", [0, 1, 2, 4])
def test_goes_on_where_it_was_stopped(tmp_path, format, block, monkeypatch):
    expected, path = random_model(), tmp_path / "q.safetensors"
    (whole,) = quantize_tables(expected, format)
    monkeypatch.setattr(quantize_module, "_BLOCKS_PER_NOTE", 2)
    cls, encoded = FORMATS[format], []
    encode = cls.encode

    def stopping(rows, scale):
        if len(encoded) == block:
            raise Stop
        encoded.append(rows.shape[0])
        return encode(rows, scale)

    monkeypatch.setattr(cls, "encode", stopping)
    with pytest.raises(Stop):
        quantize_tables(random_model(), format, path=path)
    encoded.clear()
    monkeypatch.setattr(cls, "encode", lambda rows, scale: encoded.append(rows.shape[0]) or encode(rows, scale))
    model = random_model()
    (error,) = quantize_tables(model, format, path=path)
    assert sum(encoded) == ROWS - 70 * (block // 2 * 2)
    assert error == whole
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), model.state_dict()[name].view(torch.uint8))


KILLED = """
import os, signal
from ple_compile.tables import quantize
from tests.tables.test_quantize import random_model
quantize._BLOCK_VALUES, quantize._BLOCKS_PER_NOTE = 70 * 32, 1
save = quantize._Note.save
def kill(note):
    save(note)
    if any(state["done"] >= 140 for state in note.state.values()):
        os.kill(os.getpid(), signal.SIGKILL)
quantize._Note.save = kill
quantize.quantize_tables(random_model(), "fp8_row", path={path!r})
"""


def test_goes_on_after_a_kill(tmp_path):
    path = tmp_path / "q.safetensors"
    run = subprocess.run([sys.executable, "-c", KILLED.format(path=str(path))], cwd=os.getcwd())
    assert run.returncode == -signal.SIGKILL
    note = json.loads((tmp_path / "q.safetensors.progress").read_text())["data"]
    assert note["state"][f"{BASE}.weight"]["done"] == 140
    with pytest.raises(ValueError, match=r"q.safetensors.part is unfinished, .*begins with q.safetensors$"):
        load_tables(Model(ROWS, WIDTH), tmp_path)
    model, expected = random_model(), random_model()
    (error,) = quantize_tables(model, "fp8_row", path=path)
    assert [error] == quantize_tables(expected, "fp8_row")
    assert torch.equal(model.table(torch.arange(ROWS)), expected.table(torch.arange(ROWS)))
    assert [file.name for file in tmp_path.iterdir()] == ["q.safetensors"]


@pytest.mark.parametrize(
    "text", ["", "[]", "\xff", '{"tables": {}}', with_checksum({"done": 140}).replace("140", "210")]
)
def test_a_damaged_note(tmp_path, text):
    path = tmp_path / "q.safetensors"
    part_of(path).touch()
    (tmp_path / "q.safetensors.progress").write_text(text, encoding="latin1")
    with pytest.raises(ValueError, match="q.safetensors.progress is damaged: .* how far q.safetensors.part is; delete"):
        quantize_tables(random_model(), "fp8", path=path)


def test_begins_anew_what_stopped_before_its_first_byte(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "q.safetensors"
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "pwrite", full)
        quantize_tables(random_model(), "fp8", path=path)
    quantize_tables(random_model(), "fp8", path=path)
    assert [file.name for file in tmp_path.iterdir()] == ["q.safetensors"]


def test_two_tables_in_one_file(tmp_path):
    model = random_model()
    model.more = random_model(seed=1)
    errors = quantize_tables(model, "fp8", path=tmp_path / "q.safetensors")
    assert [error.table for error in errors] == [table.name for table in find_tables(model)]
    assert len(load_file(tmp_path / "q.safetensors")) == 4


def test_another_table_does_not_go_on(tmp_path, monkeypatch):
    path = tmp_path / "q.safetensors"
    monkeypatch.setattr(FORMATS["fp8"], "encode", lambda *_: (_ for _ in ()).throw(Stop))
    with pytest.raises(Stop):
        quantize_tables(random_model(), "fp8", path=path)
    monkeypatch.undo()
    for model, format in ((random_model(seed=1), "fp8"), (random_model(), "nvfp4")):
        with pytest.raises(
            ValueError, match=r"was begun with other tables, another format .*; delete it and q.*progress"
        ):
            quantize_tables(model, format, path=path)
    part_of(path).write_bytes(b"something else, long enough to be mistaken")
    with pytest.raises(ValueError, match="holds other tensors"):
        quantize_tables(random_model(), "fp8", path=path)


@pytest.mark.parametrize("row", [1, 130, ROWS - 2])
def test_a_table_that_was_changed_in_one_value_does_not_go_on(tmp_path, monkeypatch, row):
    path, cls = tmp_path / "q.safetensors", FORMATS["fp8_row"]
    monkeypatch.setattr(quantize_module, "_BLOCKS_PER_NOTE", 1)
    encode, blocks = cls.encode, []

    def stopping(rows, scale):
        blocks.append(rows)
        if len(blocks) == 3:
            raise Stop
        return encode(rows, scale)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(cls, "encode", stopping)
        quantize_tables(random_model(), "fp8_row", path=path)
    model = random_model()
    model.table.weight.data[row, 5] += 1e-3
    with pytest.raises(ValueError, match="was begun with other tables"):
        quantize_tables(model, "fp8_row", path=path)
    assert quantize_tables(random_model(), "fp8_row", path=path)


def test_another_encoder_does_not_go_on(tmp_path, monkeypatch):
    path = tmp_path / "q.safetensors"
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(FORMATS["fp8"], "encode", lambda *_: (_ for _ in ()).throw(Stop))
        quantize_tables(random_model(), "fp8", path=path)
    monkeypatch.setattr(quantize_module, "_encoder", lambda: "of another version")
    with pytest.raises(ValueError, match="or another version of ple_compile; delete it"):
        quantize_tables(random_model(), "fp8", path=path)


def test_the_note_of_a_file_that_was_deleted_says_nothing_about_the_next(tmp_path, monkeypatch):
    """Killed, the unfinished file deleted, and killed again before the first note."""
    path, note = tmp_path / "q.safetensors", tmp_path / "q.safetensors.progress"
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(FORMATS["fp8"], "encode", lambda *_: (_ for _ in ()).throw(Stop))
        quantize_tables(random_model(), "fp8", path=path)
    part_of(path).unlink()
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(quantize_module._Note, "save", lambda note: (_ for _ in ()).throw(Stop))
        quantize_tables(random_model(), "fp8", path=path)
    assert part_of(path).exists() and not note.exists()


def test_a_file_that_another_process_writes_is_left_alone(tmp_path):
    path = tmp_path / "q.safetensors"
    with TensorWriter(path, {"a": (torch.uint8, (3, 2))}) as writer:
        writer.write_rows("a", 0, torch.full((3, 2), 7, dtype=torch.uint8))
        with pytest.raises(ValueError, match="q.safetensors.part is being written by another process; wait for it"):
            quantize_tables(random_model(), "fp8", path=path)
    assert load_file(path)["a"].tolist() == [[7, 7]] * 3


def test_a_file_that_is_there_is_not_overwritten(tmp_path):
    path = tmp_path / "q.safetensors"
    quantize_tables(random_model(), "fp8", path=path)
    with pytest.raises(ValueError, match="is there already; delete it"):
        quantize_tables(random_model(), "fp8", path=path)


@pytest.mark.parametrize("name", ["q", "q.bin", "missing/q.safetensors"])
def test_a_path_that_would_not_load_is_refused_at_once(tmp_path, monkeypatch, name):
    monkeypatch.setattr(quantize_module, "largest_value", None)  # no pass over the table before
    with pytest.raises(ValueError, match="pass a file that ends in .safetensors, in a directory that is there"):
        quantize_tables(random_model(), "fp8", path=tmp_path / name)


@pytest.mark.parametrize("into_file", [False, True])
def test_a_page_lock_that_is_refused_leaves_every_table_as_it_was(driver, tmp_path, into_file):
    model = nn.ModuleList([random_model(), random_model(seed=1)])
    offload_tables(model)
    before, path = [part.table for part in model], tmp_path / "q.safetensors" if into_file else None
    driver.refuse_after = sum(driver.locked.values()) + ROWS * WIDTH + 100  # the first one and its scale
    with pytest.raises(ValueError, match="was refused"):
        quantize_tables(model, "fp8", path=path)
    gc.collect()
    assert [part.table for part in model] == before and len(driver.locked) == 2
    driver.refuse_after = None
    if into_file:
        with pytest.raises(ValueError, match="is there already"):
            quantize_tables(model, "fp8", path=path)
    quantize_tables(model, "fp8")
    assert all(part.table.format == "fp8" and is_offloaded(part.table) for part in model)


def test_refusals():
    model = random_model()
    with pytest.raises(ValueError, match="'int4' is unknown"):
        quantize_tables(model, "int4")
    with pytest.raises(ValueError, match="Linear has no n-gram table"):
        quantize_tables(nn.Linear(2, 2), "fp8")
    with pytest.raises(ValueError, match="is on the meta device"):
        quantize_tables(Model(), "fp8")
    quantize_tables(model, "fp8")
    with pytest.raises(ValueError, match="is torch.float8_e4m3fn already"):
        quantize_tables(model, "nvfp4")
    with pytest.raises(ValueError, match="rows of 24 values"):
        quantize_tables(Model(40, 24, device="cpu"), "nvfp4")


def test_moving_to_the_gpu_keeps_the_order_of_a_state_dict():
    model = random_model()
    names = list(model.state_dict())
    quantize_tables(model, "fp8")
    assert [n for n in model.state_dict() if "scale" not in n] == names


def test_progress_is_logged(caplog):
    caplog.set_level("INFO", logger="ple_compile")
    quantize_tables(random_model(), "fp8")
    assert f"quantising {BASE}.weight to fp8" in caplog.text and "error" in caplog.text


@pytest.mark.parametrize("to_file", [False, True])
def test_a_table_that_stays_in_its_files_is_read_from_there(tmp_path, to_file):
    write_checkpoint(tmp_path / "plain", ROWS, WIDTH, num_parts=7, num_files=3, base=BASE)
    mapped, expected = Model(ROWS, WIDTH), Model(ROWS, WIDTH)
    load_tables(mapped, tmp_path / "plain", format="mmap")
    load_tables(expected, tmp_path / "plain", format="nvfp4")
    quantize_tables(mapped, "nvfp4", path=tmp_path / "q.safetensors" if to_file else None)
    for name, parameter in expected.table.named_parameters():
        assert torch.equal(mapped.table.get_parameter(name).view(torch.uint8), parameter.view(torch.uint8)), name


def test_a_quantised_table_that_stays_in_its_files_is_refused(tmp_path):
    quantize_tables(random_model(), "fp8", path=tmp_path / "q.safetensors")
    model = Model(ROWS, WIDTH)
    load_tables(model, tmp_path, format="mmap")
    with pytest.raises(ValueError, match="already; load the original"):
        quantize_tables(model, "nvfp4")
