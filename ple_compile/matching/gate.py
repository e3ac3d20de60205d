"""Find the PLE gate in a graph: three grouped norms around one sigmoid.

    kn = norm(key), qn = norm(hidden), g = sigmoid(f(sum(kn * qn))), gated = g * value, normed = norm(gated)

The anchor is the sigmoid. Roles follow from data flow: the two norms above it are key and query, the norm below is the
convolution's, of what is gated; the value is what else went into that; each weight follows the norm that it scales.
A model may compute its streams one by one, from parts of these tensors, and join what it gets: then the sigmoids and
norms of all streams are taken together.
"""

import dataclasses
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ple_compile.matching import probe
from ple_compile.matching.bounds import Bounds
from ple_compile.matching.candidates import Declined
from ple_compile.matching.difference import where_they_part
from ple_compile.matching.graph import (
    LAYOUT,
    VIEWS,
    aten,
    calls,
    closure,
    cone,
    depends_on,
    dims,
    is_pointwise,
    is_tensor,
    only_input,
    open_inputs,
    origin,
    outside_reader,
    source,
    source_of_shape,
    tensor_inputs,
    value,
)
from ple_compile.matching.norms import MOST_STEPS, PRODUCERS, Norm, by_owner, find_norms, norms_above
from ple_compile.matching.repeats import asked_once, signature
from ple_compile.matching.streams import STREAM_OPS, are_streams, joined, owner
from ple_compile.ops.gate import stages

REDUCTIONS = {aten.mean.dim, aten.sum.dim_IntList}
SCALES = (1e-3, 1e-9, 30.0)  # of key and value: dot products above and below the bound, and mean squares near eps
ROUNDED_GATES = 384  # a spelling that rounds elsewhere changes at least 3 gates in 100


@dataclass(frozen=True)
class Gate:
    """A gate candidate: leaves by role, and the nodes it replaces (`gated` may have several equal layouts).

    `leading` are the dims of a token, before streams and hidden size. `plain`: the norms multiply by their weights,
    not by one more than them.
    """

    sigmoid: Node
    product: Node
    key: Node
    value: Node
    hidden: Node
    weights: tuple[Node, Node, Node]
    eps: tuple[float | Node, ...]
    mask: Node | None
    gated: tuple[Node, ...]
    normed: Node
    leading: tuple
    plain: bool = False

    @property
    def gate_dtype(self) -> torch.dtype:
        return value(self.sigmoid).dtype

    @property
    def hidden_size(self) -> int:
        return dims(self.value)[-1]

    @property
    def width(self) -> int:
        return value(self.weights[0]).numel()

    @property
    def leaves(self) -> list[Node]:
        found = [self.key, self.value, self.hidden, *self.weights, *(e for e in self.eps if isinstance(e, Node))]
        return found + ([self.mask] if self.mask is not None else [])


def find_gates(graph: Graph) -> list[tuple[Node, Gate | Declined]]:
    """Every gate, verified, or why something like one is none.

    That is a sigmoid of one value for each group of two norms, and the root of a magnitude, of something made of norms,
    with no sigmoid to follow.
    """
    norms = {norm.source: norm for norm in find_norms(graph)}
    roots = {node: _sigmoids_below(node) for node in graph.nodes if _is_root_of_magnitude(node)}
    sigmoids: dict[Hashable, list[Node]] = {}
    above: dict[Hashable, dict[Node, Norm]] = {}
    for sigmoid in graph.find_nodes(op="call_function", target=aten.sigmoid.default):
        own = norms_above(sigmoid)
        if any(sigmoid in below for below in roots.values()) or _is_one_per_group(sigmoid, own):
            normed = frozenset(owner(norm.source) for norm in own)
            gate = normed if len(normed) == 2 else sigmoid
            sigmoids.setdefault(gate, []).append(sigmoid)
            above.setdefault(gate, {}).update({norm.source: norm for norm in own})
    found = [(nodes[0], _match(nodes, list(above[gate].values()), norms)) for gate, nodes in sigmoids.items()]
    no_sigmoid = Declined("no sigmoid follows the root of a magnitude, as in a PLE gate")
    return found + [(root, no_sigmoid) for root, below in roots.items() if not below and len(norms_above(root)) > 1]


def _is_one_per_group(sigmoid: Node, above: list[Norm]) -> bool:
    """Whether a sigmoid has two norms above, and one value where they have a group."""
    groups = [dims(norm.squared)[:-1] for norm in above]
    return len(above) == 2 and any(dims(sigmoid) in (shape, (*shape, 1)) for shape in groups)


