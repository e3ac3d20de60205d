"""shard_tables on fake groups: which rows a rank keeps, what it refuses, and what a module does afterwards."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ple_compile.sharding import shard
from ple_compile.sharding.embedding import ShardedLookup
from ple_compile.sharding.shard import shard_tables
from ple_compile.sharding.topology import Sharding
from ple_compile.tables.find import find_tables
from ple_compile.tables.formats import FP8Embedding
from ple_compile.tables.offload import offload_tables
from tests.faults import fail_at, out_of_memory
from tests.sharding.fake import fake_mesh
from tests.sharding.lowered import NGrams, random_table, same_bytes
from tests.tables.conftest import driver  # noqa: F401


def with_table(table):
    module = NGrams(1)
    module.rows = nn.Embedding(*table.shape, _weight=table, _freeze=True)
    return module


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 101])
@pytest.mark.parametrize("axis", ["tp", ("dp", "tp")])
def test_ranks_keep_contiguous_rows_and_no_more_memory(rows, axis):
    table, kept = random_table(rows, 3, torch.bfloat16), []
    num_ranks = 2 if axis == "tp" else 4
    for rank in range(num_ranks):
        module = with_table(table)
        with fake_mesh(rank=rank, dp=2, tp=2) as mesh:
            assert shard_tables(module, mesh, axis) == ["rows.weight"]
            per_rank = -(-rows // num_ranks)
            assert module.rows.weight.untyped_storage().nbytes() == per_rank * 3 * 2
            layout = module.rows.layout
            kept.append(module.rows.weight[: layout.num_local_rows])
            assert not module.rows.weight[layout.num_local_rows :].view(torch.uint8).any()
            assert module.rows.num_embeddings == rows and isinstance(module.rows, nn.Embedding)
            assert find_tables(module)[0].embedding is module.rows
    assert same_bytes(torch.cat(kept), table)


def test_the_whole_table_is_released():
    module = NGrams(1000)
    whole = weakref.ref(module.rows.weight.untyped_storage())
    with fake_mesh(tp=4) as mesh:
        shard_tables(module, mesh)
        assert whole() is None


def test_a_table_on_the_meta_device_gets_its_rows_only():
    with torch.device("meta"):
        module = NGrams(100)
    with fake_mesh(rank=1, tp=4) as mesh:
        shard_tables(module, mesh)
        assert module.rows.weight.device.type == "cpu" and module.rows.weight.untyped_storage().nbytes() == 25 * 16
        assert module.seeds.is_meta
        table = random_table(100, 8, torch.bfloat16)
        module.rows.load_state_dict({"weight": table})
        assert same_bytes(module.rows.weight, table[25:50])


def test_a_quantised_table_whose_scales_come_later():
    module = NGrams(7, embedding=FP8Embedding)
    with fake_mesh(tp=1) as mesh:
        shard_tables(module, mesh)
        with pytest.raises(ValueError, match="never loaded"):
            module.rows(torch.tensor([0]))
        module.rows.weight_scale.data.fill_(1)
        module.rows(torch.tensor([0]))


def test_layouts():
    def layout(axis, axes, **settings):
        module = NGrams(7)
        with fake_mesh(rank=5, **axes) as mesh:
            shard_tables(module, mesh, axis, **settings)
            found = module.rows.layout
            assert found.table == "rows.weight"
            return found.rank, found.num_ranks, found.num_copies, found.source, found.copy

    two_by_four = {"dp": 2, "tp": 4}
    assert layout("tp", two_by_four) == (1, 4, 4, 0, 1)
    assert layout("tp", two_by_four, same_tokens=False) == (1, 4, 1, 1, 0)
    assert layout(("dp", "tp"), two_by_four) == (5, 8, 4, 1, 1)
    assert layout(("dp", "tp"), two_by_four, same_tokens=False) == (5, 8, 1, 5, 0)
    assert layout(("dp", "tp"), {"pp": 2, "dp": 2, "tp": 2}) == (1, 4, 2, 0, 1)


@pytest.mark.parametrize(
    "settings, axes, message",
    [
        ({"axis": ()}, {"tp": 2}, "name one mesh axis"),
        ({"axis": ("a", "b", "c")}, {"tp": 2}, "name one mesh axis"),
        ({"axis": ("tp", "tp")}, {"tp": 2}, "name one mesh axis"),
        ({"axis": "ep"}, {"dp": 2, "tp": 2}, "'ep' is none of the mesh's"),
        ({"axis": ("tp", "dp")}, {"dp": 2, "tp": 2}, "data-parallel axis first"),
        ({"share_host": True}, {"dp": 2, "tp": 2}, "set host=True"),
        ({"host": True}, {"dp": 2, "tp": 2}, "in host memory anyway"),
    ],
)
def test_settings_without_meaning_are_refused(settings, axes, message):
    with fake_mesh(**axes) as mesh, pytest.raises(ValueError, match=message):
        shard_tables(NGrams(8), mesh, **settings)


class CudaMesh:
    """What `Sharding.check` looks at."""

    device_type, mesh_dim_names = "cuda", ("dp", "tp")


@pytest.mark.parametrize("axis", ["tp", "dp", ("dp", "tp")])
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("same_tokens", [False, True])
def test_where_rows_lie_and_over_what_they_are_split_are_independent(axis, host, same_tokens):
    Sharding(axis=axis, host=host, same_tokens=same_tokens).check(CudaMesh())


def test_replicas_share_host_memory_only_where_there_are_replicas():
    Sharding(axis="tp", host=True, share_host=True).check(CudaMesh())
    with pytest.raises(ValueError, match="no two ranks hold the same rows"):
        Sharding(axis=("dp", "tp"), host=True, share_host=True).check(CudaMesh())


class OwnGather(nn.Embedding):
    def forward(self, input):
        return self.weight[input]


class Scaled(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * 2


def test_tables_that_cannot_be_sharded_are_refused(driver):  # noqa: F811
    with fake_mesh(tp=2) as mesh:
        with pytest.raises(ValueError, match="Linear has no n-gram table"):
            shard_tables(nn.Linear(2, 2), mesh)
        module = NGrams(8)
        module.rows.weight = nn.Parameter(DTensor.from_local(torch.zeros(8, 4), mesh, [Shard(1)]))
        with pytest.raises(ValueError, match="DTensor already.*splits it by columns"):
            shard_tables(module, mesh)
        module = NGrams(8)
        module.rows.max_norm = 1.0
        with pytest.raises(ValueError, match="max_norm"):
            shard_tables(module, mesh)
        with pytest.raises(ValueError, match="OwnGather.*super"):
            shard_tables(NGrams(8, embedding=OwnGather), mesh)
        module = NGrams(8)
        offload_tables(module)
        with pytest.raises(ValueError, match="in place of offload_tables"):
            shard_tables(module, mesh)
        module = NGrams(8)
        shard_tables(module, mesh)
        with pytest.raises(ValueError, match="sharded already"):
            shard_tables(module, mesh)


def test_no_room_for_the_second_shard_leaves_every_table_whole(monkeypatch):
    modules = nn.ModuleList([NGrams(8), NGrams(6)])
    before = [(type(m.rows), m.rows.weight, m.rows.weight.clone()) for m in modules]
    with fake_mesh(tp=2) as mesh:
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
            fail_at(patch, shard, "_fill", 2, out_of_memory)
            shard_tables(modules, mesh)
        for module, (kind, weight, values) in zip(modules, before):
            assert type(module.rows) is kind and module.rows.weight is weight and torch.equal(weight, values)
        assert len(shard_tables(modules, mesh)) == 2


def test_transformers_plan_for_the_table_is_by_columns():
    """The case that the DTensor message names."""
    config = pytest.importorskip("transformers.models.qwen4_exp.configuration_qwen4_exp").Qwen4ExpTextConfig
    plan = config.base_model_tp_plan
    assert [plan[name] for name in plan if name.endswith("ngram_embedding")] in (
        ["embedding_colwise"],
        ["colwise_gather_output"],
    )


def test_classes_that_compute_on_the_rows_still_do():
    table = torch.randn(6, 4)
    with fake_mesh(tp=1) as mesh:
        module = NGrams(6, 4, torch.float32, Scaled)
        module.rows.weight.data.copy_(table)
        shard_tables(module, mesh)
        assert type(module.rows).__mro__[1:4] == (Scaled, ShardedLookup, nn.Embedding)
        assert torch.equal(module.rows(torch.tensor([5, 0])), table[[5, 0]] * 2)

        module = NGrams(6, 16, torch.float32)
        module.rows = FP8Embedding(6, 16)
        module.rows.weight.data.view(torch.uint8).random_(0, 120)
        module.rows.weight_scale.data.fill_(0.5)
        expected = module.rows(torch.arange(6))
        shard_tables(module, mesh)
        assert torch.equal(module.rows(torch.arange(6)), expected)


def test_transformers_model_looks_up_as_before():
    pytest.importorskip("transformers")
    from tests.whole_graph.tiny_qwen4exp import make_model

    model, ids = make_model(), torch.tensor([[5, 3, 9, 9, 2]])
    with torch.no_grad(), fake_mesh(tp=1) as mesh:
        expected = model(ids).logits
        assert [name.rpartition(".")[0] for name in shard_tables(model, mesh)] == [
            name for name, module in model.named_modules() if isinstance(module, ShardedLookup)
        ]
        assert torch.equal(model(ids).logits, expected)


def test_a_table_tied_between_two_layers_is_one():
    model = nn.ModuleList([NGrams(8), NGrams(8)])
    model[1].rows.weight = model[0].rows.weight
    with fake_mesh(tp=2) as mesh:
        assert shard_tables(model, mesh) == ["0.rows.weight", "1.rows.weight"]
        assert model[1].rows.weight is model[0].rows.weight and model[1].rows.weight.shape[0] == 4


def test_moving_the_model_leaves_the_shard():
    module = NGrams(8)
    with fake_mesh(tp=2) as mesh:
        shard_tables(module, mesh)
        address, names = module.rows.weight.data_ptr(), list(module.state_dict())
        module._apply(torch.clone)  # as `.to(device)` does: new memory for everything
        assert module.rows.weight.data_ptr() == address and list(module.state_dict()) == names
        with pytest.raises(ValueError, match="sharded as torch.bfloat16.*float32 before shard_tables"):
            module.float()
        assert module.rows.weight.dtype == torch.bfloat16


def test_a_sharded_table_is_frozen():
    module = NGrams(8)
    with fake_mesh(tp=2) as mesh:
        shard_tables(module, mesh)
        assert not module.rows.weight.requires_grad
        module.requires_grad_(True)
        with pytest.raises(ValueError, match="cannot be trained"):
            module(torch.zeros(1, 4, dtype=torch.int64))


def test_state_dict_holds_a_row_sharded_view():
    table = random_table(5, 4, torch.bfloat16)
    module = with_table(table)
    with fake_mesh(rank=1, tp=2) as mesh:
        shard_tables(module, mesh)
        saved = module.state_dict()["rows.weight"]
        assert isinstance(saved, DTensor) and saved.shape == (5, 4) and saved.placements == (Shard(0),)
        assert saved.to_local().data_ptr() == module.rows.weight.data_ptr() and saved.to_local().shape == (2, 4)
        other = with_table(torch.zeros(5, 4, dtype=torch.bfloat16))
        shard_tables(other, mesh)
        other.load_state_dict(module.state_dict())
        assert same_bytes(other.rows.weight, module.rows.weight)
        assert not copy.deepcopy(other).load_state_dict(module.state_dict()).missing_keys


@pytest.mark.parametrize("shape", [(4, 4), (5, 3)])
def test_a_table_of_another_shape_is_not_loaded(shape):
    module = with_table(random_table(5, 4, torch.bfloat16))
    with fake_mesh(tp=2) as mesh:
        shard_tables(module, mesh)
        with pytest.raises(RuntimeError, match="rows.weight has shape"):
            module.load_state_dict({**NGrams(1).state_dict(), "rows.weight": torch.zeros(shape)})
        with pytest.raises(RuntimeError, match="is sharded as"):
            columns = DTensor.from_local(torch.zeros(5, 2), mesh, [Shard(1)])
            module.load_state_dict({**NGrams(1).state_dict(), "rows.weight": columns})
        with pytest.raises(RuntimeError, match="Missing key.*rows.weight"):
            module.load_state_dict({k: v for k, v in NGrams(1).state_dict().items() if k != "rows.weight"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool])
def test_ids_of_another_type_are_refused(dtype):
    with fake_mesh(tp=2) as mesh:
        module = NGrams(20)
        shard_tables(module, mesh)
        with pytest.raises(ValueError, match=f"by int32 or int64 ids, not {dtype}"):
            module(torch.zeros(3, dtype=dtype))


def test_axes_may_be_a_list():
    with fake_mesh(dp=2, tp=2) as mesh:
        module = NGrams(20)
        shard_tables(module, mesh, ["dp", "tp"])
        assert module.rows.layout.num_ranks == 4
