"""Find lookups in a quantised table: a gather of stored bytes, and the arithmetic that makes rows of them.

    e4m3:   rows = gather(table, ids).to(P) * scale                     scale of one value, or gathered by the same ids
    nvfp4:  rows = e2m1(gather(table, ids)) * gather(scale, ids) * table_scale

The anchor is the gather. Downwards, everything computed from it and from scales is its arithmetic; of the nodes that
all of it passes through, the last that equals the op is what the op returns.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ple_compile.matching import probe
from ple_compile.matching.bounds import Bounds
from ple_compile.matching.candidates import Declined
from ple_compile.matching.graph import (
    CASTS,
    DEVICE_COPIES,
    VIEWS,
    aten,
    calls,
    cone,
    depends_on,
    dims,
    gathered,
    is_pointwise,
    is_tensor,
    open_inputs,
    source,
    tensor_inputs,
    value,
)
from ple_compile.ops.dequantized_lookup import reference as dequantize
from ple_compile.ops.sharded_lookup import sharded_lookup

E4M3 = torch.float8_e4m3fn
FLOATS = {torch.float32, torch.bfloat16, torch.float16}
REINTERPRETS = {aten.view.dtype}
JOINS = {aten.cat.default, aten.stack.default}
PARTS = {aten.slice.Tensor, aten.select.int}
ARITHMETIC = VIEWS | CASTS | REINTERPRETS | JOINS | PARTS

PROBE_ROWS = 512
PROBE_VALUES = 2**14  # decoded values in all probes of one candidate, at least
MOST_PROBES = 64


@dataclass(frozen=True)
class QuantizedLookup:
    """A lookup with its leaves by role. `scale_rows` is the gather of the scales, where each row has its own."""

    gather: Node
    table: Node
    ids: Node
    scale: Node
    scale_rows: Node | None
    table_scale: Node | None
    product_dtype: torch.dtype
    root: Node

    @property
    def leaves(self) -> list[Node]:
        return [n for n in (self.gather, self.scale_rows or self.scale, self.table_scale) if n is not None]


def find_quantized_lookups(graph: Graph) -> list[tuple[Node, QuantizedLookup | Declined]]:
    """Every gather from a table of e4m3, or of bytes with e4m3 scales, with its roles or why it has none.

    Rows of a sharded table travel as they are stored: what they are scaled with is no table.
    """
    found: list[tuple[Node, QuantizedLookup | Declined]] = []
    sharded = graph.find_nodes(op="call_function", target=sharded_lookup)
    scales = {scale for node in sharded for scale in _scales(_arithmetic(node, node.args[1]))}
    for node, (table, ids) in _gathers_of_bytes(graph):
        inside = _arithmetic(node, ids)
        leaves = _scales(inside)
        if _is_packed(table, inside):
            if E4M3 not in {value(n).dtype for n in leaves}:
                continue  # bytes of some other meaning
            scales |= set(leaves)
        elif node in scales:
            continue
        try:
            found.append((node, _match(node, table, ids, inside)))
        except Declined as reason:
            found.append((node, reason))
    return found


def _gathers_of_bytes(graph: Graph) -> list[tuple[Node, tuple[Node, Node]]]:
    """Gathers with (table, ids), those from tables of bytes first: an e4m3 gather may be the scales of one."""
    gathers = [(node, gathered(node)) for node in graph.nodes]
    rows = [(n, g) for n, g in gathers if g is not None and value(n).dtype in (E4M3, torch.uint8)]
    return sorted(rows, key=lambda item: value(item[0]).dtype == E4M3)


def _is_packed(table: Node, inside: list[Node]) -> bool:
    """Whether the stored values are bytes and stay bytes: those of e4m3 may travel as such for a while."""
    reinterpreted = any(calls(n, REINTERPRETS) and n.args[1] == E4M3 for n in inside)
    return (
        value(source(table, REINTERPRETS)).dtype == torch.uint8 and value(inside[0]).dtype != E4M3 and not reinterpreted
    )


def _same_ids(left: Node, right: Node) -> bool:
    return left is right or (source(left) is source(right) and dims(left) == dims(right))


def _arithmetic(gather: Node, ids: Node) -> list[Node]:
    """What is computed from the gather and from scales alone, in graph order, the gather first."""
    inside: dict[Node, None] = {gather: None}
    for node in gather.graph.nodes:
        if node not in inside and (is_pointwise(node) or calls(node, ARITHMETIC)) and is_tensor(node):
            inputs = tensor_inputs(node)
            if any(n in inside for n in inputs) and all(n in inside or _is_scale(n, ids) for n in inputs):
                inside[node] = None
    return list(inside)


def _is_single(node: Node) -> bool:
    return all(size == 1 for size in dims(node))


def _is_scale(node: Node, ids: Node) -> bool:
    """One value, or something made of rows gathered by the same ids and of such values."""
    if _is_single(node) or not open_inputs([node], set()):
        return True
    gather = gathered(node)
    if gather is not None:
        return _same_ids(gather[1], ids)
    made = is_pointwise(node) or calls(node, VIEWS | CASTS | REINTERPRETS)
    return made and all(_is_scale(n, ids) for n in tensor_inputs(node))


def _scales(inside: list[Node]) -> list[Node]:
    """Leaves under the arithmetic: gathers of scales, and single values (without views)."""
    members, found = set(inside), dict[Node, None]()
    stack = [n for node in inside[1:] for n in tensor_inputs(node) if n not in members]
    while stack:
        node = stack.pop(0)
        if gathered(node) is not None:
            found[node] = None
        elif _is_single(node):
            leaf = source(node, VIEWS)
            if open_inputs([leaf], set()):
                found[leaf] = None
        else:
            stack += tensor_inputs(node)
    return list(found)


def _match(gather: Node, table: Node, ids: Node, inside: list[Node]) -> QuantizedLookup:
    """The lookup that ends at the last node that equals the op; raises `Declined` with the reason otherwise."""
    table = source(table, REINTERPRETS)
    if table.op not in ("placeholder", "get_attr") or value(table).dim() != 2:
        raise Declined(f"the table at {table.name} is computed in the graph, or is not [rows, width]")
    if not isinstance(dims(table)[1], int):
        raise Declined(f"the width of the table at {table.name} is symbolic")
    if value(ids).dtype not in (torch.int32, torch.int64):
        raise Declined(f"the ids are {value(ids).dtype}")
    crossing = [u for n in inside for u in n.users if calls(u, DEVICE_COPIES) and value(u).device != value(n).device]
    if not _scales(inside):
        raise Declined(
            f"the rows go to another device ({crossing[0].name}) before they are scaled"
            if crossing
            else "its rows are used without a scale"
        )
    reasons = []
    for root in _roots(inside, ids, table):
        try:
            lookup = _assign_roles(gather, table, ids, inside, root)
            _verify(lookup)
            return lookup
        except Declined as reason:
            reasons.append(reason)
    raise reasons[0] if reasons else Declined("nothing computed from it is rows of float32, bfloat16 or float16")


def _roots(inside: list[Node], ids: Node, table: Node) -> list[Node]:
    """Nodes that could be the rows: in their layout, of a type that the op returns, the last first."""
    width = value(table).shape[1] * (2 if _is_packed(table, inside) else 1)
    found = [n for n in inside if value(n).dtype in FLOATS and dims(n) == (*dims(ids), width)]
    return found[::-1]


def _assign_roles(gather: Node, table: Node, ids: Node, inside: list[Node], root: Node) -> QuantizedLookup:
    needed = set(cone([root], {gather}))
    part = [gather, *(n for n in inside if n in needed)]
    scales, packed = _scales(part), _is_packed(table, inside)
    rows_of = {n: found for n in scales if (found := gathered(n)) is not None}
    single = [n for n in scales if n not in rows_of]
    products = [n for n in part if calls(n, {aten.mul.Tensor})]
    if (len(rows_of), len(single)) not in ([(1, 1)] if packed else [(1, 0), (0, 1)]):
        raise Declined(f"{len(rows_of)} scales by row and {len(single)} of one value belong to no known format")
    scale_rows = next(iter(rows_of), None)
    scale = single[0] if scale_rows is None else source(rows_of[scale_rows][0], VIEWS)
    if scale_rows is not None and dims(scale)[0] != dims(table)[0]:
        raise Declined(f"the scale at {scale.name} has not one row for each of the table's")
    if value(scale).dtype not in ({E4M3} if packed else FLOATS):
        raise Declined(f"the scale at {scale.name} is {value(scale).dtype}")
    product_dtype = value(products[0]).dtype if products and not packed else torch.float32
    if product_dtype not in FLOATS:
        raise Declined(f"the product at {products[0].name} is {product_dtype}")
    table_scale = single[0] if packed else None
    return QuantizedLookup(gather, table, ids, scale, scale_rows, table_scale, product_dtype, root)


def _verify(lookup: QuantizedLookup) -> None:
    nodes = cone([lookup.root], set(lookup.leaves))
    stray = open_inputs([lookup.root], set(lookup.leaves))
    if stray:
        raise Declined(f"the rows also depend on {stray[0].name}")
    interior = {lookup.gather} | depends_on(nodes, {lookup.gather})
    for node in sorted(interior - {lookup.root}):
        for user in node.users:
            if user not in interior:
                raise Declined(f"{node.name} inside the lookup is read by {user.name}")
    generator, bounds = torch.Generator().manual_seed(0), Bounds(nodes)
    try:
        for number, sizes in enumerate(probe.size_assignments([*lookup.leaves, *nodes])):
            _probe(lookup, nodes, sizes, generator, PROBE_VALUES if number == 0 else 1, bounds)
    except probe.Unprobeable as reason:
        raise Declined(str(reason)) from None
    bounds.check()


def _probe(
    lookup: QuantizedLookup,
    nodes: list[Node],
    sizes: dict,
    generator: torch.Generator,
    least_values: int,
    bounds: Bounds,
) -> None:
    resize = _FewerIds.of(lookup, nodes)
    ids_shape = probe.Probe(sizes).shape(lookup.ids) if resize is None else resize.after
    width = value(lookup.table).shape[1]
    values = torch.Size(ids_shape).numel() * width
    for _ in range(min(MOST_PROBES, -(-least_values // max(values, 1)))):
        table = torch.randint(0, 256, (PROBE_ROWS, width), generator=generator, dtype=torch.uint8)
        ids = torch.randint(0, PROBE_ROWS, ids_shape, generator=generator)
        scale, table_scale = _draw_scales(lookup, generator)
        expected = dequantize(table, scale, table_scale, ids, lookup.product_dtype, value(lookup.root).dtype)
        run = probe.Probe(sizes, resize=resize)
        run.env[lookup.gather] = table[ids].view(value(lookup.gather).dtype)
        if lookup.scale_rows is not None:
            run.env[lookup.scale_rows] = scale[ids].reshape(*ids.shape, *value(lookup.scale_rows).shape[ids.dim() :])
        else:
            run.env[lookup.scale] = scale.reshape(value(lookup.scale).shape)
        if lookup.table_scale is not None and table_scale is not None:
            run.env[lookup.table_scale] = table_scale.reshape(value(lookup.table_scale).shape)
        run.run(nodes)
        bounds.saw(run.env)
        actual = run.env[lookup.root]
        assert isinstance(actual, torch.Tensor)
        if actual.shape != expected.shape or not torch.equal(actual.isnan(), expected.isnan()):
            raise Declined(f"the rows at {lookup.root.name} differ from those of the stored values times their scale")
        if not probe.same_rounding(actual.nan_to_num(0), expected.nan_to_num(0)):
            raise Declined(f"the rows at {lookup.root.name} differ from those of the stored values times their scale")


def _draw_scales(lookup: QuantizedLookup, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor | None]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator) + 0.5

    dtype = value(lookup.scale).dtype
    if lookup.scale_rows is None:
        return draw(1).to(dtype), None
    scale = draw(PROBE_ROWS, *value(lookup.scale).shape[1:]).to(dtype)
    return scale, draw(1) if lookup.table_scale is not None else None


class _FewerIds(probe.TokenResize):
    """Runs the arithmetic on fewer ids than are baked in; it treats every id by itself."""

    @classmethod
    def of(cls, lookup: QuantizedLookup, nodes: list[Node]) -> "_FewerIds | None":
        shape = value(lookup.ids).shape
        static = not any(isinstance(size, torch.SymInt) for size in shape)
        if not static or value(lookup.gather).numel() <= probe.MOST_VALUES:
            return None
        before = tuple(int(size) for size in shape)
        after = (1,) * (len(before) - 1) + (min(before[-1], 8),)
        leaves = {lookup.gather} | ({lookup.scale_rows} if lookup.scale_rows is not None else set())
        return cls(before, after, frozenset(leaves | depends_on(nodes, leaves)))

    def check(self, node: Node) -> None:
        if calls(node, JOINS | PARTS):
            dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
            if dim % value(node).dim() < (len(self.before) if value(node).shape[:1] == self.before[:1] else 1):
                raise probe.Unprobeable(f"{node.format_node()} mixes ids, so it cannot be probed at a smaller size")
