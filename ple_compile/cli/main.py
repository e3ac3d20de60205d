"""Look at, measure and prepare models with PLE layers (hashed n-gram memory)."""

import argparse
import sys
import traceback

from ple_compile.cli import bench, doctor, explain, quantize, tune
from ple_compile.cli.target import CodeFailedError

_COMMANDS = {"explain": explain, "bench": bench, "tune": tune, "doctor": doctor, "quantize": quantize}
_MORE = """\
`python -m ple_compile COMMAND --help` tells what a command does and takes.
Exit codes: 0 all is well; 1 the command ran, and something is not; 2 it cannot run as it was given.
"""


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code; a user's mistake is one line on stderr and 2.

    What nobody foresaw, and what the user's own code raises, is a traceback and 2: Python's own 1 means here that the
    command ran.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ple_compile", description=__doc__, epilog=_MORE, formatter_class=_Formatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        text = command.__doc__ or ""
        added = commands.add_parser(
            name, help=text.splitlines()[0], description=text, formatter_class=_Formatter, allow_abbrev=False
        )
        command.add(added)
    options = parser.parse_args(argv)
    try:
        return _COMMANDS[options.command].run(options)
    except (ValueError, OSError) as error:
        print(f"python -m ple_compile {options.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except CodeFailedError as error:
        traceback.print_exception(error.__cause__)
        return 2
    except Exception:
        traceback.print_exc()
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of a description and wraps the rest at 100 columns."""

    def __init__(self, prog: str):
        super().__init__(prog, width=100, max_help_position=32)
