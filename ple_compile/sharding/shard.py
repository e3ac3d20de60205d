"""`shard_tables`: each rank keeps its rows of the model's n-gram tables."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ple_compile.sharding import _upstream
from ple_compile.sharding.agreement import succeeding_together
from ple_compile.sharding.embedding import ShardedLookup, reaches_lookup, sharded_class
from ple_compile.sharding.shared_host import empty_shared, node_name
from ple_compile.sharding.topology import Layout, Sharding
from ple_compile.tables import pinning
from ple_compile.tables.find import Table, find_tables
from ple_compile.tables.offload import is_offloaded


def shard_tables(
    model: nn.Module,
    mesh: DeviceMesh,
    axis: str | tuple[str, ...] = "tp",
    *,
    same_tokens: bool = True,
    host: bool = False,
    share_host: bool = False,
) -> list[str]:
    """Split the rows of every n-gram table over the ranks of `axis`, in place; returns the tables' names. Collective.

    Rank r of n keeps rows r * ceil(rows / n) onwards, and no more memory than ceil(rows / n) rows. A table that is
    there is copied, and released when every table has been; one on the meta device is allocated, this rank's rows only,
    and left to be filled by `load_state_dict` or `torch.distributed.checkpoint`. The rows lie on the mesh's device, or
    with `host` in page-locked host memory. On CUDA devices of one node that can read each other's memory, they are
    symmetric memory, which the lowering `peer` needs. Scales by row of a quantised table (`fp8_row`, `nvfp4`) stay
    whole on every rank.

    The ranks of the last axis look up the same ids unless `same_tokens` is False; see
    `ple_compile.sharding.topology.Sharding` for what the settings mean together. The table is frozen. Afterwards, all
    ranks must run every lookup, with a token of padding where they have nothing to do; and nobody may change the table
    while others look rows up (after loading, call `torch.distributed.barrier()`). DistributedDataParallel around the
    model leaves the shards alone; `fully_shard` needs them in `ignored_params`.

    Raises ValueError for axes that the mesh does not have or has in another order, for `host` or `share_host` where
    they mean nothing, for a model without an n-gram table, and for a table that cannot be split by rows: one that is
    sharded or offloaded already, has `max_norm`, or is looked up by other means than `nn.Embedding.forward`. Where one
    rank of the mesh raises, or ranks have other tables or settings than this one, all raise. Whatever is raised, the
    model is as it was.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"shard_tables: mesh is a {type(mesh).__name__}; pass a torch.distributed DeviceMesh")
    with succeeding_together(mesh, "shard_tables") as facts:
        sharding = Sharding(axis=axis, same_tokens=same_tokens, host=host, share_host=share_host)
        tables = _checked(model, mesh, sharding)
        facts += [f"{sharding} on a mesh of {dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape))}"]
        facts += [f"{table.name} {tuple(table.weight.shape)} {table.weight.dtype}" for table in tables]
    shards: dict[int, _Shard] = {}
    for table in tables:
        weight = table.weight
        if id(weight) not in shards:
            shards[id(weight)] = _Shard(table, mesh, sharding)
    # A table is let go of when every one has its shard: whatever fails before, the model is as it was.
    for table, shard in [(table, shards[id(table.weight)]) for table in tables]:
        shard.install(table.embedding)
    _leave_to_us(model, tables)
    return [table.name for table in tables]


def _checked(model: nn.Module, mesh: DeviceMesh, sharding: Sharding) -> list[Table]:
    """The model's tables, all of which can be sharded in this way."""
    sharding.check(mesh)
    if sharding.host and not pinning.available():
        raise ValueError("shard_tables: host=True page-locks memory for a CUDA device, and there is none")
    tables = find_tables(model)
    if not tables:
        raise ValueError(
            f"shard_tables: {type(model).__name__} has no n-gram table, that is no nn.Embedding inside a module with "
            "the integer buffers of an n-gram hash (multipliers, sizes, offsets); pass a model with PLE layers"
        )
    for table in tables:
        _check(table)
    return tables


def _leave_to_us(model: nn.Module, tables: list[Table]) -> None:
    """Keep DistributedDataParallel from giving every rank the shards, and their addresses, of the first one."""
    ignored = list(getattr(model, _upstream.IGNORED_BY_DDP, ()))
    for table in tables:
        path = table.name.removesuffix("weight")
        ignored += [name for name in (table.name, f"{path}peers") if name not in ignored]
    setattr(model, _upstream.IGNORED_BY_DDP, ignored)


