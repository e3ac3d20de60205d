"""The scales of quantised tables: finite, above zero, loaded. Whoever uses one asks here, and it is looked at once.

A scale that was right is remembered, as long as it lives, with its address and version. A change that torch records
(in place, `load_state_dict`, `.data = ...`) has it looked at again; a write into `.data` goes unseen until then.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ple_compile import upstream
from ple_compile.tables.find import find_tables

_BLOCK = 2**26  # scales looked at together, so that a check needs little memory

_RIGHT = WeakTensorKeyDictionary()


def check_scales(model: nn.Module) -> None:
    """Look at all scales. Raises ValueError for one that is absent, zero, negative, not finite, or was never loaded."""
    for table in find_tables(model):
        for key, scale in scales_of(table.embedding, table.name).items():
            _RIGHT.pop(scale, None)
            check_once(f"the {key} of {table.name}", scale)


def check_once(what: str, scale: Tensor) -> None:
    """`check_scale`, unless this scale was right before and has not changed."""
    if isinstance(scale, upstream.FakeTensor) or scale.is_meta:
        return
    state = _state(scale)
    if _RIGHT.get(scale) != state:
        check_scale(what, scale)
        _RIGHT[scale] = state


def scales_of(embedding: nn.Embedding, name: str) -> dict[str, Tensor]:
    """The scales that a table's format has; ValueError where one is absent or on the meta device, the table not."""
    parameters = embedding._parameters
    weight = parameters["weight"]
    assert weight is not None
    names: Any = getattr(embedding, "scale_names", None)
    if names is None:  # no class of ours
        names = ("weight_scale",) if weight.dtype.is_floating_point and weight.dtype.itemsize == 1 else ()
    found: dict[str, Tensor] = {}
    for key in names:
        scale = parameters.get(key)
        if scale is None:
            raise ValueError(f"{name} is {weight.dtype} and has no {key}; its rows would be off by a factor")
        if scale.is_meta and not weight.is_meta:
            raise ValueError(f"the {key} of {name} is on the meta device: it was never loaded, and the table was")
        found[key] = scale
    return found


def check_scale(what: str, scale: Tensor) -> None:
    """Raise ValueError for a scale that is zero, negative or not finite; one without values is right."""
    if scale.numel() and not scale.is_meta:
        scale = torch.atleast_1d(scale.detach())
        check_scale_blocks(what, scale.split(max(1, _BLOCK // scale[0].numel())))


def check_scale_blocks(what: str, blocks: Iterable[Tensor]) -> None:
    """`check_scale` of some rows after the other."""
    start, largest = 0, 0.0
    for block in blocks:
        low, high = _extremes(block)
        # A group of zeros may have a scale of zero (checkpoints do that); nothing else may.
        grouped = block.dtype == torch.float8_e4m3fn
        if not (low >= 0 if grouped else low > 0) or not high < torch.inf:
            values = block.reshape(block.shape[0], -1).float()
            right = (values >= 0 if grouped else values > 0) & (values < torch.inf)
            raise ValueError(_wrong(what, low, high, start + int(right.all(1).int().argmin())))
        largest = max(largest, high)
        start += block.shape[0]
    if start and not largest:
        raise ValueError(_wrong(what, 0.0, 0.0, 0))


def _state(scale: Tensor) -> tuple[int, int]:
    return scale.data_ptr(), 0 if scale.is_inference() else scale._version


def _extremes(scale: Tensor) -> tuple[float, float]:
    """Smallest and largest value; NaN if there is one."""
    if scale.dtype == torch.float8_e4m3fn:
        # Bytes are in the same order from 0 to 448, and a CPU compares them far faster than it converts them.
        low, high = scale.view(torch.int8).aminmax()
        if low >= 0 and high < 127:
            return float(low.view(torch.float8_e4m3fn)), float(high.view(torch.float8_e4m3fn))
    low, high = scale.float().aminmax()
    return float(low), float(high)


def _wrong(what: str, low: float, high: float, row: int) -> str:
    return (
        f"{what} has values from {low} to {high}, a wrong one in row {row}; a scale is finite and above zero. NaN "
        "means that it was never loaded: load the checkpoint that has it, or quantise again"
    )
