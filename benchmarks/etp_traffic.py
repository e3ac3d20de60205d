"""The tables of docs/scaling.md: bytes that a rank receives in one lookup, by topology and lowering.

python -m benchmarks.etp_traffic
"""

from ple_compile.sharding import traffic
from ple_compile.sharding.topology import Layout

HEADS, ROW_BYTES, NUM_ROWS, RANKS_PER_NODE = 16, 320, 320_001_536, 8
TENSOR_PARALLEL = [(1, 2), (1, 4), (1, 8), (1, 16), (1, 32)]
WITH_DATA_PARALLEL = [(2, 2), (2, 4), (2, 8), (4, 8), (8, 8), (16, 8), (32, 8), (64, 8), (128, 8)]
LOWERINGS = ("all_reduce", "reduce_scatter", "all_to_all", "peer")


def layout_of(dp: int, tp: int) -> Layout:
    sources = "dp" if dp > 1 else ""
    return Layout(NUM_ROWS, 0, dp * tp, tp, "table", "all", sources, "tp")


def row(dp: int, tp: int, tokens: int) -> dict[str, str]:
    layout = layout_of(dp, tp)
    cells = {
        "ranks": f"{dp * tp:,}",
        "dp x tp": f"{dp} x {tp}",
        "table, GiB a rank": f"{layout.rows_per_rank * ROW_BYTES / 2**30:.2f}",
    }
    for lowering in LOWERINGS:
        steps = traffic.steps(lowering, layout, tokens, tokens, HEADS, ROW_BYTES)
        total = sum(step.received for step in steps)
        network = sum(step.between_nodes(RANKS_PER_NODE) for step in steps)
        cells[lowering] = f"{total / 1e6:.2f} ({network / 1e6:.2f})"
        if lowering == "peer" and dp * tp > RANKS_PER_NODE:
            cells[lowering] = "-"
    one_node = dp * tp <= RANKS_PER_NODE
    cells["auto, one node's peers readable"] = traffic.choose(layout, one_node, tokens, HEADS, ROW_BYTES)
    cells["auto, else"] = traffic.choose(layout, False, tokens, HEADS, ROW_BYTES)
    return cells


def table(topologies: list[tuple[int, int]], tokens: int) -> str:
    rows = [row(dp, tp, tokens) for dp, tp in topologies]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *[list(cells.values()) for cells in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables() -> list[str]:
    return [table(TENSOR_PARALLEL, 1024), table(WITH_DATA_PARALLEL, 1024)]


if __name__ == "__main__":
    print("\n\n".join(tables()))
