"""The embedding of a sharded table: the class it had, with its lookups turned into `ple::sharded_lookup`."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import ple_compile.ops.sharded_lookup  # noqa: F401
from ple_compile.sharding import _upstream
from ple_compile.sharding.topology import Layout
from ple_compile.tables.scales import scales_of


class ShardedLookup(nn.Embedding):
    """What a sharded embedding does differently. Stands behind the embedding's own class in its method resolution
    order, so that a class which computes on the rows (`super().forward(ids) * scale`) does so as before.

    `weight` is this rank's shard, with padding rows on the last ranks. In a state dict it is a row-sharded DTensor over
    the same memory, without the padding, so `torch.distributed.checkpoint` saves and loads it as one table. Loading
    takes such a DTensor, or the whole table, of which it copies this rank's rows.
    """

    layout: Layout
    peers: Tensor | None
    mesh: DeviceMesh
    handle: object  # keeps the other ranks' shards mapped

    def forward(self, input: Tensor) -> Tensor:
        if self.weight.requires_grad and torch.is_grad_enabled():
            raise ValueError("a sharded table cannot be trained; call weight.requires_grad_(False)")
        if input.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"a sharded table is looked up by int32 or int64 ids, not {input.dtype}")
        layout = self.layout
        return torch.ops.ple.sharded_lookup(
            self.weight,
            input,
            self.peers,
            layout.num_rows,
            layout.rank,
            layout.num_ranks,
            layout.num_copies,
            layout.table,
            layout.group,
            layout.source_group,
            layout.copy_group,
            layout.on_host,
        )

    @property
    def _real_rows(self) -> Tensor:
        return self.weight.detach()[: self.layout.num_local_rows]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """The shard stays where it is when the model moves: others may be reading it."""
        converted = fn(torch.empty_like(self.weight.detach()[:0])).dtype
        if converted != self.weight.dtype:
            raise ValueError(
                f"{self.layout.table} is sharded as {self.weight.dtype}; convert the model to {converted} before "
                "shard_tables"
            )
        shard, peers = self._parameters["weight"], self._buffers["peers"]
        self._parameters["weight"] = self._buffers["peers"] = None
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters["weight"], self._buffers["peers"] = shard, peers
        return self

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = _upstream.row_sharded(self._real_rows, self.mesh, self.layout.num_rows)

    def _load_from_state_dict(
        self,
        state_dict: dict,
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "weight"
        rest = {name: tensor for name, tensor in state_dict.items() if name != key}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if key not in state_dict:
            return
        if key in missing_keys:
            missing_keys.remove(key)
        given, layout = state_dict[key], self.layout
        if tuple(given.shape) != (layout.num_rows, self.weight.shape[1]):
            error_msgs.append(
                f"{key} has shape {tuple(given.shape)}, the table {(layout.num_rows, self.weight.shape[1])}"
            )
            return
        if isinstance(given, DTensor):
            mine = given.to_local()
            if mine.shape != self._real_rows.shape:
                error_msgs.append(f"{key} is sharded as {given.placements}, and the table by rows over {self.mesh}")
                return
        else:
            mine = given[layout.first_row :][: layout.num_local_rows]
        self._real_rows.copy_(mine)


@functools.cache
def sharded_class(base: type) -> type:
    bases = (ShardedLookup,) if base is nn.Embedding else (base, ShardedLookup)
    return type(f"Sharded{base.__name__}", bases, {"__module__": __name__})


def reaches_lookup(embedding: nn.Embedding) -> bool:
    """Whether the class gets its rows from `nn.Embedding.forward`, rather than indexing the weight by itself."""
    asked = []

    class Recorder(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            asked.append(input)
            return self.weight[:0]

    base = type(embedding)
    if base is nn.Embedding:
        return True
    scales_may_come_later: dict[str, Any] = {"checked_scales": lambda self: scales_of(self, "the table")}
    probe: nn.Embedding = object.__new__(type("Probe", (base, Recorder), scales_may_come_later))
    probe.__dict__ = embedding.__dict__
    with torch.no_grad():
        probe(torch.empty(0, dtype=torch.int64, device=embedding.weight.device))
    return len(asked) == 1
