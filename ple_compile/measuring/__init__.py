"""Timing, the layer that is timed, and figures of the results: for `python -m ple_compile` and for benchmarks/."""
