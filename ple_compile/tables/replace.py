"""Another embedding in the place of a table's own, wherever the model refers to it."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from ple_compile.tables.find import Table
from ple_compile.tables.formats import CheckedScales
from ple_compile.tables.offload import is_offloaded, offload_tables


def check_replaceable(table: Table) -> None:
    """Raise ValueError for an embedding that does more than look rows up: another would leave that out."""
    embedding: Any = table.embedding
    if embedding.max_norm is not None:
        extra = "max_norm"
    elif embedding._forward_hooks or embedding._forward_pre_hooks:
        extra = "forward hooks"
    elif not _only_looks_up(embedding):
        extra = "a forward of its own"
    else:
        return
    raise ValueError(
        f"{table.name} is in a {type(embedding).__name__} with {extra}, which would be lost in another format; do that "
        "outside of the embedding"
    )


def _only_looks_up(embedding: nn.Embedding) -> bool:
    """accelerate's hook, which moves ids and rows, counts as none."""
    if "forward" in vars(embedding) and not hasattr(embedding, "_hf_hook"):
        return False
    weight = embedding._parameters["weight"]
    assert weight is not None
    scaled = weight.dtype.itemsize == 1 and "weight_scale" in embedding._parameters  # transformers' FP8Embedding
    return isinstance(embedding, CheckedScales) or scaled or type(embedding).forward is nn.Embedding.forward


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
    """A model's modules are again what they were if the block raises; what was written into their tensors stays.

    That is the class of each and all that it holds: `shard_tables` and `offload_tables` change both.
    """
    before = [(module, type(module), dict(vars(module)), _registered(module)) for module in model.modules()]
    try:
        yield
    except BaseException:
        for module, kind, attributes, registered in before:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
            for name, contents in registered.items():
                attributes[name].clear()
                attributes[name].update(contents)
        raise


def _registered(module: nn.Module) -> dict[str, Any]:
    """What is in the dictionaries that torch puts parameters, buffers and modules into."""
    names = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")
    return {name: copy.copy(vars(module)[name]) for name in names}
