"""Find the dilated short convolution in a graph, and the cache writes that belong to it.

    y = silu(conv(cat([state or zeros, x^T])))^T        new_state = last columns of cat([state or zeros, x^T])

The anchor is a depthwise 1-D convolution with a dilation. Upwards, layout ops lead to the sequence and the state;
downwards, everything computed from the convolution alone is its activation.
"""

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ple_compile.matching import probe
from ple_compile.matching.bounds import Bounds
from ple_compile.matching.candidates import Declined
from ple_compile.matching.difference import where_they_part
from ple_compile.matching.graph import (
    CASTS,
    VIEWS,
    aten,
    calls,
    closure,
    cone,
    depends_on,
    dims,
    is_pointwise,
    is_tensor,
    open_inputs,
    prims,
    producers,
    tensor_inputs,
    value,
)
from ple_compile.matching.repeats import asked_once, signature
from ple_compile.ops.short_conv import stages

# Elements of the widest probe tensor: PyTorch's depthwise convolution takes a second for 10,240 channels in float64.
MOST_VALUES = 2**16

# Ops that only move, pad or join columns: between the sequence and the convolution, and between it and the cache.
COLUMNS = {
    aten.permute.default,
    aten.constant_pad_nd.default,
    aten.slice.Tensor,
    aten.cat.default,
    aten.copy.default,
    aten.clone.default,
    prims.convert_element_type.default,
}
FILLS = {aten.full.default, aten.zeros.default}


@dataclass(frozen=True)
class ShortConv:
    """A convolution candidate: leaves by role and the node it replaces ([batch, sequence, channels] or transposed).

    `convolution` is the sum of the taps, in whatever way it is computed.
    """

    convolution: Node
    x: Node
    weight: Node
    state: Node | None
    dilation: int
    activated: Node
    transposed: bool

    @property
    def leaves(self) -> list[Node]:
        return [self.x, self.weight] + ([self.state] if self.state is not None else [])


def find_short_convs(graph: Graph) -> list[tuple[Node, ShortConv | Declined]]:
    """Every depthwise 1-D convolution with a dilation, with its roles or why it has none."""
    found: list[tuple[Node, ShortConv | Declined]] = []
    for node in graph.nodes:
        if is_dilated(node):
            try:
                found.append((node, _assign_roles(node)))
            except Declined as reason:
                found.append((node, reason))
    return found


def is_dilated(node: Node) -> bool:
    """Whether `node` is a depthwise 1-D convolution with a dilation."""
    if not calls(node, {aten.convolution.default}):
        return False
    _, weight, _, _, _, dilation, transposed, _, groups = node.args
    depthwise = not transposed and groups == dims(weight)[0] and dims(weight)[1] == 1
    return depthwise and len(dilation) == 1 and dilation[0] > 1


def _assign_roles(node: Node) -> ShortConv:
    weight, bias, stride, _, dilation = node.args[1:6]
    if bias is not None:
        raise Declined("the convolution has a bias")
    if list(stride) != [1]:
        raise Declined(f"the convolution has stride {stride[0]}")
    after = closure({node}, _follows)
    outputs = [n for n in sorted(after) if any(u not in after for u in n.users)]
    if len(outputs) != 1:
        read = ", ".join(n.name for n in outputs)
        raise Declined(f"more than the activation is read of the convolution: {read}")
    sequences = _sequences_and_states(node)
    for x, state in sequences:
        batch, length, channels = dims(x)
        for activated in producers(outputs[0], VIEWS):
            if dims(activated) in ((batch, length, channels), (batch, channels, length)):
                transposed = dims(activated) != (batch, length, channels)
                return ShortConv(node, x, weight, state, dilation[0], activated, transposed)
    if not sequences:
        raise Declined("the convolution's input is not one [batch, sequence, channels] tensor and at most one state")
    raise Declined(f"{outputs[0].name} has another shape than the sequence")


