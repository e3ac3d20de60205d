"""Another embedding in the place of a table's own, wherever the model refers to it."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from ple_compile.tables.find import Table
from ple_compile.tables.offload import is_offloaded, offload_tables


def replace_embedding(model: nn.Module, table: Table, new: nn.Embedding) -> None:
    """Put `new` where `table.embedding` was; if that was offloaded, so is `new`, with a GPU cache as large.

    A mapped table has no rows in memory, and is not.
    """
    old: Any = table.embedding
    new.train(old.training)
    for module in model.modules():
        for name, child in list(module._modules.items()):
            if child is old:
                module._modules[name] = new
    if is_offloaded(old) and new.weight.shape[0]:
        offload_tables(table.owner, gpu_cache_bytes=old._cache_bytes)


@contextlib.contextmanager
def put_back_on_failure(model: nn.Module) -> Iterator[None]:
    """The modules and parameters that a model had come back if the block raises; what was written into them stays."""
    before = [(module, dict(module._modules), dict(module._parameters)) for module in model.modules()]
    try:
        yield
    except BaseException:
        for module, children, parameters in before:
            module._modules.update(children)
            module._parameters.update(parameters)
        raise
