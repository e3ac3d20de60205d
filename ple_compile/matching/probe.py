"""Run a cone of graph nodes on real CPU tensors.

A candidate is accepted only when its cone, run on probe inputs, equals the op that would replace it: once with every
floating type widened to float64, which compares the mathematics to 1e-8, and once in the graph's own types, which
compares where it rounds. Symbolic sizes are given concrete values. Static sizes stay as they are, unless a `Resize`
says how to shrink the one dimension in which the op is parallel.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.fx import Node

from ple_compile import upstream
from ple_compile.matching.graph import VIEWS, aten, calls, dims, is_pointwise, is_tensor, prims, value

MOST_VALUES = 2**20  # elements of the widest probe tensor; larger static shapes are shrunk
LARGE_HINT = 16  # symbolic sizes are probed at their traced value up to this, else at this


_REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError)


class Unprobeable(Exception):
    """The cone cannot be run on probe inputs; the message says why."""


class Resize(Protocol):
    """Runs nodes at another size than the one that is baked into them."""

    def shape(self, node: Node, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What `shape`, the node's own with numbers for symbols, becomes."""
        ...

    def run(self, node: Node, args: tuple, kwargs: dict) -> torch.Tensor | None: ...


@dataclass
class Probe:
    """Evaluates nodes on real tensors. `sizes` assigns symbols; `precise` widens floating types to float64."""

    sizes: dict
    precise: bool = False
    resize: Resize | None = None
    env: dict[Node, object] = field(default_factory=dict)

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if self.precise and dtype.is_floating_point else dtype

    def size(self, size: int | torch.SymInt) -> int:
        if isinstance(size, torch.SymInt):
            return int(upstream.substitute(upstream.expression(size), self.sizes))
        return size

    def shape(self, node: Node) -> tuple[int, ...]:
        shape = tuple(self.size(s) for s in value(node).shape)
        return shape if self.resize is None else self.resize.shape(node, shape)

    def lookup(self, node: Node) -> object:
        if node in self.env:
            return self.env[node]
        if isinstance(node.meta.get("val"), (torch.SymInt, int)):
            return self.size(node.meta["val"])
        raise Unprobeable(f"{node.format_node()} is not among the leaves")

    def run(self, nodes: Iterable[Node]) -> None:
        """Evaluate `nodes`, which are in graph order; leaves are in `env` already."""
        for node in nodes:
            if node not in self.env and not isinstance(node.meta.get("val"), (torch.SymInt, int)):
                self.env[node] = self._call(node)

    def _call(self, node: Node) -> object:
        if node.op == "get_attr":
            tensor = getattr(node.graph.owning_module, node.target)
            return tensor.cpu().to(self.dtype(tensor.dtype))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self.lookup)
        if self.resize is not None:
            result = self.resize.run(node, args, kwargs)
            if result is not None:
                return result
        if node.target is prims.convert_element_type.default:
            return args[0].to(self.dtype(args[1]))
        if node.target is prims.device_put.default:
            return args[0]
        if node.target is aten.slice_scatter.default and len(args) > 4:
            # vmap lays out every index up to the end, which may be the largest integer.
            size = args[0].shape[args[2]]
            args = (*args[:4], size if args[4] > size else args[4], *args[5:])
        kwargs = dict(kwargs)
        if isinstance(kwargs.get("dtype"), torch.dtype):
            kwargs["dtype"] = self.dtype(kwargs["dtype"])
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if getattr(node.target, "_schema", None) is not None and node.target._schema.is_mutable:
            raise Unprobeable(f"{node.format_node()} mutates its input")
        try:
            return node.target(*args, **kwargs)
        except _REFUSALS as error:  # an op may refuse inputs that its graph would never give it
            first_line = str(error).partition("\n")[0]
            raise Unprobeable(f"{node.name} cannot run on probe inputs: {first_line}") from None


def _symbolic_sizes(node: Node) -> list[torch.SymInt]:
    sizes = value(node).shape if is_tensor(node) else [node.meta.get("val")]
    return [s for s in sizes if isinstance(s, torch.SymInt)]


