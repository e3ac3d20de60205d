"""A sharded lookup equals the lookup in the whole table, byte for byte, on real gloo ranks."""

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from ple_compile.sharding.shard import shard_tables
from tests.sharding.lowered import NGrams, random_table, same_bytes, traced
from tests.sharding.ranks import run_ranks

LOWERINGS = ("eager", "all_reduce", "reduce_scatter", "all_to_all")
HEADS, WIDTH, MAX_TOKENS = 4, 8, 9


def make(rows, dtype, mesh, axis, same_tokens, lowering, example=(7, HEADS)):
    """The sharded module, with one lowering, and the table that it was made from."""
    table = random_table(rows, WIDTH, dtype)
    module = NGrams(1, WIDTH).to("meta")
    module.rows = torch.nn.Embedding(rows, WIDTH, _weight=table, _freeze=True)
    shard_tables(module, mesh, axis, same_tokens=same_tokens)
    assert module.rows.weight.shape[0] == -(-rows // mesh.size())
    if lowering == "eager":
        return module, table
    return traced(module, lowering, torch.zeros(example, dtype=torch.int64), MAX_TOKENS), table


def edge_ids(rows, num_ranks):
    """Both sides of every shard's edge, the first and the last row, to a multiple of HEADS."""
    per_rank = -(-rows // num_ranks)
    edges = [e + d for e in range(0, rows + per_rank, per_rank) for d in (-1, 0, 1)]
    inside = [e for e in (*edges, rows - 1) if 0 <= e < rows]
    return torch.tensor(inside + [0] * (-len(inside) % HEADS)).view(-1, HEADS)[:MAX_TOKENS]


def look_up(call, table, ids):
    with torch.no_grad():
        assert same_bytes(call(ids), table[ids]), (ids.shape, ids.dtype)


def same_tokens_everywhere(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))
    for rows, lowering in itertools.product((101, 5), LOWERINGS):
        call, table = make(rows, torch.bfloat16, mesh, "tp", True, lowering)
        generator = torch.Generator().manual_seed(rows)
        look_up(call, table, edge_ids(rows, num_ranks))
        for tokens in (5, 0, 1, 8):
            look_up(call, table, torch.randint(0, rows, (tokens, HEADS), generator=generator))
            look_up(call, table, torch.randint(0, rows, (tokens, HEADS), generator=generator, dtype=torch.int32))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_same_tokens(num_ranks):
    assert run_ranks(num_ranks, same_tokens_everywhere, num_ranks) == [None] * num_ranks


def every_type(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))
    types = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
    for dtype, lowering in itertools.product(types, LOWERINGS):
        call, table = make(77, dtype, mesh, "tp", True, lowering)
        look_up(call, table, torch.arange(77)[:36].view(-1, HEADS))


def test_every_byte_survives():
    assert run_ranks(2, every_type, 2) == [None] * 2


def own_tokens(rank, num_ranks):
    """Each rank has as many tokens as it has: none, one, up to the limit; then 20 steps of prefill beside decode."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",))
    pairs = [(5, 0), (0, 5), (0, 0), (3, 7), (MAX_TOKENS, 1)]
    counts = [tuple(itertools.islice(itertools.cycle(pair), num_ranks)) for pair in pairs]
    for step in range(20):
        turn = step % num_ranks
        counts.append(tuple(MAX_TOKENS - step % 3 if r == turn else (step + r) % 2 for r in range(num_ranks)))
    for lowering in LOWERINGS:
        call, table = make(101, torch.bfloat16, mesh, "dp", False, lowering)
        generator = torch.Generator().manual_seed(rank)
        look_up(call, table, edge_ids(101, num_ranks))
        for count in counts:
            look_up(call, table, torch.randint(0, 101, (count[rank], HEADS), generator=generator))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_own_tokens(num_ranks):
    assert run_ranks(num_ranks, own_tokens, num_ranks) == [None] * num_ranks


def two_axes(rank, same_tokens):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    who = rank // 2 if same_tokens else rank
    for rows, lowering in itertools.product((101, 6), LOWERINGS):
        call, table = make(rows, torch.bfloat16, mesh, ("dp", "tp"), same_tokens, lowering, (7, 1, HEADS))
        generator = torch.Generator().manual_seed(who)
        for counts in [(5, 0, 2, 1), (0, 5, 0, 9), (0, 0, 0, 0), (3, 7, 8, 4)]:
            look_up(call, table, torch.randint(0, rows, (counts[who], 1, HEADS), generator=generator))


@pytest.mark.parametrize("same_tokens", [True, False])
def test_two_axes(same_tokens):
    assert run_ranks(4, two_axes, same_tokens) == [None] * 4


def ids_outside(rank):
    """What CUDA does too: zeros, and never a padding row."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for lowering in LOWERINGS:
        module = NGrams(5)
        shard_tables(module, mesh)
        table = module.rows.weight[:2].clone()  # on rank 1, rows 3 and 4
        if rank == 1:
            module.rows.weight[2:] = 1.0  # its padding
        call = module if lowering == "eager" else traced(module, lowering, torch.zeros(1, HEADS, dtype=torch.int64))
        with torch.no_grad():
            rows = call(torch.tensor([[4, 5, -1, 2**40]]))
        assert rank == 0 or same_bytes(rows[0, 0], table[1])
        assert rows[0, 0].any() and not rows[0, 1:].any(), (lowering, rows)


def test_ids_outside_the_table():
    assert run_ranks(2, ids_outside) == [None] * 2
