"""Time one PLE layer on this machine: eager, stock Inductor, this package.

The layer is a plain PyTorch one with random weights: ids, lookup, projections, gate, norms, convolution, residuals;
without a cache. On a GPU it has the released widths in bf16, and times are medians over CUDA-graph replays with inputs
that rotate through more memory than the L2 cache holds; on a CPU it is tiny, in float32, and times are medians of wall
time, each in microseconds per call. `floor` is what moving the layer's bytes once takes at the bandwidth of a large
copy.

Exit code 0: the layer ran fused; 1: it did not, which the column `fused` (of --layers) shows.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from ple_compile.cli import arguments
from ple_compile.measuring import figures
from ple_compile.measuring.compare import WAYS, compare
from ple_compile.measuring.layer import Sizes
from ple_compile.measuring.timing import environment, markdown

ON_GPU: dict[str, Any] = {"tokens": [1, 64, 1024, 8192], "hidden": 2560, "rows": 8_000_000, "dtype": "bfloat16"}
ON_CPU: dict[str, Any] = {"tokens": [1, 64], "hidden": 64, "rows": 20_000, "dtype": "float32"}


def add(parser: argparse.ArgumentParser) -> None:
    def both(name: str) -> str:
        shown = [",".join(map(str, x)) if isinstance(x, list) else x for x in (ON_GPU[name], ON_CPU[name])]
        return f"(default: {shown[0]} on a GPU, {shown[1]} on a CPU)"

    arguments.add_device(parser)
    parser.add_argument("--tokens", type=arguments.numbers, help=f"tokens per call, a list {both('tokens')}")
    parser.add_argument("--hidden", type=int, help=f"width of a stream {both('hidden')}")
    parser.add_argument("--streams", type=int, default=4, help="residual streams (default: 4)")
    parser.add_argument("--kernel", type=int, default=4, help="taps of the convolution (default: 4)")
    parser.add_argument("--rows", type=int, help=f"rows of the table {both('rows')}")
    parser.add_argument("--layers", type=int, default=1, help="PLE layers in a row, each with a table (default: 1)")
    parser.add_argument("--dtype", choices=arguments.DTYPES, help=f"of weights and inputs {both('dtype')}")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw times and shares of the floor (.svg or .png)")
    parser.add_argument("--json", action="store_true", help="print the measurement as JSON")


def run(options: argparse.Namespace) -> int:
    device = arguments.device_of(options.device)
    defaults = ON_GPU if device.type == "cuda" else ON_CPU
    given = {
        name: default if getattr(options, name) is None else getattr(options, name)
        for name, default in defaults.items()
    }
    if options.layers < 1:
        raise ValueError(f"--layers {options.layers}: a number from 1 on")
    if options.plot is not None:
        figures.check(options.plot)
    sizes = Sizes(
        hidden=given["hidden"], streams=options.streams, kernel=options.kernel, rows=given["rows"],
        dtype=arguments.DTYPES[given["dtype"]], device=str(device),
    )  # fmt: skip
    with arguments.current(device):
        rows = compare(sizes, options.layers, given["tokens"])
    described = environment(device)
    if options.json:
        print(json.dumps({"environment": described, "PLE layer, us": rows}, indent=1))
    else:
        print(f"microseconds per call of {options.layers} PLE layer(s), medians:\n\n{markdown(rows)}")
    if options.plot is not None:
        figures.draw(rows, WAYS, f"{options.layers} PLE layer(s), hidden {sizes.hidden}", described, options.plot)
    return 0 if all(row["fused"] == options.layers for row in rows) else 1
