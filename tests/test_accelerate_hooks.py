"""Models that accelerate has dispatched: idle hooks are passed by, hooks at work are told of."""

import logging
import pathlib

import pytest
import torch
from accelerate import dispatch_model
from transformers import Qwen4ExpForCausalLM

import ple_compile
from tests.tiny_models import prompt, tiny_model

TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding"
AT_WORK = "hooks move weights or inputs inside model.layers.1.ple in every forward"


def hooked(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")]


def with_table_on_disk(folder: pathlib.Path) -> Qwen4ExpForCausalLM:
    return dispatch_model(tiny_model(), {"": "cpu", TABLE: "disk"}, offload_dir=folder)


@torch.no_grad()
def test_idle_hooks_do_not_prevent_fusion_and_come_back(no_codegen: None) -> None:
    model = tiny_model()
    expected = model(prompt(7)).logits
    dispatch_model(model, {"model": "cpu", "lm_head": "cpu"}, force_hooks=True)
    before = {name: model.get_submodule(name).forward for name in hooked(model)}
    assert f"{TABLE}" in before
    ple_compile.compile(model, strict=True)
    torch.testing.assert_close(model(prompt(7)).logits, expected, rtol=1e-4, atol=1e-4)
    assert ple_compile.stats()["ple_executions"] == 1
    ple_compile.restore(model)
    assert {name: model.get_submodule(name).forward for name in hooked(model)} == before


@torch.no_grad()
def test_hooks_that_move_the_table_are_told_of(
    no_codegen: None, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = with_table_on_disk(tmp_path)
    expected = model(prompt(7)).logits
    with caplog.at_level(logging.WARNING, "ple_compile"):
        ple_compile.compile(model)
    ours = [record.getMessage() for record in caplog.records if record.name == "ple_compile"]
    assert len(ours) == 1 and AT_WORK in ours[0]
    assert torch.equal(model(prompt(7)).logits, expected)
    assert ple_compile.stats()["ple_executions"] == 0
    ple_compile.restore(model)
    with pytest.raises(ValueError, match=AT_WORK):
        ple_compile.compile(model, strict=True)
    assert torch.equal(model(prompt(7)).logits, expected)


def test_a_hook_on_part_of_a_layer_stays(no_codegen: None) -> None:
    """Nothing says where the inputs of a layer without a hook of its own are."""
    model = tiny_model()
    layer = model.model.layers[1].ple
    dispatch_model(layer.key_proj, {"": "cpu"}, force_hooks=True)
    with pytest.raises(ValueError, match=AT_WORK):
        ple_compile.compile(model, strict=True)
    assert hasattr(layer.key_proj, "_hf_hook")
