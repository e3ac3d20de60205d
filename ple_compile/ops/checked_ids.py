"""The ids of a lookup, after a look at each of them on the host.

Without it an id outside the table gives a row of zeros on a GPU, and nobody hears of it. `Config.debug` puts this op in
front of the lookups that the passes make. It waits for the device and cannot be captured in a CUDA graph.
"""

from torch import Tensor

from ple_compile.ops import lookup
from ple_compile.ops._library import define


def reference(table: Tensor, ids: Tensor) -> Tensor:
    lookup.check_ids(table, ids)
    return ids.clone()


def fake(table: Tensor, ids: Tensor) -> Tensor:
    return ids.clone()


checked_ids = define(
    "checked_ids(Tensor table, Tensor ids) -> Tensor", cpu=reference, cuda=reference, fake=fake, on_host=True
)
