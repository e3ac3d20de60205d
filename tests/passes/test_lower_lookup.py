"""lower_lookup on a fake process group: what the graph becomes, and what is left alone."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ple_compile.ops.sharded_lookup import sharded_lookup
from ple_compile.passes.lower_lookup import lower_lookup
from ple_compile.report import GraphReport
from ple_compile.sharding import traffic
from ple_compile.sharding.shard import shard_tables
from ple_compile.sharding.topology import Layout
from tests.graphs import assert_expected, printed
from tests.sharding.fake import fake_mesh
from tests.sharding.lowered import NGrams, compiled

device_put = torch.ops.prims.device_put
SAME = Layout(10, 1, 2, 2, "rows.weight", "0", "", "0")  # rank 1 of tp=2
HOST = SAME._replace(on_host=True)
OWN = Layout(10, 3, 4, 2, "rows.weight", "0", "1", "3")  # rank 3 of dp=2 x tp=2


@pytest.fixture(autouse=True)
def groups():
    with fake_mesh(rank=3, dp=2, tp=2):
        yield


def lower(layout, lowering, max_tokens=4, peers=False, look_up=None, tokens=3, dtype=torch.bfloat16, width=4):
    """The graph of one lookup, lowered; and the report."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        shard = torch.empty(layout.rows_per_rank, width, dtype=dtype)
        ids = torch.empty(tokens, 2, dtype=torch.int64)
        addresses = torch.empty(layout.num_ranks, dtype=torch.int64) if peers else None

        def plain(shard, ids, *addresses):
            return sharded_lookup(shard, ids, addresses[0] if peers else None, *layout) + 1

        gm = make_fx(look_up or plain)(shard, ids, *[a for a in [addresses] if a is not None])
    report = GraphReport()
    before = printed(gm.graph)
    count = lower_lookup(gm.graph, report, etp_lowering=lowering, etp_max_tokens=max_tokens)
    assert count == report.counts().get("lower_lookup", 0)
    gm.graph.lint()
    if count == 0:
        assert printed(gm.graph) == before
    assert all("val" in node.meta for node in gm.graph.nodes if node.op == "call_function")
    return gm.graph, report


def test_all_reduce_of_the_same_ids():
    assert_expected("lower_lookup.all_reduce_of_the_same_ids", printed(lower(SAME, "all_reduce")[0]))


def test_all_reduce_of_own_ids():
    assert_expected("lower_lookup.all_reduce_of_own_ids", printed(lower(OWN, "all_reduce")[0]))


def test_reduce_scatter():
    assert_expected("lower_lookup.reduce_scatter", printed(lower(OWN, "reduce_scatter")[0]))


def test_reduce_scatter_for_sequence_parallelism():
    layout = OWN._replace(num_copies=1, source_group="0", copy_group="")
    assert_expected("lower_lookup.reduce_scatter_for_sequence_parallelism", printed(lower(layout, "reduce_scatter")[0]))


def test_all_to_all():
    assert_expected("lower_lookup.all_to_all", printed(lower(OWN, "all_to_all")[0]))


def test_peer():
    assert_expected("lower_lookup.peer", printed(lower(OWN, "peer", peers=True)[0]))


def test_more_tokens_than_the_limit():
    """The other ranks learn of it from the gathered count."""
    assert_expected("lower_lookup.more_tokens_than_the_limit", printed(lower(OWN, "reduce_scatter", tokens=5)[0]))


@pytest.mark.parametrize("width, words", [(4, "torch.int32"), (3, "torch.uint8")])
def test_rows_travel_as_the_widest_integers_that_fit(width, words):
    text = printed(lower(SAME, "all_reduce", dtype=torch.uint8, width=width)[0])
    assert f"aten.view.dtype(arg0_1, {words})" in text


@pytest.mark.parametrize("lowering", ["all_reduce", "reduce_scatter"])
def test_rows_on_the_host_are_read_by_the_op_that_prefetch_knows(lowering):
    text = printed(lower(OWN._replace(on_host=True), lowering)[0])
    assert "ple.lookup.default(arg0_1, getitem)" in text and "aten.view.dtype(lookup, torch.int32)" in text
    assert "ple.lookup" not in printed(lower(OWN, lowering)[0])


