"""The private parts of PyTorch that we use, each by name: what fails here is what upstream moved."""

import pathlib
import re

import pytest
import torch

from ple_compile import upstream

SOURCES = [p for folder in ("ple_compile", "passes") for p in pathlib.Path(folder).rglob("*.py")]


@pytest.mark.parametrize("name", upstream.__all__)
def test_exists(name: str) -> None:
    assert hasattr(upstream, name)


def test_inductors_slots_and_settings_exist() -> None:
    settings = upstream.inductor_config.get_config_copy()
    for name in ("post_grad_custom_pre_pass", "reorder_for_locality", "triton.cudagraphs"):
        assert name in settings
    assert isinstance(torch._dynamo.config.recompile_limit, int)
    assert isinstance(torch._dynamo.config.skip_nnmodule_hook_guards, bool)


def test_nobody_else_uses_private_modules() -> None:
    private = re.compile(r"^\s*(?:from|import) torch\._(?!ops\b)", re.M)
    allowed = {"upstream.py", "_upstream.py"}
    offenders = [str(p) for p in SOURCES if p.name not in allowed and private.search(p.read_text())]
    assert offenders == []


def test_every_way_to_compile_a_module_is_seen() -> None:
    plain, in_place, forward, disabled = (torch.nn.Linear(2, 2) for _ in range(4))
    wrapper = torch.compile(plain, backend="eager")
    in_place.compile(backend="eager")
    forward.forward = torch.compile(forward.forward, backend="eager")
    disabled.forward = torch.compiler.disable(disabled.forward)
    found = [upstream.is_compiled(module) for module in (plain, wrapper, in_place, forward, disabled)]
    assert found == [False, True, True, True, False]
