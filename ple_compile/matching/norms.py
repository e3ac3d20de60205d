"""Find RMS norms in a graph, by the root of a mean of squares that each one takes."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Graph, Node

from ple_compile.matching.graph import CASTS, VIEWS, aten, calls, origin, source, tensor_inputs, value
from ple_compile.matching.streams import cut_from, owner

# Walking up from a node stops at these: what they produce is somebody's input, never part of a norm or a gate.
PRODUCERS = {aten.mm.default, aten.addmm.default, aten.embedding.default, aten.convolution.default}
MOST_STEPS = 128


@dataclass(frozen=True)
class Norm:
    """`root` is the square root, reciprocal or not, of `mean(squared ** 2) + eps` over the last dim of `squared`."""

    root: Node
    squared: Node
    eps: float | Node

    @property
    def source(self) -> Node:
        """What the norm is taken of, without views and lossless casts."""
        return source(self.squared)


def find_norm(node: Node) -> Norm | None:
    """The norm whose root `node` is."""
    if calls(node, {aten.pow.Tensor_Scalar}):
        is_root = node.args[1] in (0.5, -0.5)
    else:
        is_root = calls(node, {aten.rsqrt.default, aten.sqrt.default})
    split = _eps(node.args[0]) if is_root else None
    squared = _squared(split[1]) if split is not None else None
    return Norm(node, squared, split[0]) if squared is not None else None


def find_norms(graph: Graph) -> list[Norm]:
    return [norm for node in graph.nodes if (norm := find_norm(node)) is not None]


def norms_above(node: Node) -> list[Norm]:
    """The norms that feed `node`, one for each thing that is normed, without walking past any of those."""
    found: dict[Node, Norm] = {}
    for _ in range(4):  # the first walk does not know yet where to stop
        found, stops = _reached(node, set(found)), set(found)
        if set(found) == stops:
            break
    return list(found.values())


def _reached(node: Node, stops: set[Node]) -> dict[Node, Norm]:
    """Norms by what they are taken of, walking up from `node` as far as `stops`."""
    found: dict[Node, Norm] = {}
    seen: set[Node] = set()
    stack = [node]
    while stack and len(seen) < MOST_STEPS:
        current = stack.pop(0)
        if current in seen or current.op != "call_function" or current.target in PRODUCERS or current in stops:
            continue
        seen.add(current)
        norm = find_norm(current)
        if norm is not None:
            found.setdefault(norm.source, norm)
        whole = cut_from(current)
        stack += tensor_inputs(current) if whole is None else [whole]
    return found


def by_owner(norms: Iterable[Norm]) -> list[tuple[Node, list[Norm]]]:
    """(what is normed, the norms of it or of its parts): several norms of parts of one tensor are one of the whole."""
    groups: dict[Node, list[Norm]] = {}
    for norm in norms:
        groups.setdefault(owner(norm.source), []).append(norm)
    return [(group[0].squared if len(group) == 1 else _whole(group[0]), group) for group in groups.values()]


def _whole(norm: Norm) -> Node:
    """What a stream's norm is a part of; a whole one is of itself."""
    whole = cut_from(norm.source)
    return norm.squared if whole is None else whole


def _eps(node: Node) -> tuple[float | Node, Node] | None:
    """Split `mean + eps` into (eps, mean)."""
    node = source(node, VIEWS)
    if not calls(node, {aten.add.Tensor, aten.add.Scalar}):
        return None
    left, right = node.args[:2]
    if isinstance(right, (int, float)):
        return float(right), left
    for mean, eps in ((left, right), (right, left)):
        scalar = origin(eps)  # a float64 scalar is cast down to the norm's type
        if scalar.op == "placeholder" and value(scalar).dim() == 0:
            return scalar, mean
        if calls(scalar, {aten.full.default}) and not scalar.args[0]:
            return float(scalar.args[1]), mean
    return None


def _squared(mean: Node) -> Node | None:
    """What a mean of squares was taken of."""
    node = mean
    for _ in range(8):
        node = source(node, VIEWS | CASTS)
        if calls(node, {aten.pow.Tensor_Scalar}) and node.args[1] == 2:
            root = source(node.args[0], VIEWS)
            if not (calls(root, {aten.pow.Tensor_Scalar}) and root.args[1] == 0.5):  # a vector norm, squared
                return node.args[0]
            node = root.args[0]
        elif calls(node, {aten.mul.Tensor}):
            factors = [n for n in node.args if isinstance(n, Node) and value(n).dim()]
            if len(factors) == 2:
                return factors[0] if source(factors[0]) is source(factors[1]) else None
            node = factors[0] if factors else None
        elif calls(node, {aten.mean.dim, aten.sum.dim_IntList, aten.div.Tensor, aten.div.Scalar, aten.mul.Scalar}):
            node = node.args[0]
        else:
            return None
        if not isinstance(node, Node):
            return None
    return None
