"""The serving loop with its decode steps in a CUDA graph, at tiny size and at the released widths.

    pytest tests/gpu/test_continuous_batching_gpu.py

`main` compares every generated token with one request at a time in eager PyTorch, and raises where one differs.
"""

from __future__ import annotations

import pytest
import torch

import ple_compile
from examples import continuous_batching
from examples.continuous_batching import main


@pytest.mark.parametrize("preset", ["tiny", "flash_next"])
def test_tokens_equal_one_request_at_a_time(preset):
    result = main(["--device", "cuda", "--preset", preset, "--seed", "1"])
    assert result["mixed"] > 5 and result["decode"] > 5


@pytest.mark.parametrize("preset", ["tiny", "flash_next"])
def test_through_the_backend(preset, fresh_dynamo, monkeypatch):
    """PLE layers fused and strict; decode steps are replays of a graph that holds the fused kernels."""
    replays, kernels = [], []
    replay, capture = torch.cuda.CUDAGraph.replay, continuous_batching.DecodeStep.capture

    def count_replay(graph):
        replays.append(graph)
        replay(graph)

    def count_executions(step):
        before = ple_compile.stats()["ple_executions"]
        graph = capture(step)
        kernels.append(ple_compile.stats()["ple_executions"] - before)
        return graph

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", count_replay)
    monkeypatch.setattr(continuous_batching.DecodeStep, "capture", count_executions)
    result = main(["--device", "cuda", "--preset", preset, "--seed", "1", "--backend", "ple", "--strict"])
    assert result["mixed"] > 5 and len(replays) == result["decode"] > 5
    assert kernels == [4]  # three to warm up, one captured: the preset has one PLE layer
    assert ple_compile.stats()["ple_executions"] == 4 + result["mixed"]
