"""What the search tries for each op, and the work that it times.

A space is a list of groups, searched one after another: choices that depend on each other stand in one group, with the
work on which they show. Only names in TUNABLE (ple_compile/tuning/entries.py) may appear.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ple_compile.measuring.layer import EOS, HEADS, MULTIPLIERS, VOCABULARY, Layer, Sizes, draw
from ple_compile.measuring.timing import num_sets
from ple_compile.ops import gate_conv, lookup, ngram_ids, ngram_lookup, packed_gate_conv, short_conv
from ple_compile.tuning.table import chosen

_ALL_REGISTERS = (None, 128, 144, 168)
_FEW, _MANY = 1024, 8192  # tokens of a prefill
_LOOKUP_CALLS = 16  # each with ids of its own


@dataclass(frozen=True)
class Work:
    """`step(i, choices)` for i below `calls`, on inputs in no cache; it gives what the op returns and writes."""

    name: str
    calls: int
    step: Callable[[int, Any], object]


@dataclass(frozen=True)
class Group:
    axes: dict[str, tuple]
    works: Callable[[], list[Work]]  # made when they are timed, so that one group's inputs are in memory at a time
    sensible: Callable[[dict[str, Any]], bool] = lambda values: True

    def candidates(self) -> list[dict[str, Any]]:
        values = itertools.product(*self.axes.values())
        return [found for found in (dict(zip(self.axes, value)) for value in values) if self.sensible(found)]


@dataclass(frozen=True)
class Space:
    op: str
    shape: dict[str, int]
    present: Any
    groups: list[Group]


def gate_conv_space(sizes: Sizes) -> Space:
    layer, device = Layer(sizes), torch.device(sizes.device)
    shape = {"width": sizes.hidden, "bytes": sizes.dtype.itemsize}

    def works(*cases: tuple[int, int, bool]) -> Callable[[], list[Work]]:
        def work(batch: int, tokens: int, state: bool) -> Work:
            inputs = [layer.inputs(*tensors) for tensors in draw(batch, tokens, state, sizes)]

            def step(i: int, tuning: Any) -> Any:
                return gate_conv.run(inputs[i], inputs[i].state, tuning), inputs[i].state

            return Work(f"{batch} x {tokens} tokens{', state' if state else ''}", len(inputs), step)

        return lambda: [work(*case) for case in cases]

    # More rows than `few_rows`, so that the scalars are given; fewer tokens than `few_tokens`, so that they are not.
    groups = _gate_conv_groups(works((1, _FEW, False), (1, _MANY, False)), works((64, 1, True), (256, 1, True)))
    groups.append(Group({"few_programs": (40, 132, 264, 528)}, works((1, 1, False), (1, 8, False), (4, 1, True))))
    return Space("gate_conv", shape, chosen("gate_conv", gate_conv.Tuning(), device, **shape), groups)


def packed_gate_conv_space(sizes: Sizes) -> Space:
    layer, device = Layer(sizes), torch.device(sizes.device)
    shape = {"width": sizes.hidden, "bytes": sizes.dtype.itemsize}
    window = (sizes.kernel - 1) * sizes.dilation

    def work(requests: int, tokens: int) -> Work:
        """Requests of as many tokens each, all with a state."""
        starts = torch.arange(requests + 1, device=device, dtype=torch.int32) * tokens
        slots = torch.arange(1, requests + 1, device=device, dtype=torch.int32)
        has = torch.ones(requests, device=device, dtype=torch.bool)

        def inputs(key: Tensor, value: Tensor, hidden: Tensor) -> packed_gate_conv.Inputs:
            pool = sizes.random(requests + 1, sizes.channels, window)
            padded = layer.inputs(key[0], value[0], hidden[0])
            return packed_gate_conv.Inputs(
                *padded[:7], pool, starts, slots, has, None, None, padded.eps, [], sizes.dtype, sizes.dilation, True
            )

        sets = [inputs(*tensors) for tensors in draw(1, requests * tokens, sizes=sizes)]

        def step(i: int, tuning: Any) -> Any:
            return packed_gate_conv.run(sets[i], tuning)[0], sets[i].pool

        return Work(f"{requests} x {tokens} tokens", len(sets), step)

    groups = _gate_conv_groups(lambda: [work(4, _FEW // 4), work(64, _MANY // 64)], lambda: [work(64, 1), work(256, 1)])
    groups.append(Group({"few_programs": (40, 132, 264, 528)}, lambda: [work(1, 1), work(8, 1)]))
    present = chosen("packed_gate_conv", packed_gate_conv.PACKED, device, **shape)
    return Space("packed_gate_conv", shape, present, groups)


def _gate_conv_groups(prefill: Callable[[], list[Work]], decode: Callable[[], list[Work]]) -> list[Group]:
    steps = {"conv_block": (128, 256), "conv_vector": (4, 8), "conv_steps": (2, 3, 4, 6)}
    return [
        Group({"gate_registers": _ALL_REGISTERS}, prefill),
        Group(steps, prefill, lambda v: v["conv_vector"] * v["conv_steps"] <= 32),  # more do not fit into registers
        Group({"conv_programs": (2048, 4096, 8192, 16384), "dependent": (True, False)}, prefill),
        # At least two channels a thread: 16-bit numbers are handled in pairs.
        Group(
            {"step_block": (128, 256, 512), "step_warps": (2, 4, 8)},
            decode,
            lambda v: v["step_block"] >= 64 * v["step_warps"],
        ),
    ]


def short_conv_space(sizes: Sizes) -> Space:
    device, shape = torch.device(sizes.device), {"channels": sizes.channels, "bytes": sizes.dtype.itemsize}
    weight = sizes.random(sizes.channels, 1, sizes.kernel, scale=0.5)

    def work(tokens: int) -> Work:
        count = num_sets(tokens * sizes.channels * sizes.dtype.itemsize)
        xs = [sizes.random(1, tokens, sizes.channels) for _ in range(count)]
        return Work(
            f"{tokens} tokens", count, lambda i, choices: short_conv.run(xs[i], weight, None, sizes.dilation, choices)
        )

    axes = {"block": (128, 256, 512, 1024), "num_warps": (1, 2, 4), "chains": (2048, 4096, 8192)}
    group = Group(axes, lambda: [work(_FEW), work(_MANY)], lambda v: v["block"] >= 64 * v["num_warps"])
    return Space("short_conv", shape, chosen("short_conv", short_conv.Choices(), device, **shape), [group])


def _hashes(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    heads = torch.tensor([sizes.rows // HEADS - head for head in range(HEADS)], device=sizes.device)
    return torch.tensor(MULTIPLIERS, device=sizes.device), heads, heads.cumsum(0) - heads


def _tokens(sizes: Sizes, count: int) -> list[Tensor]:
    return [torch.randint(0, VOCABULARY, (1, count), device=sizes.device) for _ in range(_LOOKUP_CALLS)]


def ngram_ids_space(sizes: Sizes) -> Space:
    device, shape, hashes = torch.device(sizes.device), {"heads": HEADS}, _hashes(sizes)

    def work(count: int) -> Work:
        tokens = _tokens(sizes, count)
        return Work(
            f"{count} tokens", _LOOKUP_CALLS,
            lambda i, choices: ngram_ids.run(tokens[i], None, *hashes, EOS, choices),
        )  # fmt: skip

    group = Group({"block": (8, 16, 32, 64, 128), "num_warps": (1, 2, 4, 8)}, lambda: [work(64), work(_MANY)])
    return Space("ngram_ids", shape, chosen("ngram_ids", ngram_ids.Choices(), device, **shape), [group])


def lookup_space(sizes: Sizes) -> Space:
    """One table of its own for the whole search; candidates share it and none copies it."""
    device, hashes, table = torch.device(sizes.device), _hashes(sizes), _table(sizes)
    shape = {"row_bytes": table.shape[1] * table.element_size()}

    def work(count: int) -> Work:
        ids = [ngram_ids.launch(tokens, None, *hashes, EOS) for tokens in _tokens(sizes, count)]

        def step(i: int, choices: Any) -> Tensor:
            rows = lookup.empty_rows(table, ids[i])
            lookup.run(rows, table, ids[i], choices)
            return rows

        return Work(f"{count} tokens", _LOOKUP_CALLS, step)

    axes = {"tile_words": (512, 1024, 2048), "most_rows": (4, 8, 16, 32), "num_warps": (4, 8)}
    works = lambda: [work(64), work(_FEW), work(_MANY)]  # noqa: E731
    groups = [Group(axes, works), Group({"programs": (512, 1024, 2048, 4096)}, works)]
    return Space("lookup", shape, chosen("lookup", lookup.Choices(), device, **shape), groups)


def ngram_lookup_space(sizes: Sizes) -> Space:
    """As `lookup_space`."""
    device, hashes, table = torch.device(sizes.device), _hashes(sizes), _table(sizes)
    shape = {"row_bytes": table.shape[1] * table.element_size()}

    def work(count: int) -> Work:
        tokens = _tokens(sizes, count)
        return Work(
            f"{count} tokens", _LOOKUP_CALLS,
            lambda i, choices: ngram_lookup.run(table, tokens[i], None, *hashes, EOS, choices),
        )  # fmt: skip

    axes = {"many_rows": (16, 32, 64, 128), "few_rows": (4, 8, 16, 32), "num_warps": (2, 4, 8)}
    group = Group(axes, lambda: [work(64), work(_FEW), work(_MANY)], lambda v: v["few_rows"] <= v["many_rows"])
    return Space("ngram_lookup", shape, chosen("ngram_lookup", ngram_lookup.Choices(), device, **shape), [group])


def _table(sizes: Sizes) -> Tensor:
    return torch.empty(sizes.rows, sizes.hidden // HEADS, dtype=sizes.dtype, device=sizes.device)


SPACES: dict[str, Callable[[Sizes], Space]] = {
    "gate_conv": gate_conv_space,
    "packed_gate_conv": packed_gate_conv_space,
    "short_conv": short_conv_space,
    "ngram_ids": ngram_ids_space,
    "lookup": lookup_space,
    "ngram_lookup": ngram_lookup_space,
}