def _sequences_and_states(convolution: Node) -> list[tuple[Node, Node | None]]:
    """Readings of a convolution's input: a [batch, sequence, channels] tensor, and a state [batch, channels, window].

    The sequence is what was transposed; or, where it was padded or joined to the state before, what it was then.
    """
    sequences, states = _through_columns(convolution.args[0])
    if len(set(sequences)) != 1 or len(set(states)) > 1:
        return []
    readings = [(sequences[0], states[0] if states else None)]
    if not states and calls(sequences[0], {aten.constant_pad_nd.default, aten.cat.default, aten.slice.Tensor}):
        states, sequences = _through_columns(sequences[0], COLUMNS - CASTS)
        if len(set(states)) <= 1 and len(set(sequences)) == 1:
            readings.append((sequences[0], states[0] if states else None))
    return readings


def _through_columns(node: Node, through: set = COLUMNS) -> tuple[list[Node], list[Node]]:
    """(what was transposed, everything else) that columns were moved from."""
    transposed: list[Node] = []
    others: list[Node] = []
    stack = [node]
    while stack:
        current = stack.pop()
        if calls(current, {aten.permute.default}) and list(current.args[1]) == [0, 2, 1]:
            transposed.append(current.args[0])
        elif calls(current, through):
            stack += [n for n in current.all_input_nodes if is_tensor(n)]
        elif not calls(current, FILLS):
            others.append(current)
    return transposed, others


def _follows(node: Node, inside: set[Node]) -> bool:
    """Whether a node is computed elementwise, or moved, from what is inside and nothing else."""
    elementwise = is_pointwise(node) or node.target in COLUMNS | VIEWS | CASTS
    return elementwise and all(n in inside for n in tensor_inputs(node))


def find_state_writes(conv: ShortConv) -> tuple[list[Node], Node | None]:
    """(new cache states, first other reader) among everything made of the sequence by moving columns.

    A new state holds the last columns of the history and is read by someone else; that it does is probed.
    """
    reached = closure({conv.x} | ({conv.state} if conv.state is not None else set()), _moves_columns)
    made = depends_on(sorted(reached - {conv.x}), {conv.x}) | {conv.x}
    read = [n for n in sorted(made) if any(u not in reached and u is not conv.convolution for u in n.users)]
    writes = [n for n in read if n is not conv.x and _is_state_write(conv, n)]
    others = [u for n in read if n not in writes for u in n.users if u not in reached and u is not conv.convolution]
    return writes, others[0] if others else None


def _moves_columns(node: Node, inside: set[Node]) -> bool:
    """Whether a node moves columns of what is inside, or of constants, and nothing else."""
    sources = node.args[1:2] if calls(node, {aten.copy.default}) else node.all_input_nodes
    return calls(node, COLUMNS) and all(n in inside or calls(n, FILLS) or not is_tensor(n) for n in sources)


def verify(conv: ShortConv) -> None:
    """Raise `Declined` unless the candidate computes the short convolution, rounding included."""
    verify_mathematics(conv)
    verify_rounding(conv)


def verify_mathematics(conv: ShortConv) -> None:
    """Raise `Declined` unless the candidate computes the short convolution."""
    stray = open_inputs([conv.activated], set(conv.leaves))
    if stray:
        raise Declined(f"the convolution also reads {stray[0].name}")
    _verify(conv, (1.0,), precise=True)


def verify_rounding(conv: ShortConv) -> None:
    """Raise `Declined` unless the candidate rounds where the op does."""
    _verify(conv, (1.0, 20.0), precise=False)


def _verify(conv: ShortConv, scales: tuple[float, ...], *, precise: bool) -> None:
    nodes = cone([conv.activated], set(conv.leaves))
    question = signature(nodes, conv.leaves, conv.dilation, conv.activated, conv.transposed, scales, precise)
    try:
        asked_once(conv.activated.graph, question, lambda: _probe(conv, nodes, scales, precise=precise))
    except (probe.Unprobeable, ValueError) as reason:
        raise Declined(str(reason)) from None


def _probe(conv: ShortConv, nodes: list[Node], scales: tuple[float, ...], *, precise: bool) -> None:
    assignments, bounds = probe.size_assignments([*conv.leaves, *nodes], conv.leaves[2:]), Bounds(nodes)
    for sizes in assignments if precise else assignments[:1]:
        for scale in scales:
            bounds.saw(_probe_once(conv, nodes, sizes, scale, precise=precise))
    bounds.check()


