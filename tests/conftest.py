"""Without a GPU, Triton kernels run in Triton's interpreter; it must be switched on before triton is imported."""

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before or after, counters and statistics at zero."""
    import ple_compile
    from ple_compile import upstream

    torch._dynamo.reset()
    upstream.counters.clear()
    ple_compile.reset_stats()
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_codegen(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    """Run rewritten graphs in eager PyTorch: all of the backend but Inductor's code generation."""
    from ple_compile import upstream
    from tests.graphs import run_graph

    original = upstream.compile_fx

    def compile_fx(gm: torch.fx.GraphModule, inputs: list, **kwargs: object) -> object:
        patches = {**kwargs.pop("config_patches"), "force_disable_caches": True}
        return original(gm, inputs, inner_compile=run_graph, config_patches=patches, **kwargs)

    monkeypatch.setattr(upstream, "compile_fx", compile_fx)
