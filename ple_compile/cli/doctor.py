"""Tell what this machine has, what is missing and how to get it.

Works without a GPU. Each line is `ok`, `warning` (something will be slower, or not be there) or `missing`.

Exit code 0: nothing is missing; 1: something is.
"""

import argparse
import dataclasses
import json

from ple_compile.cli.checks import every_check

_MARKS = {"ok": "ok     ", "warning": "warning", "missing": "MISSING"}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the lines as JSON")


def run(options: argparse.Namespace) -> int:
    found = every_check()
    if options.json:
        print(json.dumps([dataclasses.asdict(check) for check in found], indent=1))
    else:
        width = max(len(check.name) for check in found)
        for check in found:
            print(f"{_MARKS[check.status]}  {check.name:<{width}}  {check.found}")
            if check.remedy:
                print(f"{'':<{width + 9}}  -> {check.remedy}")
    return 1 if any(check.status == "missing" for check in found) else 0
