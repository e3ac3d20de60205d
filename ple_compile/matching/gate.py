"""Find the PLE gate in a graph: three grouped norms around one sigmoid.

    kn = norm(key), qn = norm(hidden), g = sigmoid(f(sum(kn * qn))), gated = g * value, normed = norm(gated)

The anchors are the reciprocal square roots: each names a norm's source. Roles follow from data flow: the two norms
above the sigmoid are key and query, the factor beside it is the value, the norm below is the convolution's.
"""

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ple_compile.matching import probe
from ple_compile.matching.candidates import Declined
from ple_compile.matching.graph import (
    CASTS,
    LAYOUT,
    VIEWS,
    aten,
    calls,
    cone,
    depends_on,
    dims,
    open_inputs,
    origin,
    outside_reader,
    source,
    source_of_shape,
    tensor_inputs,
    value,
)
from ple_compile.matching.repeats import asked_once, signature

# Walking up from a sigmoid stops at these: what they produce is an input of the gate, never part of it.
PRODUCERS = {aten.mm.default, aten.addmm.default, aten.embedding.default, aten.convolution.default, aten.cat.default}
MOST_STEPS = 64


@dataclass(frozen=True)
class Norm:
    """One application of an RMS norm: `applied = source * rsqrt(mean(source ** 2) + eps)`."""

    source: Node
    applied: Node
    eps: float | Node


@dataclass(frozen=True)
class Gate:
    """A gate candidate: leaves by role, and the nodes it replaces (`gated` may have several equal flattenings)."""

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
    gate_dtype: torch.dtype

    @property
    def leaves(self) -> list[Node]:
        found = [self.key, self.value, self.hidden, *self.weights, *(e for e in self.eps if isinstance(e, Node))]
        return found + ([self.mask] if self.mask is not None else [])


def _reciprocal_root(node: Node) -> Node | None:
    """The operand whose reciprocal square root `node` is, in any spelling."""
    node = source(node, VIEWS | CASTS)
    if calls(node, {aten.rsqrt.default}):
        return node.args[0]
    if calls(node, {aten.pow.Tensor_Scalar}) and node.args[1] == -0.5:
        return node.args[0]
    if calls(node, {aten.reciprocal.default}):
        return _root(node.args[0])
    return None


def _root(node: Node) -> Node | None:
    node = source(node, VIEWS)
    if calls(node, {aten.sqrt.default}):
        return node.args[0]
    if calls(node, {aten.pow.Tensor_Scalar}) and node.args[1] == 0.5:
        return node.args[0]
    return None


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


def find_norm(node: Node) -> Norm | None:
    """`node` as a norm application, or None."""
    if calls(node, {aten.mul.Tensor}):
        pairs = [(node.args[0], node.args[1]), (node.args[1], node.args[0])]
        roots = [(x, _reciprocal_root(r)) for x, r in pairs if isinstance(x, Node) and isinstance(r, Node)]
    elif calls(node, {aten.div.Tensor}) and all(isinstance(n, Node) for n in node.args[:2]):
        roots = [(node.args[0], _root(node.args[1]))]
    else:
        return None
    for x, squares in roots:
        split = _eps(squares) if squares is not None else None
        if split is not None and source(x) in _square_sources(split[1]):
            return Norm(source(x), node, split[0])
    return None


def _square_sources(mean: Node) -> set[Node]:
    """What a mean of squares was taken of."""
    found, stack = set(), [mean]
    for _ in range(8):
        if not stack:
            break
        node = source(stack.pop())
        if calls(node, {aten.pow.Tensor_Scalar}):
            found.add(source(node.args[0]))
        elif calls(node, {aten.mul.Tensor, aten.linalg_vector_norm.default}):
            found |= {source(n) for n in tensor_inputs(node)}
        if calls(node, {aten.mean.dim, aten.sum.dim_IntList, aten.div.Tensor, aten.mul.Tensor}):
            stack += tensor_inputs(node)
    return found


def _norms_above(sigmoid: Node) -> list[Norm]:
    """The norms that feed `sigmoid`, without walking past what they normalise."""
    found: dict[Node, Norm] = {}
    seen: set[Node] = set()
    stack = [sigmoid]
    while stack and len(seen) < MOST_STEPS:
        node = stack.pop(0)
        if node in seen or node.op != "call_function" or node.target in PRODUCERS:
            continue
        seen.add(node)
        norm = find_norm(node)
        if norm is not None:
            found[norm.source] = norm
        else:
            stack += tensor_inputs(node)
    return list(found.values())


def _weighted(norm: Norm, width: int) -> tuple[Node, Node]:
    """(weight leaf, node after the weight and any cast back) of a norm."""
    node = norm.applied
    for _ in range(6):
        users = [u for u in node.users if calls(u, LAYOUT | {aten.mul.Tensor})]
        for user in users:
            if calls(user, {aten.mul.Tensor}):
                other = [n for n in tensor_inputs(user) if n is not node]
                found = [n for n in open_inputs(other, set()) if value(n).numel() == width] if other else []
                if len(found) == 1 and find_norm(user) is None:
                    return found[0], user
        if len(users) != 1:
            break
        node = users[0]
    raise Declined(f"no weight of {width} values follows the norm at {norm.applied.name}")