def _is_root_of_magnitude(node: Node) -> bool:
    """Whether `node` is the square root of an absolute value that was bounded from below."""
    if not calls(node, {aten.sqrt.default}) and not (calls(node, {aten.pow.Tensor_Scalar}) and node.args[1] == 0.5):
        return False
    for _ in range(4):
        node = source(node.args[0])
        if calls(node, {aten.abs.default}):
            return True
        if not is_pointwise(node) or sum(value(n).dim() > 0 for n in tensor_inputs(node)) != 1:
            return False
    return False


def _sigmoids_below(node: Node) -> list[Node]:
    """Sigmoids of something computed elementwise from `node`."""
    seen, stack = {node}, [node]
    while stack and len(seen) < MOST_STEPS:
        new = [u for u in stack.pop(0).users if u not in seen and (is_pointwise(u) or calls(u, LAYOUT | STREAM_OPS))]
        seen.update(new)
        stack += [u for u in new if not calls(u, {aten.sigmoid.default})]
    return [n for n in seen if calls(n, {aten.sigmoid.default})]


def _match(sigmoids: list[Node], above: list[Norm], norms: dict[Node, Norm]) -> Gate | Declined:
    """The gate around sigmoids with the norms `above` them, or why the reading of it that comes closest is none."""
    reasons: list[Declined] = []
    try:
        for gate in _readings(sigmoids, above, norms):
            try:
                _verify(gate)
                return gate
            except Declined as reason:
                reasons.append(reason)
    except Declined as reason:
        return reason
    return max(reasons, key=lambda reason: reason.stage)


