"""What tests/sanitized.py does to the ops before compute-sanitizer looks at them."""

import pytest
import torch
from packed_inputs import BATCHES, draw
from ple_inputs import make_inputs

from ple_compile.ops import gate_conv, packed_gate_conv
from tests import sanitized


def test_the_end_of_scalars_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what window_kernel reads past the last token, and no more than that."""
    seen = []
    for module in (gate_conv, packed_gate_conv):
        monkeypatch.setattr(module, "take", lambda steps, *tensors: seen.append(tensors[2]))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(7))
    sanitized.fill_the_end_of_scalars()
    inputs, tuning = make_inputs(2, 5, 24, 3, 4, 3, None), gate_conv.Tuning(few_tokens=0)
    gate_conv.run(inputs, None, tuning)
    packed_gate_conv.run(packed := draw(BATCHES["chunks"], 24, 3), packed_gate_conv.PACKED)
    for scalars, rows in zip(seen, (2 * 5 * 3, packed.key.shape[0] * 3), strict=True):
        assert len(scalars) == gate_conv.scalars_size(rows, 3, tuning) > 2 * rows
        assert (scalars[: 2 * rows] == 7).all() and (scalars[2 * rows :] == 0).all()