def _settle(node: Node, dtype: torch.dtype, shape: tuple) -> Node:
    """Follow the cast back to `dtype` and the flattening to `shape`."""
    for _ in range(4):
        onward = [u for u in node.users if calls(u, LAYOUT) and u.args[0] is node]
        if len(onward) != len(node.users) or len(onward) != 1:
            break
        step = onward[0]
        if (value(node).dtype != dtype and value(step).dtype == dtype) or (dims(node) != shape and dims(step) == shape):
            node = step
        else:
            break
    return node


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


def _flat_nodes(node: Node, shape: tuple) -> list[Node]:
    """`node` and its views, those in the layout `shape`."""
    return [n for n in (node, *(u for u in node.users if calls(u, VIEWS))) if dims(n) == shape]


def find_gates(graph: Graph) -> list[tuple[Node, Gate | Declined]]:
    """Every gate candidate with its roles, or why it is none. A sigmoid without two norms above is no candidate."""
    found: list[tuple[Node, Gate | Declined]] = []
    for sigmoid in graph.find_nodes(op="call_function", target=aten.sigmoid.default):
        norms = _norms_above(sigmoid)
        if len(norms) != 2 or value(sigmoid).dim() < 3 or dims(sigmoid)[-1] != 1:
            continue
        try:
            found.append((sigmoid, _assign_roles(sigmoid, norms)))
        except Declined as reason:
            found.append((sigmoid, reason))
    return found


def _value_product(sigmoid: Node, leading: tuple) -> tuple[Node, Node]:
    """(gate * value, value leaf [..., hidden])."""
    views = [sigmoid, *(u for u in sigmoid.users if calls(u, LAYOUT))]
    for user in (u for v in views for u in v.users):
        others = [n for n in tensor_inputs(user) if n not in views] if calls(user, {aten.mul.Tensor}) else []
        leaf = source_of_shape(others[0], leading + dims(user)[-1:]) if len(others) == 1 else None
        if leaf is not None and dims(user)[:-2] == leading:
            return user, leaf
    raise Declined("no product of the gate and a value of one hidden width")


def _assign_roles(sigmoid: Node, norms: list[Norm]) -> Gate:
    leading = dims(sigmoid)[:-2]
    streams = dims(sigmoid)[-2]
    product, value_leaf = _value_product(sigmoid, leading)
    hidden_size = dims(product)[-1]
    if not isinstance(streams, int) or not isinstance(hidden_size, int):
        raise Declined("the number of streams or the hidden size is symbolic")
    width = streams * hidden_size
    conv_norm = _norm_below(product)
    sources = [_laid_out(norm, leading + (width,)) for norm in norms]
    weights = [_weighted(norm, width)[0] for norm in norms]
    if _shares_producer(sources[1], value_leaf) and not _shares_producer(sources[0], value_leaf):
        norms, sources, weights = norms[::-1], sources[::-1], weights[::-1]
    conv_weight, weighted = _weighted(conv_norm, width)
    normed = _settle(weighted, value(product).dtype, leading + (width,))
    leaves = {value_leaf, *sources, *weights, conv_weight}
    inside = set(cone([normed], leaves))
    flat = _flat_nodes(product, leading + (width,))
    gated = [n for n in flat if any(user not in inside for user in n.users)] or flat[:1]
    if not gated or dims(normed) != leading + (width,):
        raise Declined("the gated value is not laid out as [..., streams * hidden]")
    masks = [_masked(n, inside, leading) for n in (*gated, normed)]
    mask = masks[0][0] if masks[0] is not None else None
    if mask is not None and all(m is not None and m[0] is mask for m in masks) and len(masks[-1][1]) == 1:
        gated, normed = [n for m in masks[:-1] for n in m[1]], masks[-1][1][0]
    else:
        mask = None
    return Gate(
        sigmoid=sigmoid,
        product=product,
        key=sources[0],
        value=value_leaf,
        hidden=sources[1],
        weights=(weights[0], weights[1], conv_weight),
        eps=(norms[0].eps, norms[1].eps, conv_norm.eps),
        mask=mask,
        gated=tuple(gated),
        normed=normed,
        gate_dtype=value(sigmoid).dtype,
    )


def _laid_out(norm: Norm, shape: tuple) -> Node:
    """What a norm was taken of, in the layout [..., streams * hidden]."""
    for node in tensor_inputs(norm.applied):
        leaf = source_of_shape(node, shape)
        if leaf is not None:
            return leaf
    raise Declined(f"{norm.source.name} is not laid out as [..., streams * hidden]")


