"""Table rows as integer words: kernels move bytes, so that every dtype and every bit pattern comes through."""

import triton.language as tl
from torch import Tensor


def word_type(table: Tensor) -> tl.dtype:
    """The widest integer that divides every row and its address."""
    alignment = table.data_ptr() | (table.stride(0) * table.element_size()) | (table.shape[1] * table.element_size())
    for word in (tl.int64, tl.int32, tl.int16):
        if alignment % (word.primitive_bitwidth // 8) == 0:
            return word
    return tl.int8


def in_words(num_elements: int, table: Tensor, word: tl.dtype) -> int:
    return num_elements * table.element_size() // (word.primitive_bitwidth // 8)
