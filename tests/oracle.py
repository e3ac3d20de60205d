"""n-gram ids in plain Python integers: what every spelling and kernel of the hash is measured against."""

from __future__ import annotations


def ngram_ids(
    history: list[int], multipliers: list[int], sizes: list[int], offsets: list[int], eos: int, heads: int
) -> list[list[int]]:
    """Table rows for every position of one request, whose whole history (from its first token on) is given.

    `heads` is the number of heads per order; `len(multipliers)` is the largest order.
    """
    return [_row(history[: t + 1], multipliers, sizes, offsets, eos, heads) for t in range(len(history))]


def _row(past: list[int], multipliers: list[int], sizes: list[int], offsets: list[int], eos: int, heads: int):
    newest_first = past[::-1]
    window = newest_first[:1]
    for shift in range(1, len(multipliers)):
        cut_off = shift >= len(newest_first) or eos in newest_first[1 : shift + 1]
        window.append(eos if cut_off else newest_first[shift])
    rows = []
    for order in range(2, len(multipliers) + 1):
        mixed = 0
        for token, multiplier in zip(window[:order], multipliers):
            mixed ^= to_int64(token * multiplier)
        for head in range((order - 2) * heads, (order - 1) * heads):
            rows.append(mixed % sizes[head] + offsets[head])
    return rows


def to_int64(value: int) -> int:
    """Wraps as two's complement does."""
    return (value + 2**63) % 2**64 - 2**63
