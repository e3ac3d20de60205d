"""Search launch choices of the kernels for this GPU, and keep them.

Times how each op may cut its work among programs and threads, for the widths that are given, and writes what is faster
than the present choices by 2 % or more into the user's cache folder, from where every later process takes it. Only
choices that change no bit of a result are tried. Nothing else tunes: not a compilation, not a call of a model. Other
GPUs, other Triton versions and changed kernels have files of their own; deleting the file undoes it.

The search compiles and times every candidate, which takes a while, and makes a table of its own for the lookups, of at
most half of the free GPU memory.

Exit code 0; 2 without a GPU.
"""

import argparse
import dataclasses
import json

import torch

from ple_compile.cli import arguments
from ple_compile.measuring.layer import HEADS, Sizes
from ple_compile.tables.progress import Steps
from ple_compile.tuning import store, table
from ple_compile.tuning.search import Result, num_candidates, search
from ple_compile.tuning.spaces import SPACES

_MOST_ROWS = 100_000_000  # 30 GiB at the released width


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", default=",".join(SPACES), help="a list of (default: all) %(default)s")
    parser.add_argument("--hidden", type=int, default=2560, help="width of a stream (default: 2560)")
    parser.add_argument("--streams", type=int, default=4, help="residual streams (default: 4)")
    parser.add_argument("--kernel", type=int, default=4, help="taps of the convolution (default: 4)")
    parser.add_argument("--dilation", type=int, default=3, help="its dilation (default: 3)")
    parser.add_argument("--dtype", choices=arguments.DTYPES, default="bfloat16", help="(default: bfloat16)")
    parser.add_argument("--rows", type=int, help="rows of the table for lookups (default: what half the memory holds)")
    arguments.add_device(parser)
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def run(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise ValueError("tune measures kernels on a GPU, and there is no CUDA device; `doctor` tells what is missing")
    ops = options.ops.split(",")
    for op in ops:
        if op not in SPACES:
            raise ValueError(f"--ops {op}: the ops are {', '.join(SPACES)}")
    device = arguments.device_of(options.device)
    if device.type != "cuda":
        raise ValueError(f"--device {device}: tune measures kernels on a GPU; give cuda or cuda:N")
    device = torch.device("cuda", device.index or 0)
    dtype = arguments.DTYPES[options.dtype]
    with arguments.current(device):
        rows = _MOST_ROWS if options.rows is None else options.rows
        if options.rows is None:
            row_bytes = max(1, options.hidden // HEADS) * dtype.itemsize
            rows = min(rows, torch.cuda.mem_get_info()[0] // 2 // row_bytes)
        sizes = Sizes(
            hidden=options.hidden, streams=options.streams, kernel=options.kernel, dilation=options.dilation,
            rows=rows, dtype=dtype, device=str(device),
        )  # fmt: skip
        results = [tune(op, sizes) for op in ops]
    file = store.save(device, [result.entry() for result in results])
    table.forget()
    if options.json:
        found = [dataclasses.asdict(result) | {"changes": result.changes} for result in results]
        print(json.dumps({"file": str(file), "results": found}, indent=1))
    else:
        print("\n".join([*map(describe, results), f"wrote {file}"]))
    return 0


def tune(op: str, sizes: Sizes) -> Result:
    space = SPACES[op](sizes)
    steps = Steps(f"tune {op}", num_candidates(space))
    result = search(space, steps=steps)
    steps.end()
    return result


def describe(result: Result) -> str:
    changes = ", ".join(f"{name} {result.before[name]} -> {value}" for name, value in result.changes.items())
    shape = ", ".join(f"{name} {value}" for name, value in result.shape.items())
    gain = f"{1 - result.ratio:.0%} less time with {changes}" if changes else "the present choices are the fastest"
    return f"{result.op} ({shape}): {gain}"
