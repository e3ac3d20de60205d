"""What a table of launch choices holds, and which choices may be in one.

They say how work is cut among programs and threads, how many registers a thread gets and when a launch begins. Each
output is computed from the same numbers in the same order under all of them, so they change no bit. The other choices
of an op are part of its numerics: the warps of a program that sums over a row (`gate_warps`, `few_warps`) and its rows
(`gate_rows`) fix the order of float32 sums, and `few_tokens` and `few_rows` choose between kernels that sum in
different orders.
"""

from typing import Any, NamedTuple

TUNABLE: dict[str, tuple[str, ...]] = {
    "gate_conv": (
        "gate_registers", "conv_block", "conv_vector", "conv_steps", "conv_programs", "step_block", "step_warps",
        "few_programs", "dependent",
    ),
    "packed_gate_conv": (
        "gate_registers", "conv_block", "conv_vector", "conv_steps", "conv_programs", "step_block", "step_warps",
        "few_programs", "dependent",
    ),
    "short_conv": ("block", "chains", "num_warps"),
    "ngram_ids": ("block", "num_warps"),
    "ngram_lookup": ("many_rows", "few_rows", "num_warps"),
    "lookup": ("tile_words", "most_rows", "programs", "num_warps"),
}  # fmt: skip


class Entry(NamedTuple):
    """One line of a table of choices."""

    op: str
    shape: dict[str, int]
    choices: dict[str, Any]
    capability: tuple[int, int] | None = None  # None: the table is one GPU's


def entries_of(data: list[dict[str, Any]]) -> list[Entry]:
    """Checked entries of a table read from JSON; ValueError for a choice that may not be tuned."""
    found = []
    for item in data:
        op, choices, on = item["op"], item["choices"], item.get("capability")
        for name, value in choices.items():
            if name not in TUNABLE.get(op, ()):
                raise ValueError(f"{name!r} of {op!r} is no choice that may be tuned")
            if value is not None and not isinstance(value, int):
                raise ValueError(f"{name} of {op} is {value!r}; it is a number, true, false or null")
        found.append(Entry(op, item["shape"], choices, tuple(on) if on else None))
    return found