def test_every_lookup_of_a_graph():
    def two(shard, ids):
        return sharded_lookup(shard, ids, None, *SAME) + sharded_lookup(shard, ids.flip(0), None, *SAME)

    graph, report = lower(SAME, "all_reduce", look_up=two)
    assert report.counts() == {"lower_lookup": 2} and "sharded_lookup" not in printed(graph)


@pytest.mark.parametrize("second", [lambda rows: rows, lambda rows: rows.float()])
def test_a_second_user_reads_the_lowered_rows(second):
    def used_twice(shard, ids):
        rows = sharded_lookup(shard, ids, None, *SAME)
        return rows + 1, second(rows)

    graph, _ = lower(SAME, "all_reduce", look_up=used_twice)
    assert "sharded_lookup" not in printed(graph) and printed(graph).count("all_reduce.default") == 1


def test_peer_without_symmetric_memory_is_declined():
    _, report = lower(OWN, "peer")
    (event,) = report.declines()
    assert event.pass_name == "lower_lookup" and "no symmetric memory" in event.reason


def test_one_rank_is_not_applicable():
    _, report = lower(SAME._replace(rank=0, num_ranks=1, num_copies=1), "auto")
    assert [event.status for event in report.events] == ["not applicable"] and not report.declines()


def host_lookup(shard, ids):
    rows = sharded_lookup(shard, ids.cpu(), None, *HOST)
    return device_put(rows, "cuda") * 2


def on_cuda(look_up):
    with FakeTensorMode():
        shard = torch.empty(5, 4, dtype=torch.bfloat16)
        ids = torch.empty(3, 2, dtype=torch.int64, device="cuda")
        return make_fx(look_up)(shard, ids)


def test_ids_stay_on_the_device_where_the_model_moves_them_to_a_host_table():
    gm, report = on_cuda(host_lookup), GraphReport()
    assert lower_lookup(gm.graph, report, etp_lowering="all_reduce", etp_max_tokens=4) == 1
    gm.graph.lint()
    assert "_to_copy" not in printed(gm.graph) and "device_put" not in printed(gm.graph)


def test_rows_used_on_the_host_are_declined():
    def on_the_host_too(shard, ids):
        rows = sharded_lookup(shard, ids.cpu(), None, *HOST)
        return device_put(rows, "cuda") * 2, rows + 1

    gm, report = on_cuda(on_the_host_too), GraphReport()
    before = printed(gm.graph)
    assert lower_lookup(gm.graph, report, etp_lowering="all_reduce", etp_max_tokens=4) == 0
    assert "used on the host" in report.declines()[0].reason and printed(gm.graph) == before


@pytest.mark.parametrize(
    "layout, peers, chosen",
    [
        (SAME, True, "peer"),
        (SAME, False, "all_reduce"),
        (OWN, False, "reduce_scatter"),
        (OWN._replace(rank=0, num_ranks=64, num_copies=8), False, "all_to_all"),
    ],
)
def test_auto(layout, peers, chosen):
    _, report = lower(layout, "auto", peers=peers, max_tokens=64)
    assert [event.reason for event in report.events] == [chosen]
    assert traffic.choose(layout, peers, 64, 2, 8) == chosen


def test_no_host_read_in_the_summing_lowerings():
    """Counts travel with the ids: the number of tokens shows in sizes of views only, never in a collective's."""
    for lowering in ("all_reduce", "reduce_scatter"):
        sizes = [collective_sizes(lower(OWN, lowering, tokens=tokens)[0]) for tokens in (0, 1, 4)]
        assert sizes[0] == sizes[1] == sizes[2] and len(sizes[0]) >= 2


def collective_sizes(graph):
    return [
        (str(node.target), tuple(node.args[0].meta["val"].shape))
        for node in graph.nodes
        if "_c10d_functional" in str(node.target)
    ]


def test_dynamic_shapes_through_dynamo():
    module, graphs = NGrams(10), []
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shard_tables(module, mesh, ("dp", "tp"))
    call = compiled(module, "reduce_scatter", graphs=graphs, dynamic=True)
    with torch.no_grad():
        shapes = [call(torch.zeros(1, tokens, 4, dtype=torch.int64)).shape for tokens in (3, 5, 7)]
    assert shapes == [(1, tokens, 4, 8) for tokens in (3, 5, 7)] and len(graphs) == 1
