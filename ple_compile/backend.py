"""`torch.compile(..., backend="ple")`: Inductor with the PLE passes in its post-grad slot."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ple_compile import host_tables, records, upstream
from ple_compile.config import Config, make_config
from ple_compile.expand_on_cpu import rounding
from ple_compile.graph_scales import GraphScales
from ple_compile.pipeline import FusePass
from ple_compile.stack_room import with_room
from ple_compile.stats import count_call
from ple_compile.table_reads import ReadCounter
from ple_compile.tables.hash_buffers import check_graph_hashes

log = logging.getLogger("ple_compile")


def ple(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable:
    """Compile one Dynamo graph; `options` are the fields of `ple_compile.Config`.

    Raises ValueError for an unknown option or value, a quantised table whose scale is zero, NaN or was never loaded,
    hash buffers that do not fit together and token ids that are neither int32 nor int64, and DeclinedError under
    `strict`; `torch.compile` wraps each in its BackendCompilerFailed at the first call.
    """
    return compile_graph(gm, example_inputs, make_config(options or {}, mode))


@with_room
def compile_graph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], config: Config) -> Callable:
    """Compile one graph under `config`, and count its PLE layers at every call."""
    patches = {**rounding(gm), **config.inductor_patches()}
    name = "post_grad_custom_pre_pass"
    users = upstream.custom_passes(patches.get(name, getattr(upstream.inductor_config, name)))
    training = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs)
    names = [upstream.input_name(node) for node in gm.graph.find_nodes(op="placeholder")]
    scales = GraphScales(gm, example_inputs, names)
    scales.check(example_inputs)
    check_graph_hashes(names, example_inputs)
    graph_break = upstream.graph_break(gm)
    inputs = list(example_inputs)
    # Before the record is looked for: whether a table is page-locked decides what the graph is.
    tables, left_on_host = host_tables.take_over(gm, inputs, config)
    fuse = FusePass(config, training, users, names, example_inputs, left_on_host)
    record = records.find(gm, inputs, f"{fuse.uuid()} {upstream.inductor_settings(patches)}")
    fuse.nonce = record.nonce
    patches[name] = fuse
    hits = upstream.cache_hits()
    compiled: Any = upstream.compile_fx(gm, inputs, config_patches=patches)
    report = records.resolve(record, fuse, upstream.cache_hits() > hits)
    report.graph_break = graph_break
    records.publish(report)
    if report.ple_layers and upstream.is_last_graph():
        log.warning(
            "PyTorch has compiled as many graphs of one function as torch._dynamo.config.recompile_limit allows: calls "
            "that need another will run eagerly, or raise under fullgraph=True; raise that limit, or give the model to "
            "ple_compile.compile, which does"
        )
    reads, prefetched = ReadCounter(report.reads, report.symbols), report.counts().get("prefetch_lookup", 0)

    def run(*args: Any) -> Any:
        scales.check(args)
        count_call(ple_executions=report.ple_layers, prefetched_lookups=prefetched, **reads(args))
        records.executed(report, names, args)
        return compiled(*(host_tables.views(tables, args) if tables else args))

    return run
