"""Buffers of an n-gram hash that do not fit together, where they have the names that transformers gives them.

A table is found by what the module around it holds, whatever the names. Where the names are these and the buffers are
no hash, a hash was meant: they come from another config, or were cut or cast.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

MULTIPLIERS, SIZES, OFFSETS = NAMES = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


def check_hash_buffers(model: nn.Module) -> None:
    """Raise ValueError for the first module of `model` whose hash buffers have a wrong type or length."""
    for path, owner in model.named_modules():
        buffers = {name: buffer for name in NAMES if (buffer := owner._buffers.get(name)) is not None}
        if buffers:
            around = [owner, model.get_submodule(path.rpartition(".")[0])]
            stated = [size for module in around if isinstance(size := getattr(module, "ngram_size", None), int)]
            _check(path, buffers, stated[0] if stated else None)


def check_graph_hashes(names: Sequence[str], inputs: Sequence[Any]) -> None:
    """The same for the inputs of a Dynamo graph."""
    owners: dict[str, dict[str, Tensor]] = {}
    for name, value in zip(names, inputs):
        path, _, last = name.rpartition(".")
        if last in NAMES and isinstance(value, Tensor) and all(isinstance(size, int) for size in value.shape):
            owners.setdefault(path.removeprefix("L['self']").removeprefix("."), {})[last] = value
    for path, buffers in owners.items():
        _check(path, buffers, None)


def _check(path: str, buffers: Mapping[str, Tensor], ngram_size: int | None) -> None:
    for name, buffer in buffers.items():
        if buffer.dtype != torch.int64 or buffer.dim() != 1:
            raise ValueError(_message(path, name, buffer, "a vector of torch.int64, in which the n-gram hash computes"))
    lengths = {name: buffer.shape[0] for name, buffer in buffers.items()}
    if (num := lengths.get(MULTIPLIERS)) is not None:
        if ngram_size is not None and num != ngram_size:
            raise ValueError(_message(path, MULTIPLIERS, buffers[MULTIPLIERS], f"[{ngram_size}], the ngram_size"))
        if num < 2:
            raise ValueError(
                _message(path, MULTIPLIERS, buffers[MULTIPLIERS], "[N] for n-grams of up to N >= 2 tokens")
            )
    orders = num - 1 if num is not None else 1
    heads = {name: lengths[name] for name in (SIZES, OFFSETS) if name in lengths}
    if len(set(heads.values())) > 1:
        wrong = SIZES if heads[SIZES] % orders and heads[OFFSETS] % orders == 0 else OFFSETS
        right = OFFSETS if wrong == SIZES else SIZES
        raise ValueError(_message(path, wrong, buffers[wrong], f"[{heads[right]}], one for each of {right}"))
    for name, length in heads.items():
        if length == 0 or length % orders:
            expected = f"[N] with N - 1 orders that share the {length} of {name} equally"
            raise ValueError(_message(path, MULTIPLIERS, buffers[MULTIPLIERS], expected))


def _message(path: str, name: str, buffer: Tensor, expected: str) -> str:
    where = f"{path}.{name}" if path else name
    return (
        f"{where} is {buffer.dtype} of shape {list(buffer.shape)}; expected {expected}. It was cut or cast, or comes "
        "from another config: build the module from its config, and load the checkpoint that goes with it"
    )
