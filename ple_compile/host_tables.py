"""Tables in host memory: graphs that gather on the CPU are rewritten to read the table from the GPU.

A model whose table did not fit on the GPU moves ids to the host, gathers there and moves the rows back:

    rows = F.embedding(ids.to("cpu"), table).to("cuda")          becomes          rows = ple.lookup(table, ids)

What was computed from the rows on the host, as a quantised table is scaled there, is then computed on the GPU. A shard
of a table that is split over ranks is read from the GPU likewise; its `ple.sharded_lookup` stays.

This happens on the Dynamo graph, before autograd: the table's place among the inputs is then taken by a CUDA view of
the same page-locked memory, so nothing of the compiled graph lies on the CPU and CUDA graphs can hold it. The view is
made anew when the parameter's memory changes; memory that is not page-locked is refused, never read.
"""

import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ple_compile import upstream
from ple_compile.config import Config
from ple_compile.matching.graph import layer_of, source_line
from ple_compile.merged_weights import storage_of
from ple_compile.ops.checked_ids import checked_ids
from ple_compile.ops.lookup import lookup
from ple_compile.ops.sharded_lookup import sharded_lookup
from ple_compile.report import DECLINED, Event
from ple_compile.tables import hot_rows, pinning

log = logging.getLogger("ple_compile")

_warned: set[str] = set()

_OFFLOAD = "call ple_compile.offload_tables(model) first, or compile with offload=True"
_ROWS_STAY = "its rows meet other host tensors before they move to the GPU, or stay on the host; move the rows first"


@dataclass
class HostTable:
    """One input of a compiled function that is a host table, and the view that stands for it.

    The view does not own the memory: compiled code must not keep a table alive that its model has dropped.
    """

    index: int
    device: torch.device
    name: str
    page_lock: bool = False  # Config.offload: lock whatever memory the table has by the time of a call
    address: int = -1
    view: Tensor | None = None

    def current_view(self, table: Tensor) -> Tensor:
        """The CUDA view of `table`; raises ValueError where its memory is not page-locked and is not to be."""
        if not pinning.is_page_locked(table):
            if not self.page_lock:
                raise ValueError(
                    f"the table {self.name}, page-locked when its model was compiled, now lies in pageable memory (was "
                    "its .data replaced, the model copied, or handed to another process?); call "
                    "ple_compile.offload_tables(model) again"
                )
            pinning.page_lock(table, self.name)
        if self.view is None or table.data_ptr() != self.address:
            self.view, self.address = pinning.cuda_view(table, self.device, owning=False), table.data_ptr()
        hot_rows.drop_outdated(table)  # the replay of a CUDA graph would not
        return self.view


