"""Small questions about post-grad FX graphs, asked by every matcher."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.fx import Graph, Node

from ple_compile import upstream

aten = torch.ops.aten
prims = torch.ops.prims

_NUMBERED = re.compile(r"^(.*?)\.(\d+)(?:\.|$)")

CASTS = {prims.convert_element_type.default, aten._to_copy.default}
VIEWS = {
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.alias.default,
    aten.clone.default,
}
LAYOUT = VIEWS | CASTS
SIZES = {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default}
DEVICE_COPIES = {prims.device_put.default, aten._to_copy.default}


def value(node: Node) -> torch.Tensor:
    """The fake tensor (or SymInt) that a node produces."""
    return node.meta["val"]


def is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def calls(node: object, targets: Iterable[object]) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def tensor_inputs(node: Node) -> list[Node]:
    return [source for source in node.all_input_nodes if is_tensor(source)]


def is_pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def casts_up_or_keeps(node: Node) -> bool:
    """A cast that loses nothing, so that its input may stand for it."""
    before, after = value(node.args[0]).dtype, value(node).dtype
    if before == after or before.itemsize == 1 and before.is_floating_point:
        return before == after  # float8 does not promote
    return not (after.is_floating_point and after.itemsize == 1) and torch.promote_types(before, after) == after


def producers(node: Node, through: set, *, lossy: bool = False) -> Iterator[Node]:
    """`node`, then what it was made of, one step at a time, while it is one of the ops in `through`."""
    yield node
    while calls(node, through) and (lossy or node.target not in CASTS or casts_up_or_keeps(node)):
        node = node.args[0]
        yield node


def source(node: Node, through: set = LAYOUT) -> Node:
    """What `node` is a view or lossless cast of."""
    *_, last = producers(node, through)
    return last


def origin(node: Node) -> Node:
    """What `node` was made of, through every view and cast, lossy ones too."""
    while calls(node, LAYOUT):
        node = node.args[0]
    return node


def gathered(node: Node) -> tuple[Node, Node] | None:
    """(table [R, *], ids) when `node` takes whole rows of a table by id, in any spelling."""
    if calls(node, {aten.embedding.default}):
        return node.args[0], node.args[1]
    if calls(node, {aten.index.Tensor}) and len(node.args[1]) == 1 and node.args[1][0] is not None:
        return node.args[0], node.args[1][0]
    return None


def dims(node: Node) -> tuple:
    """A tensor's shape with symbolic sizes as fingerprints, which compare without adding guards."""
    return tuple(upstream.fingerprint(s) if isinstance(s, torch.SymInt) else s for s in value(node).shape)


def source_of_shape(node: Node, shape: tuple) -> Node | None:
    """The earliest producer of `node`, through views and lossless casts, that has this shape."""
    found = [n for n in producers(node, LAYOUT) if dims(n) == shape]
    return found[-1] if found else None


def cone(roots: Iterable[Node], leaves: set[Node]) -> list[Node]:
    """Every node that `roots` need, down to `leaves`, in graph order, without leaves and placeholders."""
    needed: set[Node] = set()
    stack = [root for root in roots if root not in leaves]
    while stack:
        node = stack.pop()
        if node in needed:
            continue
        needed.add(node)
        stack += [n for n in node.all_input_nodes if n not in leaves and n not in needed]
    return sorted(n for n in needed if n.op != "placeholder")


def _inputs(roots: Iterable[Node], leaves: set[Node]) -> Iterator[Node]:
    seen: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node in seen or node in leaves or calls(node, SIZES):
            continue
        seen.add(node)
        if node.op in ("placeholder", "get_attr"):
            if is_tensor(node):
                yield node
        else:
            stack += node.all_input_nodes


def open_inputs(roots: Iterable[Node], leaves: set[Node]) -> list[Node]:
    """Tensor placeholders and attributes that `roots` reach without passing through `leaves`; not by their sizes."""
    return list(_inputs(roots, leaves))


def only_input(node: Node) -> Node | None:
    """The tensor placeholder or attribute that `node` is made of, or None where there are several, or none."""
    found = list(itertools.islice(_inputs([node], set()), 2))
    return found[0] if len(found) == 1 else None


