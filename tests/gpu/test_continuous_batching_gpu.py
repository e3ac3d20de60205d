"""The serving loop with its decode steps in a CUDA graph, at tiny size and at the released widths."""

from __future__ import annotations

import pytest

from examples.continuous_batching import main


@pytest.mark.parametrize("preset", ["tiny", "flash_next"])
def test_tokens_equal_one_request_at_a_time(preset):
    result = main(["--device", "cuda", "--preset", preset, "--seed", "1"])
    assert result["mixed"] > 5 and result["decode"] > 5