def _resize(conv: ShortConv) -> probe.Resize | None:
    shape = value(conv.x).shape
    if isinstance(shape[2], torch.SymInt):
        raise Declined("the number of channels is symbolic")
    static = [s for s in shape if not isinstance(s, torch.SymInt)]
    if torch.Size(static).numel() * probe.LARGE_HINT <= MOST_VALUES:
        return None
    if not calls(conv.convolution, {aten.convolution.default}):
        return probe.FewerChannels(shape[2], min(shape[2], 8))
    channel_dims = {conv.x: 2, conv.weight: 0} | ({conv.state: 1} if conv.state is not None else {})
    return probe.ChannelResize(shape[2], min(shape[2], 8), channel_dims)


def _draw(conv: ShortConv, sizes: dict, scale: float) -> tuple[probe.Resize | None, dict[Node, torch.Tensor]]:
    generator = torch.Generator().manual_seed(int(scale))
    resize = _resize(conv)
    shapes = probe.Probe(sizes, resize=resize)
    drawn = {}
    for leaf in conv.leaves:
        tensor = torch.randn(shapes.shape(leaf), generator=generator, dtype=torch.float64)
        drawn[leaf] = (tensor * (scale if leaf is conv.x else 1.0)).to(value(leaf).dtype)
    return resize, drawn


def _probe_once(conv: ShortConv, nodes: list[Node], sizes: dict, scale: float, *, precise: bool) -> dict[Node, object]:
    """The values of all nodes; raises `Declined` where they differ from the op's."""
    resize, drawn = _draw(conv, sizes, scale)
    run = probe.Probe(sizes, precise=precise, resize=resize)
    run.env = {leaf: tensor.to(run.dtype(tensor.dtype)) for leaf, tensor in drawn.items()}
    leaf = dict(run.env)
    run.run(nodes)
    state = leaf[conv.state] if conv.state is not None else None
    if leaf[conv.x].numel() == 0:
        return run.env
    expected = stages(leaf[conv.x], leaf[conv.weight], state, conv.dilation)
    actual = run.env[conv.activated]
    actual = actual.transpose(1, 2) if conv.transposed else actual
    same = probe.close if precise else probe.same_rounding
    if not same(actual, expected["activation"]):
        parting = where_they_part(nodes, run.env, expected, "activation", same)
        what = "differs from silu of a causal dilated convolution" if precise else "rounds at other points than eager's"
        raise Declined(f"the activation at {conv.activated.name} {what}{parting.text}", parting.node)
    return run.env


def _is_state_write(conv: ShortConv, node: Node) -> bool:
    sources = {conv.x} | ({conv.state} if conv.state is not None else set())
    target = node.args[1] if calls(node, {aten.copy.default}) else node
    if open_inputs([target], sources) or dims(target)[:2] != (dims(conv.x)[0], dims(conv.x)[2]):
        return False
    nodes = cone([target], sources)
    question = signature(nodes, "state write", conv.leaves, conv.dilation, target)
    return asked_once(node.graph, question, lambda: _holds_last_columns(conv, target, nodes))


def _holds_last_columns(conv: ShortConv, target: Node, nodes: list[Node]) -> bool:
    sources = [leaf for leaf in conv.leaves if leaf is not conv.weight]
    try:
        for sizes in probe.size_assignments([*sources, *nodes], conv.leaves[2:]):
            resize, drawn = _draw(conv, sizes, 1.0)
            run = probe.Probe(sizes, resize=resize)
            run.env = {leaf: drawn[leaf] for leaf in sources}
            run.run(nodes)
            columns = run.env[conv.x].transpose(1, 2)
            if conv.state is not None:
                columns = torch.cat([run.env[conv.state], columns], dim=-1)
            actual = run.env[target]
            missing = actual.shape[-1] - columns.shape[-1]
            if missing > 0:
                columns = torch.nn.functional.pad(columns, (missing, 0))
            if not torch.equal(actual, columns[..., columns.shape[-1] - actual.shape[-1] :]):
                return False
    except probe.Unprobeable:
        return False
    return True
