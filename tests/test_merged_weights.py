"""Merged parameters inside a transformers model: saving, loading and reloading see nothing of it."""

import threading

import pytest
import torch

from ple_compile import merged_weights
from ple_compile.ops.kv_proj import kv_proj

transformers = pytest.importorskip("transformers")

from tests.whole_graph.tiny_qwen4exp import make_model  # noqa: E402


def merge_projections(model):
    ple = model.model.layers[1].ple
    x = torch.randn(2, 3, ple.key_proj.in_features)
    with torch.no_grad():
        kv_proj(x, ple.key_proj.weight, ple.value_proj.weight)
    assert merged_weights.merged_view(ple.key_proj.weight, ple.value_proj.weight) is not None


def assert_same_state(state, expected):
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_save_pretrained_and_reload(tmp_path):
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merge_projections(model)
    model.save_pretrained(tmp_path)
    assert_same_state(type(model).from_pretrained(tmp_path).state_dict(), before)
    # Saving left the model as it was.
    assert_same_state(model.state_dict(), before)
    ple = model.model.layers[1].ple
    assert merged_weights.merged_view(ple.key_proj.weight, ple.value_proj.weight) is not None


def test_torch_save_keeps_one_storage_and_loads_into_another_model(tmp_path):
    model, other = make_model(), make_model(seed=1)
    merge_projections(model)
    merge_projections(other)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert_same_state(other.state_dict(), model.state_dict())


def test_the_model_computes_the_same():
    model, tokens = make_model(), torch.tensor([[5, 3, 9, 7, 3, 3, 1]])
    with torch.no_grad():
        before = model(tokens).logits
        merge_projections(model)
        assert torch.equal(model(tokens).logits, before)


def test_two_threads_merge_once():
    first, second = (torch.nn.Parameter(torch.randn(64, 8)) for _ in range(2))
    barrier = threading.Barrier(2)

    def merge():
        barrier.wait()
        merged_weights.merge(first, second)

    threads = [threading.Thread(target=merge) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert merged_weights.merged_view(first, second).shape == (128, 8)
    assert first.untyped_storage().nbytes() == first.nbytes + second.nbytes
