"""What matchers ask of single nodes."""

import pytest
import torch
from torch.fx import Graph, Node

from ple_compile.matching.candidates import Declined
from ple_compile.matching.graph import aten, casts_up_or_keeps, numbered_layer, open_inputs, prims
from ple_compile.matching.packed_roles import find_roles


def placeholder(graph: Graph, name: str, tensor: torch.Tensor) -> Node:
    node = graph.placeholder(name)
    node.meta["val"] = tensor
    return node


def test_casts_that_lose_nothing() -> None:
    float8 = torch.float8_e4m3fn
    lossless = {(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (float8, float8)}
    for before, after in (*lossless, (torch.float32, torch.bfloat16), (float8, torch.float32), (torch.float32, float8)):
        graph = Graph()
        x = placeholder(graph, "x", torch.ones(2).to(before))
        cast = graph.call_function(prims.convert_element_type.default, (x, after))
        cast.meta["val"] = x.meta["val"].to(after)
        assert casts_up_or_keeps(cast) == ((before, after) in lossless), (before, after)


def test_what_a_pool_is_updated_by() -> None:
    graph, counts = Graph(), torch.ones(3, dtype=torch.int32)
    slots, accepted, more = (placeholder(graph, name, counts) for name in ("slots", "accepted", "more"))
    starts = placeholder(graph, "starts", torch.ones(4, dtype=torch.int32))
    flags = placeholder(graph, "flags", counts.bool())
    pool, x = placeholder(graph, "pool", torch.ones(5, 8, 9)), placeholder(graph, "x", torch.ones(7, 8))

    def roles(*others: Node) -> tuple:
        new = graph.call_function(aten.cat.default, ([pool, x, slots, *others],))
        return next(find_roles(new, pool, x, slots))

    assert roles(starts, flags) == (starts, slots, flags, None)
    assert roles(accepted, flags, starts) == (starts, slots, flags, accepted)
    with pytest.raises(Declined, match="reads starts, flags, accepted, more, and nothing computed of these"):
        roles(more, accepted, flags, starts)


def test_a_size_is_no_input() -> None:
    graph = Graph()
    x, weight = (placeholder(graph, name, torch.ones(6)) for name in ("x", "weight"))
    size = graph.call_function(aten.sym_size.int, (x, 0))
    view = graph.call_function(aten.reshape.default, (weight, [size]))
    assert open_inputs([view], set()) == [weight]


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("L['self'].model.layers[3].ple", ("model.layers", 3)),
        ("L['self'].layers._modules['3']", ("layers", 3)),
        ("L['layers'][3].ple", ("L.layers", 3)),
        ("L['args'][0].ple_embedding", None),  # a region of `ple_compile.compile`
        ("L['args'][0].layers[3]", ("layers", 3)),
    ],
)
def test_the_numbered_layer_of_a_module_path(path: str, layer: tuple[str, int] | None) -> None:
    node = Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"a": (path, torch.nn.Module)}
    assert numbered_layer(node) == layer