def size_assignments(nodes: Iterable[Node], states: Iterable[Node] = ()) -> list[dict]:
    """Concrete values for the symbols that `nodes` and their inputs use: traced (capped), lower bound, and between.

    Past their batch dim, `states` keep their traced sizes: those are constants of the model, even where they are
    symbols because a token count happened to equal them.
    """
    pinned = {t for n in states for s in value(n).shape[1:] for t in upstream.free_symbols(s)}
    involved = dict.fromkeys(n for node in nodes for n in (node, *node.all_input_nodes))
    sizes = [s for node in involved for s in _symbolic_sizes(node)]
    symbols = {symbol: size for size in sizes for symbol in upstream.free_symbols(size)}
    if not symbols:
        return [{}]
    choices = []
    for symbol, size in symbols.items():
        if not upstream.is_backed(size, symbol):
            raise Unprobeable(f"the size {size} is known at run time only")
        low, high = upstream.symbol_range(size, symbol)
        traced = upstream.symbol_hint(size, symbol)
        if symbol in pinned:
            choices.append([traced])
            continue
        capped = min(traced, max(LARGE_HINT, low))
        choices.append(sorted({capped, max(low, 1), min(max(low, 1) + 2, high)}, key=lambda n: n != capped))
    traced_values = {symbol: options[0] for symbol, options in zip(symbols, choices)}
    assignments = [traced_values]
    for symbol, options in zip(symbols, choices):
        assignments += [{**traced_values, symbol: other} for other in options[1:]]
    size = next(iter(symbols.values()))
    held = [a for a in assignments if upstream.guards_hold(size, a)]
    if not held:
        held = [{symbol: upstream.symbol_hint(size, symbol) for symbol in symbols}]
    return held


