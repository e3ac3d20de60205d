"""Tables in host memory: graphs that gather on the CPU are rewritten to read the table from the GPU.

A model whose table did not fit on the GPU moves ids to the host, gathers there and moves the rows back:

    rows = F.embedding(ids.to("cpu"), table).to("cuda")          becomes          rows = ple.lookup(table, ids)

This happens on the Dynamo graph, before autograd: the table's place among the inputs is then taken by a CUDA view of
the same page-locked memory, so nothing of the compiled graph lies on the CPU and CUDA graphs can hold it. The view is
made anew when the parameter's memory changes; memory that is not page-locked is refused, never read.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ple_compile import upstream
from ple_compile.config import Config
from ple_compile.ops.lookup import lookup
from ple_compile.tables import pinning

log = logging.getLogger("ple_compile")

_warned: set[str] = set()


@dataclass
class HostTable:
    """One input of a compiled function that is a host table, and the view that stands for it."""

    index: int
    device: torch.device
    address: int = -1
    view: Tensor | None = None

    def current_view(self, table: Tensor) -> Tensor:
        """The CUDA view of `table`; raises ValueError when its memory is not page-locked (any more)."""
        if self.view is None or table.data_ptr() != self.address:
            self.view, self.address = pinning.cuda_view(table, self.device), table.data_ptr()
        return self.view


def take_over(gm: GraphModule, example_inputs: list[Any], config: Config) -> list[HostTable]:
    """Rewrite every lookup in a page-locked host table; replaces its example input, and returns which inputs those are.

    A table in pageable memory is page-locked when `config.offload` is set, else left to the CPU with one warning.
    """
    found = []
    placeholders = gm.graph.find_nodes(op="placeholder")
    for index, (node, table) in enumerate(zip(placeholders, example_inputs)):
        lookups = _host_lookups(node, table)
        if not lookups or not _page_locked(node, table, config):
            continue
        device = lookups[0][1].meta["example_value"].device
        for embedding, ids in lookups:
            with gm.graph.inserting_before(embedding):
                rows = gm.graph.call_function(lookup, (node, ids))
            rows.meta.update({k: v for k, v in embedding.meta.items() if k != "example_value"})
            embedding.replace_all_uses_with(rows)
            gm.graph.erase_node(embedding)
        example_inputs[index] = upstream.fake_on(node.meta["example_value"], device)
        found.append(HostTable(index, device))
    if found:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return found


def views(tables: Sequence[HostTable], args: tuple) -> tuple:
    """The arguments of a compiled function with each host table replaced by its view."""
    replaced = list(args)
    for table in tables:
        replaced[table.index] = table.current_view(args[table.index])
    return tuple(replaced)


def _host_lookups(node: Node, table: Any) -> list[tuple[Node, Node]]:
    """(embedding, ids on the device) for each reader of a CPU table, if all of them look rows up for a GPU.

    Where there is no GPU, a page-locked table counts as one that a GPU would read.
    """
    if not isinstance(table, Tensor) or table.device.type != "cpu" or table.dim() != 2:
        return []
    if table.requires_grad and torch.is_grad_enabled():
        return []
    found = []
    for user in node.users:
        if user.target is not torch.nn.functional.embedding or user.args[:2][-1] is not node:
            return []
        if any(user.kwargs.get(name) for name in ("max_norm", "sparse", "scale_grad_by_freq")):
            return []
        ids = _before_moving_to_host(user.args[0])
        if ids.meta["example_value"].device.type != "cuda" and not pinning.is_page_locked(table):
            return []
        found.append((user, ids))
    return found


def _before_moving_to_host(ids: Node) -> Node:
    """`x` behind `x.to("cpu")` or `x.cpu()`."""
    moves = ids.op == "call_method" and ids.target in ("to", "cpu")
    if moves and ids.args[0].meta["example_value"].dtype == ids.meta["example_value"].dtype:
        return ids.args[0]
    return ids


def _page_locked(node: Node, table: Tensor, config: Config) -> bool:
    if pinning.is_page_locked(table):
        return True
    name = node.name
    if config.offload:
        pinning.page_lock(table, name)
        return True
    if name not in _warned:
        _warned.add(name)
        log.warning(
            "the table %s (%.1f GiB) lies in pageable host memory and is looked up on the CPU, which stops the GPU in "
            "every forward; call ple_compile.offload_tables(model) first, or compile with offload=True",
            name,
            table.nbytes / 2**30,
        )
    return False
