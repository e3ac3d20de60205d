"""load_tables on several ranks: each reads its own rows, and lookups find all of them."""

import copy

import pytest
import torch

from ple_compile.tables import load as load_module
from ple_compile.tables.formats import FORMATS
from ple_compile.tables.load import load_tables
from tests.checkpoints import table_rows, write_checkpoint
from tests.sharding.fake import fake_mesh
from tests.sharding.ranks import run_ranks
from tests.tables.test_load import BASE, ROWS, WIDTH, Model
from tests.tables.test_load_quantized import write_quantized


def load_rows(rank, directory, sharded_before):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from ple_compile.sharding.shard import shard_tables
    from ple_compile.tables import load as load_module

    read, read_rows = [], load_module.read_rows

    def recorded(part, start, stop, into):
        read.append((part.name, start, stop))
        read_rows(part, start, stop, into)

    load_module.read_rows = recorded
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = Model()
    if sharded_before:
        shard_tables(model, mesh)
        load_module.load_tables(model, directory)
    else:
        load_module.load_tables(model, directory, mesh)
    dist.barrier()
    rows = model.table(torch.arange(ROWS)).detach()
    return rows.view(torch.uint8).numpy(), read, type(model.table).__name__


@pytest.mark.parametrize("ranks, sharded_before", [(2, False), (3, True)])
def test_each_rank_reads_its_own_rows(tmp_path, ranks, sharded_before):
    write_checkpoint(tmp_path, ROWS, WIDTH, num_parts=7, num_files=2, base=BASE)
    results = run_ranks(ranks, load_rows, tmp_path, sharded_before)
    expected = table_rows(0, ROWS, WIDTH).view(torch.uint8)
    assert all(torch.equal(torch.from_numpy(rows), expected) for rows, _, _ in results)
    rows = [(name, row) for _, read, _ in results for name, start, stop in read for row in range(start, stop)]
    assert len(rows) == len(set(rows)) == ROWS


@pytest.mark.parametrize("name", ["fp8", "fp8_row", "nvfp4"])
def test_quantised_tables(tmp_path, name):
    expected = write_quantized(tmp_path, FORMATS[name], 4)(torch.arange(ROWS))
    results = run_ranks(2, load_rows, tmp_path, False)
    for rows, _, kind in results:
        assert kind == f"Sharded{FORMATS[name].__name__}"
        assert torch.equal(torch.from_numpy(rows), expected.view(torch.uint8))


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_checkpoint_into_a_plain_model_in_memory(tmp_path, monkeypatch, name):
    expected = write_quantized(tmp_path, FORMATS[name])
    model = Model(device="cpu")
    monkeypatch.delattr(torch.nn.Module, "to_empty")  # no rank has memory for the whole table
    with fake_mesh(tp=1) as mesh:
        load_tables(model, tmp_path, mesh)
        assert torch.equal(model.table(torch.arange(ROWS)), expected(torch.arange(ROWS)))


def quantise_while_loading(rank, directory, format):
    from torch.distributed.device_mesh import init_device_mesh

    load_tables(Model(), directory, init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), format)


@pytest.mark.parametrize("format", ["fp8", "mmap"])
def test_what_a_mesh_does_not_go_with(tmp_path, format):
    write_checkpoint(tmp_path, ROWS, WIDTH, num_parts=7, num_files=2, base=BASE)
    (text,) = run_ranks(1, quantise_while_loading, tmp_path, format)
    assert f"format='{format}' with a mesh; quantise once with quantize_tables" in text


def contents(model):
    """All that the modules are and hold."""
    return [
        (m, type(m), dict(vars(m)), *(dict(d) for d in (m._parameters, m._buffers, m._modules)))
        for m in model.modules()
    ]


def unchanged(model, before):
    return all(
        kind is type(module) and vars(module).keys() == attributes.keys()
        and all(a is b for a, b in zip(vars(module).values(), attributes.values()))
        and all(a is b for d, e in zip(rest, (module._parameters, module._buffers, module._modules))
                for a, b in zip(d.values(), e.values(), strict=True))
        for module, kind, attributes, *rest in before
    )  # fmt: skip


@pytest.mark.parametrize("name", [None, *FORMATS])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_failed_load_leaves_the_model_as_it_was(tmp_path, monkeypatch, name, device):
    if name is None:
        write_checkpoint(tmp_path, ROWS, WIDTH, num_parts=3, base=BASE)
    else:
        write_quantized(tmp_path, FORMATS[name], 3)
    model = Model(device=device)
    before, state = contents(model), copy.deepcopy(model.table.state_dict())

    def cut_off(*_):
        raise ValueError("the file was cut off")

    with fake_mesh(tp=1) as mesh, monkeypatch.context() as patch, pytest.raises(ValueError, match="was cut off"):
        patch.setattr(load_module, "fill", cut_off)
        load_tables(model, tmp_path, mesh)
    assert unchanged(model, before) and type(model.table) is torch.nn.Embedding
    assert device == "meta" or torch.equal(model.table.weight, state["weight"])
    with fake_mesh(tp=1) as mesh:
        load_tables(model, tmp_path, mesh)
        assert model.table(torch.arange(ROWS)).isfinite().all() and not unchanged(model, before)


def load_with_a_fault(rank, directory, where):
    """Rank 1 finds a fault, in the checkpoint or while it reads."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from ple_compile.tables import load as load_module

    def fault(*_):
        raise OSError("disk on fire")

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model, original = Model(), getattr(load_module, where)
    before = contents(model)
    if rank == 1:
        setattr(load_module, where, fault)
    try:
        load_module.load_tables(model, directory, mesh)
    except (ValueError, OSError) as error:
        text = str(error)
    assert unchanged(model, before)
    setattr(load_module, where, original)
    load_module.load_tables(model, directory, mesh)  # they are in step again
    return text, model.table(torch.arange(ROWS)).view(torch.uint8).numpy()


@pytest.mark.parametrize("where", ["Checkpoint", "fill"])
def test_a_fault_of_one_rank_stops_all(tmp_path, where):
    write_checkpoint(tmp_path, ROWS, WIDTH, num_parts=7, num_files=2, base=BASE)
    results = run_ranks(3, load_with_a_fault, tmp_path, where)
    told = "load_tables: rank 1 failed, so this one has stopped too: OSError: disk on fire"
    assert [text for text, _ in results] == [told, "disk on fire", told]
    expected = table_rows(0, ROWS, WIDTH).view(torch.uint8)
    assert all(torch.equal(torch.from_numpy(rows), expected) for _, rows in results)