def _shares_producer(left: Node, right: Node) -> bool:
    """Whether both come out of a matrix product of the same input."""
    products = [origin(left), origin(right)]
    if not all(calls(p, {aten.mm.default, aten.addmm.default}) for p in products):
        return False
    first, second = (origin(tensor_inputs(p)[-2]) for p in products)
    return first is second


def _norm_below(gated: Node) -> Norm:
    stack = [gated]
    for _ in range(8):
        if not stack:
            break
        node = stack.pop(0)
        for user in node.users:
            norm = find_norm(user)
            if norm is not None and norm.source is source(gated):
                return norm
            if calls(user, LAYOUT):
                stack.append(user)
    raise Declined("no norm over the gated value")


def verify(gate: Gate) -> None:
    """Raise `Declined` unless the candidate computes the gate, rounding included."""
    roots = [*gate.gated, gate.normed]
    nodes = cone(roots, set(gate.leaves))
    stray = open_inputs(roots, set(gate.leaves))
    if stray:
        raise Declined(f"the gate also reads {stray[0].name}")
    interior = depends_on(nodes, {gate.key, gate.value, gate.hidden}) - set(roots)
    reader = outside_reader(interior, roots)
    if reader is not None:
        raise Declined(f"{reader[0].name} inside the gate is read by {reader[1].name}")
    question = signature(
        nodes, gate.key, gate.value, gate.hidden, gate.weights, gate.eps, gate.mask, gate.gate_dtype, roots
    )
    try:
        asked_once(gate.normed.graph, question, lambda: _probe(gate, nodes))
    except (probe.Unprobeable, ValueError) as reason:
        raise Declined(str(reason)) from None


def _probe(gate: Gate, nodes: list[Node]) -> None:
    assignments = probe.size_assignments([*gate.leaves, *nodes])
    for sizes in assignments:
        _probe_once(gate, nodes, sizes, 1.0, precise=True)
    for scale in (1e-3, 1e-9, 30.0):
        _probe_once(gate, nodes, assignments[0], scale, precise=True)
        _probe_once(gate, nodes, assignments[0], scale, precise=False)


def _resize(gate: Gate, nodes: list[Node]) -> probe.TokenResize | None:
    shape = value(gate.hidden).shape
    if any(isinstance(s, torch.SymInt) for s in shape) or len(shape) not in (2, 3):
        return None
    if shape.numel() <= probe.MOST_VALUES:
        return None
    before = tuple(int(s) for s in shape[:-1])
    after = tuple(min(size, limit) for size, limit in zip(before, (2, 4) if len(before) == 2 else (8,)))
    leaves = {gate.key, gate.value, gate.hidden} | ({gate.mask} if gate.mask is not None else set())
    return probe.TokenResize(before, after, frozenset(depends_on(nodes, leaves) | leaves))


def _probe_once(gate: Gate, nodes: list[Node], sizes: dict, scale: float, *, precise: bool) -> None:
    generator = torch.Generator().manual_seed(int(scale * 1e10) % 2**31)
    resize = _resize(gate, nodes)
    drawn: dict[Node, torch.Tensor] = {}
    shapes = probe.Probe(sizes, resize=resize)
    for leaf in gate.leaves:
        dtype = value(leaf).dtype
        shape = shapes.shape(leaf)
        if leaf is gate.mask:
            tensor = torch.rand(shape, generator=generator) > 0.3
        elif value(leaf).dim() == 0:
            tensor = torch.rand((), generator=generator, dtype=torch.float64) * 1e-5 + 1e-6
        else:
            tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
            if leaf in (gate.key, gate.value):
                tensor = tensor * scale
            if leaf is gate.key and tensor.numel() and shape[-2] > 1:
                tensor[..., -1, :] = 0
            if leaf in gate.weights:
                tensor = tensor * 0.3
        drawn[leaf] = tensor.to(dtype)
    run = probe.Probe(sizes, precise=precise, resize=resize)
    run.env = {leaf: tensor.to(run.dtype(tensor.dtype)) for leaf, tensor in drawn.items()}
    run.run(nodes)
    gated, normed = _expected(gate, run)
    checks = [("gated value", root, gated) for root in gate.gated] + [("normed value", gate.normed, normed)]
    for name, root, reference in checks:
        if precise and not probe.close(run.env[root], reference):
            raise Declined(f"the {name} at {root.name} differs from the PLE gate")
        if not precise and not probe.same_rounding(run.env[root], reference):
            raise Declined(f"the {name} at {root.name} rounds at other points than the PLE gate")


def _expected(gate: Gate, run: probe.Probe) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = run.env
    values = [float(leaf[e]) if isinstance(e, Node) else e for e in gate.eps]
    return torch.ops.ple.gate(
        leaf[gate.key],
        leaf[gate.value],
        leaf[gate.hidden],
        *(leaf[w].reshape(-1) for w in gate.weights),
        leaf[gate.mask] if gate.mask is not None else None,
        values,
        [],
        run.dtype(gate.gate_dtype),
    )
