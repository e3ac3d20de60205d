"""`python -m ple_compile`."""

import sys

from ple_compile.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
