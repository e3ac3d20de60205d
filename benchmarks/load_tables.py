"""Load a synthetic checkpoint: GB/s from the page cache, and the most memory the process had at once.

    python benchmarks/load_tables.py --gib 16 --parts 128              # bf16; JSON to load_tables.json
    python benchmarks/load_tables.py --gib 2 --parts 128 --format fp8

Writes the checkpoint into `--directory` first (kept, and used again, if it is there), reads it once to fill the page
cache, and loads it in a process of its own, whose peak it takes from the kernel (VmHWM). `--pinned` loads into
page-locked memory and needs a CUDA device.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from ple_compile.tables.load import load_tables
from ple_compile.tables.offload import offload_tables
from tests.checkpoints import BASE, table_rows, write_checkpoint

WIDTH, ROW_BYTES = 160, 320
TABLE = BASE.rsplit(".", 1)[-1]


class NGrams(nn.Module):
    """The table on the meta device, with the buffers by which it is found."""

    def __init__(self, rows: int):
        super().__init__()
        for name, length in (("multipliers", 3), ("sizes", 16), ("offsets", 16)):
            self.register_buffer(name, torch.zeros(length, dtype=torch.int64))
        self.add_module(TABLE, nn.Embedding(rows, WIDTH, dtype=torch.bfloat16, device="meta"))


def peak_memory() -> int:
    """The most bytes of memory this process has had (pages of mapped files included)."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def load(arguments: argparse.Namespace) -> dict[str, Any]:
    rows = arguments.gib * 2**30 // ROW_BYTES
    model = NGrams(rows)
    if arguments.pinned:
        offload_tables(model)
    before, started = peak_memory(), time.perf_counter()
    load_tables(model, arguments.directory, format=arguments.format)
    seconds = time.perf_counter() - started
    peak = peak_memory()
    table = getattr(model, TABLE)
    sample = torch.linspace(0, rows - 1, 1000, dtype=torch.float64).long()
    expected = torch.cat([table_rows(row, row + 1, WIDTH) for row in sample.tolist()])
    if arguments.format is None and not torch.equal(table(sample), expected):
        raise AssertionError("rows differ from those that were written")
    held = sum(p.nbytes for p in table.parameters())
    return {
        "checkpoint_bytes": rows * ROW_BYTES,
        "table_bytes": held,
        "seconds": round(seconds, 2),
        "gigabytes_per_second": round(rows * ROW_BYTES / seconds / 1e9, 2),
        "peak_bytes": peak,
        "peak_beside_the_table_mib": round((peak - before - (0 if arguments.pinned else held)) / 2**20, 1),
    }


def versions() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "commit": commit, "torch": torch.__version__, "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(), "device": device,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=16, help="size of the bf16 table")
    parser.add_argument("--parts", type=int, default=128)
    parser.add_argument("--format", choices=["fp8", "fp8_row", "nvfp4", "mmap"])
    parser.add_argument("--pinned", action="store_true")
    parser.add_argument("--directory", type=Path, default=Path("build/checkpoint"))
    parser.add_argument("--json", type=Path, default=Path("load_tables.json"))
    parser.add_argument("--only-load", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only_load:
        print(json.dumps(load(arguments)))
        return
    rows = arguments.gib * 2**30 // ROW_BYTES
    arguments.directory /= f"{arguments.gib}gib-{arguments.parts}"
    if not arguments.directory.exists():
        write_checkpoint(arguments.directory, rows, WIDTH, num_parts=arguments.parts, num_files=arguments.parts)
    for file in sorted(arguments.directory.glob("*.safetensors")):
        with open(file, "rb") as stream:
            while stream.read(2**24):
                pass
    command = [sys.executable, __file__, "--only-load", "--gib", str(arguments.gib), "--parts", str(arguments.parts)]
    command += ["--directory", str(arguments.directory)]
    command += ["--format", arguments.format] if arguments.format else []
    command += ["--pinned"] if arguments.pinned else []
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    settings = {"gib": arguments.gib, "parts": arguments.parts, "format": arguments.format, "pinned": arguments.pinned}
    result = {**settings, **json.loads(run.stdout.splitlines()[-1]), **versions()}
    arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print("| table | parts | format | GB/s | peak beside the table |\n| --- | --- | --- | --- | --- |")
    print(
        f"| {arguments.gib} GiB | {arguments.parts} | {arguments.format or 'bf16'}{', pinned' * arguments.pinned} | "
        f"{result['gigabytes_per_second']} | {result['peak_beside_the_table_mib']} MiB |"
    )


if __name__ == "__main__":
    main()