def take_over(gm: GraphModule, example_inputs: list[Any], config: Config) -> tuple[list[HostTable], list[Event]]:
    """Rewrite every lookup in a page-locked host table, and replace its example input.

    A table in pageable memory is page-locked when `config.offload` is set, else left to the CPU. Returns which inputs
    were replaced, and an event for each table that was left, which is also logged, as a warning, once.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    found_or_reason = {
        i: _host_lookups(node, table) for i, (node, table) in enumerate(zip(placeholders, example_inputs))
    }
    looked_up = {i: found for i, found in found_or_reason.items() if found and not isinstance(found, str)}
    possible = _among_themselves(looked_up)
    with pinning.all_or_none() as page_lock:
        lock = page_lock if config.offload else None
        page_locked = {i for i in possible if _page_locked(placeholders[i], example_inputs[i], lock)}
    candidates = _among_themselves({i: possible[i] for i in page_locked})
    left = []
    for index, lookups_or_reason in found_or_reason.items():
        if lookups_or_reason and index not in candidates:
            reason = lookups_or_reason if isinstance(lookups_or_reason, str) else _ROWS_STAY
            if pinning.is_page_locked(example_inputs[index]):
                left.append(_left_locked(placeholders[index], reason))
            elif index in possible:
                left.append(_left_pageable(placeholders[index], example_inputs[index], _OFFLOAD))
            elif isinstance(lookups_or_reason, str):
                left.append(_left_pageable(placeholders[index], example_inputs[index], reason))
    rows = _rows(candidates)
    _compute_on_device(_host_part(rows, rows))
    found = []
    for index, lookups in candidates.items():
        device = _traced(lookups[0][1]).device
        for embedding, ids in lookups:
            _look_up_on_device(embedding, placeholders[index], ids, config.debug)
        example_inputs[index] = upstream.fake_on(_traced(placeholders[index]), device)
        found.append(HostTable(index, device, _name(placeholders[index]), config.offload))
    if found:
        # No dead-code elimination: this graph still writes in place, and nobody reads what such a call returns.
        gm.recompile()
    return found, left


def views(tables: Sequence[HostTable], args: tuple) -> tuple:
    """The arguments of a compiled function with each host table replaced by its view."""
    replaced = list(args)
    for table in tables:
        replaced[table.index] = table.current_view(args[table.index])
    return tuple(replaced)


def _host_lookups(node: Any, table: Any) -> list[tuple[Any, Any]] | str:
    """(embedding, ids on the device) for each reader of a CPU table, if all of them look rows up for a GPU.

    Else, where rows are gathered beside tensors of a GPU, why they are not; otherwise nothing.
    """
    if not isinstance(table, Tensor) or table.device.type != "cpu" or not pinning.available():
        return []
    if table.dim() != 2 or table.layout != torch.strided:
        return []
    if not _is_gathered(node) or not _uses_the_gpu(node.graph):
        return []
    if table.requires_grad and torch.is_grad_enabled():
        return "its gradient is recorded; call the model under torch.no_grad, or freeze the table"
    found = []
    for user in node.users:
        if not _looks_up(user, node):
            return f"{user.name} reads it otherwise than by torch.nn.functional.embedding"
        if _max_norm(user) is not None:
            return "its embedding has max_norm, which writes to the table"
        ids = _on_the_gpu(_ids(user))
        if _is_on_host(ids):
            return f"its ids are computed on the host, by {ids.name}; compute them on the GPU"
        found.append((user, ids))
    return found


def _looks_up(node: Any, table: Any) -> bool:
    """Whether `node` gives whole rows of `table`, and reads it no other way."""
    if _is_sharded(node) or node.target is torch.embedding:
        given = node.args[0] if node.args else node.kwargs.get("weight")
    elif node.target is torch.nn.functional.embedding:
        given = node.args[1] if len(node.args) > 1 else node.kwargs["weight"]
    else:
        return False
    return given is table and _ids(node) is not table


def _is_gathered(table: Any) -> bool:
    """Whether rows of a table, or of a part of it, are picked by a tensor."""
    views = [user for user in table.users if _is_view(user, table)]
    return any(_gathers(user, table) for user in table.users) or any(_is_gathered(view) for view in views)


def _is_view(node: Any, of: Any) -> bool:
    seen = node.meta.get("example_value")
    dense = isinstance(seen, Tensor) and seen.layout == torch.strided
    return dense and storage_of(seen) == storage_of(_traced(of))


def _gathers(node: Any, table: Any) -> bool:
    """Whether rows of `table` are picked by a tensor, in whatever spelling."""
    if node.target is operator.getitem:
        index = node.args[1]
        return node.args[0] is table and isinstance(index, Node) and isinstance(_traced(index), Tensor)
    others = (torch.nn.functional.embedding_bag, torch.index_select, "index_select")
    return _looks_up(node, table) or node.target in others


def _ids(embedding: Any) -> Any:
    args, kwargs = embedding.args, embedding.kwargs
    if embedding.target is torch.nn.functional.embedding:
        return args[0] if args else kwargs["input"]
    return args[1] if len(args) > 1 else kwargs["indices"]


def _uses_the_gpu(graph: Graph) -> bool:
    gpu = pinning.current_device().type
    values = (node.meta.get("example_value") for node in graph.find_nodes(op="placeholder"))
    return any(isinstance(value, Tensor) and value.device.type == gpu for value in values)


def _is_sharded(node: Any) -> bool:
    return node.target in (sharded_lookup, sharded_lookup.overloadpacket)


def _on_the_gpu(ids: Any) -> Any:
    """Integers as they were before they moved to the host and were widened there; themselves where neither happened."""
    node = ids
    while _is_on_host(node) and node.op == "call_method" and node.target in ("to", "cpu", "cuda", "long", "int"):
        before, after = _traced(node.args[0]).dtype, _traced(node).dtype
        if before.is_floating_point or torch.promote_types(before, after) != after:
            break
        node = node.args[0]
    return node


def _before_moving(node: Any) -> Any:
    """`x` behind a move to some device, such as `x.to("cpu")` or `x.cuda()`."""
    moves = node.op == "call_method" and node.target in ("to", "cpu", "cuda")
    if moves and _traced(node.args[0]).dtype == _traced(node).dtype:
        return node.args[0]
    return node


def _max_norm(embedding: Any) -> object:
    if embedding.target is not torch.nn.functional.embedding:
        return None
    return embedding.args[3] if len(embedding.args) > 3 else embedding.kwargs.get("max_norm")


def _among_themselves(candidates: dict[int, list]) -> dict[int, list]:
    """Those of whose rows everything on the host can be computed on the GPU."""
    while True:
        rows = _rows(candidates)
        kept = {
            index: lookups
            for index, lookups in candidates.items()
            if not _needs_the_host(_rows({index: lookups}), _host_part(_rows({index: lookups}), rows))
        }
        if len(kept) == len(candidates):
            return kept
        candidates = kept


def _rows(candidates: dict[int, list]) -> set[Any]:
    return {embedding for lookups in candidates.values() for embedding, _ in lookups}


def _host_part(rows: set[Any], others: set[Any]) -> set[Any]:
    """What is computed on the host from rows, and what it is computed from: up to copies to and from the GPU.

    Ends at `others`, rows of tables that move as well, and at inputs of one value, which the GPU reads from the host.
    """
    part: set[Any] = set()
    stack = [user for row in rows for user in row.users]
    while stack:
        node = stack.pop()
        single = node.op in ("placeholder", "get_attr") and not any(t.dim() for t in _host_tensors(node))
        if node not in part and node not in others and not single and _is_on_host(node) and not _copied(node):
            part.add(node)
            stack += [*node.users, *node.all_input_nodes]
    return part


def _needs_the_host(rows: set[Any], part: set[Any]) -> bool:
    """Whether an output, an input, a tensor made from nothing or the name of a device is among what is on the host."""
    if any(user.op == "output" for node in rows | part for user in node.users):
        return True
    return any(not node.all_input_nodes or (_names_a_device(node) and _before_moving(node) is node) for node in part)


def _copied(node: Any) -> bool:
    """Whether this is a GPU tensor's copy on the host."""
    return _is_on_host(node) and not _is_on_host(_before_moving(node))


