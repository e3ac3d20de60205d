"""Where the nodes of a small graph go: rows from top to bottom, every edge downward.

Rows follow the longest path from the top. An edge over several rows bends around the nodes in between through invisible
nodes of its own. Within a row, order and place follow the mean of the neighbours, row by row, down and up.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

_SWEEPS = 12


@dataclass(frozen=True)
class Bend:
    """The invisible node of edge number `edge` in one row."""

    edge: int
    row: int


@dataclass(frozen=True)
class Layout:
    """`places`: (x of the middle, row) of each node, x from 0. `edges`: the points of each edge, its ends included."""

    places: dict[Hashable, tuple[float, int]]
    edges: list[tuple[Hashable, Hashable, list[tuple[float, int]]]]
    width: float
    rows: int


def layout(inputs: Mapping[Hashable, Sequence[Hashable]], node_width: float, bend_width: float) -> Layout:
    """Lay out a graph given as node -> what it reads, in an order in which every node follows its inputs.

    Parts that are not connected stand side by side, the largest first.
    """
    places: dict[Hashable, tuple[float, int]] = {}
    edges = []
    left, rows = 0.0, 0
    for part in sorted(_parts(inputs), key=len, reverse=True):
        found = _layout_part(part, node_width, bend_width)
        places.update((node, (x + left, row)) for node, (x, row) in found.places.items())
        edges += [(source, node, [(x + left, row) for x, row in points]) for source, node, points in found.edges]
        left, rows = left + found.width, max(rows, found.rows)
    return Layout(places, edges, left, rows)


def _parts(inputs: Mapping[Hashable, Sequence[Hashable]]) -> list[dict[Hashable, Sequence[Hashable]]]:
    """The connected parts of a graph, each in its order."""
    part_of: dict[Hashable, list[Hashable]] = {}
    for node, sources in inputs.items():
        joined = [node]
        for part in {id(part_of[source]): part_of[source] for source in sources}.values():
            joined += part
        part_of.update(dict.fromkeys(joined, joined))
    parts = {id(part): set(part) for part in part_of.values()}
    return [{node: sources for node, sources in inputs.items() if node in part} for part in parts.values()]


def _layout_part(inputs: Mapping[Hashable, Sequence[Hashable]], node_width: float, bend_width: float) -> Layout:
    row_of = _rows(inputs)
    edges = [(source, node) for node, sources in inputs.items() for source in dict.fromkeys(sources)]
    chains: list[list[Hashable]] = []
    for number, (source, node) in enumerate(edges):
        bends = [Bend(number, between) for between in range(row_of[source] + 1, row_of[node])]
        row_of.update((bend, bend.row) for bend in bends)
        chains.append([source, *bends, node])
    rows: list[list[Hashable]] = [[] for _ in range(max(row_of.values(), default=-1) + 1)]
    for node, number in row_of.items():
        rows[number].append(node)
    above: dict[Hashable, list[Hashable]] = {node: [] for node in row_of}
    below: dict[Hashable, list[Hashable]] = {node: [] for node in row_of}
    for chain in chains:
        for upper, lower in zip(chain, chain[1:]):
            below[upper].append(lower)
            above[lower].append(upper)

    widths = {node: bend_width if isinstance(node, Bend) else node_width for node in row_of}
    x: dict[Hashable, float] = {}
    for row in rows:
        _place(row, {node: float(i) * node_width for i, node in enumerate(row)}, widths, x)
    for sweep in range(_SWEEPS):
        neighbours, order = (above, rows) if sweep % 2 == 0 else (below, rows[::-1])
        for row in order:
            wanted = {n: sum(x[m] for m in neighbours[n]) / len(neighbours[n]) if neighbours[n] else x[n] for n in row}
            row.sort(key=lambda node: wanted[node])
            _place(row, wanted, widths, x)
    left = min((x[node] - widths[node] / 2 for node in x), default=0.0)
    right = max((x[node] + widths[node] / 2 for node in x), default=0.0)
    places = {node: (x[node] - left, number) for node, number in row_of.items()}
    routes = [(chain[0], chain[-1], [places[node] for node in chain]) for chain in chains]
    return Layout({n: p for n, p in places.items() if not isinstance(n, Bend)}, routes, right - left, len(rows))


def _rows(inputs: Mapping[Hashable, Sequence[Hashable]]) -> dict[Hashable, int]:
    rows: dict[Hashable, int] = {}
    readers: dict[Hashable, list[Hashable]] = {node: [] for node in inputs}
    for node, sources in inputs.items():
        rows[node] = max((rows[source] + 1 for source in sources), default=0)
        for source in sources:
            readers[source].append(node)
    for node, sources in inputs.items():
        if not sources and readers[node]:  # what comes from nowhere comes just before its first reader
            rows[node] = min(rows[reader] for reader in readers[node]) - 1
    return rows


def _place(
    row: list[Hashable], wanted: dict[Hashable, float], widths: dict[Hashable, float], x: dict[Hashable, float]
) -> None:
    """Put a row's nodes near where they are wanted, in order, without overlap."""
    end = float("-inf")
    for node in row:
        x[node] = max(wanted[node], end + widths[node] / 2)
        end = x[node] + widths[node] / 2
    if row:
        shift = sum(wanted[node] - x[node] for node in row) / len(row)
        for node in row:
            x[node] += shift
