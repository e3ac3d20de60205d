"""One graph as inline SVG: calls that compute as boxes, tensors from outside as pills, data flowing downward.

Views, single numbers and what takes one result of several are left out, and edges go through them.
"""

from collections.abc import Hashable
from html import escape

from ple_compile.layer_graphs import Drawing, GraphNode
from ple_compile.page.layout import layout
from ple_compile.page.pieces import editor_link, pass_class, place_of, tensor_text

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _BEND, _CHARACTERS = 148, 40, 14, 26, 14, 20
_BOX = -1  # in the place of a reader: the node itself
_WAITS = ("ple.lookup_wait.default", "ple.wait_rows.default", "_c10d_functional.wait_tensor.default")


def draw(drawing: Drawing, names: tuple[str, ...], state: str, declined: dict[str, str]) -> str:
    """The graph before or after the passes; `declined`: reasons by the name of the node."""
    nodes = drawing.nodes
    shown, outputs, marked = _shown(drawing, names, state, declined)
    inputs: dict[Hashable, list[Hashable]] = {}
    for index, sources in shown.items():
        # A pill for each reader: weights are read all over the graph.
        above = [(source, index if nodes[source].target == "input" else _BOX) for source in sources]
        inputs.update((key, []) for key in above if key[1] != _BOX)
        inputs[index, _BOX] = list(above)
    found = layout(inputs, _WIDTH + _GAP_X, _BEND)
    width, height = found.width + 2, found.rows * (_HEIGHT + _GAP_Y) - _GAP_Y + 2
    parts = [
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img" '
        f'aria-label="graph {state} the passes">'
    ]
    parts += [f'<path class="edge" d="{_curve(points)}"/>' for _, _, points in found.edges]
    for key, (x, row) in found.places.items():
        assert isinstance(key, tuple)
        index, node = key[0], nodes[key[0]]
        kind = f"node {'in' if node.target == 'input' else pass_class(node.removed_by or node.made_by)}"
        kind += " out" if index in outputs else ""
        reason = next((declined[names[i]] for i in marked.get(index, ())), "")
        kind += " declined" if reason else ""
        parts.append(_box(drawing, names[index], node, x - _WIDTH / 2 + 1, _top(row), kind, reason))
    return "".join([*parts, "</svg>"])


def _shown(
    drawing: Drawing, names: tuple[str, ...], state: str, declined: dict[str, str]
) -> tuple[dict[int, list[int]], set[int], dict[int, list[int]]]:
    """(boxes with their inputs, which of them are outputs, which declined nodes each box stands for)."""
    stands_for: dict[int, list[int]] = {}
    boxes: dict[int, list[int]] = {}
    outputs: set[int] = set()
    marked: dict[int, list[int]] = {}
    for index in _in_order(drawing, state):
        node = drawing.nodes[index]
        sources = list(dict.fromkeys(s for i in node.inputs(state) or () for s in stands_for.get(i, ())))
        if node.target == "input":
            stands_for[index] = [index] if node.shape != () else []
            continue
        if node.launches or node.target in _WAITS:
            boxes[index], stands_for[index] = sources, [index]
        else:
            stands_for[index] = sources
        if node.output:
            outputs.update(stands_for[index])
        if names[index] in declined:
            for box in stands_for[index]:
                marked.setdefault(box, []).append(index)
    return boxes, outputs, marked


def _in_order(drawing: Drawing, state: str) -> list[int]:
    """Indices of the nodes of one graph, each behind its inputs: what a pass made lies at the end of the drawing."""
    order: dict[int, None] = {}
    present = dict(drawing.present(state))
    for first in present:
        stack = [first]
        while stack:
            index = stack[-1]
            missing = [i for i in present[index].inputs(state) or () if i not in order]
            if missing:
                stack += missing
            else:
                order[stack.pop()] = None
    return list(order)


def _top(row: int) -> float:
    return row * (_HEIGHT + _GAP_Y) + 1


def _curve(points: list[tuple[float, int]]) -> str:
    (x, row), *rest = points
    y = _top(row) + _HEIGHT
    path = f"M{x:.0f} {y:.0f}"
    for place, (next_x, next_row) in enumerate(rest):
        top = _top(next_row)
        path += f"C{x:.0f} {y + _GAP_Y * 0.6:.0f} {next_x:.0f} {top - _GAP_Y * 0.6:.0f} {next_x:.0f} {top:.0f}"
        if place < len(rest) - 1:
            path += f"V{top + _HEIGHT:.0f}"
        x, y = next_x, top + _HEIGHT
    return path


def _box(drawing: Drawing, name: str, node: GraphNode, x: float, y: float, kind: str, reason: str) -> str:
    source = drawing.sources[node.source] if node.source >= 0 else None
    title = [f"{name}: {node.target} {tensor_text(node)} {node.device}".strip()]
    title += [f"in {node.module}"] if node.module else []
    title += [f"{place_of(source.file, source.line)} in {source.function}", source.code] if source else []
    title += [f"removed by {node.removed_by}"] if node.removed_by else []
    title += [f"made by {node.made_by}"] if node.made_by else []
    title += [f"declined: {reason}"] if reason else []
    radius = 20 if node.target == "input" else 5
    box = (
        f'<g class="{kind}"><title>{escape(chr(10).join(title))}</title>'
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{_WIDTH}" height="{_HEIGHT}" rx="{radius}"/>'
        f'<text x="{x + _WIDTH / 2:.0f}" y="{y + 17:.0f}">{escape(_cut(_label(name, node)))}</text>'
        f'<text class="small" x="{x + _WIDTH / 2:.0f}" y="{y + 31:.0f}">{escape(_cut(tensor_text(node), 4))}</text></g>'
    )
    return f'<a href="{escape(editor_link(source.file, source.line))}">{box}</a>' if source else box


def _label(name: str, node: GraphNode) -> str:
    if node.target == "input":
        return name
    namespace, _, rest = node.target.partition(".")
    op = rest.partition(".")[0] or namespace
    return f"ple.{op}" if namespace == "ple" else op


def _cut(text: str, more: int = 0) -> str:
    limit = _CHARACTERS + more
    return text if len(text) <= limit else f"…{text[1 - limit :]}" if "." in text else f"{text[: limit - 1]}…"