def depends_on(nodes: Iterable[Node], sources: set[Node]) -> set[Node]:
    """Those of `nodes` (in graph order) that are computed from one of `sources`."""
    dependent = set(sources)
    for node in nodes:
        if any(n in dependent for n in node.all_input_nodes):
            dependent.add(node)
    return dependent - set(sources)


def outside_reader(interior: Iterable[Node], allowed: Iterable[Node]) -> tuple[Node, Node] | None:
    """A node that would be fused away but is read by someone not `allowed`, and that reader; views are free."""
    interior, allowed = set(interior), set(allowed)
    for node in sorted(interior):
        if node.target in LAYOUT:
            continue
        for user in node.users:
            if user not in interior and user not in allowed:
                return node, user
    return None


def closure(starts: Iterable[Node], admits: Callable[[Node, set[Node]], bool]) -> set[Node]:
    """`starts` and every call below them that `admits`, asked again whenever one more of its inputs is inside."""
    inside = set(starts)
    frontier = list(inside)
    while frontier:
        for user in frontier.pop().users:
            if user not in inside and user.op == "call_function" and admits(user, inside):
                inside.add(user)
                frontier.append(user)
    return inside


def erase_unused(nodes: Iterable[Node]) -> None:
    """Erase those of `nodes` that nothing reads any more, and what only they read."""
    stack = sorted(set(nodes))
    erased: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in erased or node.users or node.op != "call_function" or node.is_impure():
            continue
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        erased.add(node)
        stack += inputs


def insert(graph: Graph, anchor: Node, target: Callable, args: tuple) -> Node:
    """Insert a call before `anchor`, with its fake value and the anchor's provenance."""
    with graph.inserting_before(anchor):
        node = graph.call_function(target, args)
    for key in ("nn_module_stack", "stack_trace", "source_fn_stack", "original_aten"):
        if key in anchor.meta:
            node.meta[key] = anchor.meta[key]
    node.meta["val"] = fake_value(node)
    return node


def size_node(graph: Graph, anchor: Node, tensor: Node, dim: int) -> int | Node:
    """A size of `tensor` as a graph argument: an int, an existing symbolic-size node, or a new one before `anchor`."""
    size = value(tensor).shape[dim]
    known = dims(tensor)[dim]
    if isinstance(known, int):
        return known
    for node in graph.nodes:
        if node is anchor:
            break
        candidate = node.meta.get("val")
        if isinstance(candidate, torch.SymInt) and upstream.fingerprint(candidate) == known:
            return node
    raise AssertionError(f"no node holds the size {size} of {tensor.format_node()}")


def reshape_like(graph: Graph, anchor: Node, tensor: Node, like: Node) -> Node:
    """`tensor` in the shape of `like`, inserted before `anchor`; itself where it has that shape."""
    if dims(tensor) == dims(like):
        return tensor
    sizes = [size_node(graph, anchor, like, dim) for dim in range(value(like).dim())]
    return insert(graph, anchor, aten.reshape.default, (tensor, sizes))


def fake_value(node: Node) -> object:
    """Run a node's target on the fake values of its arguments."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    mode = upstream.detect_fake_mode([n.meta["val"] for n in node.all_input_nodes])
    with mode, torch.no_grad():
        return node.target(*args, **kwargs)


def layer_of(node: Node) -> str:
    """The module path that a node comes from, as the user would write it; empty where the graph does not say."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    return path.replace("L['self'].", "").replace("L['self']", "")


def numbered_layer(node: Node) -> tuple[str, int] | None:
    """("model.layers", 3) for a node of `model.layers.3`: the outermost numbered module that it comes from."""
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        found = _NUMBERED.match(_dotted(path))
        if found:
            return found.group(1), int(found.group(2))
    return None


def _dotted(path: str) -> str:
    """Dynamo's `L['self'].model.layers[0].ple` or `layers.0` as `model.layers.0.ple`; `L['args'][0]` is no layer 0."""
    path = re.sub(r"^L\['(?:self|args)'\](?:\[\d+\])*\.?", "", path)
    return re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path).replace("._modules.", ".").lstrip(".")


def is_inside(path: str, layer: str) -> bool:
    """Whether a module path is a layer's or lies in it; an empty layer holds everything."""
    return not layer or f"{path}.".startswith(f"{layer}.")


def source_line(node: Node) -> str:
    """The user's source line that a node comes from (`file:line`), or an empty string."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    return next((line for line in reversed(lines) if line.startswith("File ")), "")
