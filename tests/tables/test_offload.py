"""offload_tables: the table stays where it is, and so does everything that people do with a module."""

import copy
import gc
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ple_compile.ops import lookup
from ple_compile.tables import hot_rows, pinning
from ple_compile.tables.find import find_tables
from ple_compile.tables.formats import FORMATS
from ple_compile.tables.offload import is_offloaded, offload_tables
from tests.faults import fail_at, out_of_memory


class NGrams(nn.Module):
    """An n-gram embedding with names of its own."""

    def __init__(self, rows=64, width=8, ngram=3, heads=4, embedding=nn.Embedding):
        super().__init__()
        self.register_buffer("seeds", torch.arange(ngram))
        self.register_buffer("moduli", torch.full(((ngram - 1) * heads,), rows // heads))
        self.register_buffer("starts", torch.arange((ngram - 1) * heads))
        self.rows = embedding(rows, width)


class Scaled(nn.Embedding):
    """Like transformers' FP8Embedding: a table and a scale."""

    def __init__(self, rows, width):
        super().__init__(rows, width)
        self.scale = nn.Parameter(torch.ones(1))


class Model(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.block = nn.ModuleDict({"ngrams": NGrams(**settings), "out": nn.Linear(8, 8)})

    @property
    def table(self):
        return self.block["ngrams"].rows


NAME = "block.ngrams.rows.weight"


@pytest.mark.parametrize("ngram, heads", [(2, 1), (2, 2), (2, 8), (3, 1), (3, 8), (4, 2)])
def test_finds_the_table_by_its_owner(ngram, heads):
    model = Model(ngram=ngram, heads=heads)
    (table,) = find_tables(model)
    assert table.name == NAME and table.embedding is model.table and table.owner is model.block["ngrams"]
    assert table.weight is dict(model.named_parameters())[NAME]
    assert find_tables(model.block["ngrams"])[0].name == "rows.weight"


def test_finds_none_where_there_is_none():
    model = Model()
    del model.block["ngrams"].starts
    assert find_tables(model) == [] and find_tables(nn.Embedding(4, 4)) == []


def test_locks_in_place(driver):
    model = Model()
    weight = model.table.weight
    address, value, state = weight.data_ptr(), weight.clone(), list(model.state_dict())
    assert offload_tables(model) == [NAME]
    assert model.table.weight is weight and weight.data_ptr() == address and torch.equal(weight, value)
    assert driver.covers(weight) and is_offloaded(model.table) and isinstance(model.table, nn.Embedding)
    assert list(model.state_dict()) == state and "OffloadedEmbedding(64, 8)" in repr(model)
    ids = torch.tensor([3, 5])
    assert torch.equal(model.table(ids), value[ids])
    assert offload_tables(model) == [NAME]
    assert len(driver.locked) == 1 and type(model.table).__mro__.count(nn.Embedding) == 1


def test_moving_the_model_leaves_the_table(driver):
    model = Model(embedding=Scaled)
    offload_tables(model)
    weight, order = model.table.weight, list(model.state_dict())
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    assert model._apply(torch.clone) is model  # as `.to(device)` does: new memory for everything
    moved = {name for name, p in model.named_parameters() if p.data_ptr() != addresses[name]}
    assert moved == addresses.keys() - {NAME}
    assert model.table.weight is weight and driver.covers(weight) and list(model.state_dict()) == order


def test_moving_to_the_meta_device_lets_go_of_the_memory(driver):
    model = Model()
    offload_tables(model)
    model.to("meta")
    gc.collect()
    assert model.table.weight.is_meta and model.block["out"].weight.is_meta and not driver.locked


def test_memory_again_after_the_meta_device(driver):
    """`to_empty` gives the table host memory, whatever device the rest moves to."""
    model, other = Model(), Model()
    offload_tables(model, gpu_cache_bytes=2560)
    model.to("meta")
    assert not hot_rows.caches()
    model.to_empty(device="cpu")
    model.load_state_dict(other.state_dict())
    assert torch.equal(model.table.weight, other.table.weight)
    assert driver.covers(model.table.weight) and len(hot_rows.caches()) == 1


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_changing_the_type_leaves_the_bytes_of_a_quantised_table(driver, format, dtype):
    model = Model(embedding=lambda rows, width: FORMATS[format](rows, 2 * width, dtype=torch.float32))
    offload_tables(model)
    table, kind, address = model.table, model.table.weight.dtype, model.table.weight.data_ptr()
    model.to(dtype)
    assert table.weight.dtype == kind and table.weight.data_ptr() == address and table.activation_dtype == dtype


def test_changing_the_type_converts_and_locks_again(driver):
    model = Model()
    offload_tables(model)
    expected = model.table.weight.detach().bfloat16()
    parameter = model.table.weight
    parameter.grad = torch.ones_like(parameter)
    model.to(torch.bfloat16)
    assert parameter.grad.dtype == torch.bfloat16
    gc.collect()
    assert model.table.weight is parameter and torch.equal(parameter, expected)
    assert driver.covers(parameter) and len(driver.locked) == 1
    assert model.block["out"].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(driver, assign):
    model, other = Model(), Model()
    offload_tables(model)
    address = model.table.weight.data_ptr()
    model.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(model.table.weight, other.table.weight)
    assert driver.covers(model.table.weight)
    assert (model.table.weight.data_ptr() == address) != assign


def test_meta_table_gets_host_memory_and_is_loaded(driver):
    with torch.device("meta"):
        model = Model()
    offload_tables(model)
    weight = model.table.weight
    assert weight.device.type == "cpu" and driver.covers(weight)
    assert weight.untyped_storage().nbytes() == weight.nbytes and model.block["out"].weight.is_meta
    model.to_empty(device="cpu")
    assert model.table.weight is weight
    other = Model()
    model.load_state_dict(other.state_dict())
    assert torch.equal(weight, other.table.weight) and driver.covers(weight)


def test_copies_are_independent_and_not_locked(driver):
    model = Model()
    offload_tables(model)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert is_offloaded(clone.table) and torch.equal(clone.table.weight, model.table.weight)
        assert clone.table.weight.data_ptr() != model.table.weight.data_ptr()
        assert not pinning.is_page_locked(clone.table.weight)
        offload_tables(clone)
        assert driver.covers(clone.table.weight)


def test_shared_memory_is_locked_where_it_lies(driver):
    model = Model()
    model.table.weight.share_memory_()
    address = model.table.weight.data_ptr()
    offload_tables(model)
    assert model.table.weight.is_shared() and model.table.weight.data_ptr() == address
    assert driver.covers(model.table.weight)
    model.share_memory()


def test_shared_memory_after_offloading_is_refused(driver):
    model = Model()
    offload_tables(model)
    with pytest.raises(ValueError, match="before offload_tables"):
        model.share_memory()


def test_a_table_tied_between_two_layers_is_one(driver):
    with torch.device("meta"):
        model = nn.ModuleList([NGrams(), NGrams()])
        model[1].rows.weight = model[0].rows.weight
    offload_tables(model)
    assert model[1].rows.weight is model[0].rows.weight and len(driver.locked) == 1


def cache_of(model):
    return hot_rows.cache_of(model.table.weight, torch.device("cpu"))


def warm(model):
    cache, ids = cache_of(model), torch.arange(64)
    cache.prepared(torch.empty(64, 8, dtype=model.table.weight.dtype), model.table.weight, ids).fetch()
    assert cache.holds(ids).any()
    return cache


def test_a_cache_follows_the_table(driver):
    model, other, ids = Model(), Model(), torch.arange(64)
    offload_tables(model, gpu_cache_bytes=2560)
    cache = warm(model)
    assert cache.rows.nbytes + cache.words.nbytes <= 2560 + 8 * 256
    model.load_state_dict(other.state_dict())
    assert cache_of(model) is cache and not cache.holds(ids).any()
    warm(model)
    with torch.no_grad():
        model.table.weight.add_(1)
    assert cache_of(model).is_current() and not cache.holds(ids).any()
    model.load_state_dict(other.state_dict(), assign=True)
    assert cache_of(model) is not cache and not cache_of(model).holds(ids).any()
    warm(model)
    model.bfloat16()
    assert cache_of(model).rows.shape[1] == 16 and not cache_of(model).holds(ids).any()
    offload_tables(model)
    assert cache_of(model) is None
    assert len(hot_rows._CACHES) == 0


def test_offloading_again_empties_the_cache_where_it_lies(driver):
    """Graphs that were captured with it read it at every replay."""
    model = Model()
    offload_tables(model, gpu_cache_bytes=2560)
    cache = warm(model)
    words, rows = cache.words.data_ptr(), cache.rows.data_ptr()
    model.table.weight.data[3] = 7
    offload_tables(model, gpu_cache_bytes=2560)
    assert cache_of(model) is cache and not cache.holds(torch.arange(64)).any()
    assert (cache.words.data_ptr(), cache.rows.data_ptr()) == (words, rows)


@pytest.mark.parametrize("nbytes", [0, 5120])
def test_a_replaced_cache_stays_for_the_graphs_captured_with_it(driver, nbytes):
    model, ids = Model(), torch.arange(64)
    offload_tables(model, gpu_cache_bytes=2560)
    cache = warm(model)
    cache._captured = True
    offload_tables(model, gpu_cache_bytes=nbytes)
    assert cache_of(model) is not cache and cache in hot_rows.caches() and not cache.holds(ids).any()
    cache.prepared(torch.empty(64, 8), model.table.weight, ids).fetch()  # as a replay does
    assert cache.holds(ids).any()
    with torch.no_grad():
        model.table.weight.add_(1)
    hot_rows.drop_outdated(model.table.weight)
    assert not cache.holds(ids).any()
    del model
    gc.collect()
    assert not hot_rows.caches() and not hot_rows._RETIRED


def test_tables_that_are_parts_of_one_tensor_have_a_cache_each(driver):
    both, model = torch.randn(128, 8), nn.ModuleList([NGrams(), NGrams()])
    model[0].rows.weight, model[1].rows.weight = nn.Parameter(both[:64]), nn.Parameter(both[64:])
    offload_tables(model, gpu_cache_bytes=6400)
    first, second = (hot_rows.cache_of(part.rows.weight, torch.device("cpu")) for part in model)
    assert first is not second and {first, second} == set(hot_rows.caches()) and len(driver.locked) == 1
    # The storage of a CUDA view begins with the table.
    view = torch.frombuffer(both[64:].numpy().data, dtype=torch.float32).view(64, 8)
    assert hot_rows.cache_of(view, torch.device("cpu")) is second


def test_a_tied_table_has_the_whole_cache_memory(driver):
    model = nn.ModuleList([NGrams(), NGrams()])
    model[1].rows.weight = model[0].rows.weight
    offload_tables(model, gpu_cache_bytes=6400)
    (cache,) = hot_rows.caches()
    assert cache.num_sets == 20


def test_two_tables_share_the_cache_memory(driver):
    model = nn.ModuleList([NGrams(), NGrams()])
    offload_tables(model, gpu_cache_bytes=6400)
    caches = [hot_rows.cache_of(part.rows.weight, torch.device("cpu")) for part in model]
    assert [cache.num_sets for cache in caches] == [10, 10]  # of 8 rows of 32 + 8 bytes


def test_refusals(driver, monkeypatch):
    for size in (-1, 6400.0, float("nan"), float("inf"), "2GB", None, True):
        with pytest.raises(ValueError, match=f"gpu_cache_bytes is {size!r}; .* whole number"):
            offload_tables(Model(), gpu_cache_bytes=size)
    with pytest.raises(ValueError, match=f"{2**45} bytes make .* pass 320 to 85899345600 bytes"):
        offload_tables(Model(), gpu_cache_bytes=2**45)
    with pytest.raises(ValueError, match="100 bytes make 0 sets"):
        offload_tables(Model(), gpu_cache_bytes=100)
    with pytest.raises(ValueError, match="Linear has no n-gram table"):
        offload_tables(nn.Linear(2, 2))
    model = Model()
    model.table.weight = nn.Parameter(torch.randn(8, 64).T)
    with pytest.raises(ValueError, match="contiguous"):
        offload_tables(model)
    model = Model()
    parametrize.register_parametrization(model.table, "weight", nn.Identity())
    with pytest.raises(ValueError, match=f"{NAME} is no parameter of its ParametrizedEmbedding; .*parametrization"):
        offload_tables(model)
    model = Model()
    driver.refuse_after = 0
    with pytest.raises(ValueError, match="refused"):
        offload_tables(model)
    assert not is_offloaded(model.table)
    monkeypatch.setattr(pinning, "available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"):
        offload_tables(model)


def tables_of(model):
    return [(part.rows.weight, part.rows.weight.data_ptr(), type(part.rows)) for part in model]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_refusal_leaves_every_table_as_it_was(driver, device):
    with torch.device(device):
        model = nn.ModuleList([NGrams(), NGrams()])
    before, one_table = tables_of(model), 64 * 8 * 4
    driver.refuse_after = one_table
    with pytest.raises(ValueError, match="page-locking 1.rows.weight was refused"):
        offload_tables(model)
    assert tables_of(model) == before and not driver.locked and not pinning._LOCKED
    driver.refuse_after = None
    assert len(offload_tables(model)) == 2 and sum(driver.locked.values()) == 2 * one_table


def test_a_cache_that_is_too_small_for_the_second_table_changes_nothing(driver):
    model = nn.ModuleList([NGrams(), NGrams(width=64)])
    before = tables_of(model)
    with pytest.raises(ValueError, match="400 bytes make 0 sets"):
        offload_tables(model, gpu_cache_bytes=800)
    assert tables_of(model) == before and not driver.locked


def test_no_room_for_the_second_cache_leaves_none(driver, monkeypatch):
    model = nn.ModuleList([NGrams(), NGrams()])
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        fail_at(patch, hot_rows, "attach", 2, out_of_memory)
        offload_tables(model, gpu_cache_bytes=6400)
    assert all(is_offloaded(part.rows) for part in model) and len(driver.locked) == 2 and not hot_rows.caches()
    model.bfloat16()
    assert not hot_rows.caches()
    offload_tables(model, gpu_cache_bytes=6400)
    assert len(hot_rows.caches()) == 2


def test_no_room_for_another_type_leaves_the_table_and_its_cache(driver, monkeypatch):
    model = Model()
    offload_tables(model, gpu_cache_bytes=6400)
    before, convert = model.table.weight.clone(), Tensor.to
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(Tensor, "to", lambda self, *to: full() if self.shape[:1] == (64,) else convert(self, *to))
        model.bfloat16()
    assert torch.equal(model.table.weight, before) and pinning.is_page_locked(model.table.weight)
    assert len(hot_rows.caches()) == 1


def full():
    raise out_of_memory()


def test_swapped_data_is_refused_not_read(driver):
    """The lookup itself looks at the memory it is about to read."""
    model = Model()
    offload_tables(model)
    ids = torch.zeros(2, dtype=torch.int64, device="meta")  # any device but the table's
    lookup.check_arguments(model.table.weight, ids)
    model.table.weight.data = torch.randn(64, 8)
    with pytest.raises(ValueError, match="pageable"):
        lookup.check_arguments(model.table.weight, ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_transformers_fp8_module(driver, dtype):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    model, ids = Model(embedding=fp8.FP8Embedding), torch.arange(64)
    model.table.weight.data = torch.randn(64, 8).to(torch.float8_e4m3fn)
    model.table.weight_scale.data = torch.tensor([0.37], dtype=dtype)
    expected, state = model.table(ids), model.state_dict()
    offload_tables(model)
    assert isinstance(model.table, fp8.FP8Embedding) and driver.covers(model.table.weight)
    assert model.table(ids).dtype == dtype and torch.equal(model.table(ids), expected)
    assert model.state_dict().keys() == state.keys()
    weight, scale = model.table.weight, model.table.weight_scale.data_ptr()
    model._apply(torch.clone)  # as `.to(device)` does
    assert model.table.weight is weight and model.table.weight_scale.data_ptr() != scale
    assert torch.equal(copy.deepcopy(model).table(ids), expected)


def test_the_scale_of_transformers_fp8_module_comes_to_the_rows(driver):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")

    class Elsewhere:
        """A scale that nothing can be computed with before it has moved."""

        def to(self, device):
            assert device.type == "cpu"
            return torch.tensor([0.5])

    model = Model(embedding=fp8.FP8Embedding)
    offload_tables(model)
    model.table.weight.data.view(torch.uint8).fill_(0x38)  # ones
    model.table._parameters["weight_scale"] = Elsewhere()
    assert (model.table(torch.arange(3)) == 0.5).all()


def test_transformers_model_saves_and_loads(driver, tmp_path):
    pytest.importorskip("transformers")
    from tests.whole_graph.tiny_qwen4exp import make_model

    model = make_model(split_ngram_parts=4, ple_layer_ids=[1, 3])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = offload_tables(model)
    assert names == [f"model.layers.{i}.ple.ple_embedding.ngram_embedding.weight" for i in (0, 2)]
    with torch.no_grad():
        model(torch.tensor([[5, 3, 9]]))
    model.save_pretrained(tmp_path)
    reloaded = type(model).from_pretrained(tmp_path).state_dict()
    assert reloaded.keys() == state.keys() and all(torch.equal(reloaded[name], state[name]) for name in state)
