"""Quantised, loaded and mapped tables with a CUDA device: the bits of the CPU, from wherever the table lies."""

import copy

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from ple_compile.ops.dequantized_lookup import dequantized_lookup
from ple_compile.tables.formats import FORMATS
from ple_compile.tables.load import load_tables
from ple_compile.tables.offload import offload_tables
from ple_compile.tables.quantize import quantize_tables
from tests.checkpoints import table_rows, write_checkpoint
from tests.gpu import synchronisation
from tests.host_stack import Stack
from tests.passes.test_fuse_lookup import Fused
from tests.tables.test_load import BASE, Model

ROWS, WIDTH = 40_000, 160


def draw(*shape):
    return torch.randint(0, ROWS, shape, device="cuda")


def random_model(device="cpu"):
    model = Model(ROWS, WIDTH, device="cpu")
    torch.nn.init.normal_(model.table.weight, std=0.02, generator=torch.Generator().manual_seed(0))
    return model.to(device)


@pytest.mark.parametrize("format", FORMATS)
def test_quantised_on_the_device_as_on_the_host(format):
    on_host, on_device = random_model(), random_model("cuda")
    (first,), (second,) = quantize_tables(on_host, format), quantize_tables(on_device, format)
    assert on_device.table.weight.is_cuda and first.overall == pytest.approx(second.overall)
    for name, tensor in on_host.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), on_device.state_dict()[name].cpu().view(torch.uint8))
    ids = draw(64, 16)
    assert torch.equal(on_device.table(ids).cpu(), on_host.table(ids.cpu()))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_fused_equals_eager(format, dynamic):
    model = random_model("cuda")
    quantize_tables(model, format)
    fused = Fused(model.table, dynamic=dynamic)
    with torch.no_grad():
        for tokens in (3, 8192):
            ids = draw(tokens, 16)
            assert torch.equal(fused(ids), model.table(ids))
    assert fused.report.counts()["fuse_lookup"] >= 1


@pytest.mark.parametrize("format", FORMATS)
def test_from_page_locked_memory(format):
    model = random_model()
    quantize_tables(model, format)
    expected = copy.deepcopy(model.table)
    offload_tables(model)
    table, ids = model.table, draw(64, 16)
    names = [name for name in ("weight_scale", "weight_scale_2") if name in table._parameters]
    scales = [table.get_parameter(name).detach().cuda() for name in names]
    table_scale = scales[1] if len(scales) > 1 else None
    rows = dequantized_lookup(table.weight, scales[0], table_scale, ids, torch.float32, torch.bfloat16)
    assert torch.equal(rows.cpu(), expected(ids.cpu()))


@torch.no_grad()
@pytest.mark.parametrize("format", FORMATS)
def test_on_the_host_its_bytes_are_fetched_a_layer_ahead(format):
    torch._dynamo.reset()
    model = Stack(3, rows=4000, width=WIDTH, hidden=256)
    quantize_tables(model, format)
    offload_tables(model)
    model.to("cuda")
    table = model.layers[3].ngrams.table
    assert not table.weight.is_cuda and table.weight_scale.is_cuda
    args = model.inputs(200)
    expected = model(*args)
    compiled = torch.compile(model, backend="ple", fullgraph=True)
    actual, (code,) = run_and_get_code(compiled, *args)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert code.count("ple.lookup_start.default(") == code.count("ple.lookup_wait.default(") == 1
    # Nothing waits for the device: the scales are not copied to the host, nor the ids.
    with synchronisation.forbidden():
        compiled(*args)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_transformers_fp8_module_on_the_host(dtype):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    torch._dynamo.reset()
    model = Stack(3, rows=4000, width=WIDTH, hidden=256)
    quantize_tables(model, "fp8")
    stored, model.layers[3].ngrams.table = model.layers[3].ngrams.table, fp8.FP8Embedding(4000, WIDTH)
    table = model.layers[3].ngrams.table
    table.load_state_dict(stored.state_dict())
    table.weight_scale.data = table.weight_scale.data.to(dtype)
    model.layers[3].proj.to(dtype).register_forward_hook(lambda module, args, out: out.float())
    offload_tables(model)
    model.to("cuda")
    assert not table.weight.is_cuda and table.weight_scale.is_cuda
    args = model.inputs(200)
    expected = model(*args)
    actual, (code,) = run_and_get_code(torch.compile(model, backend="ple", fullgraph=True), *args)
    torch.testing.assert_close(actual, expected, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-2)
    assert code.count("ple.lookup_start.default(") == code.count("ple.lookup_wait.default(") == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_loads_to_where_the_table_is(tmp_path, device):
    write_checkpoint(tmp_path, ROWS, WIDTH, num_parts=7, num_files=2, base=BASE)
    model = random_model(device)
    load_tables(model, tmp_path)
    assert model.table.weight.device.type == device
    assert torch.equal(model.table.weight.cpu(), table_rows(0, ROWS, WIDTH))


def test_loads_into_page_locked_memory(tmp_path):
    write_checkpoint(tmp_path, ROWS, WIDTH, num_parts=7, num_files=2, base=BASE)
    model = Model(ROWS, WIDTH)
    offload_tables(model)
    load_tables(model, tmp_path)
    ids = draw(64, 16)
    assert torch.equal(torch.ops.ple.lookup(model.table.weight, ids).cpu(), table_rows(0, ROWS, WIDTH)[ids.cpu()])


@pytest.mark.parametrize("compiled", [False, True])
def test_mapped_files(tmp_path, compiled):
    write_checkpoint(tmp_path, ROWS, WIDTH, num_parts=7, num_files=2, base=BASE)
    model = Model(ROWS, WIDTH)
    load_tables(model, tmp_path, format="mmap")
    lookup = torch.compile(model.table, fullgraph=True) if compiled else model.table
    for _ in range(3):
        ids = draw(64, 16)
        rows = lookup(ids)
        assert rows.is_cuda and torch.equal(rows.cpu(), table_rows(0, ROWS, WIDTH)[ids.cpu()])
