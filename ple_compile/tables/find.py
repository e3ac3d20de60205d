"""Finding a model's n-gram tables by what they are, not by what they are called."""

import reprlib
from collections import Counter
from dataclasses import dataclass

from torch import nn

from ple_compile.tables.hash_buffers import check_hash_buffers


@dataclass(frozen=True)
class Table:
    name: str  # of the weight, as in state_dict
    owner: nn.Module  # the module that holds the hash buffers
    embedding: nn.Embedding

    @property
    def weight(self) -> nn.Parameter:
        """Raises ValueError where that is no parameter of the embedding, as under a parametrization."""
        weight = self.embedding._parameters.get("weight")
        if weight is None:
            raise ValueError(
                f"{self.name} is no parameter of its {type(self.embedding).__name__}; take its parametrization away "
                "first (torch.nn.utils.parametrize.remove_parametrizations), or give it a weight"
            )
        return weight


def find_tables(model: nn.Module) -> list[Table]:
    """Every `nn.Embedding` inside a module that owns the buffers of an n-gram hash, in the model's order.

    Raises ValueError for what is no module, and for hash buffers, known by their names, that do not fit together.
    """
    check_is_module(model)
    check_hash_buffers(model)
    found, seen = [], set()
    for owner_name, owner in model.named_modules():
        if not _owns_ngram_hash(owner):
            continue
        for name, module in owner.named_modules(prefix=owner_name):
            if isinstance(module, nn.Embedding) and id(module) not in seen:
                seen.add(id(module))
                found.append(Table(f"{name}.weight" if name else "weight", owner, module))
    return found


def check_is_module(model: object) -> None:
    """Raise ValueError for what is no module."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"the model is {reprlib.repr(model)}, a {type(model).__name__}; pass the nn.Module that holds the PLE "
            "layers"
        )


def _owns_ngram_hash(module: nn.Module) -> bool:
    """N multipliers, and sizes and offsets of N - 1 times as many heads: three 1-D integer buffers of such lengths."""
    lengths = Counter(
        buffer.numel()
        for buffer in module.buffers(recurse=False)
        if buffer.dim() == 1 and not buffer.dtype.is_floating_point and buffer.dtype.itemsize == 8
    )
    for ngram in lengths:
        others = lengths - Counter([ngram])
        if ngram >= 2 and any(count >= 2 and heads % (ngram - 1) == 0 for heads, count in others.items()):
            return True
    return False
