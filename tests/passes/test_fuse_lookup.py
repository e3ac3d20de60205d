"""fuse_lookup: every spelling of a quantised lookup becomes one op with eager's bits; look-alikes are left alone."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.nn import functional as F

from ple_compile import upstream
from ple_compile.passes.fuse_lookup import fuse_lookup
from ple_compile.report import GraphReport
from ple_compile.sharding.shard import shard_tables
from tests.graphs import printed, run_graph
from tests.sharding.fake import fake_mesh
from tests.sharding.lowered import NGrams
from tests.tables.test_formats import CLASSES, quantized

E4M3 = torch.float8_e4m3fn
ROWS, WIDTH = 64, 32


class Fused:
    """`torch.compile` with this pass alone; remembers the graphs and the report of the last compilation."""

    def __init__(self, function, *, debug=False, **options):
        torch._dynamo.reset()
        self.debug = debug
        self.report, self.graph = GraphReport(), ""
        self.call = torch.compile(function, backend=self.backend, fullgraph=True, **options)

    def backend(self, gm, inputs):
        patches = {"post_grad_custom_pre_pass": self.rewrite, "force_disable_caches": True}
        return upstream.compile_fx(gm, inputs, inner_compile=run_graph, config_patches=patches)

    def rewrite(self, graph):
        with upstream.no_dispatch_modes(), torch.no_grad():
            fuse_lookup(graph, self.report, debug=self.debug)
        upstream.stable_topological_sort(graph)
        graph.lint()
        self.graph = printed(graph)

    @property
    def reasons(self):
        return [event.reason for event in self.report.declines()]

    def __call__(self, *args):
        return self.call(*args)


def assert_fused(function, *args, **options):
    fused = Fused(function, **options)
    with torch.no_grad():
        actual, expected = fused(*args), function(*args)
    assert fused.report.counts() == {"fuse_lookup": 1} and not fused.reasons
    assert not any(op in fused.graph for op in ("aten.embedding", "aten.index", "aten.mul"))
    assert actual.dtype == expected.dtype and torch.equal(actual, expected)
    return fused


def assert_left_alone(function, *args, because):
    fused = Fused(function)
    with torch.no_grad():
        actual, expected = fused(*args), function(*args)
    assert fused.report.counts() == {} and "dequantized_lookup" not in fused.graph
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert len(fused.reasons) == (because is not None)
    assert because is None or because in fused.reasons[0], fused.reasons


def ids(*shape):
    return torch.randint(0, ROWS, shape or (2, 5, 4))


def table(rows=ROWS):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)).to(E4M3)


def scales(*shape, dtype=torch.float32):
    return (torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.5).to(dtype)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_our_modules(cls, dtype, dynamic):
    module, _ = quantized(cls, dtype=dtype)
    assert_fused(module, ids(), dynamic=dynamic)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_transformers_module(scale_dtype, dynamic):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    module = fp8.FP8Embedding(ROWS, WIDTH)
    module.weight.data, module.weight_scale.data = table(), scales(1, dtype=scale_dtype)
    fused = assert_fused(module, ids(), dynamic=dynamic)
    kind = str(scale_dtype)
    assert f"dequantized_lookup.default(arg0_1, arg2_1, None, arg1_1, {kind}, {kind})" in fused.graph or dynamic


def test_graph_of_one_scale():
    def rows(weight, scale, ids):
        return F.embedding(ids, weight).to(torch.bfloat16) * scale

    assert_expected_inline(
        assert_fused(rows, table(), scales(1, dtype=torch.bfloat16), ids()).graph,
        """\
def forward(arg0_1, arg1_1, arg2_1):
    dequantized_lookup_default = ple.dequantized_lookup.default(arg1_1, arg2_1, None, arg0_1, torch.bfloat16, torch.bfloat16);  arg1_1 = arg2_1 = arg0_1 = None
    return (dequantized_lookup_default,)
