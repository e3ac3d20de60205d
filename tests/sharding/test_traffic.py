"""docs/scaling.md: its formulas against messages counted on fake groups of up to 1,024 ranks; its tables."""

import pathlib

import pytest
import torch

from benchmarks import etp_traffic
from ple_compile.sharding import traffic
from ple_compile.sharding.shard import shard_tables
from tests.sharding.fake import fake_mesh
from tests.sharding.lowered import NGrams
from tests.sharding.simulation import simulate

TOPOLOGIES = [(1, 2), (1, 4), (1, 8), (1, 16), (2, 2), (2, 8), (4, 2), (4, 8), (16, 8), (128, 8)]
TOKENS, HEADS, ROW_BYTES, RANKS_PER_NODE = 16, 4, 32, 8


def layout_of(dp, tp, rank, same_tokens=True):
    with fake_mesh(rank=rank, dp=dp, tp=tp) as mesh:
        module = NGrams(4 * dp * tp)
        shard_tables(module, mesh, ("dp", "tp"), same_tokens=same_tokens)
        yield module.rows.layout


@pytest.mark.parametrize("dp, tp", TOPOLOGIES)
@pytest.mark.parametrize("same_tokens", [True, False])
def test_formulas_equal_counted_messages(dp, tp, same_tokens):
    for layout in layout_of(dp, tp, rank=dp * tp - 1, same_tokens=same_tokens):
        for lowering in ("all_reduce", "reduce_scatter", "all_to_all", "peer"):
            counted = simulate(lowering, layout, TOKENS, HEADS, ROW_BYTES, RANKS_PER_NODE)
            steps = traffic.steps(lowering, layout, TOKENS, TOKENS, HEADS, ROW_BYTES)
            expected = sum(step.received for step in steps)
            between = sum(step.between_nodes(RANKS_PER_NODE) for step in steps)
            assert counted.received.mean().item() == pytest.approx(expected, rel=1e-9), lowering
            assert counted.between_nodes.mean().item() == pytest.approx(between, rel=1e-9), lowering


def test_all_ranks_issue_the_same_collectives():
    """Whatever the rank: the fake group's own rank is the only thing that differs."""
    found = []
    for rank in range(4):
        for layout in layout_of(2, 2, rank):
            messages = [simulate(name, layout, 6, HEADS, ROW_BYTES, 2) for name in ("all_reduce", "reduce_scatter")]
            found.append(torch.stack([m.received for m in messages]))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_tables_in_the_documentation_are_current():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    for table in etp_traffic.tables():
        assert table in text, f"docs/scaling.md lacks this table; python -m benchmarks.etp_traffic prints it\n{table}"
