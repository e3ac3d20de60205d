"""Whole models: the roads that do not go through `generate`."""

import pytest
import torch
from transformers import Qwen4ExpConfig, Qwen4ExpForConditionalGeneration

import ple_compile
from tests.tiny_models import prompt, shallow_model, tiny_model


def executions() -> int:
    return ple_compile.stats()["ple_executions"]


@torch.no_grad()
def test_hidden_states_do_not_prevent_fusion(no_codegen: None) -> None:
    model = shallow_model((1, 2))
    expected = model(prompt(9), output_hidden_states=True)
    ple_compile.compile(model, strict=True, whole_graph=False)
    actual = model(prompt(9), output_hidden_states=True)
    assert executions() == 2
    assert len(actual.hidden_states) == len(expected.hidden_states)
    for mine, eager in zip(actual.hidden_states, expected.hidden_states):
        torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_padded_batches(no_codegen: None) -> None:
    model = shallow_model()
    ids = prompt(9, batch=3)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[1, :1] = 0
    expected = model(ids, attention_mask=mask).logits
    ple_compile.compile(model, strict=True, whole_graph=False)
    torch.testing.assert_close(model(ids, attention_mask=mask).logits, expected, rtol=1e-4, atol=1e-4)
    assert executions() == 1


@torch.no_grad()
def test_embeddings_with_their_ids(no_codegen: None) -> None:
    """The text side of the multimodal model gets embeddings, and the ids for PLE beside them."""
    text = shallow_model().config
    config = Qwen4ExpConfig(
        text_config=text.to_dict(),
        vision_config=dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=32),
    )
    torch.manual_seed(0)
    model = Qwen4ExpForConditionalGeneration(config).eval()
    for parameter in model.model.language_model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = prompt(8)
    language_model = model.model.language_model
    embeddings = language_model.embed_tokens(ids)
    expected = language_model(inputs_embeds=embeddings, ple_input_ids=ids).last_hidden_state
    logits = model(ids).logits
    ple_compile.compile(model, strict=True, whole_graph=False)
    actual = language_model(inputs_embeds=embeddings, ple_input_ids=ids).last_hidden_state
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(ids).logits, logits, rtol=1e-4, atol=1e-4)
    assert executions() == 2


@torch.no_grad()
def test_save_pretrained_after_compiling(no_codegen: None, tmp_path: pytest.TempPathFactory) -> None:
    model = tiny_model()
    ple_compile.compile(model, whole_graph=False)
    expected = model(prompt(6)).logits
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(prompt(6)).logits, expected, rtol=1e-4, atol=1e-4)
