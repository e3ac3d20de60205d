"""The support matrix: every pass matches, and output and cache equal eager's.

By default a selection in which every pair of values meets at least once; PLE_MATRIX=full runs the whole product over
the first eight dimensions.
"""

import dataclasses
import itertools
import os

import pytest
import torch
from allpairspy import AllPairs

from ple_compile.matching import short_conv
from tests.graphs import Traced, passes_backend
from tests.ple_cases import MATRIX, Case

ALL_PASSES = {"fuse_short_conv", "fuse_gate", "fuse_ngram_ids", "merge_gate_conv"}


def selection() -> list[Case]:
    names = list(MATRIX)
    if os.environ.get("PLE_MATRIX") == "full":
        product = itertools.product(*(MATRIX[n] for n in names[:8]))
        return [Case(**dict(zip(names, values))) for values in product]
    return [Case(**dict(zip(names, values)), seed=i) for i, values in enumerate(AllPairs(list(MATRIX.values())))]


def name(case: Case) -> str:
    return "-".join(str(value) for value in dataclasses.astuple(case))


@pytest.mark.parametrize("case", selection(), ids=name)
def test_fused_layer_equals_eager(case: Case) -> None:
    torch._dynamo.reset()
    layer = case.layer()
    streams, ids, mask = case.inputs()
    ours, eagers = case.new_cache(layer), case.new_cache(layer)
    traced = Traced()
    dynamic = {"static": False, "dynamic": True, "mark_dynamic": None}[case.shapes]
    if case.shapes == "mark_dynamic" and case.length > 1:
        for tensor in (streams, ids, *([mask] if mask is not None else [])):
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
    backend = passes_backend(traced, expanded=case.expanded)
    compiled = torch.compile(case.call, backend=backend, dynamic=dynamic, fullgraph=True)
    with torch.no_grad(), case.autocast():
        actual = compiled(layer, streams, ids, mask, ours)
        expected = case.call(layer, streams, ids, mask, eagers)

    assert not traced.declines() or set(p for p, _ in traced.declines()) == {"merge_kv_proj"}
    merges = {"merge_kv_proj"} if case.dtype != "autocast" else set()
    assert traced.counts() == dict.fromkeys(ALL_PASSES | merges, 1)
    assert_equal(actual, expected)
    for ours_state, eager_state in zip(case.states(ours), case.states(eagers)):
        assert ours_state.shape == eager_state.shape
        assert ours_state.stride() == eager_state.stride()
        assert_equal(ours_state, eager_state)


@pytest.mark.parametrize(
    ("model", "cache"), [("transformers", "none"), ("transformers", "static_filled"), ("reference", "dynamic_filled")]
)
def test_wide_layers_are_probed_with_fewer_channels(model: str, cache: str) -> None:
    """Also where the number of tokens is symbolic."""
    widths, draw = [], short_conv._draw

    def watched(conv: short_conv.ShortConv, *others: object) -> tuple:
        resize, drawn = draw(conv, *others)
        widths.append(drawn[conv.x].shape[2])
        return resize, drawn

    torch._dynamo.reset()
    case, traced = Case(model=model, cache=cache, hidden_size=1032, batch=1), Traced()
    layer = case.layer()
    ours, eagers = case.new_cache(layer), case.new_cache(layer)
    compiled = torch.compile(case.call, backend=passes_backend(traced), dynamic=True, fullgraph=True)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(short_conv, "_draw", watched)
        for length in (7, 11):
            streams, ids, _ = case.inputs(length)
            assert_equal(compiled(layer, streams, ids, None, ours), case.call(layer, streams, ids, None, eagers))
    assert traced.counts() == dict.fromkeys(ALL_PASSES | {"merge_kv_proj"}, 1)
    assert set(widths) == {8}


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """float32: 2e-5 of the largest value. 16 bits: all but one in a thousand (or one) bit-equal to eager of that type.

    The ops round where eager does; what may differ is the order of a sum, in the one product for key and value most of
    all, and then the rounding of a value in ten thousand. On a CPU all are equal.
    """
    assert actual.dtype == expected.dtype
    different = actual != expected
    if actual.dtype.itemsize == 2:
        assert different.sum() <= max(1, different.numel() // 1000)
    else:
        assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()
