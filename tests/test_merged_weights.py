"""Merged parameters inside a transformers model: saving, loading and reloading see nothing of it."""

import threading

import pytest
import torch

import ple_compile
from ple_compile import merged_weights, records
from ple_compile.ops.kv_proj import kv_proj

transformers = pytest.importorskip("transformers")

from tests.ple_cases import Case  # noqa: E402
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


def tied_by_a_view(layer):
    layer.value_proj.weight = torch.nn.Parameter(layer.key_proj.weight.detach()[32:64])


def in_a_larger_storage(layer):
    larger = torch.randn(layer.key_proj.weight.shape[0] + 1, layer.key_proj.weight.shape[1])
    layer.key_proj.weight = torch.nn.Parameter(larger[:-1])


def one_matrix_already(layer):
    sizes = [layer.key_proj.weight.shape[0], layer.value_proj.weight.shape[0]]
    both = torch.randn(sum(sizes), layer.key_proj.weight.shape[1])
    layer.key_proj.weight, layer.value_proj.weight = map(torch.nn.Parameter, both.split(sizes))


@torch.no_grad()
@pytest.mark.parametrize(
    "prepare", [None, tied_by_a_view, pytest.param(in_a_larger_storage, marks=pytest.mark.slow), one_matrix_already]
)
def test_the_report_says_whether_the_weights_are_merged(no_codegen, prepare):
    case = Case()
    layer, (streams, ids, _) = case.layer(), case.inputs()
    if prepare is not None:
        prepare(layer)
    before = layer(streams, ids, None)
    report = ple_compile.explain(layer, streams, ids, None)
    (event,) = [event for _, event in report.events() if event.pass_name == "merge_kv_proj"]
    merged = merged_weights.merged_view(layer.key_proj.weight, layer.value_proj.weight) is not None
    assert merged == (prepare in (None, one_matrix_already)) == (event.status == "matched")
    assert merged or "the weights cannot share one storage: " in event.reason
    torch.testing.assert_close(layer(streams, ids, None), before)


@pytest.mark.parametrize("prepare", [tied_by_a_view, in_a_larger_storage, one_matrix_already])
def test_the_report_of_other_storages_is_another_record(prepare):
    layer = Case().layer()
    gm = torch.fx.symbolic_trace(lambda key, value: (key, value))
    plain = records.find(gm, [layer.key_proj.weight, layer.value_proj.weight], "").file
    assert records.find(gm, [layer.key_proj.weight, layer.value_proj.weight], "").file == plain
    prepare(layer)
    assert records.find(gm, [layer.key_proj.weight, layer.value_proj.weight], "").file != plain


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
