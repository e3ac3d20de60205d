"""Where a node says that it comes from."""

from ple_compile import node_facts
from ple_compile.layer_graphs import Source


def test_the_innermost_line_that_is_not_pytorchs() -> None:
    torchs = f'  File "{node_facts._TORCH}nn/modules/module.py", line 5, in forward'
    mine = ['  File "a.py", line 3, in model', "    x = gate(x)", '  File "b.py", line 8, in gate', "    return x * 2"]
    trace = "\n".join([*mine, torchs, "    return F.linear(x)"])
    assert node_facts.innermost_source(trace) == Source("b.py", 8, "gate", "return x * 2")
    without_code = "\n".join([mine[2], torchs])
    assert node_facts.innermost_source(without_code) == Source("b.py", 8, "gate", "")
    assert node_facts.innermost_source("no frames") is None
