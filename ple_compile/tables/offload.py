"""`offload_tables`: n-gram tables in page-locked host memory, in place.

The parameter stays what it was, the host tensor at the same address (unless it was on another device), so
`state_dict`, `load_state_dict` and `save_pretrained` see nothing new. The embedding's class becomes a subclass of
itself that keeps the table on the host when the model is moved, and page-locks it again when it is replaced through
the module (`.to(dtype)`, `load_state_dict(assign=True)`). A replacement that the module does not see (`.data = ...`)
is refused by the lookup, since that memory is not page-locked; call `offload_tables` again. So is a table that
`torch.multiprocessing` moved into shared memory to send it to another process.

Scales of a quantised table move with the model and come to the rows, one value or those of the rows looked up.
transformers' `FP8Embedding` multiplies where the rows are, on the host, by a scale that is then on the GPU, which torch
refuses; its subclass here brings the scale to the rows, and computes as it does.

To share one table between the processes of a node, put it into shared memory first (`weight.share_memory_()`), hand
the model to the processes, and call `offload_tables` in each: every process page-locks the same pages.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ple_compile.tables import hot_rows, pinning
from ple_compile.tables.find import Table, find_tables


def offload_tables(model: nn.Module, gpu_cache_bytes: int = 0) -> list[str]:
    """Keep the model's n-gram tables in page-locked host memory; returns their names.

    A table on the CPU is page-locked where it lies; one on a GPU moves to the host first; one on the meta device gets
    host memory of its exact size, to be filled by `load_state_dict`. Page-locking takes about 0.1 s per GB.

    `gpu_cache_bytes` of GPU memory, split evenly between the tables, hold the most used rows (`hot_rows`). They are
    copies: `load_state_dict` and in-place updates of the parameter drop them; a write through `.data`, which torch
    does not record, does not, so call `offload_tables` again after one. Another call with as many bytes empties the
    caches where they lie; with other bytes it replaces them, but one that a CUDA graph was captured with stays, for its
    replays, until the table goes.

    Raises ValueError for a model without an n-gram table, for a weight that is no contiguous plain parameter, for a
    cache whose bytes are no whole number, negative, or too few to hold a set of rows, on a machine without a GPU, and
    where the CUDA driver refuses to lock so much memory (the message says which limit to raise). The model is then as
    it was, and so it is where the host has too little memory; where the GPU has too little for the caches, none of its
    tables has one.
    """
    if not isinstance(gpu_cache_bytes, int) or isinstance(gpu_cache_bytes, bool) or gpu_cache_bytes < 0:
        raise ValueError(
            f"offload_tables: gpu_cache_bytes is {gpu_cache_bytes!r}; pass 0 for no cache, or a whole number of bytes"
        )
    tables = find_tables(model)
    if not tables:
        raise ValueError(
            f"offload_tables: {type(model).__name__} has no n-gram table, that is no nn.Embedding inside a module with "
            "the integer buffers of an n-gram hash (multipliers, sizes, offsets); pass a model with PLE layers"
        )
    if not pinning.available():
        raise ValueError("offload_tables: no CUDA device to read the tables; leave them where they are on a CPU")
    cache_bytes = gpu_cache_bytes // len({table.weight for table in tables})
    for table in tables:
        _check_weight(table.name, table.weight)
        if cache_bytes:
            hot_rows.num_sets(table.weight, cache_bytes)
    hosts: dict[nn.Parameter, Tensor] = {}
    with pinning.all_or_none() as page_lock:
        for table in tables:
            if table.weight not in hosts:
                hosts[table.weight] = _on_host(table.weight)
                page_lock(hosts[table.weight], table.name)
    for table in tables:
        _install(table, hosts[table.weight], cache_bytes)
    _settle_all([table.embedding for table in tables])
    return [table.name for table in tables]


def _on_host(weight: nn.Parameter) -> Tensor:
    """The weight itself where it is on the host, else memory of its size there: its values, or none yet."""
    if weight.is_meta:
        # Not torch's pinned allocator, which rounds 95 GiB up to 128.
        return nn.Parameter(torch.empty_like(weight, device="cpu"), weight.requires_grad)
    return weight if weight.device.type == "cpu" else weight.data.cpu()


def _install(table: Table, host: Tensor, cache_bytes: int) -> None:
    weight, embedding = table.weight, cast(Any, table.embedding)
    if weight.is_meta:
        embedding.weight = host
    elif host is not weight:
        weight.data = host
    embedding.__class__ = _offloaded(_base_class(embedding))
    embedding._cache_bytes, embedding._cache_device = cache_bytes, _device(table)


def _settle_all(embeddings: list[Any]) -> None:
    """Give all tables their caches, or none of them where the GPU's memory does not suffice."""
    try:
        for embedding in embeddings:
            embedding._settle()
    except BaseException:
        for embedding in embeddings:
            embedding._cache_bytes = 0
            hot_rows.detach(embedding.weight)
        raise


