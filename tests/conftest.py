"""Without a GPU, Triton kernels run in Triton's interpreter; it must be switched on before triton is imported."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from ple_compile import Report

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked slow run with PLE_MATRIX=full."""
    if os.environ.get("PLE_MATRIX") != "full":
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: set PLE_MATRIX=full"))


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before or after, counters and statistics at zero."""
    import ple_compile
    from ple_compile import regions, upstream

    torch._dynamo.reset()
    for model in list(regions._compiled_models):
        ple_compile.restore(model)
    upstream.reset_dynamo()  # models that died compiled
    upstream.counters.clear()
    ple_compile.reset_stats()
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_codegen(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    """Run rewritten graphs in eager PyTorch, fused ops as they are: all of the backend but code generation."""
    without_codegen(monkeypatch)


def without_codegen(monkeypatch: pytest.MonkeyPatch) -> None:
    from ple_compile import pipeline, upstream
    from tests.graphs import run_graph

    original = upstream.compile_fx

    def compile_fx(gm: torch.fx.GraphModule, inputs: list, **kwargs: object) -> object:
        patches = {**kwargs.pop("config_patches"), "force_disable_caches": True}
        return original(gm, inputs, inner_compile=run_graph, config_patches=patches, **kwargs)

    monkeypatch.setattr(upstream, "compile_fx", compile_fx)
    monkeypatch.setattr(pipeline.FusePass, "expand", lambda self, graph: None)


@pytest.fixture(scope="session")
def layer_report() -> "Report":
    """What `explain` says of the reference model's PLE layer with a filled cache and symbolic sizes: 2 x 7 tokens."""
    import ple_compile
    from tests.ple_cases import Case

    case = Case(model="reference", cache="dynamic_filled")
    layer = case.layer()
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_codegen(monkeypatch)
        compiled = torch.compile(case.call, backend="ple", dynamic=True)
        report = ple_compile.explain(compiled, layer, *case.inputs(), case.new_cache(layer))
    torch._dynamo.reset()
    return report
