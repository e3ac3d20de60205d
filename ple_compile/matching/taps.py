"""Find short convolutions that are spelled as a sum of taps: slices, shifts or windows of a sequence times a weight.

No convolution op marks them. The anchor is a silu above which there is something normed and one weight [C, 1, K] or
[C, K]; the sequence is the nearest [batch, sequence, C] tensor that carries everything else but one state.
"""

from collections.abc import Iterator

from torch.fx import Graph, Node

from ple_compile.matching import probe
from ple_compile.matching.candidates import Declined
from ple_compile.matching.graph import (
    CASTS,
    aten,
    calls,
    cone,
    depends_on,
    dims,
    is_tensor,
    open_inputs,
    outside_reader,
    source,
    tensor_inputs,
    value,
)
from ple_compile.matching.norms import MOST_STEPS, PRODUCERS, norms_above
from ple_compile.matching.short_conv import ShortConv, verify_mathematics

MOST_TAPS, MOST_DILATION = 8, 64


def find_taps(graph: Graph) -> list[tuple[Node, ShortConv | Declined]]:
    """Every sum of taps under a silu that computes a short convolution, or why it cannot be taken out of the graph."""
    found: list[tuple[Node, ShortConv | Declined]] = []
    for node in graph.nodes:
        total = _silu_of(node)
        weights = _weights_above(total) if total is not None else []
        conv = _match(node, total, weights[0]) if len(weights) == 1 and norms_above(total) else None
        if conv is not None:
            found.append((node, conv))
    return found


def _silu_of(node: Node) -> Node | None:
    """What `node` is the silu of: x / (exp(-x) + 1), or x * sigmoid(x)."""
    if calls(node, {aten.div.Tensor}) and isinstance(node.args[1], Node):
        x, below = source(node.args[0]), source(node.args[1])
        exp = source(below.args[0]) if calls(below, {aten.add.Tensor}) and below.args[1] == 1 else None
        neg = source(exp.args[0]) if calls(exp, {aten.exp.default}) else None
        return x if calls(neg, {aten.neg.default}) and source(neg.args[0]) is x else None
    if calls(node, {aten.mul.Tensor}):
        for x, opening in (node.args, node.args[::-1]):
            if calls(opening, {aten.sigmoid.default}) and isinstance(x, Node) and source(opening.args[0]) is source(x):
                return source(x)
    return None


def _weights_above(total: Node) -> list[Node]:
    """Inputs of a filter's shape, [channels, 1, taps] or [channels, taps], that feed `total`."""
    seen: set[Node] = set()
    stack = [total]
    while stack and len(seen) < MOST_STEPS:
        node = stack.pop(0)
        if node not in seen and node.target not in PRODUCERS:
            seen.add(node)
            stack += tensor_inputs(node)
    return [n for n in seen if n.op in ("placeholder", "get_attr") and _is_filter(n)]


def _is_filter(node: Node) -> bool:
    shape = dims(node)
    if len(shape) not in (2, 3) or not all(isinstance(size, int) for size in shape):
        return False
    return 1 < shape[-1] <= MOST_TAPS < shape[0] and shape[1:-1] in ((), (1,)) and value(node).is_floating_point()


def _match(silu: Node, total: Node, weight: Node) -> ShortConv | Declined | None:
    activated = silu
    while len(activated.users) == 1 and calls(next(iter(activated.users)), CASTS | {aten.permute.default}):
        (activated,) = activated.users
    for conv in _readings(total, activated, weight):
        try:
            verify_mathematics(conv)
        except Declined:
            continue
        inside = depends_on(cone([activated], set(conv.leaves)), {conv.x, weight}) - {activated}
        reader = outside_reader(inside, [activated])
        read = Declined(f"more than the activation is read of the convolution: {reader[0].name}") if reader else None
        return read or conv
    return None


def _readings(total: Node, activated: Node, weight: Node) -> Iterator[ShortConv]:
    """Possible sequences, the nearest first, each with every dilation that the graph has a number for."""
    channels = dims(weight)[0]
    nodes = cone([activated], {weight})
    weighted = depends_on(nodes, {weight})
    for x in (*reversed(nodes), *open_inputs([activated], {weight})):
        if x in weighted or not is_tensor(x) or not value(x).is_floating_point() or dims(x)[2:] != (channels,):
            continue
        transposed = dims(activated) != dims(x)
        if transposed and dims(activated) != (dims(x)[0], channels, dims(x)[1]):
            continue
        states = [n for n in open_inputs([activated], {x, weight}) if n is not x]
        if len(states) > 1 or any(dims(n)[:2] != (dims(x)[0], channels) or len(dims(n)) != 3 for n in states):
            continue
        state = states[0] if states else None
        for dilation in _numbers(cone([activated], {x, weight, *states})):
            if 1 < dilation <= MOST_DILATION:
                yield ShortConv(total, x, weight, state, dilation, activated, transposed)


def _numbers(nodes: list[Node]) -> list[int]:
    """Every integer that `nodes` mention, and those by which they pad."""
    pads = [n for node in nodes if calls(node, {aten.constant_pad_nd.default}) for n in node.args[1]]
    return sorted({*probe.constants(nodes), *(n for n in pads if isinstance(n, int))})
