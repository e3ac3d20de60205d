"""`_c10d_functional.wait_tensor` that names the lookup when the collective fails: a peer died, or did not come.

Gloo reports a failed collective here, as a broken connection or a timeout that names neither. NCCL does not wait on
the host: its watchdog ends the process and names the collective and its group.
"""

import torch
from torch import Tensor

from ple_compile.ops._library import define


def wait(pending: Tensor, what: str) -> Tensor:
    try:
        return torch.ops._c10d_functional.wait_tensor(pending)
    except RuntimeError as error:
        raise RuntimeError(f"{what} failed; a rank of the group has ended or did not come: {error}") from error


def fake(pending: Tensor, what: str) -> Tensor:
    return pending.view(pending.shape)


wait_rows = define("wait_rows(Tensor(a) pending, str what) -> Tensor(a)", cpu=wait, cuda=wait, fake=fake)
