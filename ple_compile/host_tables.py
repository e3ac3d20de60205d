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
from torch.fx import GraphModule

from ple_compile import upstream
from ple_compile.config import Config
from ple_compile.ops.checked_ids import checked_ids
from ple_compile.ops.lookup import lookup
from ple_compile.tables import pinning

log = logging.getLogger("ple_compile")

_warned: set[str] = set()


@dataclass
class HostTable:
    """One input of a compiled function that is a host table, and the view that stands for it.

    The view does not own the memory: compiled code must not keep a table alive that its model has dropped.
    """

    index: int
    device: torch.device
    address: int = -1
    view: Tensor | None = None

    def current_view(self, table: Tensor) -> Tensor:
        """The CUDA view of `table`; raises ValueError when its memory is not page-locked (any more)."""
        if not pinning.is_page_locked(table):
            raise ValueError(
                "a table that was page-locked when its model was compiled now lies in pageable memory (its .data was "
                "replaced?); call ple_compile.offload_tables(model) again"
            )
        if self.view is None or table.data_ptr() != self.address:
            self.view, self.address = pinning.cuda_view(table, self.device, owning=False), table.data_ptr()
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
        device = _traced(lookups[0][1]).device
        for embedding, ids in lookups:
            with gm.graph.inserting_before(embedding):
                known = gm.graph.call_function(checked_ids, (node, ids)) if config.debug else ids
                rows = gm.graph.call_function(lookup, (node, known))
            for made in (rows, known) if config.debug else (rows,):
                made.meta.update({k: v for k, v in embedding.meta.items() if k != "example_value"})
            embedding.replace_all_uses_with(rows)
            moved = embedding.args[0]
            gm.graph.erase_node(embedding)
            if moved is not ids and not moved.users:
                gm.graph.erase_node(moved)
        example_inputs[index] = upstream.fake_on(_traced(node), device)
        found.append(HostTable(index, device))
    if found:
        # No dead-code elimination: this graph still writes in place, and nobody reads what such a call returns.
        gm.recompile()
    return found


def views(tables: Sequence[HostTable], args: tuple) -> tuple:
    """The arguments of a compiled function with each host table replaced by its view."""
    replaced = list(args)
    for table in tables:
        replaced[table.index] = table.current_view(args[table.index])
    return tuple(replaced)


def _host_lookups(node: Any, table: Any) -> list[tuple[Any, Any]]:
    """(embedding, ids on the device) for each reader of a CPU table, if all of them look rows up for a GPU."""
    if not isinstance(table, Tensor) or table.device.type != "cpu" or table.dim() != 2 or not pinning.available():
        return []
    if table.requires_grad and torch.is_grad_enabled():
        return []
    gpu, found = pinning.current_device().type, []
    for user in node.users:
        if user.target is not torch.nn.functional.embedding or user.args[1:2] != (node,):
            return []
        if _max_norm(user) is not None:  # writes to the table
            return []
        ids = _before_moving_to_host(user.args[0])
        if _traced(ids).device.type != gpu or _meets_host_tensors(user, gpu):
            return []
        found.append((user, ids))
    return found


def _before_moving_to_host(ids: Any) -> Any:
    """`x` behind `x.to("cpu")` or `x.cpu()`."""
    moves = ids.op == "call_method" and ids.target in ("to", "cpu")
    if moves and _traced(ids.args[0]).dtype == _traced(ids).dtype:
        return ids.args[0]
    return ids


def _max_norm(embedding: Any) -> object:
    return embedding.args[3] if len(embedding.args) > 3 else embedding.kwargs.get("max_norm")


def _meets_host_tensors(rows: Any, gpu: str) -> bool:
    """Whether the rows are combined with another host tensor (a scale, say) before they move to the GPU."""
    reached, stack = {rows}, list(rows.users)
    while stack:
        node = stack.pop()
        if node in reached or not isinstance(node.meta.get("example_value"), Tensor):
            continue
        if _traced(node).device.type == gpu:
            continue
        reached.add(node)
        others = (n.meta.get("example_value") for n in node.all_input_nodes if n not in reached)
        if any(isinstance(other, Tensor) and other.dim() > 0 for other in others):
            return True
        stack += node.users
    return False


def _traced(node: Any) -> Any:
    return node.meta["example_value"]


def _page_locked(node: Any, table: Tensor, config: Config) -> bool:
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
