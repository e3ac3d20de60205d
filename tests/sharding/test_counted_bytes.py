"""`stats()["bytes_from_other_ranks"]`, on a fake process group: what compiled lookups count, call by call."""

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx

import ple_compile
from ple_compile import Config, pipeline
from ple_compile.ops.sharded_lookup import sharded_lookup
from ple_compile.report import GraphReport
from ple_compile.sharding import traffic
from ple_compile.sharding.topology import Layout
from ple_compile.table_reads import ReadCounter
from tests.sharding.fake import fake_mesh
from tests.sharding.lowered import NGrams

LIMIT, HEADS, ROW_BYTES = 16, 4, 16
OWN = Layout(10, 3, 4, 2, "rows.weight", "0", "1", "3")  # rank 3 of dp=2 x tp=2


@pytest.fixture(autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(rank=3, dp=2, tp=2) as mesh:
        yield mesh


def counted(config: Config, layout: Layout = OWN, tokens: int = 3, peers: bool = False) -> dict[str, int]:
    """What one lookup adds to the counters after the passes of `config`."""
    with FakeTensorMode():
        shard = torch.empty(layout.rows_per_rank, ROW_BYTES // 2, dtype=torch.bfloat16)
        ids = torch.empty(tokens, HEADS, dtype=torch.int64)
        addresses = torch.empty(layout.num_ranks, dtype=torch.int64)
        gm = make_fx(lambda shard, ids, addresses: sharded_lookup(shard, ids, addresses if peers else None, *layout))(
            shard, ids, addresses
        )
    report = GraphReport()
    pipeline.run(gm.graph, config, report, training=False)
    return dict(ReadCounter(report.reads, report.symbols)(()))


@pytest.mark.parametrize("lowering", ["all_reduce", "reduce_scatter", "all_to_all", "peer"])
def test_what_the_lowering_receives(lowering: str) -> None:
    found = counted(Config(etp_lowering=lowering, etp_max_tokens=LIMIT), peers=lowering == "peer")
    received = traffic.received(lowering, OWN, 3, LIMIT, HEADS, ROW_BYTES)
    assert found == {
        "rows_looked_up": 3 * HEADS,
        "host_table_bytes": 0,
        "bytes_from_other_ranks": round(received),
    }
    if lowering == "peer":
        assert received == 3 / 4 * 3 * HEADS * ROW_BYTES


@pytest.mark.parametrize(
    "config",
    [
        Config(lower_lookup=False),
        Config(etp_lowering="peer"),  # no symmetric memory: declined
        Config(inductor={"disabled_passes": "lower_lookup"}),
    ],
)
@pytest.mark.parametrize("tokens", [0, 3])
def test_what_was_not_lowered_counts_as_a_sum_without_padding(config: Config, tokens: int) -> None:
    with torch._inductor.config.patch(config.inductor_patches()):
        found = counted(config, tokens=tokens)
    received = traffic.received("all_reduce", OWN, tokens, max(1, tokens), HEADS, ROW_BYTES)
    assert found["bytes_from_other_ranks"] == received > 0


def test_one_rank_receives_nothing() -> None:
    found = counted(Config(), OWN._replace(rank=0, num_ranks=1, num_copies=1))
    assert found == {"rows_looked_up": 3 * HEADS, "host_table_bytes": 0, "bytes_from_other_ranks": 0}


@torch.no_grad()
def test_through_the_backend_with_symbolic_sizes(mesh: DeviceMesh, no_codegen: None) -> None:
    """Of `all_reduce` where all ranks look up the same ids, bytes follow the tokens of each call."""
    module = NGrams(10)
    ple_compile.shard_tables(module, mesh["tp"], "tp")
    compiled = torch.compile(module, backend="ple", dynamic=True, options={"etp_lowering": "all_reduce"})
    for tokens in (3, 5, 3):
        compiled(torch.zeros(tokens, HEADS, dtype=torch.int64))
    rows, stats = (3 + 5 + 3) * HEADS, ple_compile.stats()
    assert stats["rows_looked_up"] == rows
    assert stats["bytes_from_other_ranks"] == rows * ROW_BYTES  # times 2 * (n - 1) / n, with n = 2 ranks
