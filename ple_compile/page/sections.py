"""What the page says of the whole model; `layer_section` says the rest."""

from html import escape
from typing import TYPE_CHECKING

from ple_compile.layer_graphs import AFTER, BEFORE
from ple_compile.page.layer_section import Drawn, layer_section
from ple_compile.page.pieces import arrow, code, layer_name, size_text, status_chip
from ple_compile.report import DECLINED, MATCHED, NOT_APPLICABLE, Event

if TYPE_CHECKING:
    from ple_compile.explain import LayerRun, Report

_METHOD = """<section id="method"><h2>How the figures are made</h2>
<p><b>Graphs</b> are the part of the post-grad FX graph that belongs to the layer, right before and right after the
passes. Inductor's own passes and its fusion of neighbouring calls come later and are not shown. The drawings leave out
views, single numbers, and the taking of one result of several; the lists have every node. Colours say which pass
removed a call (before) or made it (after); grey calls stayed. A thick border means that the result is read outside the
layer.</p>
<p><b>Launches</b> count calls that compute, as if the graph were run op by op: one for each call, none for views,
single numbers and waits. Inductor fuses neighbouring pointwise calls in both graphs, so the kernels that run are fewer,
above all before the passes.</p>
<p><b>Intermediate bytes</b> are the sizes of the tensors that those calls write to memory, each counted once, also from
shapes alone. Symbolic sizes are taken from the call that was explained; the formula is what is saved at any size.
Nothing on this page was measured.</p></section>"""


def render(report: "Report") -> str:
    """All sections, in order."""
    runs: dict[str, list[LayerRun]] = {layer: [] for layer in report.layers}
    events: dict[str, list[Event]] = {layer: [] for layer in report.layers}
    for run in report.layer_runs():
        runs.setdefault(run.layer, []).append(run)
    for layer, event in report.events():
        events.setdefault(layer, []).append(event)
    names = list(dict.fromkeys([*runs, *events]))
    results = {layer: _result(layer, names, events.get(layer, [])) for layer in names}
    drawn = Drawn(opened=len(names) <= 4)
    return "\n".join(
        [
            _header(report, runs),
            _overview(names, runs, results),
            *(
                layer_section(
                    report, layer, f"layer-{number}", results[layer], runs.get(layer, []), events[layer], drawn
                )
                for number, layer in enumerate(names)
            ),
            _list_section("graph-breaks", "Graph breaks", "", _breaks(report)),
            _list_section(
                "replaced",
                "Replaced forwards",
                "By forwards that a graph can hold:",
                report.replaced,
            ),
            _METHOD,
        ]
    )


def _result(layer: str, names: list[str], events: list[Event]) -> str:
    """What became of a layer."""
    declined = sum(event.status == DECLINED for event in events)
    if declined:
        return status_chip(DECLINED, f"{declined} declined")
    if any(event.status == MATCHED for event in events):
        return status_chip(MATCHED, "fused")
    if events:
        return status_chip(NOT_APPLICABLE)
    if any(layer in name.split(" or ") for name in names if name != layer):
        return status_chip(NOT_APPLICABLE, "see the graphs that may be this layer")
    return status_chip(DECLINED, "did not run compiled in this call")


def _header(report: "Report", runs: "dict[str, list[LayerRun]]") -> str:
    everything = [run for mine in runs.values() for run in mine]
    cards = [
        ("PLE layers", str(len(report.layers) or len(runs))),
        ("ran fused", str(sum(graph.ple_layers for _, graph in report.graphs))),
        ("compiled graphs", str(len(report.graphs))),
        ("launches in PLE layers", _launches(everything)),
        ("intermediate bytes", _bytes(everything)),
    ]
    shown = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in cards)
    ran_on = " · ".join(f"{escape(name)} <b>{escape(value)}</b>" for name, value in report.environment.items())
    return (
        f'<header id="summary"><p class="kicker">ple-compile report</p><h1>{escape(report.model)}</h1>'
        f'<dl class="cards">{shown}</dl><p class="environment">{ran_on}</p></header>'
    )


def _launches(runs: "list[LayerRun]") -> str:
    before, after = (sum(run.found.drawing.launches(state) for run in runs) for state in (BEFORE, AFTER))
    return arrow(before, after)


def _bytes(runs: "list[LayerRun]") -> str:
    saved = [run.savings for run in runs]
    before, after = [s.bytes_before for s in saved], [s.bytes_after for s in saved]
    if None in before or None in after:
        return "sizes not known"
    return arrow(size_text(sum(filter(None, before))), size_text(sum(filter(None, after))))


def _overview(names: list[str], runs: "dict[str, list[LayerRun]]", results: dict[str, str]) -> str:
    rows = "".join(
        f'<tr><td><a href="#layer-{number}">{layer_name(layer)}</a></td><td>{results[layer]}</td>'
        f"<td>{_launches(runs[layer]) if runs.get(layer) else ''}</td>"
        f"<td>{_bytes(runs[layer]) if runs.get(layer) else ''}</td></tr>"
        for number, layer in enumerate(names)
    )
    none = '<tr><td colspan="4">No PLE layer was found, and no pass found anything.</td></tr>'
    return (
        '<section id="layers"><h2>Layers</h2><div class="wide" tabindex="0"><table><thead><tr><th>layer</th>'
        "<th>result</th><th>launches</th><th>intermediate bytes</th></tr></thead>"
        f"<tbody>{rows or none}</tbody></table></div></section>"
    )


def _breaks(report: "Report") -> list[str]:
    return list(dict.fromkeys(graph.graph_break for _, graph in report.graphs if graph.graph_break))


def _list_section(name: str, title: str, words: str, items: list[str]) -> str:
    rows = "".join(f"<li>{code(item)}</li>" for item in items)
    told = f"{f'<p>{words}</p>' if words else ''}<ul>{rows}</ul>" if items else "<p>None.</p>"
    return f'<section id="{name}"><h2>{title}</h2>{told}</section>'
