"""Every node of a graph as a table row."""

from html import escape

from ple_compile.layer_graphs import Drawing, GraphNode
from ple_compile.page.pieces import code, pass_chip, source_link, tensor_text

_HEAD = (
    "<tr><th>node</th><th>call, and what it reads</th><th>result</th><th>module</th><th>pass</th><th>source</th></tr>"
)


def node_list(drawing: Drawing, names: tuple[str, ...], state: str) -> str:
    """The graph before or after the passes, folded."""
    rows = []
    for index, node in drawing.present(state):
        reads = ", ".join(names[i] for i in node.inputs(state) or ())
        cells = (
            code(names[index]),
            code(node.target) + (f"<br><small>{escape(reads)}</small>" if reads else ""),
            code(tensor_text(node)),
            escape(node.module),
            pass_chip(node.removed_by or node.made_by),
            _source(drawing, node),
        )
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return (
        f'<details><summary>All {len(rows)} nodes</summary><div class="wide" tabindex="0"><table class="nodes">'
        f"<thead>{_HEAD}</thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _source(drawing: Drawing, node: GraphNode) -> str:
    if node.source < 0:
        return ""
    source = drawing.sources[node.source]
    return f"{source_link(source.file, source.line)}<br>{code(source.code)}"
