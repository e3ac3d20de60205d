"""Every lowering through Inductor's own code generation, on two real ranks."""

import functools

import torch
from torch.distributed.device_mesh import init_device_mesh

from ple_compile import upstream
from ple_compile.sharding.shard import shard_tables
from tests.sharding.lowered import NGrams, lower, random_table, same_bytes
from tests.sharding.ranks import run_ranks


def through_inductor(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    table = random_table(21, 8, torch.bfloat16)
    results = {}
    for lowering in ("all_reduce", "reduce_scatter", "all_to_all"):
        module = NGrams(1)
        module.rows = torch.nn.Embedding(21, 8, _weight=table, _freeze=True)
        shard_tables(module, mesh, "dp", same_tokens=False)

        class Pass(upstream.CustomGraphPass):
            def __call__(self, graph, lowering=lowering):
                lower(graph, lowering, max_tokens=8)

            def uuid(self):
                return None  # keeps Inductor from taking the graph of another lowering out of its cache

        backend = functools.partial(upstream.compile_fx, config_patches={"post_grad_custom_pre_pass": Pass()})

        torch._dynamo.reset()
        call = torch.compile(
            lambda ids, module=module: module(ids).view(torch.int16) + 1, backend=backend, dynamic=True
        )
        generator = torch.Generator().manual_seed(rank)
        with torch.no_grad():
            for tokens in (4, 7 - rank):
                ids = torch.randint(0, 21, (tokens, 4), generator=generator)
                results[lowering, tokens] = same_bytes(call(ids), table[ids].view(torch.int16) + 1)
    return results


def test_through_inductor():
    for results in run_ranks(2, through_inductor):
        assert len(results) == 6 and all(results.values()), results