""",  # noqa: E501
    )


def by_embedding(weight, scale, ids):
    return (F.embedding(ids, weight).float() * F.embedding(ids, scale[:, None])).bfloat16()


def by_index(weight, scale, ids):
    return (weight[ids].float() * scale[ids].unsqueeze(-1)).bfloat16()


def by_index_select(weight, scale, ids):
    flat = ids.flatten()
    rows = (weight.index_select(0, flat).float() * scale[ids.flatten(), None]).bfloat16()
    return rows.view(*ids.shape, -1)


def as_bytes(weight, scale, ids):
    return (scale[ids].unsqueeze(-1) * weight.view(torch.uint8)[ids].view(E4M3).float()).bfloat16()


def through_bfloat16(weight, scale, ids):
    return (F.embedding(ids, weight).bfloat16() * scale[ids][..., None]).bfloat16()


class Spelled(nn.Module):
    def __init__(self, function, weight, scale):
        super().__init__()
        self.function = function
        self.weight, self.scale = (nn.Parameter(t, requires_grad=False) for t in (weight, scale))

    def forward(self, ids):
        return self.function(self.weight, self.scale, ids)


@pytest.mark.parametrize("spelling", [by_embedding, by_index, by_index_select, as_bytes, through_bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_spellings_of_a_scale_by_row(spelling, dynamic):
    assert_fused(Spelled(spelling, table(), scales(ROWS)), ids(), dynamic=dynamic)


def test_symbolic_tables():
    """A table that is an argument under dynamic=True: its rows may be symbolic, its width may not."""
    arguments = table(), scales(ROWS), ids()
    fused = Fused(by_index, dynamic=True)
    assert torch.equal(fused(*arguments), by_index(*arguments)) and "width" in fused.reasons[0]
    torch._dynamo.mark_static(arguments[0], 1)
    assert_fused(by_index, *arguments, dynamic=True)


def test_a_table_that_is_stored_as_bytes():
    def rows(weight, scale, ids):
        return weight[ids].view(E4M3).float() * scale

    assert_fused(rows, table().view(torch.uint8), scales(1), ids())


def test_a_scale_of_no_dimension_and_one_that_is_cast_first():
    def rows(weight, scale, ids):
        return F.embedding(ids, weight).to(torch.bfloat16) * scale.to(torch.bfloat16)

    some = ids()
    for scale in (scales(), scales(1)):
        fused = Fused(rows)
        assert torch.equal(fused(table(), scale, some), rows(table(), scale, some))
        assert fused.report.counts() == {"fuse_lookup": 1}


def test_another_spelling_of_nvfp4():
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

    def rows(weight, scale, table_scale, ids):
        packed = weight[ids]
        low, high = packed & 15, packed >> 4
        codes = torch.stack([low, high], dim=-1).flatten(-2)
        size = (codes & 7).float()
        size = torch.where(size < 5, size / 2, size - 2)
        size = torch.where(codes & 7 == 4, 2.0, torch.where(codes & 7 == 6, 4.0, size))
        size = torch.where(codes & 7 == 7, 6.0, size)
        groups = scale[ids].float() * table_scale
        signed = torch.where(codes > 7, -size, size)
        return (signed.unflatten(-1, (-1, 16)) * groups[..., None]).flatten(-2).half()

    module, _ = quantized(CLASSES[2], dtype=torch.float16)
    weights = (module.weight, module.weight_scale, module.weight_scale_2)
    codes = torch.arange(8, dtype=torch.uint8).repeat(2)[None]
    one = torch.ones(1, 2).to(E4M3)
    assert torch.equal(rows(codes, one, torch.ones(1), torch.tensor([0]))[0, 0::2].float(), values.repeat(2))
    fused, some = Fused(rows), ids()
    torch.testing.assert_close(fused(*weights, some), rows(*weights, some), rtol=2e-3, atol=0)
    assert fused.report.counts() == {"fuse_lookup": 1}


def test_large_static_shapes_are_probed_small():
    module, _ = quantized(CLASSES[2])
    assert_fused(module, ids(2, 4096, 16))  # two values in a byte
    module, _ = quantized(CLASSES[1])
    assert_fused(module, ids(70_000))


@pytest.mark.parametrize("shape", [(1,), (3, 1), (7, 2, 3, 4)])
def test_any_shape_of_ids(shape):
    assert_fused(quantized(CLASSES[1])[0], ids(*shape))


def test_what_follows_stays():
    module, _ = quantized(CLASSES[0], dtype=torch.float32)

    def layer(ids, hidden):
        return (module(ids) * 3).flatten(-2) + hidden

    fused, some, hidden = Fused(layer), ids(), torch.randn(2, 5, 4 * WIDTH)
    with torch.no_grad():
        assert torch.equal(fused(some, hidden), layer(some, hidden))
    assert fused.report.counts() == {"fuse_lookup": 1} and "mul" in fused.graph and "add" in fused.graph


def test_another_factor_behind_it_stays():
    def rows(weight, scale, factor, ids):
        return F.embedding(ids, weight).float() * scale * factor

    fused, arguments = Fused(rows), (table(), scales(1), scales(1) + 1, ids())
    assert torch.equal(fused(*arguments), rows(*arguments))
    assert fused.report.counts() == {"fuse_lookup": 1} and "aten.mul" in fused.graph


def test_two_readers_of_the_rows():
    module, _ = quantized(CLASSES[1])

    def both(ids):
        rows = module(ids)
        return torch.cat([rows, rows.relu()])

    fused, some = Fused(both), ids()
    assert torch.equal(fused(some), both(some)) and fused.report.counts() == {"fuse_lookup": 1}


def test_debug_checks_the_ids():
    module, _ = quantized(CLASSES[0])
    fused, wanted = Fused(module, debug=True), ids()
    with torch.no_grad():
        assert torch.equal(fused(wanted), module(wanted))
        wanted[0, 0] = ROWS
        with pytest.raises(ValueError, match=f"4 of 40 ids lie outside the table of {ROWS} rows, {ROWS} for one"):
            fused(wanted)
    assert fused.graph.index("ple.checked_ids") < fused.graph.index("ple.dequantized_lookup")


def test_plain_tables_are_not_touched():
    for weight in (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH).bfloat16()):
        assert_left_alone(lambda w, i: F.embedding(i, w) * 2, weight, ids(), because=None)


@pytest.mark.parametrize("cls", CLASSES)
def test_sharded_tables_are_not_touched(cls):
    model = NGrams(ROWS, WIDTH)
    model.rows, _ = quantized(cls, ROWS, WIDTH)
    with fake_mesh(tp=1) as mesh:
        shard_tables(model, mesh)
        assert_left_alone(model, ids(), because=None)


def test_bytes_of_another_meaning_are_not_touched():
    weight = torch.randint(0, 256, (ROWS, WIDTH), dtype=torch.uint8)
    assert_left_alone(lambda w, i: F.embedding(i, w).float() * 0.5, weight, ids(), because=None)


def test_rows_without_a_scale():
    assert_left_alone(lambda w, i: F.embedding(i, w).float(), table(), ids(), because="without a scale")


def test_another_kind_of_e4m3_is_not_touched():
    weight = torch.randn(ROWS, WIDTH).to(torch.float8_e5m2)
    assert_left_alone(lambda w, s, i: w[i].float() * s, weight, scales(1), ids(), because=None)


@pytest.mark.parametrize(
    "function",
    [
        lambda w, s, i: w[i].float() / s,
        lambda w, s, i: w[i].float() * s * s,
        lambda w, s, i: w[i].float() * s + s,
        lambda w, s, i: (w[i].float() * s.bfloat16()).abs(),
        lambda w, s, i: w[i].float() * (s + 1e-3) * s,
    ],
)
def test_other_arithmetic(function):
    fused, some = Fused(function), ids()
    weight, scale = table(), scales(1)
    assert torch.equal(fused(weight, scale, some), function(weight, scale, some))
    # A part of it may be the lookup; the whole never is.
    assert fused.report.counts() == {} or "mul" in fused.graph or "add" in fused.graph or "abs" in fused.graph


def test_a_single_changed_constant_in_nvfp4():
    module, _ = quantized(CLASSES[2], dtype=torch.float32)

    def rows(weight, scale, table_scale, ids):
        packed = weight[ids]
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
        size = (codes & 7).float()
        size = torch.where(size < 4, size * 0.5, torch.where(size < 6, size - 2, size * 2 - 7))
        signed = torch.where(codes < 8, size, -size).unflatten(-1, (-1, 16))
        return (signed * scale[ids].float()[..., None]).flatten(-2) * table_scale

    weights = (module.weight, module.weight_scale, module.weight_scale_2)
    assert_left_alone(rows, *weights, ids(), because="differ from those of the stored values")


def test_a_single_changed_value_where_few_ids_are_probed():
    def rows(weight, scale, ids):
        values = F.embedding(ids, weight).float()
        return torch.where(values == 2.25, 2.5, values) * scale

    assert_left_alone(rows, table(), scales(1), ids(1), because="differ from those of the stored values")


def test_scales_by_other_ids():
    def rows(weight, scale, ids):
        return weight[ids].float() * scale[ids.flip(0)].unsqueeze(-1)

    assert_left_alone(rows, table(), scales(ROWS), ids(), because="without a scale")


def test_a_scale_of_another_table():
    def rows(weight, scale, ids):
        return weight[ids].float() * scale[ids].unsqueeze(-1)

    assert_left_alone(rows, table(), scales(ROWS + 1), ids(), because="not one row for each")


def test_a_double_scale():
    def rows(weight, scale, ids):
        return weight[ids].double() * scale

    assert_left_alone(rows, table(), scales(1, dtype=torch.float64), ids(), because="is rows of float32")


def test_a_computed_table():
    def rows(weight, scale, ids):
        return (weight + 1.0).to(E4M3)[ids].float() * scale

    assert_left_alone(rows, torch.randn(ROWS, WIDTH), scales(1), ids(), because="computed in the graph")


def test_stored_rows_with_another_reader():
    def rows(weight, scale, ids):
        stored = F.embedding(ids, weight).float()
        return stored * scale, stored.sum()

    fused, some = Fused(rows), ids()
    assert torch.equal(fused(table(), scales(1), some)[0], rows(table(), scales(1), some)[0])
    assert fused.report.counts() == {} and "is read by" in fused.reasons[0]


def test_a_trained_scale_keeps_its_gradient():
    weight, scale, some = table(), scales(1).requires_grad_(), ids()

    def rows(weight, scale, ids):
        return F.embedding(ids, weight).float() * scale

    fused = Fused(rows)
    (actual,) = torch.autograd.grad(fused(weight, scale, some).sum(), scale)
    (expected,) = torch.autograd.grad(rows(weight, scale, some).sum(), scale)
    torch.testing.assert_close(actual, expected)
    assert fused.report.counts() == {} and fused.reasons


def test_inside_a_model_with_trained_layers():
    """Rows of a frozen table in a training graph: fused, and the gradients are eager's."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.out = quantized(CLASSES[1], dtype=torch.float32)[0], nn.Linear(WIDTH, 4)

        def forward(self, ids):
            return self.out(self.rows(ids)).square().sum()

    model, some = Model(), ids()
    fused = Fused(model)
    (actual,) = torch.autograd.grad(fused(some), model.out.weight)
    (expected,) = torch.autograd.grad(model(some), model.out.weight)
    assert torch.equal(actual, expected) and fused.report.counts() == {"fuse_lookup": 1}
