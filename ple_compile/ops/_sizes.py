"""Whole numbers that launches are made of. Triton's own are made for kernels too, and cost 1 us a call on the host."""


def cdiv(number: int, by: int) -> int:
    """`number / by`, rounded up."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()
