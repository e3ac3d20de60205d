"""examples/etp.py under torchrun, on the CPU."""

import subprocess
import sys
from pathlib import Path

import pytest


def torchrun(num_ranks, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += ["-m", "examples.etp", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "num_ranks, dp, arguments", [(4, 2, ["--tokens", "6"]), (2, 1, ["--tokens", "1", "--backend", "ple"])]
)
def test_tokens_are_those_of_the_whole_table(num_ranks, dp, arguments):
    output = torchrun(num_ranks, "--tp", "2", *arguments)
    for rank in range(num_ranks):
        assert f"rank {rank} of dp {dp} x tp 2" in output
