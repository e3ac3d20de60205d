"""The commands of `python -m ple_compile`, one file each.

`add` describes a command's arguments, `run` runs it and returns the exit code.
"""
