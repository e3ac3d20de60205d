"""A graph with a quantised table whose scale is wrong is not compiled."""

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from ple_compile.sharding.shard import shard_tables
from tests.sharding.fake import fake_mesh
from tests.sharding.lowered import NGrams
from tests.tables.test_formats import CLASSES, quantized


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