def _names_a_device(node: Any) -> bool:
    values = (*node.args, *node.kwargs.values())
    return any(isinstance(v, torch.device) or (node.target == "to" and isinstance(v, str)) for v in values)


def _compute_on_device(part: set[Any]) -> None:
    """Take away the copies to the host in front of these nodes and among them."""
    for node in part:
        for read in (node, *node.all_input_nodes):
            if _before_moving(read) is not read and (read in part or _copied(read)):
                # Whoever else reads a copy keeps it; a move among these nodes is none any more.
                within = part if _copied(read) else read.users.keys()
                read.replace_all_uses_with(_before_moving(read), within.__contains__)
                if not read.users:
                    read.graph.erase_node(read)


def _look_up_on_device(embedding: Any, table: Any, ids: Any, debug: bool) -> None:
    graph, moved, made = embedding.graph, _ids(embedding), []
    with graph.inserting_before(embedding):
        known = ids
        if _traced(ids).dtype != _traced(moved).dtype:
            made.append(known := graph.call_method("to", (ids, _traced(moved).dtype)))
        if _is_sharded(embedding):
            made.append(graph.call_function(sharded_lookup, (table, known, *embedding.args[2:]), embedding.kwargs))
        else:
            if debug:
                made.append(known := graph.call_function(checked_ids, (table, known)))
            made.append(graph.call_function(lookup, (table, known)))
    for node in made:
        node.meta.update({k: v for k, v in embedding.meta.items() if k != "example_value"})
    rows = made[-1]
    embedding.replace_all_uses_with(rows)
    graph.erase_node(embedding)
    if moved is ids:
        return
    for back in list(moved.users):  # the scales' own lookup, on the GPU
        same = (_traced(back).device, _traced(back).dtype) == (_traced(ids).device, _traced(ids).dtype)
        if same and _before_moving(back) is moved:
            back.replace_all_uses_with(ids)
            graph.erase_node(back)
    while moved is not ids and not moved.users:
        before = moved.args[0]
        graph.erase_node(moved)
        moved = before


def _is_on_host(node: Any) -> bool:
    return bool(_host_tensors(node))


def _host_tensors(node: Any) -> list[Tensor]:
    leaves = upstream.tree_leaves(node.meta.get("example_value"))
    return [t for t in leaves if isinstance(t, Tensor) and t.device.type != pinning.current_device().type]


def _name(placeholder: Node) -> str:
    """As in `state_dict`, or as Dynamo calls it."""
    return upstream.LOCAL.sub("", upstream.input_name(placeholder))


def _traced(node: Any) -> Any:
    return node.meta["example_value"]


def _page_locked(node: Any, table: Tensor, lock: Callable[[Tensor, str], None] | None) -> bool:
    """Whether a table is page-locked, or is now by `lock`."""
    if pinning.is_page_locked(table):
        return True
    if lock is not None:
        lock(table, _name(node))
        return True
    return False


def _left_locked(node: Node, reason: str) -> Event:
    name = _name(node)
    if _first_word_about(name):
        log.warning(
            "the page-locked table %s is looked up on the CPU, which stops the GPU in every forward: %s", name, reason
        )
    return _left(node, f"the page-locked table {name} is looked up on the CPU: {reason}")


def _left_pageable(node: Node, table: Tensor, remedy: str) -> Event:
    name = _name(node)
    if _first_word_about(name):
        log.warning(
            "the table %s (%.1f GiB) lies in pageable host memory and is looked up on the CPU, which stops the GPU in "
            "every forward: %s",
            name,
            table.nbytes / 2**30,
            remedy,
        )
    return _left(node, f"the table {name} lies in pageable host memory and is looked up on the CPU: {remedy}")


def _left(table: Node, reason: str) -> Event:
    reader = next(iter(table.users))
    return Event("offload_tables", DECLINED, layer_of(reader), reason, table.name, source_line(reader))


def _first_word_about(name: str) -> bool:
    if name in _warned:
        return False
    _warned.add(name)
    return True
