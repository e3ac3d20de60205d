"""Models that accelerate has dispatched over a GPU and the CPU."""

import pathlib

import pytest
import torch
from accelerate import dispatch_model

import ple_compile
from tests.tiny_models import prompt, tiny_model

TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding"


@torch.no_grad()
def test_hooks_on_one_gpu_do_not_prevent_fusion(fresh_dynamo: None) -> None:
    model = tiny_model().to("cuda")
    expected = model(prompt(7).cuda()).logits
    dispatch_model(model, {"model": 0, "lm_head": 0}, force_hooks=True)
    ple_compile.compile(model, strict=True)
    # The hooks move what arrives on the CPU, as they do in eager.
    torch.testing.assert_close(model(prompt(7)).logits.cuda(), expected, rtol=1e-3, atol=1e-3)
    assert ple_compile.stats()["ple_executions"] == 1


@torch.no_grad()
def test_a_map_of_all_but_the_table_leaves_it_on_the_host(fresh_dynamo: None, tmp_path: pathlib.Path) -> None:
    source = tiny_model()
    source.save_pretrained(tmp_path)
    expected = source(prompt(7)).logits
    names = [name for name, _ in (*source.named_parameters(), *source.named_buffers())]
    device_map = {name: 0 for name in names if name != f"{TABLE}.weight"}
    model = type(source).from_pretrained(tmp_path, device_map=device_map)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    table = model.get_parameter(f"{TABLE}.weight")
    others = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor is not table]
    assert table.device.type == "cpu" and all(tensor.is_cuda for tensor in others)
    ple_compile.offload_tables(model)
    ple_compile.compile(model, strict=True)
    torch.testing.assert_close(model(prompt(7).cuda()).logits.cpu(), expected, rtol=1e-3, atol=1e-3)
    assert ple_compile.stats()["ple_executions"] == 1


@torch.no_grad()
def test_a_table_that_accelerate_moves_to_the_gpu_is_told_of(fresh_dynamo: None) -> None:
    model = tiny_model()
    expected = model(prompt(7)).logits
    dispatch_model(model, {"": 0, TABLE: "cpu"})
    torch.testing.assert_close(model(prompt(7)).logits.cpu(), expected, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="hooks move weights or inputs"):
        ple_compile.compile(model, strict=True)
