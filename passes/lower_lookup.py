"""Look rows of a sharded table up by one of four lowerings.

Matches:
    rows = ple.sharded_lookup(shard, ids, peers, num_rows, rank, num_ranks, num_copies, table, groups..., on_host)
Becomes, with `etp_lowering="peer"`:
    rows = ple.peer_lookup(shard, ids, peers, num_rows, ...)
and, with "all_reduce" where all ranks look up the same ids:
    local, mine = ple.local_ids(ids, ...)
    words = aten.where(mine, aten.embedding(aten.view.dtype(shard, int32), local), 0)
    rows = aten.view.dtype(ple.wait_rows(_c10d_functional.all_reduce(words, "sum", group)), bfloat16)
The other forms are in `ple_compile.sharding.lowerings`, whose functions are traced into the graph. A shard in host
memory is read by `ple.lookup`, which `prefetch_lookup` may then start early. Where the model moves ids to a host table
and rows back, the copies go.

Declines where "peer" is asked for and the shards are not symmetric memory, and where rows of a host table are used on
the host. One rank alone has nothing to lower.
"""

from torch import Tensor
from torch.fx import Graph, Node

from ple_compile.matching.graph import DEVICE_COPIES, calls, erase_unused, value
from ple_compile.matching.inline import inline
from ple_compile.ops.sharded_lookup import sharded_lookup
from ple_compile.report import GraphReport
from ple_compile.sharding import traffic
from ple_compile.sharding.lowerings import LOWERINGS
from ple_compile.sharding.topology import Layout


def lower_lookup(graph: Graph, report: GraphReport, *, etp_lowering: str, etp_max_tokens: int) -> int:
    """Lower every lookup in a sharded table; returns how many."""
    count = 0
    for node in graph.find_nodes(op="call_function", target=sharded_lookup):
        shard, given, peers, *fields = node.args
        layout, (*copies, ids) = Layout(*fields), _device_copies(given)
        if layout.num_ranks == 1:
            report.not_applicable("lower_lookup", node, "one rank holds the whole table")
            continue
        outputs = _outputs(node, ids)
        if not outputs:
            report.declined(
                "lower_lookup", node, f"rows of {layout.table} are used on the host, ids come from the device"
            )
            continue
        name = etp_lowering
        if name == "auto":
            heads, row_bytes = int(value(ids).shape[-1]), value(shard).shape[1] * value(shard).element_size()
            name = traffic.choose(layout, peers is not None, etp_max_tokens, heads, row_bytes)
        if name == "peer" and peers is None:
            reason = f"the ranks cannot read each other's rows of {layout.table}, which are no symmetric memory"
            report.declined("lower_lookup", node, reason)
            continue

        def lowered(shard: Tensor, ids: Tensor, *peers: Tensor, layout: Layout = layout, name: str = name) -> Tensor:
            return LOWERINGS[name](shard, ids, peers[0] if peers else None, layout, etp_max_tokens)

        result = inline(graph, node, lowered, [shard, ids] if peers is None else [shard, ids, peers])
        report.matched("lower_lookup", node, name)
        for output in outputs:
            output.replace_all_uses_with(result)
        erase_unused([*outputs, node, *copies])
        count += 1
    return count


def _device_copies(ids: Node) -> list[Node]:
    """`ids`, and what it was copied from, one device after the other."""
    found = [ids]
    while calls(ids, DEVICE_COPIES):
        ids = ids.all_input_nodes[0]
        if value(ids).dtype != value(found[-1]).dtype:
            break
        found.append(ids)
    return found


def _outputs(node: Node, ids: Node) -> list[Node]:
    """The rows on the device of `ids`: the lookup itself, or, where it ran on the host, the copies of its rows."""
    device = value(ids).device
    if value(node).device == device:
        return [node]
    copies = [n for n in node.users if calls(n, DEVICE_COPIES) and value(n).device == device]
    return copies if len(copies) == len(node.users) else []