def identical(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal types, shapes and values, NaN where there is NaN."""
    same = actual.dtype == expected.dtype and actual.shape == expected.shape
    return same and bool(((actual == expected) | (actual.isnan() & expected.isnan())).all())


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal shapes, and equal values to float64 rounding, of small ones relative to the largest."""
    if actual.shape != expected.shape:
        return False
    largest = float(expected.double().nan_to_num().abs().max()) if expected.numel() else 0.0
    atol = 1e-11 * min(largest, 1.0)
    return torch.allclose(actual.double(), expected.double(), rtol=1e-8, atol=atol, equal_nan=True)


def same_rounding(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal dtype, and equal bits but for one value in a hundred (float32 and wider: equal to 1e-5 of the largest)."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    if actual.dtype.itemsize >= 4:
        scale = expected.abs().max().clamp_min(1e-30) if expected.numel() else 1.0
        return bool(((actual - expected).abs() <= 1e-5 * scale).all())
    different = (actual != expected) & ~(actual.isnan() & expected.isnan())
    return int(different.sum()) <= actual.numel() // 100


@dataclass(frozen=True)
class TokenResize:
    """Runs a cone that is parallel over its leading dims, (batch, sequence) or tokens, with fewer than are baked in."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    dependent: frozenset[Node]

    def _resized(self, shape: tuple[int, ...], node: Node) -> tuple[int, ...]:
        if shape[: len(self.before)] == self.before:
            return self.after + shape[len(self.before) :]
        if shape[:1] == (math.prod(self.before),):
            return (math.prod(self.after),) + shape[1:]
        raise Unprobeable(f"{node.format_node()} mixes tokens, so it cannot be probed at a smaller size")

    def shape(self, node: Node, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self._resized(shape, node) if node in self.dependent else shape

    def run(self, node: Node, args: tuple, kwargs: dict) -> torch.Tensor | None:
        if node not in self.dependent or not is_tensor(node):
            return None
        shape = self.shape(node, tuple(value(node).shape))
        if calls(node, {aten.reshape.default, aten.view.default, aten._unsafe_view.default}):
            return args[0].reshape(shape)
        if calls(node, {aten.expand.default}):
            return args[0].expand(shape)
        self.check(node)
        return None

    def check(self, node: Node) -> None:
        """Raise `Unprobeable` for an op that may mix tokens."""
        reduces_inside = calls(node, {aten.sum.dim_IntList, aten.mean.dim}) and all(
            d % value(node.args[0]).dim() >= len(self.before) for d in node.args[1]
        )
        layout = {aten.unsqueeze.default, aten.clone.default, prims.convert_element_type.default, aten.squeeze.dim}
        if not (is_pointwise(node) or reduces_inside or calls(node, layout)):
            raise Unprobeable(f"{node.format_node()} may mix tokens, so it cannot be probed at a smaller size")


class ChannelResize:
    """Runs a depthwise cone with fewer channels than are baked in; follows where the channel dim lies at each node."""

    def __init__(self, before: int, after: int, dims: dict[Node, int]):
        self.before, self.after, self.dims = before, after, dict(dims)

    def shape(self, node: Node, shape: tuple[int, ...]) -> tuple[int, ...]:
        if node not in self.dims:
            return shape
        dim = self.dims[node]
        return (*shape[:dim], self.after, *shape[dim + 1 :])

    def run(self, node: Node, args: tuple, kwargs: dict) -> torch.Tensor | None:
        tracked = [n for n in node.all_input_nodes if n in self.dims]
        if not tracked:
            return None
        dim = self.dims[tracked[0]]
        if calls(node, {aten.permute.default}):
            self.dims[node] = [d % len(node.args[1]) for d in node.args[1]].index(dim)
        elif calls(node, {aten.convolution.default}):
            self.dims[node] = 1
            return node.target(*args[:8], self.after)
        elif calls(node, {aten.cat.default}):
            self.dims[node] = dim
            parts = [p.narrow(dim, 0, self.after) if n not in self.dims else p for n, p in zip(node.args[0], args[0])]
            return torch.cat(parts, *args[1:])
        elif is_pointwise(node) or calls(
            node,
            {
                aten.constant_pad_nd.default,
                aten.slice.Tensor,
                aten.clone.default,
                prims.convert_element_type.default,
            },
        ):
            if any(dims(n) != dims(tracked[0]) for n in tracked):
                raise Unprobeable(f"{node.format_node()} may mix channels, so it cannot be probed at a smaller size")
            self.dims[node] = dim
        else:
            raise Unprobeable(f"{node.format_node()} may mix channels, so it cannot be probed at a smaller size")
        return None


@dataclass(frozen=True)
class FewerChannels:
    """Runs a cone that is parallel over channels with fewer of them: sizes that mention their number are replaced.

    Nothing else mentions it unless it mixes channels, and then fails, or gives something else than the reference.
    """

    before: int
    after: int

    def shape(self, node: Node, shape: tuple[int, ...]) -> tuple[int, ...]:
        if dims(node).count(self.before) != 1:
            return shape
        dim = dims(node).index(self.before)
        return (*shape[:dim], self.after, *shape[dim + 1 :])

    def run(self, node: Node, args: tuple, kwargs: dict) -> torch.Tensor | None:
        if not calls(node, VIEWS | {aten.full.default}) or self.before not in dims(node):
            return None
        if dims(node).count(self.before) > 1:
            raise Unprobeable(f"{node.format_node()} has two sizes of {self.before}, the number of channels")
        index = int(calls(node, VIEWS))
        if len(args) <= index or not isinstance(args[index], (list, tuple)):
            return None
        size = [self.after if n == self.before else n for n in args[index]]
        return node.target(*args[:index], size, *args[index + 1 :], **kwargs)


def constants(nodes: Iterable[Node]) -> list[int]:
    """Every integer constant below 2**30 that `nodes` mention (integer pads arrive as floats)."""
    found: set[int] = set()
    for node in nodes:
        for item in itertools.chain(node.args, node.kwargs.values()):
            number = isinstance(item, (int, float)) and not isinstance(item, bool) and abs(item) < 2**30
            if number and float(item).is_integer():
                found.add(int(item))
    return sorted(found)
