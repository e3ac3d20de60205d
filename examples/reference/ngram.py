"""Hashed n-gram ids: which rows of the table a token looks up.

For every order g = 2 .. N the last g tokens are hashed to `mixed_g = XOR_j token[t - j] * multiplier[j]` in wrapping
int64, and each head of that order takes `mixed_g` modulo its own prime. An EOS hides everything before it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def ngram_ids(
    tokens: Tensor, older: list[Tensor], multipliers: Tensor, sizes: Tensor, offsets: Tensor, eos: int
) -> Tensor:
    """Table rows [..., heads] of int64 `tokens` [...]; `older[j]` holds, for each, the token j + 1 steps before it.

    Before a request's start `older` holds EOS. The current token may itself be EOS and still sees what came before.
    """
    heads_per_ngram = sizes.shape[0] // len(older)
    mixed = tokens * multipliers[0]
    hidden = torch.zeros_like(tokens, dtype=torch.bool)
    orders = []
    for shift, token in enumerate(older, start=1):
        hidden = hidden | (token == eos)
        mixed = mixed ^ (torch.where(hidden, eos, token) * multipliers[shift])
        orders.append(mixed)
    per_head = torch.stack(orders, dim=-1).repeat_interleave(heads_per_ngram, dim=-1)
    return per_head % sizes + offsets  # floor modulo: a negative hash still lands in the table


def layer_multipliers(vocab_size: int, ngram_size: int, ple_index: int, seed: int) -> list[int]:
    """Odd numbers small enough that no legal token overflows int64; `ple_index` counts the PLE layers before this."""
    gamma, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    half = max(1, (2**63 - 1) // vocab_size // 2)
    start = seed + 10007 * ple_index
    return [2 * (splitmix64((start + gamma * i) & mask) % half) + 1 for i in range(1, ngram_size + 1)]


def splitmix64(state: int) -> int:
    """One output of the SplitMix64 generator."""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def head_sizes(base: int, num_heads: int, ple_index: int) -> list[int]:
    """Consecutive primes from `base` on, so that no two heads of any two layers share one."""
    primes: list[int] = []
    candidate = base
    while len(primes) < (ple_index + 1) * num_heads:
        if candidate > 1 and all(candidate % d for d in range(2, math.isqrt(candidate) + 1)):
            primes.append(candidate)
        candidate += 1
    return primes[-num_heads:]
