"""A graph with a quantised table whose scale is wrong is not compiled."""

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from ple_compile.sharding.shard import shard_tables
from ple_compile.tables.formats import FP8Embedding, NVFP4Embedding
from ple_compile.tables.load import load_tables
from tests.sharding.fake import fake_mesh
from tests.sharding.lowered import NGrams
from tests.tables.test_formats import CLASSES, quantized
from tests.tables.test_load import ROWS, WIDTH, Model
from tests.tables.test_load_quantized import write_quantized


@pytest.fixture(params=CLASSES)
def model(request):
    model = NGrams(64, 32)
    model.rows, _ = quantized(request.param)
    return model


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.nan])
@pytest.mark.parametrize("in_place", [False, True])
def test_wrong_scales_are_refused(no_codegen, model, bad, in_place):
    name = model.rows.table_parameters[-1] if model.rows.table_parameters else "weight_scale"
    model.rows.get_parameter(name).data[-1:] = bad
    if in_place:
        model.compile(backend="ple")
    else:
        model = torch.compile(model, backend="ple")
    with (
        torch.no_grad(),
        pytest.raises(BackendCompilerFailed, match=rf"the {name} of .*rows.weight has values from .* wrong one in"),
    ):
        model(torch.arange(3))


def test_those_of_a_sharded_table_are_refused(no_codegen, model):
    model.rows.weight_scale.data[-1:] = torch.nan
    with fake_mesh(tp=1) as mesh, torch.no_grad():
        shard_tables(model, mesh)
        with pytest.raises(BackendCompilerFailed, match="the weight_scale of .*rows.weight has values from nan"):
            torch.compile(model, backend="ple")(torch.arange(3))


def test_right_ones_are_not(no_codegen, model):
    with torch.no_grad():
        expected = model(torch.arange(3))
        assert torch.equal(torch.compile(model, backend="ple")(torch.arange(3)), expected)


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.nan, torch.inf])
@pytest.mark.parametrize("compiled", ["table", "model", "in_place", "function"])
@pytest.mark.parametrize("cls", [FP8Embedding, NVFP4Embedding])
def test_the_scale_of_a_mapped_table(no_codegen, tmp_path, cls, bad, compiled):
    write_quantized(tmp_path, cls)
    model = Model()
    load_tables(model, tmp_path, format="mmap")
    (name,) = model.table.scale_names
    model.table.get_parameter(name).data.fill_(bad)
    owner = NGrams(ROWS, WIDTH)
    owner.rows = model.table
    if compiled == "in_place":
        owner.compile(backend="ple")
        call = owner
    else:
        called = {"table": owner.rows, "model": owner, "function": lambda ids: owner(ids) + 1}[compiled]
        call = torch.compile(called, backend="ple")
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match=f"the {name} of .*weight has values from"):
        call(torch.arange(3))


def test_a_scale_that_turns_wrong_after_compiling(no_codegen, model):
    name = model.rows.scale_names[-1]
    compiled = torch.compile(model, backend="ple")
    with torch.no_grad():
        compiled(torch.arange(3))
        model.rows.get_parameter(name)[-1:] = torch.nan
        with pytest.raises(ValueError, match=f"the {name} of .*weight has values from"):
            compiled(torch.arange(3))
