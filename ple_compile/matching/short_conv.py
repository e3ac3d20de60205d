"""Find the dilated short convolution in a graph, and the cache writes that belong to it.

    y = silu(conv(cat([state or zeros, x^T])))^T        new_state = last columns of cat([state or zeros, x^T])

The anchor is a depthwise 1-D convolution with a dilation. Upwards, layout ops lead to the sequence and the state;
downwards, everything computed from the convolution alone is its activation.
"""

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ple_compile.matching import probe
from ple_compile.matching.candidates import Declined
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
    value,
)
from ple_compile.matching.repeats import asked_once, signature

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
    """A convolution candidate: leaves by role and the node it replaces ([batch, sequence, channels] or transposed)."""

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
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        _, weight, _, _, _, dilation, transposed, _, groups = node.args
        if transposed or len(dilation) != 1 or dilation[0] < 2 or groups != dims(weight)[0] or dims(weight)[1] != 1:
            continue
        try:
            found.append((node, _assign_roles(node)))
        except Declined as reason:
            found.append((node, reason))
    return found


def _assign_roles(node: Node) -> ShortConv:
    sequence, weight, bias, stride, padding, dilation = node.args[:6]
    if bias is not None:
        raise Declined("the convolution has a bias")
    if list(stride) != [1]:
        raise Declined(f"the convolution has stride {stride[0]}")
    x, state = _sequence_and_state(sequence)
    after = closure(node, lambda n: is_pointwise(n) or n.target in COLUMNS | VIEWS | CASTS)
    outputs = [n for n in after if any(u not in after for u in n.users)]
    if len(outputs) != 1:
        read = ", ".join(n.name for n in outputs)
        raise Declined(f"more than the activation is read of the convolution: {read}")
    activated = outputs[0]
    batch, length, channels = dims(x)
    if dims(activated) == (batch, length, channels):
        transposed = False
    elif dims(activated) == (batch, channels, length):
        transposed = True
    else:
        raise Declined(f"{activated.name} has another shape than the sequence")
    return ShortConv(node, x, weight, state, dilation[0], activated, transposed)


def _sequence_and_state(node: Node) -> tuple[Node, Node | None]:
    """The [batch, sequence, channels] input and the [batch, channels, window] state above a convolution."""
    sequences: list[Node] = []
    states: list[Node] = []
    stack = [node]
    while stack:
        current = stack.pop()
        if calls(current, {aten.permute.default}) and list(current.args[1]) == [0, 2, 1]:
            sequences.append(current.args[0])
        elif calls(current, COLUMNS):
            stack += [n for n in current.all_input_nodes if is_tensor(n)]
        elif not calls(current, FILLS):
            states.append(current)
    if len(set(sequences)) != 1 or len(set(states)) > 1:
        raise Declined("the convolution's input is not one [batch, sequence, channels] tensor and at most one state")
    return sequences[0], states[0] if states else None


def find_state_writes(conv: ShortConv) -> tuple[list[Node], Node | None]:
    """(new cache states, first other reader) among everything made of the sequence by moving columns.

    A new state holds the last columns of the history and is read by someone else; that it does is probed.
    """
    reached = {conv.x} | ({conv.state} if conv.state is not None else set())
    for node in conv.x.graph.nodes:
        if calls(node, COLUMNS) and any(n in reached for n in node.all_input_nodes):
            sources = node.args[1:2] if calls(node, {aten.copy.default}) else node.all_input_nodes
            if all(n in reached or calls(n, FILLS) or not is_tensor(n) for n in sources):
                reached.add(node)
    made = depends_on(sorted(reached - {conv.x}), {conv.x}) | {conv.x}
    read = [n for n in sorted(made) if any(u not in reached and u is not conv.convolution for u in n.users)]
    writes = [n for n in read if n is not conv.x and _is_state_write(conv, n)]
    others = [u for n in read if n not in writes for u in n.users if u not in reached and u is not conv.convolution]
    return writes, others[0] if others else None


def verify(conv: ShortConv) -> None:
    """Raise `Declined` unless the candidate computes the short convolution, rounding included."""
    nodes = cone([conv.activated], set(conv.leaves))
    stray = open_inputs([conv.activated], set(conv.leaves))
    if stray:
        raise Declined(f"the convolution also reads {stray[0].name}")
    question = signature(nodes, conv.leaves, conv.dilation, conv.activated, conv.transposed)
    try:
        asked_once(conv.activated.graph, question, lambda: _probe(conv, nodes))
    except (probe.Unprobeable, ValueError) as reason:
        raise Declined(str(reason)) from None


def _probe(conv: ShortConv, nodes: list[Node]) -> None:
    assignments = probe.size_assignments([*conv.leaves, *nodes], conv.leaves[2:])
    for sizes in assignments:
        _probe_once(conv, nodes, sizes, 1.0, precise=True)
    for scale in (1.0, 20.0):
        _probe_once(conv, nodes, assignments[0], scale, precise=False)


def _resize(conv: ShortConv) -> probe.ChannelResize | None:
    shape = value(conv.x).shape
    if isinstance(shape[2], torch.SymInt):
        raise Declined("the number of channels is symbolic")
    static = [s for s in shape if not isinstance(s, torch.SymInt)]
    if torch.Size(static).numel() * probe.LARGE_HINT <= MOST_VALUES:
        return None
    channel_dims = {conv.x: 2, conv.weight: 0} | ({conv.state: 1} if conv.state is not None else {})
    return probe.ChannelResize(shape[2], min(shape[2], 8), channel_dims)


def _draw(conv: ShortConv, sizes: dict, scale: float) -> tuple[probe.ChannelResize | None, dict[Node, torch.Tensor]]:
    generator = torch.Generator().manual_seed(int(scale))
    resize = _resize(conv)
    shapes = probe.Probe(sizes, resize=resize)
    drawn = {}
    for leaf in conv.leaves:
        tensor = torch.randn(shapes.shape(leaf), generator=generator, dtype=torch.float64)
        drawn[leaf] = (tensor * (scale if leaf is conv.x else 1.0)).to(value(leaf).dtype)
    return resize, drawn


def _probe_once(conv: ShortConv, nodes: list[Node], sizes: dict, scale: float, *, precise: bool) -> None:
    resize, drawn = _draw(conv, sizes, scale)
    run = probe.Probe(sizes, precise=precise, resize=resize)
    run.env = {leaf: tensor.to(run.dtype(tensor.dtype)) for leaf, tensor in drawn.items()}
    leaf = dict(run.env)
    run.run(nodes)
    state = leaf[conv.state] if conv.state is not None else None
    expected = torch.ops.ple.short_conv(leaf[conv.x], leaf[conv.weight], state, conv.dilation)
    actual = run.env[conv.activated]
    actual = actual.transpose(1, 2) if conv.transposed else actual
    if precise and not probe.close(actual, expected):
        raise Declined(f"the activation at {conv.activated.name} differs from silu of a causal dilated convolution")
    if not precise and not probe.same_rounding(actual, expected):
        raise Declined(f"the activation at {conv.activated.name} rounds at other points than eager's")


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