def _readings(sigmoids: list[Node], above: list[Norm], norms: dict[Node, Norm]) -> Iterator[Gate]:
    """Gates by role: with norms that multiply by one more than their weights, and with norms that multiply by them."""
    normed_above = by_owner(above)
    if len(normed_above) != 2:
        raise Declined(f"{len(above)} norms feed the gate, not that of one key and that of the hidden state")
    product, conv_norms = _normed_below(sigmoids, norms)
    conv_norm = conv_norms[0]
    hidden_size = dims(conv_norm.squared)[-1]
    conv_weight, conv_scale, normed = _scaled(conv_norms, product)
    width = value(conv_weight).numel()
    if not isinstance(hidden_size, int) or not isinstance(width, int) or width % hidden_size:
        raise Declined("the number of streams or the hidden size is symbolic, or they do not divide the norm's weight")
    layout = (width // hidden_size, hidden_size)
    leading = dims(conv_norm.squared)[:-1] if len(conv_norms) > 1 else _leading(dims(conv_norm.squared), layout)
    scores = [size for sigmoid in sigmoids for size in dims(sigmoid)[len(leading) :]]
    if not all(isinstance(size, int) for size in scores) or _num_scores(sigmoids, leading) != layout[0]:
        raise Declined("the sigmoids are not one value for each token and stream")
    key, hidden = (_laid_out(node, leading, layout) for node, _ in normed_above)
    value_leaf = _value(product, {key, hidden}, leading + layout[1:])
    if _shares_producer(hidden, value_leaf) and not _shares_producer(key, value_leaf):
        normed_above, key, hidden = normed_above[::-1], hidden, key
    weights = _weights(sigmoids, key, hidden, width)
    leaves = {value_leaf, key, hidden, *weights, conv_weight}
    inside = set(cone([normed], leaves))
    gated = _read_layouts(product, inside, leading, layout)
    masks = [_masked(n, inside, leading) for n in (*gated, normed)]
    mask = masks[0][0] if masks[0] is not None else None
    if mask is not None and all(m is not None and m[0] is mask for m in masks) and len(masks[-1][1]) == 1:
        gated, normed = [n for m in masks[:-1] for n in m[1]], masks[-1][1][0]
    else:
        mask = None
    eps = (*(of_it[0].eps for _, of_it in normed_above), conv_norm.eps)
    gate = Gate(
        sigmoids[0], product, key, value_leaf, hidden, (*weights, conv_weight), eps, mask, tuple(gated), normed, leading
    )
    yield gate
    nodes = cone(sigmoids, {key, hidden})
    scales = (*(_scale(weight, nodes) for weight in weights), conv_scale)
    if all(value(scale).numel() == width for scale in scales):
        yield dataclasses.replace(gate, weights=scales, plain=True)


def _num_scores(sigmoids: list[Node], leading: tuple) -> int:
    return sum(math.prod(dims(sigmoid)[len(leading) :]) for sigmoid in sigmoids)


def _normed_below(sigmoids: list[Node], norms: dict[Node, Norm]) -> tuple[Node, list[Norm]]:
    """(the nearest thing below the sigmoids that is normed, the norms of it or of its streams)"""
    found: dict[Node, Norm] = {}
    for sigmoid in sigmoids:
        nearest = _nearest_below(sigmoid, norms)
        found |= {n: norm for n, norm in norms.items() if n is nearest or are_streams(n, nearest)}
    ((whole, of_it), *others) = by_owner(found.values())
    if not others:
        return source(whole), of_it
    # Each stream's own, joined afterwards.
    product = joined(list(found))
    if product is None:
        raise Declined("the streams that are gated one by one are not joined as they are")
    return product, list(found.values())


def _nearest_below(sigmoid: Node, norms: dict[Node, Norm]) -> Node:
    seen, stack = {sigmoid}, [sigmoid]
    while stack and len(seen) < MOST_STEPS:
        new = [u for u in stack.pop(0).users if u not in seen and u.target not in PRODUCERS]
        for user in new:
            if user in norms:
                return user
        seen.update(new)
        stack += new
    raise Declined("no norm over the gated value")


def _scaled(norms: list[Norm], product: Node) -> tuple[Node, Node, Node]:
    """(weight, what norms of a product or its streams are multiplied by, the whole norm as others read it)"""
    streams = STREAM_OPS if len(norms) > 1 else set()
    starts = {product, *(norm.source for norm in norms)}

    def admits(node: Node, inside: set[Node]) -> bool:
        if not (is_pointwise(node) or calls(node, REDUCTIONS | LAYOUT | streams)):
            return False
        others = [n for n in node.all_input_nodes if n not in inside and is_tensor(n)]
        return all(value(n).dim() == 0 or _vector(n, product) is not None for n in others)

    inside = closure(starts, admits)
    normed = depends_on(sorted(inside), {norm.root for norm in norms})
    read = [n for n in sorted(normed) if any(u not in inside for u in n.users)]
    nodes = cone(read[-1:], starts)
    weights = [n for n in open_inputs(read[-1:], starts) if value(n).dim()]
    if len(norms) > 1 and not weights:
        raise Declined(f"the norms of the streams, {norms[0].root.name} for one, share no weight")
    if len(weights) != 1:
        raise Declined(f"{len(weights)} vectors could be the weight of the norm at {norms[0].root.name}")
    return weights[0], _scale(weights[0], nodes), read[-1]


def _vector(node: Node, product: Node) -> Node | None:
    """The weight of all channels of `product` that `node`, or a stream's part, is made of, and of nothing else."""
    weight = only_input(node) if node.op == "call_function" else node
    if weight is None or not value(weight).is_floating_point() or not 0 < value(weight).dim() <= 2:
        return None
    channels = dims(product)[-1:], dims(product)[-2:]
    sizes = [math.prod(shape) for shape in channels if all(isinstance(size, int) for size in shape)]
    fits = value(weight).numel() in sizes and value(weight).numel() % value(node).numel() == 0
    return weight if fits else None


def _scale(weight: Node, nodes: list[Node]) -> Node:
    """The last of `nodes` that is made of `weight` alone, and is all of it."""
    made = [n for n in sorted(depends_on(nodes, {weight})) if only_input(n) is weight]
    made = [n for n in made if is_tensor(n) and value(n).numel() == value(weight).numel()]
    return made[-1] if made else weight


def _leading(grouped: tuple, layout: tuple[int, int]) -> tuple:
    """The dims of a token, told from those of what is normed in groups."""
    if grouped[-2:] == layout and len(grouped) > 2:
        return grouped[:-2]
    if layout[0] == 1 and len(grouped) > 1:
        return grouped[:-1]
    raise Declined("the gated value is not laid out as [..., streams * hidden]")


def _laid_out(node: Node, leading: tuple, layout: tuple[int, int]) -> Node:
    """What is normed, in the layout [..., streams * hidden] or [..., streams, hidden]."""
    for shape in ((*leading, layout[0] * layout[1]), leading + layout):
        leaf = source_of_shape(node, shape)
        if leaf is not None:
            return leaf
    raise Declined(f"{source(node).name} is not laid out as [..., streams * hidden]")


def _value(product: Node, sources: set[Node], shape: tuple) -> Node:
    """What else the product is made of: the nearest thing of one hidden width that neither key nor query feeds."""
    nodes = cone([product], sources)
    fed = depends_on(nodes, sources) | sources
    for node in (*reversed(nodes), *open_inputs([product], sources)):
        if node not in fed and is_tensor(node) and dims(node) == shape and value(node).is_floating_point():
            return source_of_shape(node, shape) or node
    raise Declined("no product of the gate and a value of one hidden width")


def _weights(sigmoids: list[Node], key: Node, hidden: Node, width: int) -> tuple[Node, Node]:
    """The weights of the key's and the query's norm."""
    inputs = open_inputs(sigmoids, {key, hidden})
    found = sorted(n for n in inputs if value(n).dim() in (1, 2) and value(n).numel() == width)
    if len(found) not in (1, 2):
        raise Declined(f"{len(found)} vectors of {width} values could be the weights of key and query")
    first, last = found[0], found[-1]
    nodes = cone(sigmoids, {key, hidden})
    of_key, scaled = depends_on(nodes, {key}), depends_on(nodes, {first})
    met = next((n for n in nodes if n in scaled and n in of_key | depends_on(nodes, {hidden})), None)
    return (first, last) if met in of_key else (last, first)


def _read_layouts(product: Node, inside: set[Node], leading: tuple, layout: tuple[int, int]) -> list[Node]:
    """The product and its views in a gate's layouts, those that someone else reads."""
    shapes = ((*leading, layout[0] * layout[1]), leading + layout)
    if dims(product) not in shapes:
        raise Declined("the gated value is not laid out as [..., streams * hidden]")
    views = [product]
    for node in views:
        views += [u for u in node.users if calls(u, VIEWS) and dims(u) in shapes and u not in views]
    return [n for n in views if any(u not in inside and u not in views for u in n.users)] or [product]


def _masked(node: Node, inside: set[Node], leading: tuple) -> tuple[Node, list[Node]] | None:
    """(mask leaf, products) when every reader of `node` outside `inside` multiplies it by one mask over `leading`."""
    products: dict[Node, list[Node]] = {}
    readers = [user for user in node.users if user not in inside]
    for user in readers:
        others = [n for n in tensor_inputs(user) if n is not node] if calls(user, {aten.mul.Tensor}) else []
        mask = source_of_shape(others[0], leading) if len(others) == 1 else None
        if mask is None:
            return None
        products.setdefault(mask, []).append(user)
    return next(iter(products.items())) if len(products) == 1 else None


def _shares_producer(left: Node, right: Node) -> bool:
    """Whether both come out of a matrix product of the same input."""
    products = [origin(left), origin(right)]
    if not all(calls(p, {aten.mm.default, aten.addmm.default}) for p in products):
        return False
    first, second = (origin(tensor_inputs(p)[-2]) for p in products)
    return first is second


def _verify(gate: Gate) -> None:
    """Raise `Declined` unless the candidate computes the gate, rounding included."""
    roots = [*gate.gated, gate.normed]
    nodes = cone(roots, set(gate.leaves))
    stray = open_inputs(roots, set(gate.leaves))
    if stray:
        raise Declined(f"the gate also reads {stray[0].name}")
    interior = depends_on(nodes, {gate.key, gate.value, gate.hidden}) - set(roots)
    reader = outside_reader(interior, roots)
    if reader is not None:
        raise Declined(f"{reader[0].name} inside the gate is read by {reader[1].name}", reader[1])
    roles = (gate.key, gate.value, gate.hidden, gate.weights, gate.eps, gate.mask, gate.gate_dtype, gate.plain, roots)
    try:
        asked_once(gate.normed.graph, signature(nodes, roles), lambda: _probe(gate, nodes))
    except (probe.Unprobeable, ValueError) as reason:
        raise Declined(str(reason)) from None


def _probe(gate: Gate, nodes: list[Node]) -> None:
    assignments, bounds = probe.size_assignments([*gate.leaves, *nodes]), Bounds(nodes)
    for sizes in assignments:
        bounds.saw(_probe_once(gate, nodes, sizes, 1.0, precise=True))
    for precise in (True, False):
        for scale in SCALES:
            bounds.saw(_probe_once(gate, nodes, assignments[0], scale, precise=precise))
    bounds.check()


def _resize(gate: Gate, nodes: list[Node]) -> probe.TokenResize | None:
    shape = value(gate.hidden).shape
    if any(isinstance(s, torch.SymInt) for s in shape) or len(gate.leading) not in (1, 2):
        return None
    if shape.numel() <= probe.MOST_VALUES:
        return None
    before = tuple(int(s) for s in shape[: len(gate.leading)])
    after = tuple(min(size, limit) for size, limit in zip(before, (2, 4) if len(before) == 2 else (8,)))
    leaves = {gate.key, gate.value, gate.hidden} | ({gate.mask} if gate.mask is not None else set())
    return probe.TokenResize(before, after, frozenset(depends_on(nodes, leaves) | leaves))


def _samples(gate: Gate, shape: tuple[int, ...], *, precise: bool) -> int:
    """How many inputs of this shape of the hidden state are run at once."""
    if precise or value(gate.normed).dtype.itemsize >= 4:
        return 2  # a zero dot product among them
    gates = math.prod(shape) // gate.hidden_size
    return max(2, min(-(-ROUNDED_GATES // max(gates, 1)), probe.MOST_VALUES // max(math.prod(shape), 1)))


def _draw(gate: Gate, leaf: Node, shape: tuple[int, ...], scale: float, generator: torch.Generator) -> torch.Tensor:
    if leaf is gate.mask:
        return torch.rand(shape, generator=generator) > 0.3
    if value(leaf).dim() == 0:
        return torch.rand((), generator=generator, dtype=torch.float64) * 1e-5 + 1e-6
    tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
    if leaf in gate.weights:
        return tensor * 0.3 + (1.0 if gate.plain else 0.0)
    if leaf in (gate.key, gate.value):
        tensor = tensor * scale
    if leaf is gate.hidden:
        tensor = tensor * max(scale, 1e-3)  # a smaller one would leave no dot product above the bound
    if leaf is gate.key and tensor.numel():
        tensor.flatten(0, len(gate.leading))[-1] = 0
    return tensor


def _probe_once(gate: Gate, nodes: list[Node], sizes: dict, scale: float, *, precise: bool) -> dict[Node, object]:
    """The values of all nodes; raises `Declined` where they differ from the op's."""
    generator = torch.Generator().manual_seed(int(scale * 1e10) % 2**31)
    empty = probe.Probe(sizes, precise=precise, resize=_resize(gate, nodes))
    samples = _samples(gate, empty.shape(gate.hidden), precise=precise)
    by_token = [leaf for leaf in gate.leaves if leaf in (gate.key, gate.value, gate.hidden, gate.mask)]
    drawn: dict[Node, torch.Tensor] = {}
    for leaf in gate.leaves:
        shape = (samples, *empty.shape(leaf)) if leaf in by_token else empty.shape(leaf)
        drawn[leaf] = _draw(gate, leaf, shape, scale, generator).to(empty.dtype(value(leaf).dtype))

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        one = dataclasses.replace(empty, env={**drawn, **dict(zip(by_token, inputs))})
        one.run(nodes)
        return [one.env[node] for node in tensors]

    tensors = [node for node in nodes if is_tensor(node)]
    values = dict(zip(tensors, torch.func.vmap(run)(*(drawn[leaf] for leaf in by_token))))
    expected = _expected(gate, {**drawn, **{leaf: drawn[leaf].flatten(0, 1) for leaf in by_token}}, empty)
    same = probe.close if precise else probe.same_rounding
    for stage, root in [*(("gated value", root) for root in gate.gated), ("normed value", gate.normed)]:
        actual, wanted = values[root], expected[stage]
        if not same(actual, wanted.reshape(actual.shape) if actual.numel() == wanted.numel() else wanted):
            parting = where_they_part(nodes, values, expected, stage, same)
            what = "differs from the PLE gate" if precise else "rounds at other points than the PLE gate"
            agreed = parting.stage if precise else parting.stage + len(expected)
            raise Declined(f"the {stage} at {root.name} {what}{parting.text}", parting.node, agreed)
    return {**drawn, **values}


def _expected(gate: Gate, leaf: dict[Node, torch.Tensor], run: probe.Probe) -> dict[str, torch.Tensor]:
    """The op's own intermediate results by name."""
    key, hidden = (leaf[n].reshape(*leaf[gate.value].shape[:-1], gate.width) for n in (gate.key, gate.hidden))
    key_weight, query_weight, conv_weight = (leaf[weight].reshape(-1) for weight in gate.weights)
    weights = (key_weight, query_weight, conv_weight)
    mask = leaf[gate.mask] if gate.mask is not None else None
    eps = [float(leaf[e]) if isinstance(e, Node) else e for e in gate.eps]
    return stages(key, leaf[gate.value], hidden, *weights, mask, eps, [], run.dtype(gate.gate_dtype), gate.plain)
