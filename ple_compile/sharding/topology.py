"""Which ranks share a table: the settings, checked against a mesh, and the layout that a lookup carries.

Three independent questions: over which mesh axes the rows are split, whether the rows lie in device or in host memory,
and whether the ranks of the last axis look up the same ids.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from ple_compile.sharding import _upstream


class Layout(NamedTuple):
    """One rank's place among the ranks that share a table.

    `num_ranks` ranks of `group` hold `rows_per_rank` rows each, in rank order. They are `num_sources` times
    `num_copies`: the copies of one source, neighbours in `group`, look up the same ids.
    """

    num_rows: int
    rank: int
    num_ranks: int
    num_copies: int
    table: str
    group: str
    source_group: str  # one rank of every source, in order
    copy_group: str  # the copies of this rank's source
    on_host: bool = False  # the rows lie in host memory, and a device reads them

    @property
    def num_sources(self) -> int:
        return self.num_ranks // self.num_copies

    @property
    def source(self) -> int:
        return self.rank // self.num_copies

    @property
    def copy(self) -> int:
        return self.rank % self.num_copies

    @property
    def rows_per_rank(self) -> int:
        return -(-self.num_rows // self.num_ranks)

    @property
    def first_row(self) -> int:
        return self.rank * self.rows_per_rank

    @property
    def num_local_rows(self) -> int:
        """Rows of the table on this rank; the last ranks may have fewer than `rows_per_rank`, or none."""
        return max(0, min(self.rows_per_rank, self.num_rows - self.first_row))


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How `shard_tables` splits a table.

    axis: the mesh axis, or the two axes, over whose ranks the rows are split; with two, the first one's ranks have
        tokens of their own (data parallelism).
    same_tokens: the ranks of the last axis look up the same ids (tensor parallelism); False where each has its own
        (sequence or data parallelism).
    host: page-locked host memory instead of device memory.
    share_host: the replicas on one node (ranks that differ only in the other axes) keep one host copy between them.

    Raises ValueError for a combination that has no meaning, and says why.
    """

    axis: str | tuple[str, ...] = "tp"
    same_tokens: bool = True
    host: bool = False
    share_host: bool = False

    def __post_init__(self) -> None:
        named = isinstance(self.axis, (str, tuple, list)) and all(isinstance(axis, str) for axis in self.axes)
        if not named or not 1 <= len(self.axes) <= 2 or len(set(self.axes)) != len(self.axes):
            raise ValueError(f"shard_tables: axis is {self.axis!r}; name one mesh axis, or two as in ('dp', 'tp')")
        if self.share_host and not self.host:
            raise ValueError(
                "shard_tables: share_host=True shares host memory, and the shards are on the device; set host=True"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,) if isinstance(self.axis, str) else tuple(self.axis)

    def check(self, mesh: DeviceMesh) -> None:
        names = mesh.mesh_dim_names or ()
        if not names:
            raise ValueError("shard_tables: the mesh's axes have no names; give it mesh_dim_names, as ('dp', 'tp')")
        for axis in self.axes:
            if axis not in names:
                raise ValueError(f"shard_tables: axis {axis!r} is none of the mesh's, which are {names}")
        if [n for n in names if n in self.axes] != list(self.axes):
            raise ValueError(
                f"shard_tables: axis {self.axes} is not in the order of the mesh, {names}; ranks that share tokens "
                "must be neighbours, so write the data-parallel axis first in both"
            )
        if self.host and mesh.device_type == "cpu":
            raise ValueError("shard_tables: on a CPU mesh the shards are in host memory anyway; leave host=True out")
        if self.share_host and not self.replica_axes(mesh):
            raise ValueError(
                f"shard_tables: share_host=True, but the table is split over all of the mesh, {names}, so no two ranks "
                "hold the same rows; leave it out, or split over fewer axes"
            )

    def replica_axes(self, mesh: DeviceMesh) -> tuple[str, ...]:
        return tuple(n for n in mesh.mesh_dim_names or () if n not in self.axes)

    def layout(self, mesh: DeviceMesh, num_rows: int, table: str) -> Layout:
        """This rank's place for one table. Collective, since flattening two axes makes a group."""
        whole = _upstream.flatten(mesh, self.axes)
        group = whole.get_group()
        if not self.same_tokens:
            num_copies, sources, copies = 1, str(group.group_name), ""
        elif len(self.axes) == 1:
            num_copies, sources, copies = group.size(), "", str(group.group_name)
        else:
            copy_group = mesh[self.axes[1]].get_group()
            num_copies, copies = copy_group.size(), str(copy_group.group_name)
            sources = str(mesh[self.axes[0]].get_group().group_name)
        return Layout(
            num_rows=num_rows,
            rank=whole.get_local_rank(),
            num_ranks=group.size(),
            num_copies=num_copies,
            table=table,
            group=group.group_name,
            source_group=sources,
            copy_group=copies,
            on_host=self.host,
        )
