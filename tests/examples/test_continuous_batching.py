"""The serving loop: its own comparison with one request at a time, and that the comparison would notice."""

from __future__ import annotations

import pytest
import torch

import ple_compile
from examples.continuous_batching import Piece, Request, main
from examples.reference import tiny
from examples.reference.packed import PackedPLE

OPTIONS = [
    [],
    ["--chunk-size", "3", "--slots", "2"],
    pytest.param(["--backend", "aot_eager"], marks=pytest.mark.slow),
    ["--backend", "ple", "--strict"],
]


@pytest.mark.parametrize("options", OPTIONS)
def test_tokens_equal_one_request_at_a_time(options, capsys, no_codegen):
    """Through the backend every layer runs fused; tests/gpu does the same with code, and decode in CUDA graphs."""
    result = main([*options, "--seed", "1"])
    fused = ple_compile.stats()["ple_executions"]
    assert fused == (result["mixed"] + result["decode"] if "ple" in options else 0)
    assert result["requests"] == 12 and result["tokens"] > 50
    assert result["mixed"] > 5 and result["decode"] > 5
    assert "all equal" in capsys.readouterr().out


WRONG = {
    ("--slots", "0"): "argument --slots: '0' is no whole number from 1 on",
    ("--chunk-size", "0"): "argument --chunk-size: '0' is no whole number from 1 on",
    ("--chunk-size", "-3"): "argument --chunk-size: '-3' is no whole number from 1 on",
    ("--requests", "many"): "argument --requests: 'many' is no whole number from 1 on",
    ("--longest-prompt", "0"): "argument --longest-prompt: '0' is no whole number from 1 on",
    ("--longest-answer", "1.5"): "argument --longest-answer: '1.5' is no whole number from 1 on",
    ("--device", "toaster"): "argument --device: 'toaster': ",
    ("--backend", "pie"): "argument --backend: 'pie' is none of",
    ("--strict",): "--strict is an option of --backend ple",
    ("--preset", "large"): "argument --preset: invalid choice: 'large'",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_wrong_arguments_are_named(arguments, capsys):
    with pytest.raises(SystemExit):
        main(list(arguments))
    assert WRONG[arguments] in capsys.readouterr().err


def test_comparison_notices_a_stale_slot(monkeypatch):
    forward = PackedPLE.forward

    def without_has_initial_state(self, streams, input_ids, batch, conv_pool):
        stale = batch._replace(has_initial_state=torch.ones_like(batch.has_initial_state))
        return forward(self, streams, input_ids, stale, conv_pool)

    monkeypatch.setattr(PackedPLE, "forward", without_has_initial_state)
    with pytest.raises(AssertionError, match="batched .* alone"):
        main(["--requests", "24", "--seed", "1"])


def test_placeholder_in_the_context_is_refused():
    request = Request(prompt=[5, -1, 7], max_new_tokens=1, computed=2)
    with pytest.raises(ValueError, match="ngram_context"):
        Piece(request, end=3).context(tiny())
