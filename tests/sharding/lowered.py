"""A sharded lookup as a graph, after `lower_lookup`."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from ple_compile.passes.lower_lookup import lower_lookup
from ple_compile.report import GraphReport


class NGrams(nn.Module):
    """A table beside the buffers of an n-gram hash, which is what `find_tables` looks for."""

    def __init__(self, rows: int, width: int = 8, dtype: torch.dtype = torch.bfloat16, embedding: type = nn.Embedding):
        super().__init__()
        self.register_buffer("seeds", torch.arange(3))
        self.register_buffer("moduli", torch.full((4,), 7))
        self.register_buffer("starts", torch.arange(4))
        self.rows = embedding(rows, width, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids)


def random_table(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Every bit pattern: NaNs with payloads, -0.0, infinities."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 256, (rows, width * dtype.itemsize), generator=generator, dtype=torch.uint8)
    table[0] = 0
    table[0, dtype.itemsize - 1 :: dtype.itemsize] = 128  # a row of -0.0
    return table.view(dtype)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def lower(graph: torch.fx.Graph, lowering: str, max_tokens: int) -> None:
    report = GraphReport()
    count = lower_lookup(graph, report, etp_lowering=lowering, etp_max_tokens=max_tokens)
    assert count == 1 and report.counts() == {"lower_lookup": 1}, report.events
    graph.eliminate_dead_code()
    graph.lint()


def traced(module: NGrams, lowering: str, ids: Tensor, max_tokens: int = 16) -> Callable[[Tensor], Tensor]:
    """`module` as a graph with `lower_lookup` applied, for any number of ids; runs as it stands, without Inductor."""

    def look_up(ids: Tensor, *held: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(("rows.weight", "rows.peers"), held)), ids)

    held = [module.rows.weight] + ([] if module.rows.peers is None else [module.rows.peers])
    with torch.no_grad():
        gm = make_fx(look_up, tracing_mode="symbolic")(ids, *held)
    lower(gm.graph, lowering, max_tokens)
    gm.recompile()
    return lambda ids: gm(ids, *held)


def compiled(
    module: nn.Module, lowering: str, max_tokens: int = 16, graphs: list | None = None, dynamic: bool | None = None
) -> Callable:
    """`module` under `torch.compile`, its graphs treated alike and collected: guards and recompilations are real."""

    def compile_graph(gm: torch.fx.GraphModule, example_inputs: list) -> Callable:
        lower(gm.graph, lowering, max_tokens)
        gm.recompile()
        if graphs is not None:
            graphs.append(gm.graph)
        return gm.forward

    return torch.compile(module, backend=aot_autograd(fw_compiler=compile_graph), fullgraph=True, dynamic=dynamic)