class _Shard:
    """This rank's rows of one table; several embeddings may hold them."""

    def __init__(self, table: Table, mesh: DeviceMesh, sharding: Sharding):
        weight = table.weight
        self.mesh = _upstream.flatten(mesh, sharding.axes)
        self.layout = sharding.layout(mesh, weight.shape[0], table.name)
        self.handle: object = None
        self.peers: Tensor | None = None
        group = self.mesh.get_group()
        rows, width = self.layout.rows_per_rank, weight.shape[1]
        if sharding.share_host:
            replicas = _upstream.flatten(mesh, sharding.replica_axes(mesh)).get_group()
            shard, first = empty_shared(rows, width, weight.dtype, replicas)
            if first:
                _fill(shard, weight, self.layout)
            dist.barrier(replicas)
        elif sharding.host or mesh.device_type != "cuda":
            shard = torch.empty(rows, width, dtype=weight.dtype)
        else:
            device = torch.device("cuda", torch.cuda.current_device())
            if _can_read_each_other(group, device):
                shard = _upstream.empty_symmetric(rows, width, weight.dtype, device)
                self.handle, addresses = _upstream.exchange_pointers(shard, group)
                self.peers = torch.tensor(addresses, device=device)
            else:
                shard = torch.empty(rows, width, dtype=weight.dtype, device=device)
        if not sharding.share_host:
            _fill(shard, weight, self.layout)
        if sharding.host:
            pinning.page_lock(shard, f"rank {self.layout.rank}'s rows of {table.name}")
        if self.peers is not None:
            torch.cuda.synchronize()
            dist.barrier(group)
        self.parameter = nn.Parameter(shard, requires_grad=False)

    def install(self, embedding: nn.Embedding) -> None:
        base: type = type(embedding)
        embedding.__class__ = sharded_class(base)
        assert isinstance(embedding, ShardedLookup)
        embedding.weight = self.parameter
        embedding.register_buffer("peers", self.peers, persistent=False)
        embedding.layout, embedding.mesh, embedding.handle = self.layout, self.mesh, self.handle


def _fill(shard: Tensor, weight: Tensor, layout: Layout) -> None:
    real = layout.num_local_rows
    shard[real:].view(torch.uint8).zero_()
    if not weight.is_meta:
        shard[:real].copy_(weight.detach()[layout.first_row :][:real])


def _can_read_each_other(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks are on one node, on devices with peer access to one another. Collective; equal on all ranks."""
    places: list[tuple[str, str] | None] = [None] * group.size()
    dist.all_gather_object(places, (node_name(), str(torch.cuda.get_device_properties(device).uuid)), group=group)
    uuids = {place[1] for place in places if place is not None and place[0] == node_name()}
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    reachable = len(uuids) == group.size() and all(
        u in visible and (visible[u] == device.index or torch.cuda.can_device_access_peer(device.index, visible[u]))
        for u in uuids
    )
    answers: list[bool | None] = [None] * group.size()
    dist.all_gather_object(answers, reachable, group=group)
    return all(answers)


def _check(table: Table) -> None:
    weight, embedding = table.weight, table.embedding
    if isinstance(weight, DTensor):
        raise ValueError(
            f"shard_tables: {table.name} is a DTensor already, {weight.placements} (transformers' tensor parallelism "
            "splits it by columns); shard_tables splits it by rows, so load the model without a plan for this table"
        )
    if isinstance(embedding, ShardedLookup):
        raise ValueError(f"shard_tables: {table.name} is sharded already")
    if is_offloaded(embedding):
        raise ValueError(
            f"shard_tables: {table.name} is offloaded; use shard_tables(host=True) in place of offload_tables"
        )
    if embedding.max_norm is not None:
        raise ValueError(f"shard_tables: {table.name} has max_norm, which changes the table at every lookup")
    if not reaches_lookup(embedding):
        raise ValueError(
            f"shard_tables: {type(embedding).__name__}, the class of {table.name}, does not get its rows from "
            "nn.Embedding.forward, so they cannot come from other ranks; call super().forward(ids) there"
        )
