"""Sharded lookups on 2 and 4 GPUs: NCCL, symmetric memory, CUDA graphs, tables on the host."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ple_compile.sharding.shard import shard_tables
from ple_compile.tables import pinning
from tests.sharding.lowered import NGrams, random_table, same_bytes, traced
from tests.sharding.ranks import DIED, run_ranks

ROWS, HEADS, MAX_TOKENS = 1003, 16, 96
LOWERINGS = ("eager", "all_reduce", "reduce_scatter", "all_to_all", "peer")
BACKEND = "cpu:gloo,cuda:nccl"


def gpus(num_ranks):
    return pytest.mark.skipif(torch.cuda.device_count() < num_ranks, reason=f"needs {num_ranks} GPUs")


NUM_RANKS = [pytest.param(n, marks=gpus(n)) for n in (2, 4)]


def run(num_ranks, function, *args, **options):
    return run_ranks(num_ranks, function, *args, backend=BACKEND, **options)


def make(mesh, axis, lowering, dtype=torch.bfloat16, width=160, **settings):
    """(lookup with one lowering, the whole table on the device, the sharded module)."""
    table = random_table(ROWS, width, dtype)
    module = NGrams(1)
    module.rows = nn.Embedding(ROWS, width, _weight=table, _freeze=True)
    shard_tables(module, mesh, axis, **settings)
    example = torch.zeros(7, HEADS, dtype=torch.int64, device="cuda")
    if lowering == "eager":
        return module, table.cuda(), module
    return traced(module, lowering, example, MAX_TOKENS), table.cuda(), module


def draw(tokens, generator):
    return torch.randint(0, ROWS, (tokens, HEADS), generator=generator).cuda()


def edges(num_ranks):
    per_rank = -(-ROWS // num_ranks)
    ids = [e + d for e, d in itertools.product(range(0, ROWS + per_rank, per_rank), (-1, 0, 1)) if 0 <= e + d < ROWS]
    return torch.tensor(ids + [ROWS - 1] * (-len(ids) % HEADS)).view(-1, HEADS).cuda()


def same_tokens(rank, num_ranks):
    mesh = init_device_mesh("cuda", (num_ranks,), mesh_dim_names=("tp",))
    for dtype, width in ((torch.bfloat16, 160), (torch.float8_e4m3fn, 160), (torch.bfloat16, 3)):
        for lowering in LOWERINGS:
            look_up, table, module = make(mesh, "tp", lowering, dtype, width)
            assert module.rows.weight.shape[0] == -(-ROWS // num_ranks) and module.rows.weight.is_cuda
            generator = torch.Generator().manual_seed(1)
            for ids in (edges(num_ranks), *(draw(tokens, generator) for tokens in (1, 0, 64, 3))):
                expected = table.view(torch.uint8)[ids].view(dtype)
                for given in (ids, ids.int()):
                    assert same_bytes(look_up(given), expected), (lowering, dtype, ids.shape)
    dist.barrier()


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_same_tokens(num_ranks):
    assert run(num_ranks, same_tokens, num_ranks) == [None] * num_ranks


def own_tokens(rank, num_ranks):
    axes = {"dp": 2} if num_ranks == 2 else {"dp": 2, "tp": 2}
    mesh = init_device_mesh("cuda", tuple(axes.values()), mesh_dim_names=tuple(axes))
    source = rank // (num_ranks // 2)
    for lowering in LOWERINGS:
        look_up, table, _ = make(mesh, tuple(axes), lowering, same_tokens=num_ranks == 4)
        generator = torch.Generator().manual_seed(source)
        assert same_bytes(look_up(edges(num_ranks)), table[edges(num_ranks)])
        steps = [(MAX_TOKENS - step, 1) if step % 2 else (1, 64 + step) for step in range(20)]
        for counts in [(5, 0), (0, 5), (0, 0), (3, 7), *steps]:
            ids = draw(counts[source], generator)
            assert same_bytes(look_up(ids), table[ids]), (lowering, counts)
    dist.barrier()


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_own_tokens(num_ranks):
    assert run(num_ranks, own_tokens, num_ranks) == [None] * num_ranks


def captured(rank, lowering):
    """One graph, replayed with other ids; nothing in it waits for the device."""
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("dp",))
    look_up, table, _ = make(mesh, "dp", lowering, same_tokens=False)
    generator = torch.Generator().manual_seed(rank)
    ids = draw(64, generator)
    look_up(ids)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    look_up(ids)
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = look_up(ids)
    for _ in range(5):
        ids.copy_(draw(64, generator))
        graph.replay()
        assert same_bytes(rows, table[ids])
    dist.barrier()


@gpus(2)
@pytest.mark.parametrize("lowering", ["peer", "all_reduce", "reduce_scatter"])
def test_cuda_graph(lowering):
    assert run(2, captured, lowering) == [None] * 2


def too_many(rank):
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("dp",))
    module = NGrams(ROWS)
    shard_tables(module, mesh, "dp", same_tokens=False)
    for tokens in (4, MAX_TOKENS + 1 if rank == 1 else 4):
        ids = torch.zeros(tokens, HEADS, dtype=torch.int64, device="cuda")
        traced(module, "all_reduce", ids, MAX_TOKENS)(ids)
    torch.cuda.synchronize()


@gpus(2)
def test_more_tokens_than_the_limit_is_an_error_on_all_ranks():
    told, crowded = run(2, too_many)
    # NCCL's watchdog may end the process, on the same assertion, before it can tell.
    assert told == DIED or "device-side assert" in told
    assert "ValueError" in crowded and "Config.etp_max_tokens" in crowded


def through_the_backend(rank, mode, host):
    """backend="ple" as a user has it; `auto` picks the peer lowering for shards on the device."""
    import ple_compile
    from ple_compile import upstream

    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))
    _, table, module = make(mesh, "tp", "eager", host=host)
    call = torch.compile(lambda ids: module(ids).float() * 2, backend="ple", options={"mode": mode, "strict": True})
    generator = torch.Generator().manual_seed(1)
    ids = draw(64, generator)
    with torch.no_grad():
        for _ in range(4):
            ids.copy_(draw(64, generator))
            rows = call(ids).clone()
            torch.testing.assert_close(rows, table[ids].float() * 2, rtol=0, atol=0, equal_nan=True)
    assert upstream.counters["ple_compile"]["lower_lookup"] == 1
    # Half of the rows lie on the other rank; an all-reduce brings as many again.
    moved = 4 * 64 * HEADS * table[0].nbytes
    assert ple_compile.stats()["bytes_from_other_ranks"] == (moved if host else moved // 2)
    dist.barrier()


@gpus(2)
@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_through_the_backend(mode, host):
    assert run(2, through_the_backend, mode, host) == [None] * 2


def on_the_host(rank, num_ranks):
    """Each rank reads its own rows over the bus; eager code brings its ids to the host and takes rows from there."""
    mesh = init_device_mesh("cuda", (num_ranks,), mesh_dim_names=("tp",))
    for lowering in ("eager", "all_reduce", "reduce_scatter", "all_to_all"):
        look_up, table, module = make(mesh, "tp", lowering, host=True)
        assert not module.rows.weight.is_cuda and pinning.is_page_locked(module.rows.weight)
        generator = torch.Generator().manual_seed(1)
        for tokens in (5, 0, 33):
            ids = draw(tokens, generator)
            assert same_bytes(look_up(ids), table[ids]), (lowering, tokens)
            if lowering == "eager":
                assert same_bytes(look_up(ids.cpu()), table[ids].cpu())
    dist.barrier()


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_host_tables(num_ranks):
    assert run(num_ranks, on_the_host, num_ranks) == [None] * num_ranks


def replicas(rank):
    """Two data-parallel ranks, one host copy: a write by the first shows in the other's lookups."""
    mesh = init_device_mesh("cuda", (2, 1), mesh_dim_names=("dp", "tp"))
    _, table, module = make(mesh, "tp", "eager", host=True, share_host=True)
    ids = edges(1)
    assert same_bytes(module(ids), table[ids])
    dist.barrier()
    if rank == 0:
        module.rows.weight[0] = 3.0
    dist.barrier()
    assert (module(torch.zeros(1, HEADS, dtype=torch.int64, device="cuda")) == 3.0).all()
    dist.barrier()


@gpus(2)
def test_replicas_share_a_host_copy():
    assert run(2, replicas) == [None] * 2


def moved(rank):
    """Moving the model leaves the shard where the other ranks read it."""
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))
    look_up, table, module = make(mesh, "tp", "peer")
    address = module.rows.weight.data_ptr()
    module.cpu()
    module.cuda()
    assert module.rows.weight.data_ptr() == address and module.rows.weight.is_cuda
    module.rows.load_state_dict({"weight": random_table(ROWS, 160, torch.bfloat16, seed=5)})
    dist.barrier()
    ids = edges(2)
    assert same_bytes(look_up(ids), random_table(ROWS, 160, torch.bfloat16, seed=5).cuda()[ids])
    dist.barrier()


@gpus(2)
def test_a_moved_and_reloaded_model():
    assert run(2, moved) == [None] * 2
