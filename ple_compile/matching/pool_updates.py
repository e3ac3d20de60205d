"""Find where a graph overwrites an input, or a view of one, by slot.

    view = aten.select.int(base, 0, 3)                        # any views, or the input itself: [slots, C, W]
    new = aten.index_put(view, [state_indices], columns)      # or what is made of that
    written = aten.select_scatter(base, new, 0, 3)            # the same views, inside out
    aten.copy_(base, written)                                 # or first the update of another view of `written`

A server's layers share one such input: `pool = states[layer]`, `states[:, layer]`, a part of wider columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from ple_compile import upstream
from ple_compile.matching.graph import aten, calls, cone, dims, is_tensor, value

# How a view is reached from what it is a view of. `clone` is none, and neither is what comes after one.
_RESHAPES = {aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims}
_PARTS = {aten.select.int, aten.slice.Tensor, aten.as_strided.default}
STEPS = _RESHAPES | _PARTS | {aten.permute.default, aten.alias.default}
_SCATTERS = {
    aten.select_scatter.default: "select",
    aten.slice_scatter.default: "slice",
    aten.as_strided_scatter.default: "as_strided",
}

Path = tuple[tuple, ...]


@dataclass(frozen=True)
class Write:
    """A part of `before` gets the contents `new`, and the whole is then `written`.

    `before` is the input `base`, or what an earlier write has made of it.
    """

    base: Node
    before: Node
    new: Node
    written: Node


@dataclass(frozen=True)
class Update(Write):
    """A write to slots of `view`, which is `before` or a view of it."""

    view: Node

    def other_readers(self) -> Iterator[Node]:
        """What reads the numbers that the update replaces past `view`, or those that it puts there."""
        _, path = path_of(self.view)
        if self.view is not self.before:
            yield from self._readers(self.before, (), path)
        node = self.new
        while node is not self.written:
            if len(node.users) > 1:
                yield max(node.users)
                return
            (node,) = node.users
        yield from self._readers(self.written, (), path)

    def _readers(self, node: Node, path: Path, replaced: Path) -> Iterator[Node]:
        for user in node.users:
            if calls(user, STEPS):
                further = path + tuple(_step(user, node))
                if user is not self.view and not are_apart(further, replaced):
                    yield from self._readers(user, further, replaced)
            elif calls(user, {aten.copy_.default}):
                if user.args[0] is not self.base:
                    yield user
            elif not calls(user, _SCATTERS) or user.args[0] is not node:
                yield user


def find_writes(graph: Graph) -> list[Write]:
    """Every write to an input; one after the other where they are to parts of the same."""
    found: list[Write] = []
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        base, written = copy.args[:2]
        writes: list[Write] = []
        while written is not base and base.op == "placeholder":
            writes.append(_write(base, written))
            written = writes[-1].before
        found += reversed(writes)
    return found


def path_of(node: Node) -> tuple[Node, Path]:
    """(what `node` is a view of, the steps from there)"""
    steps: list[tuple] = []
    while calls(node, STEPS):
        source: Any = node.args[0]
        steps += _step(node, source)
        node = source
    return node, tuple(reversed(steps))


def _step(view: Node, source: Node) -> list[tuple]:
    """The step from `source` to a view of it; none where it changes nothing."""
    if dims(view) == dims(source) and not calls(view, {aten.permute.default, aten.as_strided.default}):
        if not calls(view, {aten.slice.Tensor}) or _part("slice", source, view.args[1:])[2] in (None, 0):
            return []
    if calls(view, _RESHAPES):
        return [("reshape", dims(view))]
    if calls(view, {aten.permute.default}):
        return [("permute", tuple(d % len(view.args[1]) for d in view.args[1]))]
    names = {aten.select.int: "select", aten.slice.Tensor: "slice", aten.as_strided.default: "as_strided"}
    return [_part(names[view.target], source, view.args[1:])]


def _part(name: str, source: Node, args: tuple) -> tuple:
    """One step to a part of `source`, written in one way."""
    if name == "as_strided":
        size, stride, *offset = args
        return name, _numbers(size), _numbers(stride), _number((*offset, None)[0])
    dim, *rest = args or (0,)
    dim %= value(source).dim()
    size = dims(source)[dim]
    if name == "select":
        index = _number(rest[0])
        return name, dim, index % size if isinstance(index, int) and isinstance(size, int) else index
    start, end, step = (*(_number(n) for n in rest), *(None, None, 1)[len(rest) :])
    start = start or 0
    if isinstance(start, int) and start < 0 and isinstance(size, int):
        start += size
    if isinstance(end, int) and end < 0 and isinstance(size, int):
        end += size
    to_the_end = end is None or end == size or isinstance(end, int) and (end == _LAST or _reaches(end, size))
    return name, dim, start, None if to_the_end else end, step


_LAST = 2**63 - 1


def _reaches(end: int, size: Any) -> bool:
    return isinstance(size, int) and end >= size


def _number(size: Any) -> Any:
    """A number, or a symbolic one as `dims` gives it."""
    if isinstance(size, Node):
        held = value(size)
        return held if isinstance(held, int) else upstream.fingerprint(held)
    return size


def _numbers(sizes: Any) -> tuple:
    return tuple(_number(n) for n in sizes)


def _write(base: Node, written: Node) -> Write:
    levels = list(_levels(written))
    for new, path, rests in reversed(levels):
        if not is_tensor(new) or value(new).dim() != 3 or not value(new).dtype.is_floating_point:
            continue
        for put in (n for n in reversed(cone([new], {base})) if calls(n, {aten.index_put.default})):
            before, view = _along(put.args[0], path)
            if view is None or dims(view) != dims(new):
                continue
            if all(path_of(rest) == (before, path[:i]) for i, rest in rests.items()):
                return Update(base, before, new, written, view)
    new, _, rests = levels[-1]
    return Write(base, rests.get(0, base), new, written)


def _levels(written: Node) -> Iterator[tuple[Node, Path, dict[int, Node]]]:
    """(contents, the view that they are of, what lies around it) from the whole inwards; the last by length of path."""
    path: Path = ()
    rests: dict[int, Node] = {}
    while True:
        yield written, path, dict(rests)
        if calls(written, _SCATTERS):
            rest, source, *where = written.args
            rests[len(path)] = rest
            path += (_part(_SCATTERS[written.target], rest, tuple(where)),)
        elif calls(written, {aten.permute.default}):
            (source, order) = written.args
            path += (("permute", tuple(sorted(range(len(order)), key=lambda d: order[d] % len(order)))),)
        elif calls(written, _RESHAPES):
            source = written.args[0]
            path += (("reshape", dims(source)),)
        elif calls(written, {aten.alias.default}):
            source = written.args[0]
        else:
            return
        written = source


def _along(node: Node, path: Path) -> tuple[Node, Node | None]:
    """(what `node` is a view of, the view at `path` on the way to it, if it lies there)"""
    root, whole = path_of(node)
    while path_of(node)[1] != path:
        if node is root:
            return root, None
        node = node.args[0]
    return root, node


def are_apart(one: Path, other: Path) -> bool:
    """Whether two views of one tensor surely share no element."""
    for a, b in zip(one, other):
        if a == b:
            continue
        if a[:2] != b[:2] or a[0] not in ("select", "slice") or not all(isinstance(n, int) for n in (a[2], b[2])):
            return False
        if a[0] == "select":
            return a[2] != b[2] and (a[2] < 0) == (b[2] < 0)
        (_, _, _, first_end, _), (_, _, second_start, _, _) = sorted((a, b), key=lambda step: step[2])
        return isinstance(first_end, int) and 0 <= first_end <= second_start
    return False
