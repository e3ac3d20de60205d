"""One PLE layer: its table, what each pass did or why it declined, and its graphs before and after."""

import dataclasses
import re
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from ple_compile.layer_graphs import AFTER, BEFORE, Drawing, Prefetch
from ple_compile.page.drawing import draw
from ple_compile.page.node_list import node_list
from ple_compile.page.pieces import arrow, code, facts, layer_name, pass_chip, size_text, source_link, status_chip
from ple_compile.report import DECLINED, MATCHED, Event

if TYPE_CHECKING:
    from ple_compile.explain import LayerRun, Report

_SYMBOL = re.compile(r"\b[a-z]+\d+\b")
_FRAME = re.compile(r'File "(.*)", line (\d+)')


@dataclass
class Drawn:
    """Where each distinct drawing is, and how many more characters of drawings the page may take.

    where: by the drawing with its symbolic sizes renamed, for every compiled graph has names of its own for them.
    opened: whether graphs after the passes are unfolded at first.
    """

    opened: bool
    where: dict[Drawing, str] = field(default_factory=dict)
    room: int = 1_200_000


def layer_section(
    report: "Report", layer: str, anchor: str, result: str, runs: "list[LayerRun]", events: list[Event], drawn: Drawn
) -> str:
    parts = [
        f'<section id="{anchor}" class="layer"><h2>{layer_name(layer)} {result}</h2>',
        facts(_tables(report, layer)),
        _passes(events, runs),
    ]
    for run in runs:
        if len(report.graphs) > 1:
            region = report.graphs[run.graph][0]
            alone = f", compiled from {layer_name(region)}" if region else ""
            parts.append(f"<h3>Compiled graph {run.graph + 1} of {len(report.graphs)}{alone}</h3>")
        here = f'<a href="#{anchor}">{layer_name(layer)}</a>'
        here += f" in compiled graph {run.graph + 1}" if len(report.graphs) > 1 else ""
        parts += [facts(_figures(report, run)), _graphs(run, here, events, drawn)]
    return "".join([*parts, "</section>"])


def _tables(report: "Report", layer: str) -> list[tuple[str, str]]:
    found = []
    for table in report.tables:
        if not layer or table.name.startswith(f"{layer}."):
            name = code(table.name.removeprefix(f"{layer}."))
            told = f"{name}: {table.rows:,} rows of {table.width}, {table.format}, in {escape(table.placement)}"
            told += f"; {table.sharding}" if table.sharding else ""
            found.append(("table", f"{told} ({size_text(table.nbytes)} here)"))
    return found


def _passes(events: list[Event], runs: "list[LayerRun]") -> str:
    if not events:
        return "<p>No pass found anything here.</p>"
    items = []
    for event in events:
        told = [escape(event.reason)] if event.reason else []
        if event.status == MATCHED:
            told += [
                text for text in dict.fromkeys(_changed(run.found.drawing, event.pass_name) for run in runs) if text
            ]
        frame = _FRAME.search(event.source)
        link = source_link(frame.group(1), int(frame.group(2))) if frame else ""
        items.append(
            f"<li>{pass_chip(event.pass_name)} {status_chip(event.status)} {'; '.join(told)} "
            f'<span class="where">at {code(event.node)} {link}</span></li>'
        )
    return f'<ul class="passes">{"".join(items)}</ul>'


def _changed(drawing: Drawing, pass_name: str) -> str:
    """What a pass made of what, told in launches."""
    removed = sum(node.launches for node in drawing.nodes if node.removed_by == pass_name)
    made = [node.target for node in drawing.nodes if node.made_by == pass_name and node.launches]
    if not removed and not made:
        return ""
    into = ", ".join(code(target.removesuffix(".default")) for target in dict.fromkeys(made))
    return f"{removed} launches became {len(made)}{f': {into}' if into else ''}"


def _figures(report: "Report", run: "LayerRun") -> list[tuple[str, str]]:
    saved, graph = run.savings, report.graphs[run.graph][1]
    found = [("launches", arrow(saved.launches_before, saved.launches_after))]
    if saved.bytes_before is not None and saved.bytes_after is not None:
        found.append(("intermediate bytes", arrow(size_text(saved.bytes_before), size_text(saved.bytes_after))))
    if graph.symbols:
        sizes = (f"{name} = {run.sizes.get(name, '?')} ({symbol.name})" for name, symbol in graph.symbols.items())
        found += [("bytes saved", escape(saved.formula)), ("sizes of this call", escape(", ".join(sizes)))]
    found += [("prefetch", _prefetch(prefetch)) for prefetch in run.found.prefetches]
    collectives = (f"{count} × {code(op)}" for op, count in run.found.drawing.collectives().items())
    found.append(("collectives per step", ", ".join(collectives) or "none"))
    return found


def _prefetch(prefetch: Prefetch) -> str:
    window = f"between them {prefetch.launches} launches, {prefetch.products} of them matrix products or convolutions"
    if not prefetch.starts_in or not prefetch.waits_in:
        return f"the graph shows no layers between start and wait; {window}"
    first, last = (int(name.rpartition(".")[2]) for name in (prefetch.starts_in, prefetch.waits_in))
    return (
        f"starts in {code(prefetch.starts_in)}, is waited for in {code(prefetch.waits_in)} (distance {last - first}); "
        f"{window}"
    )


def _graphs(run: "LayerRun", here: str, events: list[Event], drawn: Drawn) -> str:
    drawing, key = run.found.drawing, _without_names(run.found.drawing)
    if key in drawn.where:
        return f"<p>The graphs equal those of {drawn.where[key]}, where they are drawn.</p>"
    declined = {event.node: event.reason for event in events if event.status == DECLINED}
    graphs = "".join(_graph(run, state, declined, drawn.opened and state == AFTER) for state in (BEFORE, AFTER))
    if len(graphs) > drawn.room:
        return '<p>Not drawn, to keep this page small; <code>report.save("report.json")</code> has it.</p>'
    drawn.room -= len(graphs)
    drawn.where[key] = here
    omitted = f"<p>{drawing.omitted} nodes of this layer were too many to keep.</p>" if drawing.omitted else ""
    return omitted + graphs


def _without_names(drawing: Drawing) -> Drawing:
    """The drawing with its symbols numbered in the order in which they are met."""
    numbers: dict[str, str] = {}

    def renamed(size: int | str) -> int | str:
        if isinstance(size, int):
            return size
        told = _SYMBOL.sub(lambda found: numbers.setdefault(found[0], f"size_{len(numbers)}"), size)
        # Terms are in the order of the names before.
        return told if "(" in told else " + ".join(sorted(told.split(" + ")))

    nodes = tuple(
        dataclasses.replace(node, shape=tuple(map(renamed, node.shape))) if node.shape else node
        for node in drawing.nodes
    )
    return dataclasses.replace(drawing, nodes=nodes)


def _graph(run: "LayerRun", state: str, declined: dict[str, str], opened: bool) -> str:
    drawing, names = run.found.drawing, run.found.names
    passes = dict.fromkeys(node.removed_by or node.made_by for _, node in drawing.present(state))
    chips = " ".join(map(pass_chip, filter(None, passes)))
    legend = f'<p class="legend">{"removed" if state == BEFORE else "made"} by {chips}</p>' if chips else ""
    return (
        f'<details class="graph {state}"{" open" if opened else ""}>'
        f"<summary>Graph {state} the passes: {drawing.launches(state)} launches</summary>{legend}"
        f'<div class="wide drawing" tabindex="0">{draw(drawing, names, state, declined)}</div>'
        f"{node_list(drawing, names, state)}</details>"
    )
