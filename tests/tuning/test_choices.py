"""Which launch choices an op takes. The expected ones are written down: a table may move them, not change them."""

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ple_compile.json_file import with_checksum
from ple_compile.ops import gate_conv, lookup, ngram_ids, ngram_lookup, packed_gate_conv, short_conv
from ple_compile.tuning import store, table
from ple_compile.tuning.entries import TUNABLE

GATE_CONV = dict(
    few_tokens=32, few_rows=64, few_warps=8, few_programs=132, gate_rows=1, gate_warps=None, gate_registers=None,
    conv_block=128, conv_vector=4, conv_steps=4, conv_programs=8192, step_block=512, step_warps=4, dependent=True,
)  # fmt: skip
PRESENT = {
    "gate_conv": (gate_conv.Tuning(), GATE_CONV),
    "packed_gate_conv": (packed_gate_conv.PACKED, GATE_CONV | dict(step_warps=8, few_rows=32)),
    "short_conv": (short_conv.Choices(), dict(block=512, chains=4096, num_warps=2)),
    "ngram_ids": (ngram_ids.Choices(), dict(block=32, num_warps=4)),
    "ngram_lookup": (ngram_lookup.Choices(), dict(many_rows=64, few_rows=16, num_warps=4)),
    "lookup": (lookup.Choices(), dict(tile_words=1024, most_rows=16, programs=2048, num_warps=8)),
}
CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine that says it has one H200; returns the file of its choices."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    table.forget()
    yield store.path(GPU)
    table.forget()


def shapes(op: str) -> list[dict[str, int]]:
    if op.endswith("gate_conv"):
        widths = (24, 64, 1000, 1024, 1536, 2048, 2560, 4096, 5120, 8192)
        return [{"width": width, "bytes": size} for width, size in itertools.product(widths, (2, 4))]
    if op == "short_conv":
        return [{"channels": channels, "bytes": size} for channels in (96, 4096, 10240, 20480) for size in (2, 4)]
    if op == "ngram_ids":
        return [{"heads": heads} for heads in (2, 8, 16)]
    return [{"row_bytes": size} for size in (16, 80, 160, 320, 640)]


@pytest.mark.parametrize("op", TUNABLE)
def test_without_a_file_of_the_user_the_choices_are_the_present_ones(
    op: str, gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults, expected = PRESENT[op]
    for capability in CAPABILITIES:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        table.forget()
        for shape in shapes(op):
            tuned = op.endswith("gate_conv") and capability == (9, 0) and shape == {"width": 2560, "bytes": 2}
            wanted = expected | (dict(gate_registers=144) if tuned else {})
            assert table.chosen(op, defaults, GPU, **shape)._asdict() == wanted
            assert table.chosen(op, defaults, torch.device("cpu"), **shape)._asdict() == expected


def test_what_orders_sums_may_not_be_tuned() -> None:
    for op, names in TUNABLE.items():
        assert set(names) <= set(PRESENT[op][1])
        assert (
            not {"gate_warps", "gate_rows", "few_warps", "few_tokens", "few_rows"} & set(names) or op == "ngram_lookup"
        )


def test_the_users_choices_go_first_and_only_for_their_shape(gpu: Path) -> None:
    found = [{"op": "short_conv", "shape": {"channels": 96, "bytes": 2}, "choices": {"block": 64, "num_warps": 1}}]
    assert store.save(GPU, found) == gpu
    table.forget()
    defaults = short_conv.Choices()
    assert table.chosen("short_conv", defaults, GPU, channels=96, bytes=2) == (64, 4096, 1)
    assert table.chosen("short_conv", defaults, GPU, channels=96, bytes=4) == defaults


def test_a_second_run_keeps_what_it_did_not_measure(gpu: Path) -> None:
    ids = {"op": "ngram_ids", "shape": {"heads": 16}, "choices": {"block": 64}}
    store.save(GPU, [ids, {"op": "ngram_ids", "shape": {"heads": 8}, "choices": {"block": 16}}])
    store.save(GPU, [{"op": "ngram_ids", "shape": {"heads": 8}, "choices": {"block": 128}}])
    assert {(e.shape["heads"], e.choices["block"]) for e in store.load(GPU)} == {(16, 64), (8, 128)}
    assert [file.name for file in gpu.parent.iterdir()] == [gpu.name]


def test_another_triton_or_other_kernels_have_another_file(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.triton, "__version__", "9.9.9")
    other = store.path(GPU)
    monkeypatch.setattr(store, "kernels_hash", lambda: "0" * 64)
    assert len({gpu, other, store.path(GPU)}) == 3


@pytest.mark.parametrize(
    "content, reason",
    [
        ("{", "it is damaged"),
        (with_checksum({"entries": []}).replace("[]", "[ 1]"), "it is damaged"),
        (with_checksum({"entries": []}), "key"),
        (with_checksum({"key": {"gpu": "another"}, "entries": []}), "written for something else"),
        (None, "'few_warps' of 'gate_conv' is no choice that may be tuned"),
    ],
)
def test_a_file_that_cannot_be_used_is_reported_and_left_aside(
    gpu: Path, content: str | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    if content is None:
        entry = {"op": "gate_conv", "shape": {"width": 2560, "bytes": 2}, "choices": {"few_warps": 4}}
        content = with_checksum({"key": store.key(GPU), "entries": [entry]})
    gpu.parent.mkdir(parents=True)
    gpu.write_text(content)
    with caplog.at_level(logging.WARNING, "ple_compile"):
        chosen = table.chosen("gate_conv", gate_conv.Tuning(), GPU, width=2560, bytes=2)
    assert chosen._asdict() == GATE_CONV | dict(gate_registers=144)
    assert reason in caplog.text and "python -m ple_compile tune" in caplog.text