def is_offloaded(embedding: nn.Module) -> bool:
    return isinstance(embedding, _Offloaded)


class _Offloaded:
    """What an embedding whose table stays on the host does differently; mixed in before its own class."""

    _parameters: dict[str, nn.Parameter | None]
    _cache_bytes: int
    _cache_device: torch.device

    def _settle(self) -> None:
        """Page-lock the table and give it an empty cache, after either may have changed."""
        table = self._parameters["weight"]
        if table is None or table.device.type != "cpu":
            return
        pinning.page_lock(table)
        if self._cache_bytes:
            hot_rows.attach(table, self._cache_bytes, self._cache_device)
        else:
            hot_rows.detach(table)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        table = self._parameters["weight"]
        assert table is not None
        no_rows = torch.empty_like(table.detach()[:0])
        moved = fn(no_rows)
        if moved.is_shared() and not moved.is_cuda and not table.is_shared():
            raise ValueError("share_memory would move the page-locked table; call it before offload_tables")
        # What its own class would make of the table, found out on no rows: quantised bytes are not converted.
        self._parameters["weight"] = nn.Parameter(no_rows, requires_grad=False)
        try:
            super()._apply(fn, recurse)  # type: ignore[misc]
            probe = cast(Tensor, self._parameters["weight"])
        finally:
            self._parameters["weight"] = table
        if probe.is_meta != table.is_meta:
            hot_rows.detach(table)
            host = torch.empty_like(table, dtype=probe.dtype, device="meta" if probe.is_meta else "cpu")
            self._parameters["weight"] = nn.Parameter(host, table.requires_grad)
            self._settle()
        elif probe.dtype != table.dtype:
            converted = table.data.to(probe.dtype)
            hot_rows.detach(table)
            gradient, table.grad = table.grad, None
            table.data = converted
            table.grad = None if gradient is None else gradient.to(probe.dtype)
            self._settle()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        before = self._parameters["weight"]
        super()._load_from_state_dict(*args)  # type: ignore[misc]
        table = self._parameters["weight"]
        if table is before and table is not None:
            # Captured graphs read the cache's address, so it stays; what it holds goes at once, not at the next call.
            hot_rows.clear(table)
        else:
            if before is not None:
                hot_rows.detach(before)
            self._settle()

    def __reduce_ex__(self, protocol: Any) -> tuple:
        # The class is made on the fly, so copies and pickles name the class that it was made from.
        return _revive, (_base_class(self),), self.__dict__


@functools.cache
def _offloaded(base: type) -> type:
    own: dict[str, Any] = {"__module__": __name__}
    if base.__name__ == "FP8Embedding" and base.__module__.startswith("transformers."):
        own["forward"] = _scaled_on_the_host
    return type(f"Offloaded{base.__name__}", (_Offloaded, base), own)


def _scaled_on_the_host(self: Any, input: Tensor) -> Tensor:
    rows = nn.Embedding.forward(self, input)
    scale = self.weight_scale.to(rows.device)
    return rows.to(scale.dtype) * scale


def _base_class(embedding: object) -> type:
    return type(embedding).__mro__[2] if isinstance(embedding, _Offloaded) else type(embedding)


def _revive(base: type) -> object:
    return object.__new__(_offloaded(base))


def _device(table: Table) -> torch.device:
    """Where the lookups run: where the hash buffers are, or will be."""
    for buffer in table.owner.buffers(recurse=False):
        if buffer.device.type == "cuda":
            return buffer.device
    return pinning.current_device()


def _check_weight(name: str, weight: nn.Parameter) -> None:
    if type(weight) is not nn.Parameter or weight.layout != torch.strided:
        raise ValueError(
            f"offload_tables: {name} is a {type(weight).__name__}; offload a plain parameter, before it is sharded or "
            "wrapped"
        )
    if not weight.is_contiguous():
        raise ValueError(f"offload_tables: {name} has strides {weight.stride()}; make it contiguous first")
